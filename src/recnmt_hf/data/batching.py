"""Batches that fill a budget of tokens instead of a number of sentences."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from ..errors import UserError
from .records import TokenRows


T = TypeVar("T")


class TokenBatchSampler(Sampler[list[int]]):
    """
    Groups sentences of similar length into batches within a budget of source tokens and of target tokens.

    The batches are a pure function of seed and epoch. Their number is a multiple of `num_processes`, so that all
    processes of a distributed run take the same number of steps; `accelerate` distributes whole batches in turn. Each
    sentence is in exactly one batch of an epoch (only if all batches have one sentence, a few are repeated).

    Args:
        source_lengths (sequence of `int`): Tokens of each source sentence.
        target_lengths (sequence of `int`, *optional*): Tokens of each target sentence; defaults to `source_lengths`.
        max_tokens (`int`): Limit of a batch's sentences times its longest source, and times its longest target (padding
            counts). A single longer sentence is a batch.
        max_sentences (`int`, *optional*): Limit of a batch's sentences.
        max_squared_tokens (`int`, *optional*): Limit of a batch's sentences times its squared longest source, for
            models whose memory grows with it.
        num_processes (`int`, *optional*, defaults to 1): The number of batches is a multiple of it.
        shuffle (`bool`, *optional*, defaults to `True`): Draw a new order of batches in each epoch, and new groups of
            the sentences of equal lengths; the number of batches is constant. `False`: sort by length.
        seed (`int` or sequence of them, *optional*, defaults to 0): Decides all random choices together with the epoch.
        multiple (`int`, *optional*, defaults to 1): Batches of more than this many sentences have a multiple of it,
            except the last one.

    Raises:
        ValueError: There are fewer sentences than processes, or lengths that do not match.
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | np.ndarray,
        target_lengths: Sequence[int] | np.ndarray | None = None,
        *,
        max_tokens: int,
        max_sentences: int | None = None,
        max_squared_tokens: int | None = None,
        num_processes: int = 1,
        shuffle: bool = True,
        seed: int | Sequence[int] = 0,
        multiple: int = 1,
    ):
        targets = source_lengths if target_lengths is None else target_lengths
        self.source_lengths, self.target_lengths = (np.asarray(side, np.int64) for side in (source_lengths, targets))
        if len(self.source_lengths) < num_processes:
            count = len(self.source_lengths)
            raise UserError(f"{count} sentence pairs within the limits are too few for {num_processes} processes.")
        self.limits = BatchLimits(max_tokens, max_sentences, max_squared_tokens, multiple)
        self.num_processes, self.shuffle, self.epoch = num_processes, shuffle, 0
        self.seeds = (seed,) if isinstance(seed, int) else tuple(seed)
        self._made: tuple[int, list[np.ndarray]] = (-1, [])  # epoch and batches

    @property
    def tokens(self) -> int:
        """Number of source and target tokens of an epoch."""
        return int(self.source_lengths.sum() + self.target_lengths.sum())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches():
            yield batch.tolist()

    def batches(self) -> list[np.ndarray]:
        """Return all batches of the current epoch, in order."""
        if self._made[0] == self.epoch:
            return self._made[1]
        rng = np.random.default_rng([*self.seeds, self.epoch])
        order = rng.permutation(len(self.source_lengths)) if self.shuffle else np.arange(len(self.source_lengths))
        # Sorted by both lengths, ties in random order: the cuts depend on the lengths alone, so all epochs have the
        # same number of batches, on which resuming relies.
        keys = combined(self.source_lengths, self.target_lengths)[order]
        order = order[np.argsort(keys, kind="stable")]
        ends = self.limits.cut(*np.unique(keys, return_counts=True))
        batches = [order[start:end] for start, end in pairwise([0, *ends])]
        # The largest batches are halved until their number is a multiple of the processes.
        while len(batches) % self.num_processes:
            largest = max(range(len(batches)), key=lambda i: len(batches[i]))
            if len(batches[largest]) == 1:  # cannot be halved: repeat some sentences
                batches.append(batches[len(batches) % self.num_processes])
                continue
            batch = batches.pop(largest)
            batches += [batch[::2], batch[1::2]]
        if self.shuffle:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        self._made = self.epoch, batches
        return batches


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch: arguments of [`TokenBatchSampler`]."""

    max_tokens: int
    max_sentences: int | None = None
    max_squared_tokens: int | None = None
    multiple: int = 1

    def sentences(self, source: int, target: int) -> int:
        """Return the maximum number of sentences of a batch whose longest ones have these lengths."""
        source, target = max(source, 1), max(target, 1)
        count = self.max_tokens // max(source, target)
        count = count if self.max_sentences is None else min(count, self.max_sentences)
        count = count if self.max_squared_tokens is None else min(count, self.max_squared_tokens // source**2)
        return max(count, 1)

    def cut(self, keys: np.ndarray, counts: np.ndarray) -> list[int]:
        """Return the ends of batches of sorted sentences, from [`combined`] lengths and how often each occurs."""
        ends: list[int] = []
        firsts = np.cumsum([0, *counts]).tolist()
        sources, targets = (keys >> 32).tolist(), (keys & (2**32 - 1)).tolist()
        start, longest = 0, 0  # of the batch; its longest target
        for run, (source, target) in enumerate(zip(sources, targets, strict=True)):
            position, end = firsts[run : run + 2]
            while position < end:
                most = self.sentences(source, max(longest, target))
                if position < start + most:
                    position = min(end, start + most)
                    longest = max(longest, target)
                    continue
                size = position - start
                start += size - size % self.multiple if size > self.multiple else size
                ends.append(start)
                first = bisect_right(firsts, start, 0, run + 1) - 1
                longest = max(targets[first : run + 1])
        return [*ends, firsts[-1]]


def combined(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return numbers (`int64`) that are ordered like pairs of source and target lengths, which have 32 bits each."""
    return (sources.astype(np.int64) << 32) | targets.astype(np.int64)


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield indices in batches of similar length, longest first, each within `max_tokens` including padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(lengths[order[start]], 1))
        yield order[start : start + size]
        start += size


def run_batches(
    run: Callable[[TokenRows, TokenRows], list[T]], sources: TokenRows, targets: TokenRows, max_tokens: int
) -> list[T]:
    """Return the result of `run` for each pair, in the [`batches_by_tokens`] of the pairs' longer sides."""
    results: dict[int, T] = {}
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    for batch in batches_by_tokens(lengths, max_tokens):
        rows = run([sources[i] for i in batch], [targets[i] for i in batch])
        results.update(zip(batch, rows, strict=True))
    return [results[i] for i in range(len(sources))]


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded token ids and their mask (1 = token), both `(len(rows), longest row)`."""
    width = max(max(map(len, rows)), 1)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids.to(device), mask.to(device)
