"""Find sentence pairs that occurred before, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


# What two pairs have in common -> the columns that are compared.
KEYS_OF_DUPLICATES = {"pair": ("source", "target"), "source": ("source",), "target": ("target",)}
# Bytes of a key. Among 10**10 different pairs, two have the same one with a probability of 1e-19.
KEY_BYTES = 16
# Keys that are compared at once: 200 MB.
KEYS_AT_ONCE = 2**22


def keys_of(columns: Mapping[str, Sequence[str]], kind: str) -> np.ndarray:
    """
    Return the keys of sentence pairs, `uint64` of shape `(pairs, 2)`; equal pairs have equal keys, if they have equal
    languages, where these are columns.
    """
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
        repeats = order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]
        repeated = all_places[repeats]
        for number in np.unique(repeated[:, 0]):
            is_first[number][repeated[repeated[:, 0] == number, 1]] = False
    return is_first
