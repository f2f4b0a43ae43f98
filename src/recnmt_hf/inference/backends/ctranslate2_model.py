"""Backend for models that were exported to CTranslate2."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..._loading_errors import read_small_text
from ...data.records import TokenRows
from ...data.tokenizer_pair import TokenizerPair
from ...errors import UserError, packages_of_extra
from ...models.configuration_nmt_transformer import NMTTransformerConfig
from ..devices import Device
from ..model_settings import end_ids, read_export_settings
from ..options import DecodingOptions, unusual_settings
from .protocol import Backend, SearchRequest, SearchResult


# Supported arguments of `generate`, with the engine's names for them; those of sampling, which need `do_sample`.
ENGINE_ARGUMENTS = {name: name for name in ("no_repeat_ngram_size", "repetition_penalty")}
ENGINE_ARGUMENTS["min_new_tokens"] = "min_decoding_length"
SAMPLING_ARGUMENTS = {"temperature": "sampling_temperature", "top_k": "sampling_topk", "top_p": "sampling_topp"}
# Settings of generation_config.json that the engine lacks.
FOR_GENERATE_ALONE = {
    *("encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "exponential_decay_length_penalty"),
    *("sequence_bias", "begin_suppress_tokens", "stop_strings", "max_time", "guidance_scale", "watermarking_config"),
}
FORBIDDING = ("bad_words_ids", "suppress_tokens")  # forbid symbols


class CTranslate2Backend(Backend):
    """
    Runs a model in CTranslate2, on `"cpu"` or `"cuda"`. Its search ends like transformers' `early_stopping=True`, by
    scores with `length ** length_penalty`; hypotheses are then truncated to their own limits, and the best one is
    chosen by the penalty in the options.
    """

    kind = "exported to CTranslate2"

    def __init__(self, path: str, tokenizers: TokenizerPair, device: Device = None, check: bool = True):
        self.tokenizers = tokenizers
        _, fields, generation_config = read_export_settings(path)
        with packages_of_extra("engines", "CTranslate2"):
            import ctranslate2  # type: ignore[import-untyped]
        name, _, number = str(device or ("cuda" if ctranslate2.get_cuda_device_count() else "cpu")).partition(":")
        config = NMTTransformerConfig.from_dict(fields)
        self.model = SimpleNamespace(config=config, generation_config=generation_config, name_or_path=str(path))
        self.engine = ctranslate2.Translator(
            str(path), device=name, device_index=int(number or 0), intra_threads=torch.get_num_threads()
        )
        tokenizers.check(self.model, strict=check)
        shared = Path(path, "shared_vocabulary.json")
        files = (Path(path, f"{side}_vocabulary.json") for side in ("source", "target"))
        symbols = (json.loads(read_small_text(file if file.is_file() else shared)) for file in files)
        self.source_symbols, self.target_symbols = symbols
        self.target_ids = {symbol: id for id, symbol in enumerate(self.target_symbols)}

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        return [self.search_batch(request) for request in requests]

    def search_batch(self, request: SearchRequest) -> SearchResult:
        """Translate a batch."""
        options, penalty = request.options, float(request.options.penalty())
        prefixes = [[self.target_symbols[id] for id in prefix.ids] for prefix in request.prefixes]
        results = self.engine.translate_batch(
            [[self.source_symbols[id] for id in source.ids] for source in request.sources],
            target_prefix=prefixes if any(prefixes) else None,
            max_input_length=0,
            beam_size=options.beams,
            num_hypotheses=max(options.beams, options.num_hypotheses),
            length_penalty=penalty,
            max_decoding_length=max(request.max_lengths),
            return_scores=True,
            return_end_token=True,
            **self.engine_arguments(options, max(request.max_lengths)),
        )
        hypotheses = [pair for result in results for pair in zip(result.hypotheses, result.scores, strict=True)]
        return SearchResult(
            [[self.target_ids[symbol] for symbol in symbols] for symbols, _ in hypotheses],
            # The engine divides by the length of what it returns, before hypotheses are truncated.
            [score * len(symbols) ** penalty for symbols, score in hypotheses],
        )

    def engine_arguments(self, options: DecodingOptions, max_length: int) -> dict[str, Any]:
        """Return the engine's arguments for those of `generate` and for the model's settings."""
        samples, config = options.generate.get("do_sample", False), self.model.generation_config
        names = {*ENGINE_ARGUMENTS, *FORBIDDING, *(SAMPLING_ARGUMENTS if samples else ())}
        settings: dict[str, Any] = {name: getattr(config, name, None) for name in names}
        if settings["min_new_tokens"] is None and (least := getattr(config, "min_length", None)):
            settings["min_new_tokens"] = least - 1  # without the first input of the decoder
        settings |= {name: value for name, value in options.generate.items() if name != "do_sample"}
        settings = {name: value for name, value in settings.items() if value is not None}
        supported = ENGINE_ARGUMENTS | SAMPLING_ARGUMENTS
        others = (set(settings) - {*supported, *FORBIDDING}) | (FOR_GENERATE_ALONE & set(unusual_settings(config)))
        if others:
            raise UserError(f"{min(others)}, of generate or generation_config.json, is not supported by CTranslate2.")
        ends = [[end] for end in end_ids(self.model)]  # `generate` ignores them among the bad words
        forbidden = [ids for ids in settings.pop("bad_words_ids", []) if list(ids) not in ends]
        forbidden += [[id] for id in settings.pop("suppress_tokens", [])]
        limits = {"min_new_tokens": max_length, "top_k": len(self.target_symbols)}
        arguments = {supported[name]: min(value, limits.get(name, value)) for name, value in settings.items()}
        if forbidden:
            arguments["suppress_sequences"] = [[self.target_symbols[id] for id in ids] for ids in forbidden]
        if samples:
            if options.beams > 1 or options.seed is not None:
                raise UserError("CTranslate2 samples without beams (--beams 1) and without a seed only.", field="beams")
            arguments.setdefault("sampling_topk", 0)  # of the whole vocabulary
        return arguments

    def score(self, sources: TokenRows, targets: TokenRows) -> list[list[float]]:
        ends = end_ids(self.model)
        # The engine appends the end token itself, and scores it.
        texts = [row.ids[:-1] if row.ids and row.ids[-1] in ends else row.ids for row in targets]
        results = self.engine.score_batch(
            [[self.source_symbols[id] for id in source.ids] for source in sources],
            [[self.target_symbols[id] for id in text] for text in texts],
            max_input_length=0,  # it would cut off sources after 1,024 tokens
        )
        return [list(result.log_probs)[: len(target)] for result, target in zip(results, targets, strict=True)]
