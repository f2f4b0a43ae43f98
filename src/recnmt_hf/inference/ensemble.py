"""Old constructor of ensembles; `Translator.from_pretrained([...])` does the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .backends.ensemble import EnsembleBackend
from .translator import Translator


class EnsembleTranslator:
    """
    Builds a [`Translator`] that averages the log-probabilities of several models. Provided for compatibility.

    Args:
        members (sequence of [`Translator`]): At least two.

    Raises:
        ValueError: There are fewer, their tokenizers or control tokens differ, or one was exported to CTranslate2.
    """

    def __new__(cls, members: Sequence[Translator]) -> Translator:  # type: ignore[misc]
        backend = EnsembleBackend([member.backend for member in members])
        return Translator.from_backend(backend, members[0].task)

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Translator:
        """Load the models of an ensemble from folders or model ids, as [`Translator.from_pretrained`]."""
        return Translator.from_pretrained([path] if isinstance(path, (str, Path)) else list(path), *args, **kwargs)
