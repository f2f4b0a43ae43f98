"""The manifest of a family of models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml


# Suffixes of the classes of every family.
CONFIG, MODEL, GENERATING = "Config", "Model", "ForConditionalGeneration"
MODEL_CLASSES = ("PreTrainedModel", MODEL, GENERATING)
# Mechanisms of the base class that combine with those of every Transformer family: name -> configuration fields.
COMBINATIONS: Mapping[str, Mapping[str, Any]] = {
    "relative positions": {"self_attention_type": "relative"},
    "directional masks": {"self_attention_type": "directional"},
    "pre-norm layers": {"normalize_before": True},
    "SSRU decoder": {"decoder_autoregression": "ssru"},
    "average-attention decoder": {"decoder_autoregression": "average_attention"},
    "gated-delta decoder": {"decoder_autoregression": "gated_delta"},
    "mLSTM encoder": {"encoder_mixer": "mlstm"},
}


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table."""

    system: str  # name of the model, the same as in the row file
    scores: Sequence[float]  # one for each test set of the table
    p: str = ""  # significance mark, as a bound of p against the first row
    parameters: float | None = None  # in millions, as printed
    added: float | None = None  # parameters in millions beyond the first row, where the paper prints the increase


@dataclass(frozen=True)
class PaperTask:
    """The data of a table."""

    name: str  # of the corpus
    languages: Sequence[str]  # source and target
    metric: str  # of the scores
    tests: Sequence[str]  # test sets


@dataclass(frozen=True)
class PaperTable:
    """
    A table (or figure) of a paper, for one corpus and size.
    A table of the kind `"main"` compares the paper's model with others, `"ablation"` compares its variants, and
    `"analysis"` measures something else than translation.
    """

    name: str  # e.g. "table 1"
    task: PaperTask
    rows: Sequence[PaperRow]  # the first row is the baseline
    size: str = "base"  # the preset that it corresponds to
    proposed: str = ""  # name of the paper's own model; empty for the last row
    kind: Literal["main", "ablation", "analysis"] = "main"
    note: str = ""  # an error or contradiction of the paper

    def __post_init__(self) -> None:
        assert all(len(row.scores) == len(self.task.tests) for row in self.rows), self.name
        assert not self.proposed or self.row(self.proposed), self.name

    @property
    def baseline(self) -> PaperRow:
        """The first row."""
        return self.rows[0]

    @property
    def own(self) -> PaperRow:
        """The row of the paper's own model."""
        return next((row for row in self.rows if row.system == self.proposed), self.rows[-1])

    def row(self, system: str) -> PaperRow | None:
        """Return the row of a model, or `None`."""
        return next((row for row in self.rows if row.system == system), None)

    def differences(self, row: PaperRow) -> tuple[float, ...]:
        """Return the scores of a row minus those of the first row."""
        return tuple(round(score - base, 2) for score, base in zip(row.scores, self.baseline.scores, strict=True))

    def texts(self, system: str) -> tuple[str, str]:
        """Return scores and differences to the first row as text; empty for a model that is not in the table."""
        row = self.row(system)
        if row is None:
            return "", ""
        digits = next(n for n in (0, 1, 2) if n == 2 or all(round(x, n) == x for row in self.rows for x in row.scores))
        of_row = "" if row is self.baseline else " / ".join(f"{x:+.{digits}f}" for x in self.differences(row))
        return " / ".join(f"{score:.{digits}f}" for score in row.scores), of_row


@dataclass(frozen=True)
class Subject:
    """A view of a family's models for `recnmt inspect`."""

    name: str  # value of --subject
    summary: str  # one line for --help
    # `module.function` of the package `analysis`. It takes a [`Translator`], a sentence, an output file (or `None`) and
    # the options, and returns the text to print.
    function: str
    options: Sequence[str]  # names of the options that the function takes


@dataclass(frozen=True)
class Family:
    """A family of models, in the modules `models/{configuration,modeling}_<model_type>.py`."""

    model_type: str  # as in `config.json`
    prefix: str  # first part of the names of its classes
    paper: str  # authors, year and title, in Markdown
    citation: str  # BibTeX entry of the paper
    tables: Sequence[PaperTable] = ()  # the paper's results
    # Further classes: suffix of the name, and Auto class to register with.
    further_classes: Mapping[str, str] = field(default_factory=dict)
    subject: Subject | None = None  # view of `recnmt inspect`
    # Other mechanisms that combine with the family's own: name, and configuration fields.
    combinations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Configuration fields of the small model for tests, in addition to the small sizes. They should select the special
    # features of the family: recurrent states, further memories, masks.
    small: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, manifest: Any) -> Family:
        """Return the family of a manifest, a file in the form of those beside this module."""
        content = yaml.safe_load(manifest.read_text(encoding="utf-8"))
        tasks = {name: PaperTask(**task) for name, task in content.pop("tasks", {}).items()}
        tables = [
            PaperTable(**{**table, "task": tasks[table["task"]], "rows": [PaperRow(**row) for row in table["rows"]]})
            for table in content.pop("tables", [])
        ]
        subject, combinations = content.pop("subject", None), content.pop("combinations", {})
        if content.pop("is_transformer", False):
            combinations = {**COMBINATIONS, **combinations}
        subject = None if subject is None else Subject(**subject)
        model_type = manifest.name.removesuffix(".yaml")
        return cls(model_type, **content, tables=tables, combinations=combinations, subject=subject)

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
