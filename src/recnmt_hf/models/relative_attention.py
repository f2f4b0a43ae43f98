"""Self-attention with relative positions."""

from typing import Any

import torch
from torch import nn

from .attention import MultiHeadAttention, key_positions, masked_softmax, visible_positions
from .fast_paths import dropout
from .initialization import Initialization


class RelativeMultiHeadAttention(MultiHeadAttention):
    """
    Self-attention with relative position representations for keys and values (Shaw et al., 2018, Eqs. 3-5):

        e_ij = q_i . (k_j + aK[clip(j - i, -k, k)]) / sqrt(d_k),   z_i = sum_j softmax(e_i)_j (v_j + aV[clip(j - i)])

    The tables' part of the scores is one matmul of queries and table, `(.., query_length, 2k + 1)`, read at the
    clipped distances; its part of the contexts first sums the weights of equal distances. Nothing of size n x n x d is
    made.

    Args:
        max_relative_positions (`int`): k.
        relative_per_head (`bool`): A table per head, or one for all heads.
    """

    def __init__(self, *args: Any, max_relative_positions: int, relative_per_head: bool, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_relative_positions = max_relative_positions
        tables = self.num_heads if relative_per_head else 1
        shape = (tables, 2 * max_relative_positions + 1, self.head_dim)
        self.relative_keys = nn.Parameter(torch.empty(shape))
        self.relative_values = nn.Parameter(torch.empty(shape))

    def initialize(self, start: Initialization) -> None:
        start.table_(self.relative_keys, self.head_dim**-0.5)
        start.table_(self.relative_values, self.head_dim**-0.5)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query_length, key_length, clip = query.shape[2], key.shape[2], self.max_relative_positions
        by_content, query_offset = torch.matmul(query, key.transpose(-1, -2)), kwargs.get("query_offset")
        key_places, query_places = key_positions(by_content, query_offset)
        buckets = (key_places - query_places).clamp(-clip, clip) + clip  # (query_length, key_length), 0 .. 2k
        buckets = buckets.expand(*query.shape[:2], query_length, key_length)

        by_distance = torch.matmul(query, self.relative_keys.transpose(-1, -2))  # (B, H, query_length, 2k + 1)
        scores = by_content + by_distance.gather(-1, buckets)
        visible = visible_positions(self, attention_mask, scores, query_offset)
        weights = masked_softmax(scores * self.scaling, visible, query.dtype)
        kept = dropout(weights, self.dropout, self.training)
        summed = kept.new_zeros(by_distance.shape).scatter_add(-1, buckets, kept)
        context = torch.matmul(kept, value) + torch.matmul(summed, self.relative_values)
        return context.transpose(1, 2), weights
