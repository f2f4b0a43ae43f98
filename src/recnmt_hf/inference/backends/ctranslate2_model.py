"""Backend for models that were exported to CTranslate2."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig

from ..._loading_errors import explained_loading, shorten
from ..._values import shown
from ...data.tokenizer_pair import TokenizerPair
from ...models.configuration_nmt_transformer import NMTTransformerConfig
from ...models.user_errors import UserError
from ..model_settings import LengthLimits, end_ids, length_limits
from ..options import DecodingOptions
from .export_settings import cannot_be_inspected, read_export_settings
from .protocol import SearchRequest, SearchResult


# Arguments of `generate` that are supported, with the engine's names for them.
ENGINE_ARGUMENTS = {
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_decoding_length",
    "temperature": "sampling_temperature",
    "top_k": "sampling_topk",
    "top_p": "sampling_topp",
}
# Value of sampling_topk that samples from the whole vocabulary.
ALL_SYMBOLS = 0
# CTranslate2 has one seed for the whole process, which a thread of an engine reads once, before its first draw.
SEED_LOCK = threading.Lock()
RANDOM_SEED = 2**32 - 1  # CTranslate2 then seeds from the system


def load_engine_package() -> Any:
    """
    Import the package ctranslate2.

    Raises:
        UserError: It is not installed.
    """
    try:
        import ctranslate2  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            'Models of CTranslate2 need the package ctranslate2. Remedy: pip install "recnmt-hf[engines]".'
        ) from None
    return ctranslate2


@dataclass(frozen=True)
class ExportedModel:
    """
    Description of a model that was exported to CTranslate2.

    Attributes:
        config (`NMTTransformerConfig`): Configuration of the model that was exported.
        generation_config (`GenerationConfig`): Its generation settings.
        name_or_path (`str`): Folder of the exported model.
    """

    config: NMTTransformerConfig
    generation_config: GenerationConfig
    name_or_path: str


class CTranslate2Backend:
    """
    Runs a model in CTranslate2; see [`Backend`]. It translates and scores.

    The engine's search ends once as many hypotheses are finished as there are beams (transformers'
    `early_stopping=True`), and divides log-probabilities by `length ** length_penalty`. The best of the finished
    hypotheses is chosen by the penalty in the options. The search continues to the largest limit of a batch; hypotheses
    are truncated to their own. Sampling with a seed loads the engine again for each buffer, and threads that sample
    with a seed wait for each other.

    Args:
        path (`str` or `Path`): Folder that [`~recnmt_hf.hub.engines.export_ctranslate2`] wrote.
        tokenizers ([`TokenizerPair`]): Its tokenizers.
        device (`str` or `torch.device`, *optional*): `"cpu"` or `"cuda"`; defaults to CUDA if the engine finds it.
        check (`bool`, *optional*, defaults to `True`): Whether to refuse tokenizers of other models.

    Raises:
        ValueError: The package is not installed, the files are damaged, or a tokenizer is not the model's.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizers: TokenizerPair,
        device: str | torch.device | None = None,
        check: bool = True,
    ):
        package = load_engine_package()
        self.path, self.tokenizers = Path(path), tokenizers
        settings = read_export_settings(path)
        self.device = str(device or ("cuda" if package.get_cuda_device_count() else "cpu")).partition(":")[0]
        with explained_loading(path):
            config = NMTTransformerConfig.from_dict(settings.config)
        self.model = ExportedModel(config, settings.generation_config, str(path))
        self.engine = self.load_engine()
        self.thread = threading.local()  # holds the engine that a thread samples with under its seed
        tokenizers.check(self.model, strict=check)
        sizes = (("source", config.vocab_size), ("target", config.decoder_vocab_size))
        self.source_symbols, self.target_symbols = (read_vocabulary(self.path, side, size) for side, size in sizes)
        self.target_ids = {symbol: id for id, symbol in enumerate(self.target_symbols)}

    def load_engine(self) -> Any:
        """
        Load the engine.

        Raises:
            UserError: The files are damaged, or CTranslate2 does not have the device.
        """
        try:
            return load_engine_package().Translator(
                str(self.path), device=self.device, intra_threads=torch.get_num_threads()
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"CTranslate2 cannot load {self.path} ({shorten(str(error))}). Remedy: export the model again, or name "
                "another device."
            ) from error

    @property
    def limits(self) -> LengthLimits:
        return length_limits(self.model.config)

    def search(self, request: SearchRequest) -> SearchResult:
        options, penalty = request.options, float(request.options.penalty())
        arguments = self.engine_arguments(options, max(request.max_lengths))
        prefixes = [[self.target_symbols[id] for id in prefix] for prefix in request.prefixes]
        try:
            results = getattr(self.thread, "engine", self.engine).translate_batch(
                [[self.source_symbols[id] for id in source] for source in request.sources],
                target_prefix=prefixes if any(prefixes) else None,
                beam_size=options.beams,
                num_hypotheses=max(options.beams, options.num_hypotheses),
                length_penalty=penalty,
                max_decoding_length=max(request.max_lengths),
                return_scores=True,
                return_end_token=True,
                **arguments,
            )
        except (TypeError, ValueError) as error:
            if not options.generate:
                raise
            raise UserError(
                f"CTranslate2 rejected generate={shown(options.generate)} ({shorten(str(error))}). Remedy: correct it, "
                "or leave it out."
            ) from error
        hypotheses = [
            (symbols, score)
            for result in results
            for symbols, score in zip(result.hypotheses, result.scores, strict=True)
        ]
        return SearchResult(
            [[self.target_ids[symbol] for symbol in symbols] for symbols, _ in hypotheses],
            # The engine divides by the length of what it returns, before hypotheses are truncated.
            [score * len(symbols) ** penalty for symbols, score in hypotheses],
        )

    def engine_arguments(self, options: DecodingOptions, max_length: int) -> dict[str, Any]:
        """
        Return the engine's arguments for those that are passed on to `generate`, within the engine's own limits.

        Raises:
            UserError: An argument is not supported.
        """
        settings = {name: value for name, value in options.generate.items() if value is not None}
        samples = settings.pop("do_sample", False)
        unsupported = sorted(set(settings) - set(ENGINE_ARGUMENTS))
        if unsupported:
            raise UserError(
                f"CTranslate2 has no {unsupported[0]} here. Remedy: leave it out, or translate with the model itself."
            )
        limits = {"min_new_tokens": max_length, "top_k": len(self.target_symbols)}
        arguments = {ENGINE_ARGUMENTS[name]: min(value, limits.get(name, value)) for name, value in settings.items()}
        if samples:
            if options.beams > 1:
                raise UserError("CTranslate2 samples without beams alone. Remedy: --beams 1.")
            arguments.setdefault("sampling_topk", ALL_SYMBOLS)
        return arguments

    @contextmanager
    def seeded(self, seed: int | None) -> Iterator[None]:
        if seed is None:
            yield
            return
        package = load_engine_package()
        with SEED_LOCK:
            package.set_random_seed(seed % RANDOM_SEED)
            try:
                self.thread.engine = self.load_engine()
                yield
            finally:
                self.thread.__dict__.pop("engine", None)
                package.set_random_seed(RANDOM_SEED)

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        ends = end_ids(self.model)
        # The engine appends the end token itself, and scores it.
        texts = [target[:-1] if target and target[-1] in ends else target for target in targets]
        results = self.engine.score_batch(
            [[self.source_symbols[id] for id in source] for source in sources],
            [[self.target_symbols[id] for id in text] for text in texts],
        )
        return [list(result.log_probs)[: len(target)] for result, target in zip(results, targets, strict=True)]

    def inspected_model(self) -> NoReturn:
        raise cannot_be_inspected(self.model.name_or_path, "CTranslate2")

    def encode(self, sources: Sequence[Sequence[int]]) -> NoReturn:
        self.inspected_model()

    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> NoReturn:
        self.inspected_model()

    def as_ensemble_member(self) -> NoReturn:
        raise UserError(
            f"{self.model.name_or_path} was exported to CTranslate2, which is not supported in an ensemble. Remedy: "
            "use the model that it was exported from."
        )


def read_vocabulary(path: Path, side: str, size: int) -> list[str]:
    """
    Read the engine's symbols of one side, one for each row of its embedding.

    Raises:
        UserError: The file is missing, or has another number of symbols.
    """
    for name in (f"{side}_vocabulary.json", "shared_vocabulary.json"):
        if (path / name).is_file():
            symbols = json.loads((path / name).read_text(encoding="utf-8"))
            if len(symbols) != size:
                raise UserError(
                    f"{path / name} has {len(symbols)} symbols for {size} rows. Remedy: export the model again."
                )
            return symbols
    raise UserError(f"{path} has no {side}_vocabulary.json. Remedy: export the model again.")
