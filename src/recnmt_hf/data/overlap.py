"""Sentences of validation and test sets that are also in the training text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


NO_WORD = re.compile(r"[\W_]+")


def folded(text: str) -> str:
    """Return a text without case, punctuation and spacing."""
    return NO_WORD.sub(" ", text.casefold()).strip()


def rows_in_training(training: Iterable[str], sets: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """
    Return for each set of sentences the rows, counted from 0, that occur in the training text. Case, punctuation and
    spacing do not count.
    """
    rows: dict[str, list[tuple[str, int]]] = {}
    for name, sentences in sets.items():
        for row, sentence in enumerate(sentences):
            rows.setdefault(folded(sentence), []).append((name, row))
    rows.pop("", None)
    seen = {text for text in map(folded, training) if text in rows}
    return {name: sorted(row for text in seen for other, row in rows[text] if other == name) for name in sets}
