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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset, Sampler

from ..errors import UserError
from .batching import BatchLimits, TokenBatchSampler, combined
from .files import digest_of, digest_of_file, naming


# Pairs from which batches are cut at a time. Larger pools need less padding, and more memory.
POOL = 2**20
# Version of the files.
FORMAT = 1
MANIFEST = "manifest.json"
# Settings of a preparation that has begun.
PLAN = "plan.json"
SHARDS = "shards"
# Ends of the names of shards, and of those with duplicates, whose keys are a further column.
SHARD, RAW = ".arrow", ".raw.arrow"
# Entry of manifests and records.
CHECKSUM = "checksum"


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


def path_of(record: ShardRecord, folder: Path, is_raw: bool) -> Path:
    """Return the file of a shard."""
    return folder / f"{record.name}{RAW if is_raw else SHARD}"


def save_table(table: pa.RecordBatch, record: ShardRecord, path: Path) -> None:
    """Write a table as an Arrow file, and note size and checksum in its record."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)
    content = sink.getvalue()
    record.bytes, record.sha256 = content.size, hashlib.sha256(content).hexdigest()
    write(path, content)


def write(path: Path, content: Any) -> None:
    """Replace a file atomically, also if another process writes the same one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with naming(path), open(partial, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def open_table(path: Path) -> pa.RecordBatch:
    """Return the table in an Arrow file, which is not copied into memory."""
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


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


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenShard:
    """The columns of a shard, mapped into memory: for each the ends of its rows, and the values of all rows."""

    ends: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, path: Path) -> OpenShard:
        """Open a shard."""
        table = open_table(path)
        columns = {name: table[name] for name in table.schema.names}
        return cls(
            {name: column.offsets.to_numpy(zero_copy_only=True) for name, column in columns.items()},
            {name: column.values.to_numpy(zero_copy_only=True) for name, column in columns.items()},
        )


class Part(NamedTuple):
    """A shard in a pool: all of its pairs, or a fixed random choice of them; `turn` counts its reads in an epoch."""

    shard: int
    pairs: int
    turn: int


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
        self.folder = Path(folder)
        self.manifest = load_manifest(self.folder)
        self.shards = [ShardRecord(**record) for record in self.manifest["shards"] if record["pairs"]]
        self.firsts = list(accumulate((record.pairs for record in self.shards), initial=0))
        for record in self.shards:
            self.verify(record)
        self.column_names: list[str] = open_table(self.path(self.shards[0])).schema.names
        self.columns = self.column_names
        self.mixture = mixture or Mixture()
        self.open_shards: OrderedDict[int, OpenShard] = OrderedDict()
        self.most_open = 1

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        number = bisect_right(self.firsts, index) - 1
        shard, row = self.open(number), index - self.firsts[number]
        return {name: shard.values[name][slice(*shard.ends[name][row : row + 2])].tolist() for name in self.columns}

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

    def path(self, record: ShardRecord) -> Path:
        """Return the file of a shard."""
        return path_of(record, self.folder / SHARDS, is_raw=False)

    def verify(self, record: ShardRecord, content: bool = False) -> None:
        """Raise `UserError` if a shard has another size or, if its `content` is read, another checksum."""
        path = self.path(record)
        if path.stat().st_size != record.bytes or (content and digest_of_file(path) != record.sha256):
            raise altered(path)

    def open(self, number: int) -> OpenShard:
        """Return a shard, and close the one that was unused for the longest time if too many are open."""
        if number not in self.open_shards:
            self.verify(self.shards[number], content=True)
            self.open_shards[number] = OpenShard.of(self.path(self.shards[number]))
            while len(self.open_shards) > self.most_open:
                self.open_shards.popitem(last=False)
        self.open_shards.move_to_end(number)
        return self.open_shards[number]

    def lengths(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of the sources and of the targets of a shard; its tokens are not read."""
        ends = OpenShard.of(self.path(self.shards[number])).ends
        return np.diff(ends["input_ids"]), np.diff(ends["labels"])


def altered(path: Path) -> UserError:
    """Return the error for a file of prepared data that is missing or has another size or checksum."""
    return UserError(f"{path} is missing, unfinished or altered. Run recnmt prepare again.", field=path)


def load_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of prepared data. `UserError` if there is none, or it is damaged."""
    manifest = read_signed(folder / MANIFEST)
    if manifest is None or manifest.get("format") != FORMAT:
        raise altered(folder / MANIFEST)
    return manifest


class PooledBatchSampler(Sampler[list[int]]):
    """
    Batches of a [`ShardedDataset`]: the shards are divided into pools, and [`TokenBatchSampler`] makes batches from one
    pool at a time, so only the lengths of one pool are in memory. The seed decides which shards, or parts of them, are
    in a pool; each epoch draws a new order of the pools. A single pool has the batches of data without shards.

    The number of batches of each pool is a multiple of `num_processes`. A pool has at least `pool` pairs. The `weights`
    of the corpora, how often each is read, are by default those of the data's mixture. A row that is read again has
    another index, so that BPE dropout segments it anew. `shuffle` and `seed` are as for [`TokenBatchSampler`].
    """

    def __init__(
        self,
        data: ShardedDataset,
        limits: BatchLimits,
        *,
        num_processes: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        pool: int = POOL,
    ):
        self.data, self.limits, self.num_processes = data, limits, num_processes
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self.skipped = 0  # batches of the epoch that are not needed
        repeats = data.mixture.repeats(data.pairs_of_corpora()) if weights is None else weights
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
        order = rng.permutation(len(self.pools)) if self.shuffle else range(len(self.pools))
        passed, skipped = 0, self.skipped
        self.skipped = 0
        for pool in order:
            passed += self.counts[pool]
            if passed <= skipped:
                yield from ([] for _ in range(self.counts[pool]))  # nothing is read
                continue
            yield from self.batches(int(pool))

    def batches(self, pool: int) -> Iterator[list[int]]:
        """Yield the batches of a pool."""
        rows, sources, targets = self.read(self.pools[pool])
        sampler = TokenBatchSampler(
            sources,
            targets,
            **vars(self.limits),
            num_processes=self.num_processes,
            shuffle=self.shuffle,
            # The only pool has the batches of data in memory.
            seed=self.seed if len(self.pools) == 1 else (self.seed, pool),
        )
        sampler.set_epoch(self.epoch)
        for batch in sampler.batches():
            yield rows[batch].tolist()

    def read(self, pool: Sequence[Part]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows of a pool in the data, and the lengths of their sources and targets."""
        columns = []
        for shard, pairs, turn in pool:
            rows = np.arange(self.data.shards[shard].pairs)
            if pairs < len(rows):
                rows = np.sort(np.random.default_rng([self.seed, shard]).permutation(rows)[:pairs])
            first = self.data.firsts[shard] + turn * len(self.data)
            columns.append((rows + first, *(lengths[rows] for lengths in self.data.lengths(shard))))
        rows, sources, targets = map(np.concatenate, zip(*columns, strict=True))
        return rows, sources, targets

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
        for number in rng.permutation(len(own)).tolist():
            shard, pairs = own[number]
            if rest > 0:
                drawn.append(Part(shard, min(pairs, rest), times))
                rest -= pairs
    pools: list[list[Part]] = [[]]
    size = 0
    for number in rng.permutation(len(drawn)).tolist():
        if size >= pool:
            pools.append([])
            size = 0
        pools[-1].append(drawn[number])
        size += drawn[number].pairs
    if size < pool / 2 and len(pools) > 1:
        last = pools.pop()
        pools[-1] += last
    return [sorted(parts) for parts in pools]
