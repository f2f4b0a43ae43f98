"""Options of decoding, and arguments that are passed on to `generate`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Literal

from .._loading_errors import shorten
from .._values import (
    LANGUAGE,
    MOST_BEAMS,
    MOST_LENGTH_PENALTY,
    MOST_SEED,
    MOST_TOKENS,
    Range,
    check_options,
    check_value,
    documented,
    option,
    shown,
)
from ..models.user_errors import UserError


# Arguments of `generate` that decoding sets by itself, with what to do instead.
STATED_ELSEWHERE = {
    "num_beams": "set beams (--beams)",
    "num_return_sequences": "set num_hypotheses (--n-best)",
    "length_penalty": "set length_penalty and length_penalty_type (--length-penalty, --length-penalty-type)",
    "max_length": "set max_length_factor and max_length_extra (--max-length-factor, --max-length-extra)",
    "max_new_tokens": "set max_length_factor to 0 and max_length_extra to that number (--max-length-extra)",
    "pad_token_id": "leave it out: it is the model's own",
    "bos_token_id": "leave it out: it is the model's own",
    "eos_token_id": "leave it out: it is the model's own",
    "decoder_start_token_id": "leave it out: it is the model's own",
    "return_dict_in_generate": "leave it out: hypotheses have their scores",
    "output_scores": "leave it out: hypotheses have their scores",
    "output_logits": "leave it out: hypotheses have their scores",
    "output_hidden_states": "call the model itself for its hidden states",
    "output_attentions": "set alignments (--alignments), or call the model itself",
}
# transformers' names of options, in Python.
ALIASES = {"num_beams": "beams", "num_return_sequences": "num_hypotheses"}
# Options that divide texts. They have no effect where each line is a segment to score: in tests and validation.
OF_TEXTS = ("split_sentences", "source_lang")
# Types and ranges of settings that transformers or an engine checks late, with a traceback, or not at all.
_COUNT = (int | None, Range(least=0))
GENERATE_VALUES: dict[str, tuple[Any, Range | None]] = {
    "do_sample": (bool, None),
    "early_stopping": (bool | Literal["never"], None),
    "use_cache": (bool, None),
    "no_repeat_ngram_size": _COUNT,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "top_k": _COUNT,
    "prefill_chunk_size": (int | None, Range(least=1)),
    "repetition_penalty": (float | None, Range(above=0)),
    "temperature": (float | None, Range(above=0)),
    "top_p": (float | None, Range(least=0, most=1)),
}
# Arguments of `generate` that are no fields of its configuration; they cannot be written as YAML.
PYTHON_ARGUMENTS = ("logits_processor", "prefix_allowed_tokens_fn")


@documented
@dataclass
class DecodingOptions:
    """
    Options of translating.

    `generate` passes other settings on to transformers' `generate`, by the names of `GenerationConfig`: sampling
    (`do_sample=True`, with `temperature`, `top_k`, `top_p`), `no_repeat_ngram_size`, `repetition_penalty`,
    `bad_words_ids`, `min_new_tokens` and so on; in Python also `logits_processor` and `prefix_allowed_tokens_fn`.
    """

    beams: Annotated[int, Range(least=1, most=MOST_BEAMS)] = option(
        4, "beam size; 1: greedy search, or sampling without beams"
    )
    num_hypotheses: Annotated[int, Range(least=1, most=MOST_BEAMS)] = option(
        1, "number of hypotheses per sentence, at most beams unless they are sampled without beams"
    )
    length_penalty_type: Literal["vaswani", "hf"] = option(
        "vaswani", "divisor of a log-probability; vaswani: ((5 + length) / 6) ^ alpha; hf: length ^ alpha"
    )
    length_penalty: Annotated[float, Range(least=-MOST_LENGTH_PENALTY, most=MOST_LENGTH_PENALTY)] = option(
        0.6, "exponent alpha of the length penalty; 0 disables it"
    )
    max_length_factor: Annotated[float, Range(least=0, most=1000)] = option(
        1.0, "maximum number of new tokens per source token"
    )
    max_length_extra: Annotated[int, Range(least=0, most=MOST_TOKENS)] = option(
        50, "constant added to the maximum length"
    )
    max_tokens: Annotated[int, Range(least=1, most=MOST_TOKENS)] = option(
        4096, "maximum of source tokens times beams per batch"
    )
    split_sentences: Literal["auto", "always", "never"] = option(
        "auto",
        "translate the sentences of a line one by one; auto: not in a line with a prefix, not with on_long=truncate, "
        "and not by a model for summaries",
    )
    source_lang: str | None = option(
        None, "language code of the source, for split_sentences; defaults to the one that the model's files name"
    )
    on_long: Literal["error", "split", "truncate"] = option(
        "error",
        "sources that are too long for the model: reject them, split them at punctuation (or between words), or "
        "truncate them, as is usual for summaries",
    )
    max_source_length: Annotated[int | None, Range(least=1, most=MOST_TOKENS)] = option(
        None, "treat sources with more tokens as too long (see on_long)"
    )
    alignments: bool = option(False, "add source-target links of tokens, read from the cross-attention")
    alignment_layer: Annotated[int | Literal["mean"] | None, Range(least=0)] = option(
        None, "decoder layer whose attention gives the links, or mean of all; defaults to the one below the top"
    )
    buffer: Annotated[int, Range(least=1, most=MOST_TOKENS)] = option(
        2000, "number of sentences that are read, sorted by length, translated and written together"
    )
    seed: Annotated[int | None, Range(least=0, most=MOST_SEED)] = option(
        None, "random seed of sampling; same seed, sentences, batches and device give the same translations"
    )
    generate: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further settings of transformers' generate, by their names in GenerationConfig"},
    )

    def __post_init__(self) -> None:
        check_options(self)
        self.generate = check_generate(self.generate, self.beams)
        samples = bool(self.generate.get("do_sample"))
        if self.num_hypotheses > self.beams and not (samples and self.beams == 1):
            raise UserError(
                f"num_hypotheses={self.num_hypotheses} is more than beams={self.beams}. Remedy: use as many beams as "
                "hypotheses, or more."
            )
        if self.max_length_factor + self.max_length_extra <= 0:
            raise UserError(
                f"max_length_factor={self.max_length_factor} and max_length_extra={self.max_length_extra} are not "
                "allowed: they leave no token. Remedy: set one above 0."
            )
        if self.source_lang is not None and not LANGUAGE.fullmatch(self.source_lang):
            raise UserError(
                f"source_lang={shown(self.source_lang)} is not allowed; it must be a language code of letters, digits, "
                "_ and -. Remedy: correct it, e.g. en, de or zh-CN."
            )
        if self.alignments and self.on_long == "split":
            raise UserError(
                'alignments=True and on_long="split" exclude each other: the parts of a split sentence have '
                'positions of their own. Remedy: use on_long="error", or split the sentences yourself.'
            )
        if self.seed is not None and not samples:
            raise UserError(
                f"seed={self.seed} has no effect without do_sample=true. Remedy: add it to generate (--generate "
                "do_sample=true), or leave the seed out."
            )

    def penalty(self) -> float:
        """Return the value of `generate`'s `length_penalty`; `length ** penalty` is the divisor."""
        from .decoding import length_penalty

        return length_penalty(self.length_penalty_type, self.length_penalty)


@cache
def names_of_generate() -> frozenset[str]:
    """Return the names of the settings of `GenerationConfig`."""
    from transformers import GenerationConfig

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) - {"transformers_version"}


def check_generate(given: Mapping[str, Any], beams: int) -> dict[str, Any]:
    """
    Check what is passed on to `generate`, and return it; whole numbers written as 1e2 are `int`.

    Raises:
        UserError: There is no such name (the message has the nearest one), decoding states it otherwise, or
            transformers refuses the value.
    """
    for name in given:
        if name in STATED_ELSEWHERE:
            raise UserError(f"generate.{name} is stated elsewhere. Remedy: {STATED_ELSEWHERE[name]}.")
    if not given:
        return {}
    known = names_of_generate() - set(STATED_ELSEWHERE)
    for name in given:
        if name not in known and name not in PYTHON_ARGUMENTS:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else "they are the fields of its GenerationConfig."
            raise UserError(f"generate has no setting {shown(name)}; {hint} Remedy: correct it.")
    given = {
        name: check_value(f"generate.{name}", value, *GENERATE_VALUES[name]) if name in GENERATE_VALUES else value
        for name, value in given.items()
    }
    from transformers import GenerationConfig

    try:
        values = {name: value for name, value in given.items() if name not in PYTHON_ARGUMENTS}
        GenerationConfig(**values, num_beams=beams).validate(strict=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"generate={shown(given)} is not allowed ({reason(error)}). Remedy: correct it.") from error
    return given


def reason(error: Exception) -> str:
    """Return the first reason in an error message of transformers."""
    lines = [line.strip("- ") for line in str(error).splitlines() if line.strip()]
    return shorten(lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0] if lines else "")


def own_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """
    Translate transformers' names of options into fields of [`DecodingOptions`]: `num_beams`, `num_return_sequences`,
    `max_new_tokens`; any other name of `GenerationConfig` goes into `generate`. Names of fields stay.

    Raises:
        UserError: There is no such name (the message has the nearest one), or one thing is stated twice.
    """
    own = {each.name for each in fields(DecodingOptions)}
    found = {name: value for name, value in changes.items() if name in own}
    for name in [name for name in changes if name not in own]:
        if name == "max_new_tokens":
            stated = {"max_length_factor": 0.0, "max_length_extra": changes[name]}
        elif name in ALIASES:
            stated = {ALIASES[name]: changes[name]}
        elif name in names_of_generate() or name in PYTHON_ARGUMENTS:
            stated = {"generate": {**found.pop("generate", {}), name: changes[name]}}
        else:
            near = difflib.get_close_matches(name, sorted(own | set(ALIASES) | names_of_generate()), n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(own))}."
            raise UserError(f"There is no option {name!r} of decoding; {hint}")
        for each in stated:
            if each in found:
                raise UserError(f"{name} and {each} state the same. Remedy: give one of them.")
        found |= stated
    return found


def decoding_options(options: DecodingOptions | None, changes: Mapping[str, Any]) -> DecodingOptions:
    """
    Return options with changes.

    Args:
        options ([`DecodingOptions`], *optional*): `None`: the default ones.
        changes (`dict`): As for [`own_names`]; `generate` replaces that of `options`.

    Raises:
        UserError: There is no such name, one thing is stated twice, or a value is not allowed.
    """
    changes = own_names(changes)
    return replace(options, **changes) if options else DecodingOptions(**changes)
