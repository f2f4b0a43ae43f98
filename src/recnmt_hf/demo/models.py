"""Models of the page: names, translators and the files that describe them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .._loading_errors import folder_of_model
from .._plain_card import CARD
from ..analysis.subjects import find_subject
from ..errors import UserError
from ..families import Subject
from ..hub.checked_copy import short_name
from ..inference.model_settings import is_export, read_export_settings
from ..inference.translator import Translator
from ..training.evidence import Evidence


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

    @cached_property
    def example(self) -> str:
        """The example sentence of the recorded evidence; empty without one."""
        with suppress(UserError):
            return Evidence.load(self.path).example
        return ""

    def card(self) -> str:
        """Return the Markdown of the card without its metadata; empty if there is none."""
        path = Path(self.path) / CARD
        return ModelCard.load(path, ignore_metadata_errors=True).text.strip() if path.is_file() else ""


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each path (see [`short_name`]); the whole path where these are not unique."""
    names = [short_name(path) or path for path in paths]
    return [whole if names.count(name) > 1 else name for whole, name in zip(paths, names, strict=True)]


def load_models(paths: Sequence[str | Path], **settings: Any) -> list[DemoModel]:
    """
    Load the models of a page; `settings` are those of [`Translator.from_pretrained`].

    Raises:
        UserError: A model cannot be loaded.
    """
    words = list(dict.fromkeys(map(folder_of_model, paths)))
    translators = [Translator.from_pretrained(word, **settings) for word in words]
    takes = [not (is_export(word) and read_export_settings(word).format == "ctranslate2") for word in words]
    return [DemoModel(*row) for row in zip(short_names(words), words, translators, takes, strict=True)]
