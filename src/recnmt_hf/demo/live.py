"""Translate while the visitor watches: in small batches, within limits, and until the visitor stops it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from .._plain_text import is_blank
from ..data.text import open_bytes, read_lines
from ..errors import UserError, short_repr
from ..inference.options import DecodingOptions
from ..inference.results import Hypothesis, TranslationWarnings
from ..inference.splitting import join_texts, split_sentences, split_text
from ..inference.translator import Translator
from ..inference.word_alignment import WordAlignment, align_pairs
from .limits import Limits
from .models import DemoModel


# Sentences of the first batches; all later ones have the size of the last. The first translation appears early.
BATCHES = (1, 2, 4, 8)
LINES_OF_BATCH = 16
# A text for a summary is one input, of at most this many segments' tokens.
SEGMENTS_OF_SUMMARY = 4


class Ended(Exception):
    """The visitor stopped the request, or its time is over; the message is for the visitor."""


class Watch:
    """Time limit and stop button of a request. As a logits processor, it ends a search at its next step."""

    def __init__(self, seconds: float):
        self.seconds, self.end = seconds, time.monotonic() + seconds
        self.is_stopped = self.has_started = False

    def start(self) -> None:
        """Start the time, after waiting in the queue."""
        self.end, self.has_started = time.monotonic() + self.seconds, True

    def stop(self) -> None:
        """Stop the request at its next step."""
        self.is_stopped = True

    def check(self) -> None:
        """Raise [`Ended`] if the request is over."""
        if self.is_stopped or time.monotonic() > self.end:
            raise Ended("Stopped" if self.is_stopped else f"Stopped at the time limit of {self.seconds:g} seconds")

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.check()
        return scores


@dataclass
class Segment:
    """A sentence, or a part of a long one, with its hypotheses once they are there."""

    separator: str  # text that joins its translation to the one before
    source: str
    opening: str = ""  # of the whole text, before its first sentence: the target language, or an instruction
    hypotheses: list[Hypothesis] = field(default_factory=list)
    alignment: WordAlignment | None = None


@dataclass
class Progress:
    """The translation of a text (or the lines of a file, without segments) by one model, as far as it is done."""

    model: DemoModel
    segments: list[Segment]
    done: int = 0
    seconds: float = 0.0
    no_attention: str = ""  # why there are no links between words

    def __post_init__(self) -> None:
        self.warnings = TranslationWarnings(self.model.translator.tokenizer)

    @property
    def is_complete(self) -> bool:
        return self.done == len(self.segments)

    @property
    def text(self) -> str:
        """The translation so far."""
        parts = self.segments[: self.done]
        best = [part.hypotheses[0].text if part.hypotheses else "" for part in parts]
        return join_texts(best, [part.separator for part in parts])


def decoding_options(limits: Limits, beams: Any, hypotheses: Any, penalty: Any) -> DecodingOptions:
    """Return the options of a request; `UserError` for values that are not allowed or beyond the limits."""
    for name, value in (("beams", beams), ("num_hypotheses", hypotheses)):
        if isinstance(value, (int, float)) and value > limits.max_beams:
            raise UserError(
                f"{name}={short_repr(value)} is not allowed; it must be at most {limits.max_beams:,}.", field=name
            )
    return DecodingOptions(
        beams=beams, num_hypotheses=hypotheses, length_penalty=penalty, max_tokens=limits.batch_tokens, on_long="split"
    )


def check_length(text: str, limits: Limits, place: str = "The text") -> None:
    """Raise `UserError` for a text with too many characters."""
    if len(text) > limits.max_characters:
        raise UserError(
            f"{place} has {len(text):,} characters, and the limit is {limits.max_characters:,}.", field=place
        )


def split_into_segments(translator: Translator, text: str, options: DecodingOptions, limits: Limits) -> list[Segment]:
    """
    Split a text into sentences, and long sentences into parts. A model for summaries takes it as a whole. A
    target language or an instruction at the beginning of the text applies to all sentences.
    """
    if is_blank(text):
        return []
    if translator.task.summarizes:
        return [Segment("", text.strip())]
    source, direction = translator.codec.read_source(text, options, "The text")
    opening = text.removesuffix(source.text)
    most = min(limits.max_segment, translator.backend.limits.source or limits.max_segment)

    def length(part: str) -> int:
        return len(translator.encode_source(part, direction))

    sentences = split_sentences(source.text, direction.source)
    parts = [part for space, one in sentences for part in split_text(one, most, length, space)]
    return [Segment(space, part, opening) for space, part in parts]


def search(state: Progress, texts: Sequence[str], options: DecodingOptions, watch: Watch, limits: Limits) -> list[Any]:
    """Translate some texts; raise [`Ended`] once the request is over."""
    watch.check()
    translator = state.model.translator
    changes: dict[str, Any] = {"max_source_length": limits.max_segment}
    if state.model.takes_processors:
        changes["generate"] = {"logits_processor": [watch]}
    if translator.task.summarizes:
        changes |= {"on_long": "truncate", "max_source_length": SEGMENTS_OF_SUMMARY * limits.max_segment}
    return list(translator.translate(texts, replace(options, **changes), warn_short=False, warnings=state.warnings))


def translate_text(
    models: Sequence[DemoModel], text: str, options: DecodingOptions, watch: Watch, limits: Limits
) -> Iterator[list[Progress]]:
    """
    Translate a text with several models in turns, some sentences at a time, and yield the state after each turn.

    Raises:
        UserError: The text is too long, or a model cannot translate it.
        Ended: The request is over.
    """
    check_length(text, limits)
    states = [Progress(model, split_into_segments(model.translator, text, options, limits)) for model in models]
    turn = 0
    while any(not state.is_complete for state in states):
        size = BATCHES[min(turn, len(BATCHES) - 1)]
        for state in states:
            if not state.is_complete:
                start = time.monotonic()
                translate_batch(state, size, options, watch, limits)
                state.seconds += time.monotonic() - start
                yield states
        turn += 1


def translate_batch(state: Progress, size: int, options: DecodingOptions, watch: Watch, limits: Limits) -> None:
    """Translate the next sentences of a text, and align their words."""
    batch = state.segments[state.done : state.done + size]
    texts = [segment.opening + segment.source for segment in batch]
    translations = search(state, texts, options, watch, limits)
    for segment, translation in zip(batch, translations, strict=True):
        segment.hypotheses = translation.hypotheses
        if not state.no_attention:
            align(state, segment)
        state.done += 1


def align(state: Progress, segment: Segment) -> None:
    """Link the words of a sentence with those of its best translation; note why that is not possible."""
    best = segment.hypotheses[0].text
    if is_blank(segment.source) or is_blank(best) or state.model.translator.task.summarizes:
        return
    try:
        segment.alignment = next(align_pairs(state.model.translator, [segment.opening + segment.source], [best]))
    except UserError as error:
        if not str(error.field).startswith("Pair "):  # of the model, not of this sentence
            state.no_attention = str(error)


# -- files -------------------------------------------------------------------------------------------------------------


def read_upload(path: str | Path, name: str, limits: Limits) -> list[str]:
    """
    Return the lines of an uploaded file, plain or compressed; `name` is the file's name in messages.

    Raises:
        UserError: The file is too large, empty, not UTF-8 or damaged, or has too many or too long lines.
    """
    is_larger = Path(path).stat().st_size > limits.max_file_size
    if not is_larger:  # decompressed, a small file may have any size; `read_lines` explains what is wrong with others
        with open_bytes(path) as file, suppress(OSError, EOFError, ValueError):
            is_larger = len(file.read(limits.max_file_size + 1)) > limits.max_file_size
    if is_larger:
        raise UserError(f"{name} has more than {limits.max_file_size:,} bytes.", field=name)
    try:
        lines = list(islice(read_lines(path), limits.max_lines + 1))
    except UserError as error:
        raise UserError(error.message.replace(str(path), name), field=name) from error
    if not 0 < len(lines) <= limits.max_lines:
        raise UserError(f"{name} is empty or has more than {limits.max_lines:,} lines.", field=name)
    for number, line in enumerate(lines, start=1):
        check_length(line, limits, f"{name}, line {number}")
    return lines


def translate_lines(
    state: Progress, lines: Sequence[str], options: DecodingOptions, watch: Watch, limits: Limits
) -> Iterator[list[str]]:
    """Translate lines in batches, and yield the translations of each batch; raises as [`translate_text`]."""
    for start in range(0, len(lines), LINES_OF_BATCH):
        batch = lines[start : start + LINES_OF_BATCH]
        yield [translation.text for translation in search(state, batch, options, watch, limits)]
