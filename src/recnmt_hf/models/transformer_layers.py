"""
The Transformer's encoder and decoder layers, post- or pre-norm, built around attention modules given to them, and the
stacks of these layers: the bases of every Transformer encoder and decoder of the package.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import causal_mask, self_mask
from .configuration_transformer import TransformerConfig
from .kernels_shared import dropout, project
from .seq2seq_outputs import Memories
from .seq2seq_stacks import Seq2SeqDecoder, Seq2SeqEncoder, TokenAndPositionInput


class TransformerSublayers(GradientCheckpointingLayer):
    """
    What both layers share: residual connections around sub-layers, and the feed-forward block.

    Post-norm computes `LN(x + Drop(sub(x)))`, pre-norm `x + Drop(sub(LN(x)))` (Vaswani et al., 2017, section 5.4; the
    order is `config.normalize_before`).
    """

    def __init__(self, config: PreTrainedConfig, ffn_dim: int):
        super().__init__()
        self.normalize_before = config.normalize_before
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.activation_fn = ACT2FN[config.activation_function]
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def before(self, hidden_states: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        """The input of a sub-layer."""
        return norm(hidden_states) if self.normalize_before else hidden_states

    def after(self, output: torch.Tensor, residual: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        """Adds a sub-layer's output to its residual branch."""
        hidden_states = residual + dropout(output, self.dropout, self.training)
        return hidden_states if self.normalize_before else norm(hidden_states)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """FFN(x) = W2 act(W1 x + b1) + b2 with its residual (Vaswani et al., 2017, Eq. 2)."""
        inner = self.activation_fn(project(self.fc1, self.before(hidden_states, self.final_layer_norm)))
        inner = dropout(inner, self.activation_dropout, self.training)
        return self.after(project(self.fc2, inner), hidden_states, self.final_layer_norm)


class TransformerEncoderLayer(TransformerSublayers):
    """
    Self-attention, then feed-forward.

    Args:
        config (`PreTrainedConfig`): Width, dropout, norm order.
        self_attn (`nn.Module`): A [`MultiHeadAttention`] or one of its kinds.
    """

    def __init__(self, config: PreTrainedConfig, self_attn: nn.Module):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = self_attn
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, source_length, d_model)`).
            attention_mask (`torch.Tensor`, *optional*): As the attention kernels want it.
            token_mask (`torch.Tensor` of shape `(batch_size, source_length)`, *optional*): 1 keeps; for layers that
                count tokens.
        """
        attended, _ = self.self_attn(
            self.before(hidden_states, self.self_attn_layer_norm), attention_mask=attention_mask, **kwargs
        )
        hidden_states = self.after(attended, hidden_states, self.self_attn_layer_norm)
        return self.feed_forward(hidden_states)


class TransformerDecoderLayer(TransformerSublayers):
    """
    Causal self-attention, attention to the encoder's memory, feed-forward.

    `fuse` is the place where a subclass adds what reads further memories.

    Args:
        config (`PreTrainedConfig`): Width, dropout, norm order.
        self_attn (`nn.Module`): Causal self-attention.
        encoder_attn (`nn.Module`): Cross-attention.
    """

    def __init__(self, config: PreTrainedConfig, self_attn: nn.Module, encoder_attn: nn.Module):
        super().__init__(config, config.decoder_ffn_dim)
        self.self_attn = self_attn
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = encoder_attn
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *memories: torch.Tensor | None,
        memory_names: tuple[str, ...] = ("encoder",),
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, target_length, d_model)`).
            attention_mask (`torch.Tensor`, *optional*): Of the self-attention, as the kernels want it.
            *memories, memory_names: [`Memories`], flattened, and their names. Everything that needs a gradient is
                positional, which reentrant gradient checkpointing asks for.
        """
        sources = Memories.unflatten(memory_names, memories)
        attended, _ = self.self_attn(
            self.before(hidden_states, self.self_attn_layer_norm),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        own = self.after(attended, hidden_states, self.self_attn_layer_norm)
        attended, _ = self.encoder_attn(
            self.before(own, self.encoder_attn_layer_norm),
            key_value_states=sources["encoder"].states,
            attention_mask=sources["encoder"].mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = self.after(attended, own, self.encoder_attn_layer_norm)
        hidden_states = self.fuse(own, hidden_states, sources, past_key_values=past_key_values, **kwargs)
        return self.feed_forward(hidden_states)

    def fuse(self, own: torch.Tensor, attended: torch.Tensor, memories: Memories, **kwargs: Any) -> torch.Tensor:
        """
        Combines the states after self-attention (`own`) and after the encoder's memory (`attended`), both
        `(batch_size, target_length, d_model)`, with further memories; the plain layer has none.
        """
        return attended


def final_norm(config: TransformerConfig) -> nn.LayerNorm | None:
    """The norm after the last layer of a pre-norm stack."""
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None


class TransformerEncoderStack(Seq2SeqEncoder):
    """Embeddings with positions and layers, which may be of any class; a subclass builds them in `build_layer`."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([self.build_layer(config, i) for i in range(config.encoder_layers)])
        self.layer_norm = final_norm(config)

    def build_input(self, config: Any) -> nn.Module:
        kind = config.position_embedding_type if config.encoder_position_embeddings else "none"
        return TokenAndPositionInput(config, kind)

    def build_layer(self, config: Any, index: int) -> nn.Module:
        """Layer `index`; it is called with states, the kernels' mask and the tokens' mask."""
        raise NotImplementedError(f"{type(self).__name__} must say how it builds a layer")

    def build_mask(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
        return self_mask(self.config, states, attention_mask)


class TransformerDecoderStack(Seq2SeqDecoder):
    """Embeddings with positions and decoder layers; a subclass builds them in `build_layer`."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([self.build_layer(config, i) for i in range(config.decoder_layers)])
        self.layer_norm = final_norm(config)

    def build_input(self, config: Any) -> nn.Module:
        kind = config.position_embedding_type if config.decoder_position_embeddings else "none"
        return TokenAndPositionInput(config, kind)

    def build_layer(self, config: Any, index: int) -> nn.Module:
        """Layer `index`; called as [`~.transformer_layers.TransformerDecoderLayer`] is."""
        raise NotImplementedError(f"{type(self).__name__} must say how it builds a layer")

    def build_mask(
        self, states: torch.Tensor, attention_mask: torch.Tensor | None, past_key_values: Cache | None
    ) -> Any:
        return causal_mask(self.config, states, attention_mask, past_key_values)
