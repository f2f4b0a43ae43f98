"""
The Transformer (Vaswani et al., 2017) with relative positions (Shaw et al., 2018), directional masks (DiSAN), and
recurrences in place of self-attention ([`~.mixers`]).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention, causal_mask, key_positions, masked_softmax, self_mask, visible_positions
from .configuration_nmt_transformer import NMTTransformerConfig
from .kernels_shared import Mask, dropout
from .mixers import build_recurrence
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Initialization, Seq2SeqPreTrainedModel
from .seq2seq_stacks import Seq2SeqDecoder, Seq2SeqEncoder
from .transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer, TransformerStack
from .user_errors import UserError, short_repr


class RelativeMultiHeadAttention(MultiHeadAttention):
    """
    Self-attention with relative position representations for keys and values (Shaw et al., 2018, Eqs. 3-5):

        e_ij = q_i . (k_j + aK[clip(j - i, -k, k)]) / sqrt(d_k),   z_i = sum_j softmax(e_i)_j (v_j + aV[clip(j - i)])

    No tensor of size n x n x d is stored: weights of equal distances are summed before the values' table is read.
    """

    def __init__(self, config: NMTTransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.max_relative_positions = config.max_relative_positions
        tables = self.num_heads if config.relative_per_head else 1
        shape = (tables, 2 * config.max_relative_positions + 1, self.head_dim)
        self.relative_keys = nn.Parameter(torch.empty(shape))
        self.relative_values = nn.Parameter(torch.empty(shape))

    def initialize(self, start: Initialization) -> None:
        start.table_(self.relative_keys, self.head_dim**-0.5)
        start.table_(self.relative_values, self.head_dim**-0.5)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        query_length, key_length, clip = query.shape[2], key.shape[2], self.max_relative_positions
        by_content, query_offset = torch.matmul(query, key.transpose(-1, -2)), kwargs.get("query_offset")
        positions, query_positions = key_positions(by_content, query_offset)
        buckets = (positions - query_positions).clamp(-clip, clip) + clip  # (query_length, key_length), 0 .. 2k
        buckets = buckets.expand(*query.shape[:2], query_length, key_length)

        by_distance = torch.matmul(query, self.relative_keys.transpose(-1, -2))  # (B, H, query_length, 2k + 1)
        scores = by_content + by_distance.gather(-1, buckets)
        visible = visible_positions(self, attention_mask, scores, query_offset)
        weights = masked_softmax(scores * self.scaling, visible, query.dtype)
        dropped = dropout(weights, self.dropout, self.training)
        summed = dropped.new_zeros(by_distance.shape).scatter_add(-1, buckets, dropped)
        context = torch.matmul(dropped, value) + torch.matmul(summed, self.relative_values)
        return context.transpose(1, 2), weights


def build_self_attention(config: NMTTransformerConfig, num_heads: int, **kwargs: Any) -> MultiHeadAttention:
    """Build the self-attention `config.self_attention_type`; directional heads differ only in their mask."""
    kind = RelativeMultiHeadAttention if config.self_attention_type == "relative" else MultiHeadAttention
    return kind(config, config.d_model, num_heads, config.attention_dropout, **kwargs)


def build_decoder_attention(config: NMTTransformerConfig, index: int) -> tuple[nn.Module, MultiHeadAttention]:
    """Build the causal self-attention of a decoder layer, or what replaces it, and its attention to `"encoder"`."""
    heads = config.decoder_attention_heads
    if config.mixers("decoder")[index] == "self_attention":
        self_attn: nn.Module = build_self_attention(config, heads, is_causal=True, layer_idx=index)
    else:
        self_attn = build_recurrence(config, "decoder", index)
    sizes = (config.d_model, heads, config.attention_dropout)
    return self_attn, MultiHeadAttention(config, *sizes, layer_idx=index, memory="encoder")


def masks_of_layers(kinds: list[str], of_attention: Callable[[], Any], of_words: Mask) -> Any:
    """Return the mask of the layers, or one of each: what attention needs, or the token mask for a recurrence."""
    if "self_attention" not in kinds:
        return of_words
    attended = of_attention()
    if set(kinds) == {"self_attention"}:
        return attended
    return [attended if kind == "self_attention" else of_words for kind in kinds]


class NMTTransformerPreTrainedModel(Seq2SeqPreTrainedModel):
    """Base class of the NMTTransformer models: configuration, initialization and loading."""

    config: NMTTransformerConfig
    _no_split_modules = ["TransformerEncoderLayer", "TransformerDecoderLayer"]

    def __init__(self, config: NMTTransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        kind, implementation = config.self_attention_type, self.config._attn_implementation
        if kind != "absolute":
            self._supports_flex_attn = self._supports_flash_attn = False  # for `set_attn_implementation`
            if implementation not in ("sdpa", "eager"):
                given = f"attn_implementation={short_repr(implementation)}"
                message = f"{given} does not support self_attention_type={kind!r}. Use 'sdpa' or 'eager'."
                raise UserError(message, field="attn_implementation")


class NMTTransformerEncoder(NMTTransformerPreTrainedModel, TransformerStack, Seq2SeqEncoder):
    """Transformer encoder; usable alone through `get_encoder()`."""

    side = "encoder"
    _can_record_outputs = {"attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn")}

    def build_layer(self, config: NMTTransformerConfig, index: int) -> nn.Module:
        if config.mixers("encoder")[index] == "self_attention":
            return TransformerEncoderLayer(config, build_self_attention(config, config.encoder_attention_heads))
        return TransformerEncoderLayer(config, build_recurrence(config, "encoder", index))

    def build_mask(self, states: Tensor, token_mask: Mask) -> Any:
        return masks_of_layers(
            self.config.mixers("encoder"), lambda: self.attention_mask(states, token_mask), token_mask
        )

    def attention_mask(self, states: Tensor, token_mask: Mask) -> Any:
        """Return the kernel mask of self-attention."""
        config, length = self.config, states.shape[1]
        if config.self_attention_type != "directional":
            return self_mask(config, states, token_mask)
        # Half of the heads see earlier words only, half later words only (Shen et al., 2018).
        diagonal = 0 if config.directional_include_self else -1
        earlier = torch.ones(length, length, dtype=torch.bool, device=states.device).tril(diagonal)
        heads = config.encoder_attention_heads // 2
        halves = torch.stack([earlier, earlier.T]).repeat_interleave(heads, dim=0)[None]
        return halves if token_mask is None else halves & token_mask[:, None, None, :].bool()


class NMTTransformerDecoder(NMTTransformerPreTrainedModel, TransformerStack, Seq2SeqDecoder):
    """Transformer decoder."""

    side = "decoder"
    _can_record_outputs = {
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="encoder_attn"),
    }

    def build_layer(self, config: NMTTransformerConfig, index: int) -> nn.Module:
        return TransformerDecoderLayer(config, *build_decoder_attention(config, index))

    def build_mask(self, states: Tensor, token_mask: Mask, cache: Cache | None) -> Any:
        has_rows = token_mask is not None and token_mask.dim() == 2
        of_words = token_mask[:, -states.shape[1] :] if has_rows else None  # type: ignore[index]  # of the new ones
        attended = lambda: causal_mask(self.config, states, token_mask, cache)  # noqa: E731
        return masks_of_layers(self.config.mixers("decoder"), attended, of_words)


class NMTTransformerModel(NMTTransformerPreTrainedModel, Seq2SeqModelBase):
    """The Transformer without an output layer (Vaswani et al., 2017)."""

    encoder_class = NMTTransformerEncoder
    decoder_class = NMTTransformerDecoder


class NMTTransformerForConditionalGeneration(
    NMTTransformerPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin
):
    """The Transformer with its output layer: `generate` translates, `labels` train."""

    model_class = NMTTransformerModel


__all__ = ["NMTTransformerForConditionalGeneration", "NMTTransformerModel", "NMTTransformerPreTrainedModel"]
