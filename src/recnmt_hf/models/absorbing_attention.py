"""Cross-attention to a memory of few positions, with projections that are carried over to it."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .attention import MultiHeadAttention, masked_softmax, visible_positions
from .fast_paths import dropout, enabled, is_plain
from .source_memory import keeps_source_memories, read_source_memory


def few_positions(length: int, num_heads: int, width: int, queries: int | None) -> bool:
    """
    Whether [`AbsorbingAttention`] carries a memory of this length to the queries: `2 num_heads length width`
    multiplications for each query and `2 length width^2` for each source, instead of `2 width^2` for each query.
    `queries` is their number for each source, or `None` where the memory is kept for further steps: to fewer it has
    been measured to lose.
    """
    return 8 * num_heads * length <= width and (queries is None or queries >= 5 * length)


class AbsorbingAttention(MultiHeadAttention):
    """
    Cross-attention to a memory of few positions. Where these are fewer than the queries by far, the projections of the
    queries and of the output are carried over to the memory, once per source, instead of to every query:

        (W_q x + b_q) . k_j = x . (W_q^T k_j) + b_q . k_j,     W_o sum_j a_j v_j = sum_j a_j (W_o v_j)   (for each head)

    The parameters and the results are those of [`MultiHeadAttention`].
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.absorbs(hidden_states, key_value_states, past_key_values):
            return super().forward(hidden_states, key_value_states, attention_mask, past_key_values, **kwargs)
        batch_size, query_length, width = hidden_states.shape
        key, value, attention_mask = read_source_memory(
            f"{self.memory}/absorbed",
            self.layer_idx,
            self.absorb_memory,
            key_value_states,
            attention_mask,
            past_key_values,
            batch_size,
        )
        query = hidden_states.reshape(key.shape[0], -1, width)
        scores = torch.baddbmm(key[:, -1:], query, key[:, :-1]).unflatten(2, (self.num_heads, -1))
        # The mask's own axes for heads and queries have one element each.
        weights = masked_softmax(scores, visible_positions(self, attention_mask, scores), value.dtype)
        weights = dropout(weights, self.dropout, self.training)  # (num_sources, queries, num_heads, key_length)
        output = torch.baddbmm(self.out_proj.bias.to(value.dtype), weights.flatten(2), value)
        weights = weights.unflatten(1, (-1, query_length)).flatten(0, 1).transpose(1, 2)
        return output.view(batch_size, query_length, self.embed_dim), weights

    def absorbs(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor, past_key_values: Cache | None
    ) -> bool:
        """Whether the memory is so short, and kept so long, that it is cheaper to project it than the queries."""
        if hidden_states.device.type != "cpu" or not enabled():
            return False
        sources, length = key_value_states.shape[:2]
        queries = None if past_key_values is not None else hidden_states.shape[0] // sources * hidden_states.shape[1]
        return (
            few_positions(length, self.num_heads, self.embed_dim, queries)
            and self.config._attn_implementation in ("sdpa", "eager")
            and all(is_plain(linear, nn.Linear) for linear in (self.q_proj, self.out_proj))
            and (past_key_values is None or keeps_source_memories(past_key_values, self.layer_idx))
        )

    def absorb_memory(self, key_value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns:
            Keys `(num_sources, query_dim + 1, num_heads * key_length)`, of which the last row is the share of the
            queries' bias, and values `(num_sources, num_heads * key_length, embed_dim)`.
        """
        key, value = self.project_memory(key_value_states)  # (num_sources, H, J, D)
        key = key * self.scaling
        by_head = (self.num_heads, self.head_dim)
        query_weight, output_weight = (
            self.q_proj.weight.unflatten(0, by_head),
            self.out_proj.weight.unflatten(1, by_head),
        )
        wide = torch.einsum("shjd,hdm->smhj", key, query_weight).flatten(2)
        bias = self.q_proj.bias.view(self.num_heads, self.head_dim, 1).to(key.dtype)
        constant = torch.matmul(key, bias).flatten(1)[:, None]
        value = torch.einsum("shjd,mhd->shjm", value, output_weight).flatten(1, 2)
        return torch.cat([wide, constant.to(wide.dtype)], dim=1), value
