"""Translating with a model that was exported to CTranslate2, by the Translator's words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from .._loading_errors import explained_loading, shorten
from .._values import shown
from ..data.tokenizer_pair import TokenizerPair
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.user_errors import UserError
from .forced_decoding import batches_by_tokens
from .options import DecodingOptions
from .origin import read_origin
from .results import Hypothesis
from .translator import Translator


# Beside the engine's own files: the configuration of the model that it was made of.
ENGINE_SETTINGS = "recnmt_engine.json"
# What `generate` calls them, and what the engine does; the others it has not.
GENERATION = {
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_decoding_length",
    "temperature": "sampling_temperature",
    "top_k": "sampling_topk",
    "top_p": "sampling_topp",
}
# Where all symbols may be drawn.
ALL_SYMBOLS = 0
# CTranslate2 has one seed for the whole process, which a thread of an engine reads once, before its first draw.
SEED_LOCK = threading.Lock()
RANDOM_SEED = 2**32 - 1  # CTranslate2 then seeds from the system


def load_engine_package() -> Any:
    """
    The package ctranslate2.

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


def engine_of(path: str | Path) -> str | None:
    """The format of a folder's model, `"ctranslate2"` or `"onnx"`; `None` where it was not exported to an engine."""
    return str(engine_settings(path)["format"]) if (Path(path) / ENGINE_SETTINGS).is_file() else None


def engine_settings(path: str | Path) -> dict[str, Any]:
    """
    What an export says of itself: `format`, and `config` and `generation_config` of the model it was made of.

    Raises:
        UserError: The file says something else.
    """
    place = Path(path) / ENGINE_SETTINGS
    try:
        about = json.loads(place.read_text(encoding="utf-8"))
        if not isinstance(about["config"], dict) or "model_type" not in about["config"]:
            raise ValueError("config is not that of a model")
        about["generation_config"] = GenerationConfig.from_dict(about["generation_config"])
        return {name: about[name] for name in ("format", "config", "generation_config")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{place} cannot be read ({shorten(str(error))}). Remedy: export the model again.") from error


class EngineTranslator(Translator):
    """
    A [`Translator`] whose model runs in CTranslate2. It translates and scores; it has no attention to align by.

    The engine's search ends once as many hypotheses are finished as there are beams (transformers'
    `early_stopping=True`), and divides log-probabilities by `length ** length_penalty`; which of the finished ones
    is best is decided by the penalty that the options name. Hypotheses of a batch are cut at their own limits; the
    search goes on to the largest one. Sampling with a seed loads the engine again for each buffer, and threads that
    sample with a seed wait for each other.

    Args:
        path (`str` or `Path`): As [`~recnmt_hf.hub.engines.export_ctranslate2`] writes it.
        device (`str` or `torch.device`, *optional*): `"cpu"` or `"cuda"`; `None`: CUDA if the engine finds any.
        check (`bool`, *optional*, defaults to `True`): Whether tokenizers that are not the model's own are refused.

    Raises:
        ValueError: The package is not installed, or the files are damaged.
    """

    def __init__(self, path: str | Path, device: str | torch.device | None = None, check: bool = True):
        engine = load_engine_package()
        path = Path(path)
        about = engine_settings(path)
        generation = about["generation_config"]
        self.path = path
        self.device = str(device or ("cuda" if engine.get_cuda_device_count() else "cpu")).partition(":")[0]
        with explained_loading(path):
            config = NMTTransformerConfig.from_dict(about["config"])
            tokenizers = TokenizerPair.load(path)
        self.engine = self.load_engine()
        self.own = threading.local()  # the engine that a thread samples with under its seed
        stand_in: Any = SimpleNamespace(
            config=config,
            generation_config=generation,
            device=torch.device("cpu"),
            name_or_path=str(path),
            exported_to="CTranslate2",
        )
        self.model = stand_in
        self.tokenizers = tokenizers
        tokenizers.check(stand_in, strict=check)
        self.control_ids = tokenizers.control_ids()
        self.origin = read_origin(path)
        sizes = (("source", config.vocab_size), ("target", config.decoder_vocab_size))
        self.symbols = [vocabulary_of(path, side, size) for side, size in sizes]
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols[1])}

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

    def _generate(
        self,
        sources: Sequence[Sequence[int]],
        options: DecodingOptions,
        prefixes: Sequence[Sequence[int]],
        scores: bool = True,
    ) -> list[list[Hypothesis]]:
        if options.alignments:
            self.inspected_model()
        limits = self.limits(sources, prefixes, options)
        penalty = options.penalty()
        settings = self.settings(options, max(limits))
        try:
            found = getattr(self.own, "engine", self.engine).translate_batch(
                [[self.symbols[0][id] for id in source] for source in sources],
                target_prefix=[[self.symbols[1][id] for id in each] for each in prefixes] if any(prefixes) else None,
                beam_size=options.beams,
                num_hypotheses=max(options.beams, options.num_hypotheses),
                length_penalty=float(penalty),
                max_decoding_length=max(limits),
                return_scores=True,
                return_end_token=True,
                **settings,
            )
        except (TypeError, ValueError) as error:
            if not options.generate:
                raise
            raise UserError(
                f"CTranslate2 rejected generate={shown(options.generate)} ({shorten(str(error))}). Remedy: correct it, "
                "or leave it out."
            ) from error
        rows = [
            self.strip([self.numbers[symbol] for symbol in symbols][:limit])
            for limit, each in zip(limits, found, strict=True)
            for symbols in each.hypotheses
        ]
        # The engine divides by the length of what it returns, and sums in float32, what is cut off here too.
        searched = [
            score * len(symbols) ** float(penalty)
            for each in found
            for symbols, score in zip(each.hypotheses, each.scores, strict=True)
        ]
        hypotheses = self.hypotheses_of(sources, rows, options, scores, searched)
        return [each[: options.num_hypotheses] for each in hypotheses]

    @contextmanager
    def seeded(self, seed: int | None, offset: int) -> Iterator[None]:
        if seed is None:
            yield
            return
        package = load_engine_package()
        with SEED_LOCK:
            package.set_random_seed((seed + offset) % RANDOM_SEED)
            try:
                self.own.engine = self.load_engine()
                yield
            finally:
                self.own.__dict__.pop("engine", None)
                package.set_random_seed(RANDOM_SEED)

    def settings(self, options: DecodingOptions, max_length: int) -> dict[str, Any]:
        """The engine's arguments for what `generate` shall do beside; it takes no number beyond its own limits."""
        given = {name: value for name, value in options.generate.items() if value is not None}
        samples = given.pop("do_sample", False)
        unknown = sorted(set(given) - set(GENERATION))
        if unknown:
            raise UserError(
                f"CTranslate2 has no {unknown[0]} here. Remedy: leave it out, or translate with the model itself."
            )
        limits = {"min_new_tokens": max_length, "top_k": len(self.symbols[1])}
        found = {GENERATION[name]: min(value, limits.get(name, value)) for name, value in given.items()}
        if samples:
            if options.beams > 1:
                raise UserError("CTranslate2 samples without beams alone. Remedy: --beams 1.")
            found.setdefault("sampling_topk", ALL_SYMBOLS)
        return found

    def score_tokens(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 4096
    ) -> list[list[float]]:
        """Log-probability of every target token."""
        results: list[list[float]] = [[] for _ in targets]
        ends = self.end_ids()
        lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
        for batch in batches_by_tokens(lengths, max_tokens):
            # The engine adds the end token itself, and scores it.
            texts = [
                list(targets[i][:-1]) if targets[i] and targets[i][-1] in ends else list(targets[i]) for i in batch
            ]
            found = self.engine.score_batch(
                [[self.symbols[0][id] for id in sources[i]] for i in batch],
                [[self.symbols[1][id] for id in text] for text in texts],
            )
            for i, scores in zip(batch, found, strict=True):
                results[i] = list(scores.log_probs)[: len(targets[i])]
        return results


def vocabulary_of(path: Path, side: str, size: int) -> list[str]:
    """The names of the rows of an embedding, as the engine has them."""
    for name in (f"{side}_vocabulary.json", "shared_vocabulary.json"):
        if (path / name).is_file():
            symbols = json.loads((path / name).read_text(encoding="utf-8"))
            if len(symbols) != size:
                raise UserError(
                    f"{path / name} has {len(symbols)} symbols for {size} rows. Remedy: export the model again."
                )
            return symbols
    raise UserError(f"{path} has no {side}_vocabulary.json. Remedy: export the model again.")
