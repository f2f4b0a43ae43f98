"""Probing tasks, and options of their classifiers and of the bag-of-words probe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from .._values import MOST_SEED, Range, check_options, documented, option
from ..errors import UserError


# Name of SentEval's file -> name in the papers' tables, kind of information
TASKS = {
    "sentence_length": ("SeLen", "surface"),
    "word_content": ("WC", "surface"),
    "tree_depth": ("TrDep", "syntactic"),
    "top_constituents": ("ToCo", "syntactic"),
    "bigram_shift": ("BShif", "syntactic"),
    "past_present": ("Tense", "semantic"),
    "subj_number": ("SubN", "semantic"),
    "obj_number": ("ObjN", "semantic"),
    "odd_man_out": ("SoMo", "semantic"),
    "coordination_inversion": ("CoIn", "semantic"),
}


@documented
@dataclass
class ClassifierOptions:
    """Training of a classifier: Adam; the setting and epoch with the best validation accuracy are tested."""

    classifier: str = option(
        "mlp",
        "mlp: a hidden layer with sigmoid; logistic: no hidden layer, as always for word_content",
        choices=("mlp", "logistic"),
    )
    hidden: Annotated[list[int], Range(least=1, most=10_000)] = field(
        default_factory=lambda: [50, 100, 200], metadata={"help": "sizes of the hidden layer to try"}
    )
    dropout: Annotated[list[float], Range(least=0, below=1)] = field(
        default_factory=lambda: [0.0, 0.1, 0.2], metadata={"help": "dropout rates to try, before the sigmoid"}
    )
    l2: Annotated[list[float], Range(least=0)] = field(
        default_factory=lambda: [1e-5, 1e-4, 1e-3, 1e-2],
        metadata={"help": "weight decays of logistic classifiers to try"},
    )
    epochs: Annotated[int, Range(least=1, most=10_000)] = option(200, "maximum passes over the training sentences")
    every: Annotated[int, Range(least=1)] = option(4, "passes between evaluations of the validation accuracy")
    patience: Annotated[int, Range(least=1)] = option(5, "evaluations without a better accuracy before training stops")
    batch_size: Annotated[int, Range(least=1)] = option(64, "sentences per batch")
    learning_rate: Annotated[float, Range(above=0)] = option(1e-3, "learning rate of Adam")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "seed of initial weights, dropout and batches")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("hidden", "dropout", "l2"):
            if not getattr(self, name):
                raise UserError("probe.empty_list", field=name)


@documented
@dataclass
class ProbeOptions:
    """Training of a probe: Adam on frozen, standardized vectors, until the validation loss no longer falls."""

    epochs: Annotated[int, Range(least=1, most=10000)] = option(50, "maximum number of passes over the training pairs")
    patience: Annotated[int, Range(least=1)] = option(3, "passes without a lower validation loss before training stops")
    batch_size: Annotated[int, Range(least=1)] = option(64, "sentences per batch")
    learning_rate: Annotated[float, Range(above=0)] = option(1e-3, "learning rate of Adam")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "seed of initial weights and batches")

    def __post_init__(self) -> None:
        check_options(self)
