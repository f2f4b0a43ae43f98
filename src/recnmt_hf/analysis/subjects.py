"""Table of what `recnmt inspect` can show, by model family."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..models.user_errors import UserError


@dataclass(frozen=True)
class Subject:
    """
    One thing that can be inspected in the models of a family.

    Attributes:
        name (`str`): Value of `--subject`.
        summary (`str`): One line for `--help`.
        function (`str`): `module.function` of this package. It takes a [`Translator`], a sentence, an output file (or
            `None`) and the options, and returns the text to print.
        options (`tuple[str]`): Names of the options that the function takes.
    """

    name: str
    summary: str
    function: str
    options: tuple[str, ...]

    def load(self) -> Callable[..., str]:
        """Import and return the function."""
        module, _, function = self.function.partition(".")
        return getattr(importlib.import_module(f".{module}", __package__), function)


# model_type -> subject
SUBJECTS = {
    "biarn_transformer": Subject(
        "attention", "attention of the recurrence encoder's steps", "recurrence.inspect_attention", ("layer", "head")
    ),
    "gret": Subject(
        "global",
        "words that each capsule reads, and the gate of each target token",
        "global_state.inspect_global_state",
        ("target", "layer"),
    ),
    "rpe_transformer": Subject(
        "positions",
        "similarity of recurrent positional embeddings by distance",
        "recurrent_positions.inspect_positions",
        ("target",),
    ),
    "onlstm_transformer": Subject(
        "tree", "binary tree given by the master gates", "syntactic_distance.inspect_tree", ("layer", "direction")
    ),
}


def find_subject(config: Any, name: str | None = None) -> Subject:
    """
    Return the subject of a name, or by default that of a model's family. A model type outside this package has the
    subject of the family from which its configuration derives.

    Raises:
        UserError: The family has nothing to inspect.
    """
    if name is not None:
        return next(subject for subject in SUBJECTS.values() if subject.name == name)
    for base in type(config).__mro__:
        if subject := SUBJECTS.get(vars(base).get("model_type", "")):
            return subject
    raise UserError(
        f"A {config.model_type} model has nothing to inspect. Remedy: use a model of one of {', '.join(SUBJECTS)}."
    )
