"""Absolute positions: sinusoids in the paper's and in MarianMT's channel order, and learned tables."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .graph_operators import is_exporting
from .initialization import Initialization
from .user_errors import UserError


def sinusoid_table(num_positions: int, dim: int, interleaved: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """
    Sinusoids of Vaswani et al. (2017), section 3.5: angle `pos / 10000^(2i / dim)`.

    Args:
        num_positions (`int`): Rows.
        dim (`int`): Channels, even.
        interleaved (`bool`):
            `True`: channel `2i` is the sine and `2i + 1` the cosine (the paper). `False`: all sines, then all cosines
            (MarianMT).
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the result; computed in float64.

    Returns:
        `torch.Tensor` of shape `(num_positions, dim)`.
    """
    position = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None]
    frequency = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    angle = position * torch.exp(frequency * (-math.log(10000.0) / dim))
    sine, cosine = angle.sin(), angle.cos()
    table = torch.stack([sine, cosine], dim=-1).flatten(1) if interleaved else torch.cat([sine, cosine], dim=-1)
    return table.to(dtype)


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """
    Positions that count real tokens only, so that padding on the left moves nothing.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch_size, length)`): 1 keeps, 0 is padding.

    Returns:
        `torch.LongTensor` of shape `(batch_size, length)`: 0 for the first real token; padding gets any valid position.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp_(min=0)


class SinusoidalPositionEmbedding(nn.Module):
    """
    Fixed sinusoids (Vaswani et al., 2017, section 3.5), looked up by position.

    The table is a buffer outside the state dict; it is written again after loading (`initialize`).
    """

    table: torch.Tensor

    def __init__(self, num_positions: int, dim: int, interleaved: bool = True):
        super().__init__()
        self.interleaved = interleaved
        # In the type that the weights get: `from_pretrained(dtype=...)` makes it the default type while it builds.
        table = sinusoid_table(num_positions, dim, interleaved, torch.get_default_dtype())
        self.register_buffer("table", table, persistent=False)

    def initialize(self, start: Initialization) -> None:
        init.copy_(self.table, self.compute_table())

    def compute_table(self) -> torch.Tensor:
        return sinusoid_table(self.table.shape[0], self.table.shape[1], self.interleaved, self.table.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A table widened from another type would lack half of its digits.
        before = self.table.dtype
        super()._apply(fn, recurse)
        if self.table.dtype != before and self.table.device.type != "meta":
            self.table.copy_(self.compute_table())
        return self

    def forward(self, length: int, offset: int | torch.Tensor = 0, position_ids: torch.Tensor | None = None) -> Any:
        """Rows `(length, dim)` from `offset` on, or `(batch_size, length, dim)` for given positions."""
        return look_up(self.table, length, offset, position_ids)


class LearnedPositionEmbedding(nn.Module):
    """A trained table of positions, looked up like [`SinusoidalPositionEmbedding`]."""

    def __init__(self, num_positions: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, dim))

    def initialize(self, start: Initialization) -> None:
        start.embedding_(self.weight)

    def forward(self, length: int, offset: int | torch.Tensor = 0, position_ids: torch.Tensor | None = None) -> Any:
        return look_up(self.weight, length, offset, position_ids)


def look_up(table: torch.Tensor, length: int, offset: int | torch.Tensor, position_ids: torch.Tensor | None) -> Any:
    """Rows of `table`; raises `ValueError` when a sequence is longer than the table."""
    if position_ids is not None:
        return nn.functional.embedding(position_ids, table)
    # Static caches keep their length on the device; an exported graph is free of it.
    if isinstance(offset, torch.Tensor) or is_exporting():
        return nn.functional.embedding(torch.arange(length, device=table.device) + offset, table)
    check_length(offset + length, table.shape[0])
    return table[offset : offset + length]


def check_length(length: int, limit: int) -> None:
    """
    Raises `ValueError` when `length` tokens do not fit a table of `limit` positions. An exported graph does not ask,
    which would bound its lengths: looking up a position beyond the table fails there.
    """
    if not is_exporting() and length > limit:
        raise UserError(
            f"A sequence of {length} tokens does not fit the position table of {limit} rows. Remedy: shorten or split "
            f"the input, or build the model with max_position_embeddings >= {length}."
        )


def build_position_embedding(kind: str, num_positions: int, dim: int) -> nn.Module | None:
    """The module for a `position_embedding_type`; `None` for `"none"`."""
    if kind == "none":
        return None
    if kind == "learned":
        return LearnedPositionEmbedding(num_positions, dim)
    return SinusoidalPositionEmbedding(num_positions, dim, interleaved=kind == "sinusoidal")
