"""Training data in shards: their files, a dataset that opens only those in use, and batches from one pool at a time."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset, Sampler

from ..errors import UserError
from ..options import Range, check_options, option
from .batching import BatchLimits, TokenBatchSampler, combined
from .files import digest_of, digest_of_file
from .text import ON_EMPTY, ON_LONG


# Pairs from which batches are cut at a time. Larger pools need less padding, and more memory.
POOL = 2**20
# Version of the files.
FORMAT = 1
MANIFEST, SHARDS = "manifest.json", "shards"
# Ends of the names of shards, and of those with duplicates, whose keys are a further column.
SHARD, RAW = ".arrow", ".raw.arrow"
# Entry of manifests and records.
CHECKSUM = "checksum"
# What two pairs have in common -> the sides that are compared.
KEYS_OF_DUPLICATES = {"pair": (0, 1), "source": (0,), "target": (1,)}


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


@dataclass
class ShardRecord:
    """A finished shard, as the manifest describes it."""

    name: str
    corpus: int
    read: int  # pairs
    pairs: int = 0  # that were written
    removed: dict[str, int] = field(default_factory=dict)  # by reason
    source_tokens: int = 0
    target_tokens: int = 0
    unknown_tokens: int = 0
    bytes: int = 0
    sha256: str = ""

    def save(self, table: pa.Table, path: Path) -> None:
        """Write a table as one batch of an Arrow file, and note its size and checksum."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        content = sink.getvalue()
        self.bytes, self.sha256 = content.size, hashlib.sha256(content).hexdigest()
        write(path, content)


def write(path: Path, content: Any) -> None:
    """Replace a file atomically, also if another process writes the same one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def open_table(path: Path) -> pa.RecordBatch:
    """Return the table in an Arrow file, which is not copied into memory."""
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


def open_columns(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return for each column of a shard, mapped into memory, the ends of its rows and the values of all rows."""
    table = open_table(path)
    columns = {name: table[name] for name in table.schema.names}
    return {name: (column.offsets.to_numpy(), column.values.to_numpy()) for name, column in columns.items()}


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping for JSON with its checksum."""
    return {**content, CHECKSUM: digest_of(content)}


def read_signed(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a JSON file without its checksum; `None` if the file is missing or was altered."""
    content = read_json(path) or {}
    checksum = content.pop(CHECKSUM, None)  # files of versions before 0.3 have none
    return content if content and checksum in (None, signed(content)[CHECKSUM]) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a JSON file; `None` if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def load_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of prepared data. `UserError` if there is none, or it is damaged."""
    manifest = read_signed(folder / MANIFEST)
    if manifest is None or manifest.get("format") != FORMAT:
        raise altered(folder / MANIFEST)
    return manifest


def altered(path: Path) -> UserError:
    """Return the error for a file of prepared data that is missing or has another size or checksum."""
    return UserError(f"{path} is missing, unfinished or altered. Run recnmt prepare again.", field=path)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """
    Weights of the corpora in an epoch.

    Args:
        weights (sequence of `float`, *optional*): Numbers of times; a fraction reads a fixed part of the pairs.
        temperature (`float`, *optional*): In place of weights: read corpora with probabilities proportional to
            `size ** (1 / temperature)` (Arivazhagan et al., 2019, section 4.2), the largest one once.
    """

    weights: Sequence[float] | None = None
    temperature: float | None = None

    def repeats(self, sizes: Sequence[int]) -> list[float]:
        """Return how often each corpus is read, from the numbers of their pairs."""
        if self.weights is not None:
            return list(self.weights)
        if self.temperature is None:
            return [1.0] * len(sizes)
        rates = [size ** (1 / self.temperature - 1) if size else 0.0 for size in sizes]
        least = min(rate for rate in rates if rate)
        return [rate / least for rate in rates]


class ShardedDataset(Dataset[dict[str, list[int]]]):
    """
    Training data that `recnmt prepare` has written. Shards are opened, and their checksums checked, when needed. In
    `__getitems__` indices beyond the last row start at the first row again, so that samplers can number the reads of a
    row.

    Args:
        folder (`str` or `Path`): The folder.
        mixture ([`Mixture`], *optional*): How often each corpus is read; once in an epoch by default.

    Raises:
        UserError: The folder has no manifest, which an unfinished preparation lacks, or a shard is missing or altered.
    """

    def __init__(self, folder: str | Path, mixture: Mixture | None = None):
        self.folder = Path(folder) / SHARDS
        self.manifest = load_manifest(Path(folder))
        self.mixture = mixture or Mixture()
        self.shards = [ShardRecord(**record) for record in self.manifest["shards"] if record["pairs"]]
        self.firsts = list(accumulate((record.pairs for record in self.shards), initial=0))
        for number, record in enumerate(self.shards):
            if self.path(number).stat().st_size != record.bytes:
                raise altered(self.path(number))
        self.column_names: list[str] = open_table(self.path(0)).schema.names
        self.columns = self.column_names
        self.open_shards: OrderedDict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = OrderedDict()
        self.most_open = 1

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        number = bisect_right(self.firsts, index) - 1
        shard, row = self.open(number), index - self.firsts[number]
        columns = ((name, *shard[name]) for name in self.columns)
        return {name: values[slice(*ends[row : row + 2])].tolist() for name, ends, values in columns}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, list[int]]]:
        return [self[index % len(self)] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "open_shards": OrderedDict()}  # each process maps its own

    @property
    def digest(self) -> str:
        """Checksum of all token ids."""
        return hashlib.sha256("".join(record.sha256 for record in self.shards).encode()).hexdigest()

    def select_columns(self, names: Sequence[str]) -> ShardedDataset:
        """Return the dataset with some of its columns."""
        selected = copy.copy(self)
        selected.columns, selected.open_shards = list(names), OrderedDict()
        return selected

    def pairs_of_corpora(self) -> list[int]:
        """Return the number of pairs of each corpus."""
        pairs = Counter[int]()
        for record in self.shards:
            pairs[record.corpus] += record.pairs
        return [pairs[number] for number in range(len(self.manifest["corpora"]))]

    def path(self, number: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{self.shards[number].name}{SHARD}"

    def open(self, number: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """
        Return the columns of a shard, as [`open_columns`]; close the shard that was unused for the longest time if more
        than `most_open` are open. `UserError` if its checksum is another one.
        """
        if number not in self.open_shards:
            path = self.path(number)
            if digest_of_file(path) != self.shards[number].sha256:
                raise altered(path)
            self.open_shards[number] = open_columns(path)
            while len(self.open_shards) > self.most_open:
                self.open_shards.popitem(last=False)
        self.open_shards.move_to_end(number)
        return self.open_shards[number]

    def lengths(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of the sources and of the targets of a shard; its tokens are not read."""
        columns = open_columns(self.path(number))
        return np.diff(columns["input_ids"][0]), np.diff(columns["labels"][0])


# -- batches -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A shard in a pool: all of its pairs, or a fixed random choice of them; `turn` counts its reads in an epoch."""

    shard: int
    pairs: int
    turn: int


class PooledBatchSampler(Sampler[list[int]]):
    """
    Batches of a [`ShardedDataset`]: the shards are divided into pools, and [`TokenBatchSampler`] makes batches from one
    pool at a time, so only the lengths of one pool are in memory. The seed decides which shards, or parts of them, are
    in a pool; each epoch draws a new order of the pools. A single pool has the batches of data without shards.

    The number of batches of each pool is a multiple of `num_processes`. A pool has at least `pool` pairs. A row that is
    read again has another index, so that BPE dropout segments it anew. The others are as for [`TokenBatchSampler`].
    """

    def __init__(
        self,
        data: ShardedDataset,
        limits: BatchLimits,
        *,
        num_processes: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        pool: int = POOL,
    ):
        self.data, self.limits, self.num_processes = data, limits, num_processes
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self.skipped = 0  # batches of the epoch that are not needed
        repeats = data.mixture.repeats(data.pairs_of_corpora())
        self.pools = divide(data.shards, repeats, seed, max(pool, num_processes))
        if not any(self.pools):
            raise UserError("The weights of the corpora leave no sentence pairs.", field="weights")
        data.most_open = max(data.most_open, *map(len, self.pools))
        self.counts = [self.count(pool) for pool in self.pools]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def tokens(self) -> int:
        """Number of source and target tokens of an epoch; about, if only a part of a shard is read."""
        parts = ((self.data.shards[part.shard], part.pairs) for pool in self.pools for part in pool)
        return round(sum((shard.source_tokens + shard.target_tokens) * pairs / shard.pairs for shard, pairs in parts))

    def drawn_pairs(self) -> list[int]:
        """Return the number of pairs that an epoch reads from each corpus."""
        pairs = [0] * len(self.data.manifest["corpora"])
        for part in (part for pool in self.pools for part in pool):
            pairs[self.data.shards[part.shard].corpus] += part.pairs
        return pairs

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch, len(self.pools)])
        order = rng.permutation(len(self.pools)).tolist() if self.shuffle else range(len(self.pools))
        passed, skipped, self.skipped = 0, self.skipped, 0
        for pool in order:
            passed += self.counts[pool]
            if passed <= skipped:
                yield from ([] for _ in range(self.counts[pool]))  # nothing is read
            else:
                yield from self.batches(pool)

    def batches(self, pool: int) -> Iterator[list[int]]:
        """Yield the batches of a pool."""
        rows, *lengths = self.read(self.pools[pool])
        # The only pool has the batches of data in memory.
        seed = self.seed if len(self.pools) == 1 else (self.seed, pool)
        settings = {**vars(self.limits), "num_processes": self.num_processes, "shuffle": self.shuffle, "seed": seed}
        sampler = TokenBatchSampler(*lengths, **settings)
        sampler.set_epoch(self.epoch)
        for batch in sampler.batches():
            yield rows[batch].tolist()

    def read(self, pool: Sequence[Part]) -> list[np.ndarray]:
        """Return the rows of a pool in the data, the lengths of their sources and those of their targets."""
        columns = []
        for shard, pairs, turn in pool:
            rows = np.arange(self.data.shards[shard].pairs)
            if pairs < len(rows):
                rows = np.sort(np.random.default_rng([self.seed, shard]).permutation(rows)[:pairs])
            first = self.data.firsts[shard] + turn * len(self.data)
            columns.append((rows + first, *(lengths[rows] for lengths in self.data.lengths(shard))))
        return list(map(np.concatenate, zip(*columns, strict=True)))

    def count(self, pool: Sequence[Part]) -> int:
        """Return the number of batches of a pool, which depends on the lengths alone."""
        _, sources, targets = self.read(pool)
        ends = self.limits.cut(*np.unique(combined(sources, targets), return_counts=True))
        return -(-len(ends) // self.num_processes) * self.num_processes


def divide(shards: Sequence[ShardRecord], repeats: Sequence[float], seed: int, pool: int) -> list[list[Part]]:
    """
    Divide shards, each as often as its corpus is repeated, into pools of at least `pool` pairs, if there are as many. A
    fraction of a corpus is made of random shards and a part of one more. The numbers in a pool are ascending.
    """
    rng = np.random.default_rng([seed, len(shards)])
    drawn: list[Part] = []
    for corpus in sorted({record.corpus for record in shards}):
        own = [(number, record.pairs) for number, record in enumerate(shards) if record.corpus == corpus]
        times = int(repeats[corpus])
        drawn += [Part(*shard, turn) for turn in range(times) for shard in own]
        rest = round((repeats[corpus] - times) * sum(pairs for _, pairs in own))
        for shard, pairs in (own[place] for place in rng.permutation(len(own)).tolist()):
            if rest > 0:
                drawn.append(Part(shard, min(pairs, rest), times))
                rest -= pairs
    pools: list[list[Part]] = [[]]
    size = 0
    for part in (drawn[place] for place in rng.permutation(len(drawn)).tolist()):
        if size >= pool:
            pools.append([])
            size = 0
        pools[-1].append(part)
        size += part.pairs
    if size < pool / 2 and len(pools) > 1:
        last = pools.pop()
        pools[-1] += last
    return [sorted(parts) for parts in pools]
