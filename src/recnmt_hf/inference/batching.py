"""Batch sentences by length and pad their token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield indices in batches of similar length, longest first, each within `max_tokens` including padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(lengths[order[start]], 1))
        yield order[start : start + size]
        start += size


def batches_of_pairs(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[list[int]]:
    """Yield batches as in [`batches_by_tokens`]; the length of a pair is that of its longer side."""
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    return batches_by_tokens(lengths, max_tokens)


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded token ids and their mask (1 = token), both `(len(rows), longest row)`."""
    width = max(max(map(len, rows)), 1)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids.to(device), mask.to(device)
