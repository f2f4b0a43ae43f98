"""Multi-head attention and its masks."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .decoder_cache import read_source_memory, self_attention_cache
from .kernels_cpu_matmuls import project, project_together
from .kernels_shared import Mask, has_short_rows, is_plain, prefers_plain_matmuls
from .kernels_shared import dropout as random_dropout


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    scaling: float,
    dropout: float = 0.0,
    query_offset: int | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """
    Compute scaled dot-product attention (Vaswani et al., 2017, Eq. 1) of `(batch_size, num_heads, length, head_dim)`
    with a boolean (`True` keeps) or additive mask. Return contexts `(batch_size, query_length, num_heads, head_dim)`
    and weights, zero for a query without a visible key.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = masked_softmax(scores, visible_positions(module, attention_mask, scores, query_offset), query.dtype)
    weights = random_dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def key_positions(scores: Tensor, query_offset: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """
    Return the positions of keys `(key_length,)` and queries `(query_length, 1)` of `scores` `(.., query_length,
    key_length)`. `query_offset` is the position of the first query; by default the queries are the last keys.
    """
    query_length, key_length = scores.shape[-2:]
    offset = key_length - query_length if query_offset is None else query_offset
    queries = torch.arange(query_length, device=scores.device)[:, None] + offset
    return torch.arange(key_length, device=scores.device), queries


def visible_positions(
    module: nn.Module, attention_mask: Mask, scores: Tensor, query_offset: int | Tensor | None = None
) -> Tensor | None:
    """Return the mask as booleans; causal attention without a mask makes its own, as torch's attention does."""
    if attention_mask is None:
        if not getattr(module, "is_causal", False) or scores.shape[-2] == 1:
            return None
        keys, queries = key_positions(scores, query_offset)
        return keys <= queries
    if attention_mask.dtype == torch.bool:
        return attention_mask
    return attention_mask > torch.finfo(attention_mask.dtype).min / 2


def masked_softmax(scores: Tensor, visible: Mask, dtype: torch.dtype) -> Tensor:
    """Compute a softmax over the last axis in at least float32; rows without a visible key become zero, not NaN."""
    if visible is None:
        return softmax(scores).to(dtype)
    weights = softmax(torch.where(visible, scores, torch.finfo(scores.dtype).min))
    return torch.where(visible, weights, 0.0).to(dtype)


def softmax(scores: Tensor) -> Tensor:
    """Compute a softmax over the last axis, in float32 for half-precision scores."""
    wide = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    if not has_short_rows(scores):
        return nn.functional.softmax(scores, -1, dtype=wide)
    scores = scores.to(wide)
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(-1, keepdim=True))


def has_own_masks(implementation: str) -> bool:
    """Return whether an attention implementation has masks of its own, which do not fit a memory."""
    # Flex masks blocks of a self-attention, and flash applies the token mask to keys and queries.
    return "flex" in implementation or "flash" in implementation


class MultiHeadAttention(nn.Module):
    """
    Multi-head attention with its four projections (Vaswani et al., 2017, section 3.2.2), without residual and norm.

    Args:
        config (`PreTrainedConfig`): Names the attention implementation (`sdpa`, ...); `dropout` is of its weights.
        embed_dim, num_heads (`int`): Width of keys, values and output; number of heads. `is_causal` masks later words.
        layer_idx (`int`, *optional*): Index of the cache layer; `None` without a cache.
        query_dim (`int`, *optional*): Width of the queries' input if it is not `embed_dim`.
        memory (`str`, *optional*): For a cross-attention: the name under which its memory is cached.
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
        hidden_states: Tensor,
        key_value_states: Any = None,
        attention_mask: Mask = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Attend from `(batch_size, query_length, query_dim)`, in a cross-attention to the memory `key_value_states`
        `(num_sources, key_length, embed_dim)`, where consecutive rows share a source. `attention_mask` is the kernel
        mask. Return the output `(batch_size, query_length, embed_dim)`, and the weights `(batch_size, num_heads,
        query_length, key_length)` if the implementation returns them, else `None`.
        """
        batch_size, query_length = hidden_states.shape[:2]
        if self.memory is None:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            query, key, value = map(self.split_heads, project_together(projections, hidden_states))
            if cache is not None:
                own = self_attention_cache(cache)
                key, value = own.update(key, value, self.layer_idx)  # type: ignore[arg-type]  # not None with a cache
        else:
            source = key_value_states, attention_mask, cache, batch_size
            key, value, attention_mask = read_source_memory(self.memory, self.layer_idx, self.project_memory, *source)
            # Beams of one source become more queries to the same memory.
            queries = batch_size // key.shape[0] * query_length
            query = self.split_heads(project(self.q_proj, hidden_states).reshape(key.shape[0], queries, self.embed_dim))
        context, weights = self.attend(query, key, value, attention_mask, **kwargs)
        context = context.reshape(batch_size, query_length, self.embed_dim)
        if weights is not None and weights.shape[0] != batch_size:
            weights = weights.unflatten(2, (-1, query_length)).transpose(1, 2).flatten(0, 1)
        return project(self.out_proj, context), weights

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return contexts `(batch_size, query_length, num_heads, head_dim)` and weights, by the attention interface."""
        dropout = self.dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        if self.memory is not None and has_own_masks(implementation):
            implementation = "sdpa"
        given = kwargs.get("output_attentions")
        wants_weights = self.config.output_attentions if given is None else given  # a configuration is slow to read
        if implementation == "sdpa" and (wants_weights or prefers_plain_matmuls(query, key, dropout)):
            implementation = "eager"
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        own = {"is_causal", "output_attentions"} | ({"query_offset"} if implementation != "eager" else set())
        settings = {name: setting for name, setting in kwargs.items() if name not in own}
        settings |= {"dropout": dropout, "scaling": self.scaling, "is_causal": self.is_causal}
        return interface(self, query, key, value, attention_mask, **settings)

    def head_weights(self, head: int, hidden_states: Tensor, key_value_states: Tensor, visible: Mask) -> Tensor:
        """Compute one head's weights `(batch_size, query_length, key_length)` in at least float32, without dropout."""
        own = slice(head * self.head_dim, (head + 1) * self.head_dim)
        query, key = (
            nn.functional.linear(states, linear.weight[own], linear.bias[own])
            if is_plain(linear, nn.Linear)
            else linear(states)[..., own]
            for linear, states in ((self.q_proj, hidden_states), (self.k_proj, key_value_states))
        )
        scores = torch.matmul(query, key.transpose(1, 2)) * self.scaling
        return masked_softmax(scores, visible, torch.promote_types(scores.dtype, torch.float32))

    def project_memory(self, key_value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a memory, each `(num_sources, num_heads, key_length, head_dim)`."""
        keys, values = project_together((self.k_proj, self.v_proj), key_value_states)
        return self.split_heads(keys), self.split_heads(values)

    def split_heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, T, D)


def source_mask(config: PreTrainedConfig, states: Tensor, attention_mask: Mask) -> Any:
    """Return the kernel mask of a memory `(num_sources, length, d)` from its token mask `(num_sources, length)`."""
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2 and has_own_masks(config._attn_implementation):  # memories are read by sdpa then
        return attention_mask[:, None, None, :].bool()
    # One row serves all queries: they see the same keys.
    return create_bidirectional_mask(
        config=config, inputs_embeds=states[:, :1], attention_mask=attention_mask, encoder_hidden_states=states
    )


def self_mask(config: PreTrainedConfig, states: Tensor, attention_mask: Mask) -> Any:
    """Return the kernel mask of an encoder's self-attention over `states` `(batch_size, length, d)`."""
    if not has_own_masks(config._attn_implementation):
        return source_mask(config, states, attention_mask)
    return create_bidirectional_mask(config=config, inputs_embeds=states, attention_mask=attention_mask)


def causal_mask(config: PreTrainedConfig, states: Tensor, attention_mask: Mask, cache: Cache | None) -> Any:
    """Return the kernel mask of a decoder's self-attention; one new token of an unpadded, growing cache needs none."""
    own = None if cache is None else self_attention_cache(cache)
    if attention_mask is None and states.shape[1] == 1 and not (own is not None and own.is_compileable):
        return None
    return create_causal_mask(config, states, attention_mask, own)
