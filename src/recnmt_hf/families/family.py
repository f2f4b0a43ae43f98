"""The manifest of a family of models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


# Suffixes of the classes of every family.
CONFIG, MODEL, GENERATING = "Config", "Model", "ForConditionalGeneration"
MODEL_CLASSES = ("PreTrainedModel", MODEL, GENERATING)


@dataclass(frozen=True)
class PaperFigure:
    """
    One row of a paper's table of results.

    Attributes:
        task (`str`): Corpus and languages.
        languages (`tuple[str, str]`): Source and target.
        size (`str`): The preset that it corresponds to; empty for none.
        metric (`str`): Metric, and the variant of the model where the paper has several.
        baseline (`str`): Result of the paper's baseline.
        model (`str`): Result of the paper's model.
    """

    task: str
    languages: tuple[str, str]
    size: str
    metric: str
    baseline: str
    model: str


@dataclass(frozen=True)
class Subject:
    """
    A view of a family's models for `recnmt inspect`.

    Attributes:
        name (`str`): Value of `--subject`.
        summary (`str`): One line for `--help`.
        function (`str`): `module.function` of the package `analysis`. It takes a [`Translator`], a sentence, an output
            file (or `None`) and the options, and returns the text to print.
        options (`tuple[str, ...]`): Names of the options that the function takes.
    """

    name: str
    summary: str
    function: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """
    A family of models.

    Attributes:
        model_type (`str`): As in `config.json`. The modules are `models/configuration_<model_type>.py` and
            `models/modeling_<model_type>.py`.
        prefix (`str`): First part of the names of its classes.
        paper (`str`): Authors, year and title, in Markdown.
        citation (`str`): BibTeX entry of the paper.
        figures (`tuple[PaperFigure, ...]`): The paper's results.
        further_classes (`dict[str, str]`): Further classes: suffix of the name, and Auto class to register with.
        subject ([`Subject`], *optional*): View of `recnmt inspect`.
        small (`dict`): Configuration fields of the small model for tests, in addition to the small sizes. They should
            select the special features of the family: recurrent states, further memories, masks.
    """

    model_type: str
    prefix: str
    paper: str
    citation: str
    figures: tuple[PaperFigure, ...] = ()
    further_classes: Mapping[str, str] = field(default_factory=dict)
    subject: Subject | None = None
    small: Mapping[str, Any] = field(default_factory=dict)

    @property
    def class_modules(self) -> dict[str, str]:
        """Return the names of its public classes with their modules, relative to the package."""
        modeling = f".models.modeling_{self.model_type}"
        modules = {f"{self.prefix}{CONFIG}": f".models.configuration_{self.model_type}"}
        return modules | {f"{self.prefix}{suffix}": modeling for suffix in (*MODEL_CLASSES, *self.further_classes)}

    def load_class(self, suffix: str) -> Any:
        """Import one of its classes, e.g. `load_class("Config")`."""
        name = f"{self.prefix}{suffix}"
        package = __package__.rpartition(".")[0]
        return getattr(importlib.import_module(self.class_modules[name], package), name)
