"""Subjects of `recnmt inspect`, by model family."""

import importlib
from collections.abc import Callable
from typing import Any

from ..errors import UserError, short_repr
from ..families import FAMILIES, Subject


# model_type -> subject
SUBJECTS = {model_type: family.subject for model_type, family in FAMILIES.items() if family.subject is not None}


def load_function(subject: Subject) -> Callable[..., str]:
    """Import and return the function of a subject."""
    module, _, function = subject.function.partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), function)


def find_subject(config: Any, name: str | None = None) -> Subject:
    """Return the subject with a name, or that of the family from which a model's configuration derives."""
    if name is not None:
        return next(subject for subject in SUBJECTS.values() if subject.name == name)
    for base in type(config).__mro__:
        if subject := SUBJECTS.get(vars(base).get("model_type", "")):
            return subject
    remedy = f"Use a model of one of these families: {', '.join(SUBJECTS)}."
    raise UserError(f"{short_repr(config.model_type)} models have nothing to inspect. {remedy}")
