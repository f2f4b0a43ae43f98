"""Translate while the visitor watches: in small batches, within limits, and until the visitor stops it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .._loading_errors import folder_of_model
from .._plain_card import CARD
from .._plain_text import is_blank
from ..errors import UserError
from ..hub.checked_copy import short_name
from ..inference.backends.ctranslate2_model import CTranslate2Backend
from ..inference.options import DecodingOptions
from ..inference.results import Hypothesis, TranslationWarnings, WordAlignment
from ..inference.splitting import join_texts, split_sentences, split_text
from ..inference.translator import Translator, align_pairs
from ..options import Range, check_value
from ..training.evidence import Evidence
from .limits import Limits


# Sentences of the first batches; all later ones have the size of the last. The first translation appears early.
BATCHES = (1, 2, 4, 8)
SEGMENTS_OF_SUMMARY = 4  # a text for a summary is one input, of at most this many segments' tokens


@dataclass
class DemoModel:
    """A model of the page."""

    name: str
    translator: Translator
    example: str  # sentence of the recorded evidence; empty without one
    card: str  # Markdown without metadata; empty if there is none


def load_models(paths: Sequence[str | Path], **settings: Any) -> list[DemoModel]:
    """Load the models of a page; `settings` are those of [`Translator.from_pretrained`]."""
    folders, models = list(dict.fromkeys(map(folder_of_model, paths))), []
    for name, folder in zip(unique_names(folders), folders, strict=True):
        translator, card = Translator.from_pretrained(folder, **settings), Path(folder) / CARD
        text = ModelCard.load(card, ignore_metadata_errors=True).text.strip() if card.is_file() else ""
        models.append(DemoModel(name, translator, Evidence.load(folder).example, text))
    return models


def unique_names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each path (see [`short_name`]); the whole path where these are not unique."""
    names = [short_name(path) or path for path in paths]
    return [whole if names.count(name) > 1 else name for whole, name in zip(paths, names, strict=True)]


class Ended(Exception):
    """The visitor stopped the request, or its time is over; the message is for the visitor."""


class Watch:
    """Time limit and stop button of a request. As a logits processor, it ends a search at its next step."""

    def __init__(self, seconds: float):
        self.seconds, self.is_stopped = seconds, False
        self.start()

    def start(self) -> None:
        """Start the time, after waiting in the queue."""
        self.end = time.monotonic() + self.seconds

    def check(self) -> None:
        """Raise [`Ended`] if the request is over."""
        if self.is_stopped or time.monotonic() > self.end:
            raise Ended("Stopped" if self.is_stopped else f"Stopped at the time limit of {self.seconds:g} seconds")

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.check()
        return scores


def decoding_options(limits: Limits, beams: Any, hypotheses: Any, penalty: Any) -> DecodingOptions:
    """Return the options of a request; `UserError` for values that are not allowed or beyond the limits."""
    for name, value in (("beams", beams), ("num_hypotheses", hypotheses)):
        check_value(name, value, int, Range(least=1, most=limits.max_beams))
    options = {"num_hypotheses": hypotheses, "length_penalty": penalty, "max_tokens": limits.batch_tokens}
    return DecodingOptions(beams=beams, on_long="split", **options)


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
    """The translation of a text by one model, as far as it is done."""

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

    def search(self, texts: Sequence[str], options: DecodingOptions, watch: Watch, limits: Limits) -> list[Any]:
        """Translate some texts; raise [`Ended`] once the request is over."""
        watch.check()
        translator = self.model.translator
        changes: dict[str, Any] = {"max_source_length": limits.max_segment}
        if not isinstance(translator.backend, CTranslate2Backend):  # it calls no logits processors
            changes["generate"] = {"logits_processor": [watch]}
        if translator.task.summarizes:
            changes |= {"on_long": "truncate", "max_source_length": SEGMENTS_OF_SUMMARY * limits.max_segment}
        return list(translator.translate(texts, replace(options, **changes), warn_short=False, warnings=self.warnings))

    def align(self, segment: Segment) -> None:
        """Link the words of a sentence with those of its best translation; note why that is not possible."""
        translator, best = self.model.translator, segment.hypotheses[0].text
        if self.no_attention or is_blank(segment.source) or is_blank(best) or translator.task.summarizes:
            return
        try:
            segment.alignment = next(align_pairs(translator, [segment.opening + segment.source], [best]))
        except UserError as error:
            if not str(error.field).startswith("Pair "):  # of the model, not of this sentence
                self.no_attention = str(error)


def split_into_segments(translator: Translator, text: str, options: DecodingOptions, limits: Limits) -> list[Segment]:
    """Split a text into sentences and parts, all with its opening (a target language); not for summaries."""
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


def translate_text(
    models: Sequence[DemoModel], text: str, options: DecodingOptions, watch: Watch, limits: Limits
) -> Iterator[list[Progress]]:
    """Translate a text with several models in turns, some sentences at a time, and yield the state after each turn."""
    if len(text) > (most := limits.max_characters):
        raise UserError(f"The text has {len(text):,} characters, and the limit is {most:,}.", field="The text")
    states = [Progress(model, split_into_segments(model.translator, text, options, limits)) for model in models]
    for size in chain(BATCHES, repeat(BATCHES[-1])):
        if not (waiting := [state for state in states if not state.is_complete]):
            return
        for state in waiting:
            start, batch = time.monotonic(), state.segments[state.done : state.done + size]
            found = state.search([segment.opening + segment.source for segment in batch], options, watch, limits)
            for segment, translation in zip(batch, found, strict=True):
                segment.hypotheses = translation.hypotheses
                state.align(segment)
                state.done += 1
            state.seconds += time.monotonic() - start
            yield states
