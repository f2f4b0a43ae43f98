"""Models of the page: names, translators and the files that describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .._loading_errors import folder_of_model
from .._plain_card import CARD
from ..analysis.subjects import find_subject
from ..errors import UserError
from ..families import Subject
from ..hub.checked_copy import short_name
from ..inference.backends.export_settings import is_export, read_export_settings
from ..inference.translator import Translator
from ..training.evidence import Evidence


# Bytes of a card that are read.
MOST_CARD_BYTES = 200_000


@dataclass
class DemoModel:
    """A model of the page."""

    name: str
    path: str
    translator: Translator
    takes_processors: bool = True  # whether its search calls logits processors, which can end it

    @cached_property
    def subject(self) -> Subject:
        """The view of its family's own mechanism; `UserError` if there is nothing to show."""
        return find_subject(self.translator.inspected_model().config)

    def evidence(self) -> Evidence:
        """Return the recorded evidence; empty without a file of it, `UserError` if that is damaged."""
        return Evidence.load(self.path)

    def card(self) -> str:
        """Return the Markdown of the card without its metadata; empty if there is none."""
        path = Path(self.path) / CARD
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            text = file.read(MOST_CARD_BYTES).decode(errors="replace").replace("\r\n", "\n")
        if text.startswith("---\n"):
            _, found, rest = text[4:].partition("\n---\n")
            text = rest if found else text
        return text.strip()


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each path (see [`short_name`]); the whole path where these are not unique."""
    names = [short_name(path) or path for path in paths]
    return [whole if names.count(name) > 1 else name for whole, name in zip(paths, names, strict=True)]


def load_models(paths: Sequence[str | Path], **settings: Any) -> list[DemoModel]:
    """
    Load the models of a page; `settings` are those of [`Translator.from_pretrained`].

    Raises:
        UserError: There is no model, one is given twice, or one cannot be loaded.
    """
    words = [folder_of_model(path) for path in paths]
    if not words:
        raise UserError("There is no model to show.", field="models")
    for number, word in enumerate(words):
        if word in words[:number]:
            raise UserError(f"The model {word} is given twice.", field=word)
    translators = [Translator.from_pretrained(word, **settings) for word in words]
    takes = [not (is_export(word) and read_export_settings(word).format == "ctranslate2") for word in words]
    return [DemoModel(*row) for row in zip(short_names(words), words, translators, takes, strict=True)]
