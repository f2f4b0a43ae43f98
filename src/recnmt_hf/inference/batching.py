"""Batch sentences by length and pad their token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ..data.records import TokenRows


T = TypeVar("T")


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
