"""Training data in shards: their files, a dataset that opens only those in use, and batches from one pool at a time."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import Dataset, Sampler

from ..errors import UserError
from .batching import BatchLimits, TokenBatchSampler, combined
from .files import digest_of, digest_of_file
from .prepared import TOKENS, count_equal
from .tokenizer_pair import TokenizerPair


POOL = 2**20  # pairs from which batches are cut at a time; larger pools need less padding, and more memory
FORMAT, MANIFEST, SHARDS, SHARD = 1, "manifest.json", "shards", ".arrow"
# For each column of a shard the ends of its rows and the values of all rows.
Columns = dict[str, tuple[np.ndarray, np.ndarray]]


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

    def save(self, table: pa.Table, path: Path, tokenizers: TokenizerPair) -> None:
        """Write a table, if it has any pairs, as one batch of an Arrow file."""
        sides = [pc.list_flatten(table[name]) for name in TOKENS]
        self.pairs, self.bytes, self.sha256 = len(table), 0, ""
        self.source_tokens, self.target_tokens = map(len, sides)
        self.unknown_tokens = sum(map(count_equal, sides, (own.unk_token_id for own in tokenizers)))
        if self.pairs:
            with pa.ipc.new_file(sink := pa.BufferOutputStream(), table.schema) as writer:
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


def open_columns(path: Path) -> Columns:
    """Return the columns of a shard, mapped into memory."""
    table = open_table(path)
    return {name: (table[name].offsets.to_numpy(), table[name].values.to_numpy()) for name in table.schema.names}


def sign(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping for JSON with its checksum."""
    return {**content, "checksum": digest_of(content)}


def read_signed(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a JSON file without its checksum; `None` if the file is missing or was altered."""
    content = read_json(path) or {}
    checksum = content.pop("checksum", None)  # files of versions before 0.3 have none
    return content if content and checksum in (None, digest_of(content)) else None


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
    check_intact(manifest is not None and manifest.get("format") == FORMAT, folder / MANIFEST)
    return manifest or {}


def check_intact(is_intact: bool, path: Path) -> None:
    """Raise `UserError` for a file of prepared data that is missing or has another size or checksum."""
    if not is_intact:
        raise UserError(f"{path} is missing, unfinished or altered. Run recnmt prepare again.", field=path)


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
        least = min(filter(None, rates))
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
        self.manifest = load_manifest(Path(folder))
        self.mixture = mixture or Mixture()
        self.shards = [ShardRecord(**record) for record in self.manifest["shards"] if record["pairs"]]
        self.paths = [Path(folder) / SHARDS / f"{record.name}{SHARD}" for record in self.shards]
        self.firsts = list(accumulate((record.pairs for record in self.shards), initial=0))
        for path, record in zip(self.paths, self.shards, strict=True):
            check_intact(path.stat().st_size == record.bytes, path)
        self.columns = self.column_names = list(open_table(self.paths[0]).schema.names)
        self.open_shards: OrderedDict[int, Columns] = OrderedDict()
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
        selected.columns = list(names)
        return selected

    def open(self, number: int) -> Columns:
        """Return the columns of a shard; of more than `most_open` the one that was unused the longest is closed."""
        if number not in self.open_shards:
            check_intact(digest_of_file(self.paths[number]) == self.shards[number].sha256, self.paths[number])
            self.open_shards[number] = open_columns(self.paths[number])
            while len(self.open_shards) > self.most_open:
                self.open_shards.popitem(last=False)
        self.open_shards.move_to_end(number)
        return self.open_shards[number]

    def lengths(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of the sources and of the targets of a shard; its tokens are not read."""
        columns = open_columns(self.paths[number])
        return np.diff(columns["input_ids"][0]), np.diff(columns["labels"][0])


class Part(NamedTuple):
    """A shard in a pool: all of its pairs, or a fixed random choice of them; `turn` counts its reads in an epoch."""

    shard: int
    pairs: int
    turn: int


class PooledBatchSampler(Sampler[list[int]]):
    """
    Batches of a [`ShardedDataset`]: the shards are divided into pools of at least `pool` pairs, and
    [`TokenBatchSampler`] makes batches from one pool at a time, so only the lengths of one pool are in memory. The seed
    decides which shards, or parts of them, are in a pool; each epoch draws a new order of the pools. A single pool has
    the batches of data without shards. A row that is read again has another index, so BPE dropout segments it anew.
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
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.skipped = 0  # batches of the epoch that are not needed
        self.pools = divide(data, seed, max(pool, num_processes))
        if not any(self.pools):
            raise UserError("The weights of the corpora leave no sentence pairs.", field="weights")
        self.parts = [(data.shards[part.shard], part.pairs) for parts in self.pools for part in parts]
        data.most_open = max(data.most_open, *map(len, self.pools))
        self.counts = []  # of batches, which depend on the lengths alone
        for parts in self.pools:
            _, *lengths = self.read(parts)
            batches = len(limits.cut(*np.unique(combined(*lengths), return_counts=True)))
            self.counts.append(-(-batches // num_processes) * num_processes)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def tokens(self) -> int:
        """Number of source and target tokens of an epoch; about, if only a part of a shard is read."""
        return round(sum((own.source_tokens + own.target_tokens) * pairs / own.pairs for own, pairs in self.parts))

    def drawn_pairs(self) -> list[int]:
        """Return the number of pairs that an epoch reads from each corpus."""
        drawn = [0] * len(self.data.manifest["corpora"])
        for record, pairs in self.parts:
            drawn[record.corpus] += pairs
        return drawn

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
                continue
            rows, *lengths = self.read(self.pools[pool])
            # The only pool has the batches of data in memory.
            seed = self.seed if len(self.pools) == 1 else (self.seed, pool)
            settings = {**vars(self.limits), "num_processes": self.num_processes, "shuffle": self.shuffle, "seed": seed}
            sampler = TokenBatchSampler(*lengths, **settings)
            sampler.set_epoch(self.epoch)
            yield from (rows[batch].tolist() for batch in sampler.batches())

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


def divide(data: ShardedDataset, seed: int, pool: int) -> list[list[Part]]:
    """Divide shards, each as often as its corpus is repeated, into pools of about `pool` pairs or more."""
    corpora: list[list[tuple[int, int]]] = [[] for _ in data.manifest["corpora"]]
    for number, record in enumerate(data.shards):
        corpora[record.corpus].append((number, record.pairs))
    sizes = [sum(pairs for _, pairs in own) for own in corpora]
    rng, drawn = np.random.default_rng([seed, len(data.shards)]), list[Part]()
    for own, size, repeats in zip(corpora, sizes, data.mixture.repeats(sizes), strict=True):
        times = int(repeats)
        drawn += [Part(*shard, turn) for turn in range(times) for shard in own]
        rest = round((repeats - times) * size)  # a fraction is made of random shards and a part of one more
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
        pools[-2:] = [pools[-2] + pools[-1]]
    return [sorted(parts) for parts in pools]
