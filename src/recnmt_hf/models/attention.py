"""Multi-head attention: plain, with relative positions, and the masks that go with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .fast_paths import dropout as random_dropout
from .fast_paths import enabled, is_plain, prefers_plain_products, project
from .recurrent_cache import SourceMemoryLayer, memory_of


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    query_offset: int | torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Scaled dot-product attention that also returns its weights (Vaswani et al., 2017, Eq. 1).

    Args:
        query (`torch.Tensor` of shape `(batch_size, num_heads, query_length, head_dim)`).
        key, value (`torch.Tensor` of shape `(batch_size, num_heads, key_length, head_dim)`).
        attention_mask (`torch.Tensor`, *optional*, broadcastable to the weights):
            Boolean (`True` keeps) or additive (0 keeps, the dtype's minimum or `-inf` hides).
        query_offset (`int` or `torch.Tensor`, *optional*): As in [`visible_positions`].

    Returns:
        Contexts `(batch_size, query_length, num_heads, head_dim)` and weights `(batch_size, num_heads, query_length,
        key_length)`. A query without any allowed key has weights and context zero.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = masked_softmax(scores, visible_positions(module, attention_mask, scores, query_offset), query.dtype)
    weights = random_dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def key_positions(scores: torch.Tensor, query_offset: int | torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Where keys and queries of `scores` `(.., query_length, key_length)` stand in their sequence.

    Args:
        query_offset (`int` or `torch.Tensor`, *optional*): Place of the first query. `None`: the queries are the last
            of the keys, which is so wherever keys are no longer than what has been seen (not in a static cache).

    Returns:
        `torch.LongTensor` of shape `(key_length,)` and `(query_length, 1)`.
    """
    query_length, key_length = scores.shape[-2:]
    offset = key_length - query_length if query_offset is None else query_offset
    queries = torch.arange(query_length, device=scores.device)[:, None] + offset
    return torch.arange(key_length, device=scores.device), queries


def visible_positions(
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    scores: torch.Tensor,
    query_offset: int | torch.Tensor | None = None,
) -> torch.Tensor | None:
    """
    The mask as booleans; without one, causal attention makes its own (as scaled_dot_product_attention does).

    Args:
        query_offset (`int` or `torch.Tensor`, *optional*): As in [`key_positions`].
    """
    if attention_mask is None:
        if not getattr(module, "is_causal", False) or scores.shape[-2] == 1:
            return None
        keys, queries = key_positions(scores, query_offset)
        return keys <= queries
    if attention_mask.dtype == torch.bool:
        return attention_mask
    return attention_mask > torch.finfo(attention_mask.dtype).min / 2


def masked_softmax(scores: torch.Tensor, visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Softmax over the last axis in at least float32; rows that see nothing become zero instead of NaN."""
    if visible is None:
        return softmax(scores).to(dtype)
    weights = softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min))
    return weights.masked_fill(~visible, 0.0).to(dtype)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis; half-precision scores are summed in float32, float64 stays float64."""
    wide = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    return nn.functional.softmax(scores, dim=-1, dtype=wide)


class MultiHeadAttention(nn.Module):
    """
    Multi-head attention with its four projections (Vaswani et al., 2017, section 3.2.2) and nothing else: no residual,
    no norm.

    Args:
        config (`PreTrainedConfig`): Names the attention implementation (`sdpa`, `eager`, ...).
        embed_dim (`int`): Width of keys, values and output.
        num_heads (`int`): Heads, each `embed_dim // num_heads` wide.
        dropout (`float`, *optional*, defaults to 0): Dropout of the weights.
        is_causal (`bool`, *optional*, defaults to `False`): Decoder self-attention.
        layer_idx (`int`, *optional*): Place in the cache; `None` where nothing is cached.
        query_dim (`int`, *optional*): Width of the queries' input where it is not `embed_dim`.
        memory (`str`, *optional*): Set for cross-attention: the name under which its memory is cached.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        is_causal: bool = False,
        layer_idx: int | None = None,
        query_dim: int | None = None,
        memory: str | None = None,
    ):
        super().__init__()
        self.config = config
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.memory = memory
        self.q_proj = nn.Linear(query_dim or embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, query_length, query_dim)`): The queries' input.
            key_value_states (`torch.Tensor` of shape `(num_sources, key_length, embed_dim)`, *optional*):
                The memory of a cross-attention; `batch_size` is a multiple of `num_sources`, consecutive rows share
                a source. `None`: self-attention.
            attention_mask (`torch.Tensor`, *optional*): What the attention interface takes for a mask.
            past_key_values (`Cache`, *optional*): Keys and values of earlier steps, or of the memory.

        Returns:
            The output `(batch_size, query_length, embed_dim)`, and the weights `(batch_size, num_heads, query_length,
            key_length)` if the implementation gives them, else `None`.
        """
        batch_size, query_length = hidden_states.shape[:2]
        if self.memory is None:
            query, key, value = self.project_all(hidden_states)
            if past_key_values is not None:
                key, value = self_attention_cache(past_key_values).update(key, value, self.layer_idx)
        else:
            key, value, attention_mask = self.read_memory(key_value_states, attention_mask, past_key_values, batch_size)
            # Beams of one source become more queries to the same memory.
            query = self.split_heads(project(self.q_proj, hidden_states).reshape(key.shape[0], -1, self.embed_dim))
        context, weights = self.attend(query, key, value, attention_mask, **kwargs)
        context = context.reshape(batch_size, query_length, self.embed_dim)
        if weights is not None and weights.shape[0] != batch_size:
            weights = weights.unflatten(2, (-1, query_length)).transpose(1, 2).flatten(0, 1)
        return project(self.out_proj, context), weights

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Contexts `(batch_size, query_length, num_heads, head_dim)` and weights through the attention interface."""
        dropout = self.dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        if implementation == "flex_attention" and self.memory is not None:
            implementation = "sdpa"  # beams are more queries than a block mask of the memory would have rows
        if implementation == "sdpa" and (kwargs.get("output_attentions") or self.config.output_attentions):
            implementation = "eager"  # sdpa has no weights to give
        elif implementation == "sdpa" and prefers_plain_products(query, key, dropout):
            implementation = "eager"
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        own = {"is_causal", "output_attentions"} | ({"query_offset"} if implementation != "eager" else set())
        return interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            is_causal=self.is_causal and query.shape[2] > 1,
            **{name: value for name, value in kwargs.items() if name not in own},
        )

    def project_all(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of self-attention, each `(batch_size, num_heads, length, head_dim)`."""
        return (
            self.split_heads(project(self.q_proj, hidden_states)),
            self.split_heads(project(self.k_proj, hidden_states)),
            self.split_heads(project(self.v_proj, hidden_states)),
        )

    def project_memory(self, key_value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a memory, each `(num_sources, num_heads, key_length, head_dim)`."""
        return self.split_heads(self.k_proj(key_value_states)), self.split_heads(self.v_proj(key_value_states))

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, T, D)

    def read_memory(
        self,
        key_value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        decoder_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Projects the memory on the first step of a generation, and takes it from the cache afterwards."""
        return read_source_memory(
            self.memory,
            self.layer_idx,
            self.project_memory,
            key_value_states,
            attention_mask,
            past_key_values,
            decoder_rows,
        )


def few_positions(length: int, num_heads: int, width: int, queries: int | None) -> bool:
    """
    Whether [`AbsorbingAttention`] carries a memory of this length to the queries: `2 num_heads length width` products
    for each query and `2 length width^2` for each source, instead of `2 width^2` for each query. `queries` is their
    number for each source, or `None` where the memory is kept for further steps: to fewer it has been measured to lose.
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
        key_value_states: torch.Tensor,
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
        weights = random_dropout(weights, self.dropout, self.training)  # (num_sources, queries, num_heads, key_length)
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


def read_source_memory(
    name: str,
    layer_idx: int | None,
    project_memory: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    key_value_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    decoder_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """
    A memory's keys, values and mask: projected on the first step of a generation, from the cache afterwards.

    Args:
        name (`str`): Under which the memory is cached; `"encoder"` is the only one a static cache has room for. A slash
            and a layout may follow.
        layer_idx (`int`, *optional*): Place in the cache; `None` where nothing is cached.
        project_memory: From states `(num_sources, key_length, d)` to keys and values `(num_sources, num_heads,
            key_length, ..)`.
        attention_mask (`torch.Tensor` of shape `(num_sources, ..)`, *optional*): Cached beside them.
        decoder_rows (`int`): `num_sources` times the beams of each.
    """
    cache = getattr(past_key_values, "cross_attention_cache", None)
    layer = cache.layers[layer_idx] if cache is not None and layer_idx is not None else None
    if isinstance(layer, SourceMemoryLayer):
        if name not in layer.memories:
            key, value = project_memory(key_value_states)
            layer.store(name, key, value, attention_mask, decoder_rows)
            past_key_values.is_updated[layer_idx] = True
        return *layer.memories[name], layer.masks[memory_of(name)]
    if layer is None or name != "encoder":
        return *project_memory(key_value_states), attention_mask
    # A static (or foreign) cache has one row for each row of the decoder.
    group = decoder_rows // key_value_states.shape[0]
    if attention_mask is not None and group > 1 and attention_mask.shape[0] != decoder_rows:
        attention_mask = attention_mask.repeat_interleave(group, dim=0)
    if past_key_values.is_updated.get(layer_idx):
        return layer.keys, layer.values, attention_mask
    key, value = project_memory(key_value_states)
    if group > 1:
        key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
    if isinstance(layer, StaticLayer) and layer.max_cache_len != key.shape[2]:
        # Places behind the memory would be attended too. A cache is sized by the source, or filled for the second time.
        layer.max_cache_len, layer.is_initialized = key.shape[2], False
    key, value = cache.update(key, value, layer_idx)
    past_key_values.is_updated[layer_idx] = True
    return key, value, attention_mask


def keeps_source_memories(past_key_values: Cache, layer_idx: int | None) -> bool:
    """Whether a cache has a place for whatever a layer reads of a source, one row for each source."""
    cache = getattr(past_key_values, "cross_attention_cache", None)
    return cache is not None and layer_idx is not None and isinstance(cache.layers[layer_idx], SourceMemoryLayer)


def self_attention_cache(past_key_values: Cache) -> Cache:
    """The decoder's own part of a cache."""
    return past_key_values.self_attention_cache if isinstance(past_key_values, EncoderDecoderCache) else past_key_values


class RelativeMultiHeadAttention(MultiHeadAttention):
    """
    Self-attention with relative position representations for keys and values (Shaw et al., 2018, Eqs. 3-5):

        e_ij = q_i . (k_j + aK[clip(j - i, -k, k)]) / sqrt(d_k),   z_i = sum_j softmax(e_i)_j (v_j + aV[clip(j - i)])

    The tables' part of the scores is one product of queries and table, `(.., query_length, 2k + 1)`, read at the
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

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query_length, key_length, clip = query.shape[2], key.shape[2], self.max_relative_positions
        products, query_offset = torch.matmul(query, key.transpose(-1, -2)), kwargs.get("query_offset")
        key_places, query_places = key_positions(products, query_offset)
        buckets = (key_places - query_places).clamp(-clip, clip) + clip  # (query_length, key_length), 0 .. 2k
        buckets = buckets.expand(*query.shape[:2], query_length, key_length)

        by_distance = torch.matmul(query, self.relative_keys.transpose(-1, -2))  # (B, H, query_length, 2k + 1)
        scores = products + by_distance.gather(-1, buckets)
        visible = visible_positions(self, attention_mask, scores, query_offset)
        weights = masked_softmax(scores * self.scaling, visible, query.dtype)
        kept = random_dropout(weights, self.dropout, self.training)
        summed = kept.new_zeros(by_distance.shape).scatter_add(-1, buckets, kept)
        context = torch.matmul(kept, value) + torch.matmul(summed, self.relative_values)
        return context.transpose(1, 2), weights


def directional_mask(
    attention_mask: torch.Tensor | None, num_heads: int, length: int, include_self: bool, device: torch.device
) -> torch.Tensor:
    """
    The masks of directional self-attention (Shen et al., 2018): the first half of the heads sees earlier words only,
    the second half later words only.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps, 0 is padding.
        num_heads (`int`): Even.
        include_self (`bool`): Whether a word sees itself.

    Returns:
        `torch.BoolTensor` of shape `(batch_size or 1, num_heads, length, length)`, `True` where a query sees a key.
    """
    earlier = torch.ones(length, length, dtype=torch.bool, device=device).tril(0 if include_self else -1)
    halves = torch.stack([earlier, earlier.T]).repeat_interleave(num_heads // 2, dim=0)[None]
    return halves if attention_mask is None else halves & attention_mask[:, None, None, :].bool()


def source_mask(config: PreTrainedConfig, states: torch.Tensor, attention_mask: torch.Tensor | None):
    """
    The mask over a memory for the configured attention implementation.

    Args:
        states (`torch.Tensor` of shape `(num_sources, key_length, d)`): The memory.
        attention_mask (`torch.Tensor` of shape `(rows, key_length)`, *optional*):
            1 keeps. `rows` may be `num_sources * g`, each source repeated `g` times.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:: max(attention_mask.shape[0] // states.shape[0], 1)]
        if config._attn_implementation == "flex_attention":  # memories are read by sdpa then
            return attention_mask[:, None, None, :].bool()
    # One query stands for all: what a source hides, it hides from every query.
    return create_bidirectional_mask(
        config=config, inputs_embeds=states[:, :1], attention_mask=attention_mask, encoder_hidden_states=states
    )


def self_mask(config: PreTrainedConfig, states: torch.Tensor, attention_mask: torch.Tensor | None):
    """
    The mask of an encoder's self-attention over `states` `(batch_size, length, d)`; `attention_mask` `(batch_size,
    length)`, 1 keeps.
    """
    if config._attn_implementation != "flex_attention":
        return source_mask(config, states, attention_mask)
    return create_bidirectional_mask(config=config, inputs_embeds=states, attention_mask=attention_mask)


def causal_mask(
    config: PreTrainedConfig,
    states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
):
    """The decoder's own mask; a single new token of an unpadded, growing cache sees everything and needs none."""
    cache = None if past_key_values is None else self_attention_cache(past_key_values)
    if attention_mask is None and states.shape[1] == 1 and not (cache is not None and cache.is_compileable):
        return None
    return create_causal_mask(config=config, inputs_embeds=states, attention_mask=attention_mask, past_key_values=cache)
