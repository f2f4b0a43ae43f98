"""How classifiers of the probing tasks are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from .._values import MOST_SEED, Range, check_options, documented, option
from ..models.user_errors import UserError


# Names of SentEval's files, of the tasks in the papers' tables, and what they ask for.
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
    """How a classifier is trained: Adam; of all settings and epochs the best by validation accuracy is tested."""

    classifier: str = option(
        "mlp",
        "mlp: one hidden layer with sigmoid; logistic: none (word_content never has one)",
        choices=("mlp", "logistic"),
    )
    hidden: Annotated[list[int], Range(least=1, most=10_000)] = field(
        default_factory=lambda: [50, 100, 200], metadata={"help": "sizes of the hidden layer"}
    )
    dropout: Annotated[list[float], Range(least=0, below=1)] = field(
        default_factory=lambda: [0.0, 0.1, 0.2], metadata={"help": "of the hidden layer, before its sigmoid"}
    )
    l2: Annotated[list[float], Range(least=0)] = field(
        default_factory=lambda: [1e-5, 1e-4, 1e-3, 1e-2], metadata={"help": "weight decays of the logistic classifier"}
    )
    epochs: Annotated[int, Range(least=1, most=10_000)] = option(200, "most passes over the training sentences")
    every: Annotated[int, Range(least=1)] = option(4, "passes between two looks at the validation accuracy")
    patience: Annotated[int, Range(least=1)] = option(5, "looks without a better one after which training ends")
    batch_size: Annotated[int, Range(least=1)] = option(64, "sentences of a batch")
    learning_rate: Annotated[float, Range(above=0)] = option(1e-3, "of Adam")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "of first weights, dropout and batches")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("hidden", "dropout", "l2"):
            if not getattr(self, name):
                raise UserError(f"{name}=[] is not allowed; it must be a list of numbers. Remedy: correct it.")
