"""Options of decoding, and arguments that are passed on to `generate`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal

from ..data.languages import check_codes
from ..errors import UserError
from ..options import (
    LEAST_LENGTH_PENALTY,
    MOST_BEAMS,
    MOST_LENGTH_PENALTY,
    MOST_SEED,
    MOST_TOKENS,
    Range,
    check_options,
    check_value,
    documented,
    given_fields,
    option,
    options_of,
)


# Arguments of `generate` that the translator sets, most of them from its own options.
SET_BY_TRANSLATOR = {
    *("num_beams", "num_return_sequences", "length_penalty", "max_length", "max_new_tokens", "output_attentions"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "return_dict_in_generate"),
    *("output_scores", "output_logits", "output_hidden_states", "prefill_chunk_size"),
}
# transformers' names of options, in Python.
ALIASES = {"num_beams": "beams", "num_return_sequences": "num_hypotheses"}
ALIASES |= {"src_lang": "source_lang", "tgt_lang": "target_lang"}
# Options that divide texts. They have no effect where each line is a segment to score: in tests and validation.
TEXT_OPTIONS = ("split_sentences", "source_lang", "target_lang", "source_prefix")
# Settings that transformers takes without a check of their type, and numbers that it wants as `float`.
GENERATE_VALUES: dict[str, Any] = {
    **dict.fromkeys(("do_sample", "use_cache"), bool),
    "forced_bos_token_id": int | None,
    "forced_eos_token_id": int | list[int] | None,
}
GENERATE_FLOATS = ("temperature", "top_p", "repetition_penalty", "encoder_repetition_penalty")
# Arguments of `generate` outside of its configuration; they cannot be written as YAML.
PYTHON_ARGUMENTS = ("logits_processor", "prefix_allowed_tokens_fn")
# Settings that most models have, or that options replace.
USUAL_SETTINGS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "max_length"),
    *("num_beams", "length_penalty", "early_stopping", "max_new_tokens", "use_cache"),
}
SEVERAL = "for models with several languages; defaults to the language named in the model's files"
Beams = Annotated[int, Range(least=1, most=MOST_BEAMS)]
Count = Annotated[int, Range(least=1, most=MOST_TOKENS)]
Factor = Annotated[float, Range(least=0, most=1000)]
Penalty = Annotated[float, Range(least=LEAST_LENGTH_PENALTY, most=MOST_LENGTH_PENALTY)]


@documented
@dataclass
class DecodingOptions:
    """
    Options of translating.

    `generate` passes other settings on to transformers' `generate`, by the names of `GenerationConfig`: sampling
    (`do_sample=True`, with `temperature`, `top_k`, `top_p`), `no_repeat_ngram_size`, `repetition_penalty`,
    `bad_words_ids`, `min_new_tokens` and so on; in Python also `logits_processor` and `prefix_allowed_tokens_fn`,
    whose first argument is the number of the sentence in the call, from 0.
    """

    beams: Beams = option(4, "beam size; 1: greedy search, or sampling without beams")
    num_hypotheses: Beams = option(1, "hypotheses per sentence; at most beams, unless they are sampled with beams=1")
    length_penalty_type: Literal["vaswani", "hf"] = option(
        "vaswani", "divisor of a log-probability; vaswani: ((5 + length) / 6) ^ alpha; hf: length ^ alpha"
    )
    length_penalty: Penalty = option(0.6, "exponent alpha of the length penalty; 0 disables it")
    max_length_factor: Factor = option(1.0, "maximum number of new tokens per source token")
    max_length_extra: Annotated[int, Range(least=0, most=MOST_TOKENS)] = option(
        50, "constant added to the maximum number of new tokens"
    )
    max_tokens: Count = option(16384, "maximum size of a batch in source tokens times beams")
    split_sentences: Literal["auto", "always", "never"] = option(
        "auto", "split into sentences; auto: unless a line has a prefix, on_long is truncate, or the model summarizes"
    )
    source_lang: str | None = option(None, f"source language code, for sentence splitting and {SEVERAL}")
    target_lang: str | None = option(None, f"target language code, {SEVERAL}")
    source_prefix: str | None = option(None, "text in front of each source sentence, as an instruction to the model")
    on_long: Literal["error", "split", "truncate"] = option(
        "error", "reject sources that are too long, split them at punctuation (or between words), or truncate them"
    )
    max_source_length: Annotated[int | None, Range(least=1, most=MOST_TOKENS)] = option(
        None, "sources with more tokens are rejected, split or truncated"
    )
    alignments: bool = option(False, "add source-target links of tokens, read from the cross-attention")
    alignment_layer: Annotated[int | Literal["mean"] | None, Range(least=0)] = option(
        None, "decoder layer of alignments, or mean of all; default: the trained head's, or the second-highest layer"
    )
    buffer: Count = option(2000, "number of sentences that are read, sorted by length, translated and written together")
    seed: Annotated[int | None, Range(least=0, most=MOST_SEED)] = option(
        None, "random seed of sampling; same seed, sentences, batches and device give the same translations"
    )
    generate: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further settings of transformers' generate, by their names in GenerationConfig"},
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_codes(self)
        if self.generate:
            self.generate = check_generate(self.generate, self.beams)
        if self.num_hypotheses > self.beams and not (self.beams == 1 and self.generate.get("do_sample")):
            raise UserError(f"num_hypotheses={self.num_hypotheses} exceeds beams={self.beams}.", field="num_hypotheses")
        if self.alignments and self.on_long == "split":
            message = "alignments=true is not supported with on_long=split, because each part has its own positions."
            raise UserError(message, field="alignments")

    def penalty(self) -> float:
        """Return the value of `generate`'s `length_penalty`; `length ** penalty` is the divisor."""
        from .decoding import LENGTH_PENALTIES

        return LENGTH_PENALTIES[self.length_penalty_type](self.length_penalty)


def length_penalty(kind: Literal["vaswani", "hf"], alpha: float) -> float:
    """
    Return the value of `length_penalty` for `generate`; `ValueError` if kind or alpha are not allowed.

    Args:
        kind (`str`): `"vaswani"`: `((5 + length) / 6) ** alpha`. `"hf"`: `length ** alpha`, transformers' own.
        alpha (`float`): Exponent, from -5 to 100; 0 disables the penalty.
    """
    return DecodingOptions(length_penalty_type=kind, length_penalty=alpha).penalty()


@cache
def names_of_generate() -> frozenset[str]:
    """Return the names of the settings of `GenerationConfig`."""
    from transformers import GenerationConfig

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) - {"transformers_version"}


def unusual_settings(settings: Any) -> dict[str, Any]:
    """Return the settings in a model's `GenerationConfig` that most models do not have."""
    names = names_of_generate() - USUAL_SETTINGS
    return {name: value for name, value in settings.to_diff_dict().items() if name in names and value is not False}


def check_generate(settings: Mapping[str, Any], beams: int) -> dict[str, Any]:
    """Return settings for `generate`, with some numbers as `float`; an error for unknown and invalid ones."""
    from transformers import GenerationConfig

    settings, allowed = dict(settings), {*PYTHON_ARGUMENTS, *names_of_generate()} - SET_BY_TRANSLATOR
    given_fields(settings, allowed, "generate")
    for name, value in settings.items():
        if name in GENERATE_VALUES:
            check_value(f"generate.{name}", value, GENERATE_VALUES[name], Range(least=0))
        if name in GENERATE_FLOATS and type(value) is int:
            settings[name] = float(value)
    values = {name: value for name, value in settings.items() if name not in PYTHON_ARGUMENTS}
    GenerationConfig(**values, num_beams=beams).validate(strict=True)
    return settings


def convert_option_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert transformers' names of options to fields of [`DecodingOptions`]; reject unknown and repeated ones."""
    own, passed_on = options_of(DecodingOptions), {*names_of_generate(), *PYTHON_ARGUMENTS}
    given_fields(changes, {*own, *ALIASES, *passed_on, "max_new_tokens", "max_length"})
    options: dict[str, Any] = {}
    for name in sorted(changes, key=lambda name: name not in own):
        value = changes[name]
        if name in own or name in ALIASES:
            translated = {ALIASES.get(name, name): value}
        elif name == "max_new_tokens" or (name == "max_length" and isinstance(value, int)):
            # The first input of the decoder is part of `max_length`.
            translated = {"max_length_factor": 0.0, "max_length_extra": value - (name == "max_length")}
        else:
            translated = {"generate": {**options.pop("generate", {}), name: value}}
        if repeated := options.keys() & translated.keys():
            raise UserError(f"{name} and {min(repeated)} set the same option.", field=name)
        options |= translated
    return options


def decoding_options(options: DecodingOptions | None, changes: Mapping[str, Any]) -> DecodingOptions:
    """Return options with changes; single settings of `generate` are added, `generate` itself replaces all."""
    converted = convert_option_names(changes)
    if options is None:
        return DecodingOptions(**converted)
    if "generate" in converted and "generate" not in changes:
        converted["generate"] = options.generate | converted["generate"]
    return replace(options, **converted)
