"""Settings of shards, and the blocks of lines or rows that they are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Annotated, Any

import numpy as np

from ..errors import UserError
from ..options import Range, check_options, option
from .corpora import Corpus
from .filters import KEYS_OF_DUPLICATES
from .prepared import row_of_pair
from .text import ON_EMPTY, ON_LONG, is_plain_file


# Bytes that are read at once to find the ends of lines.
CHUNK = 2**24


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
