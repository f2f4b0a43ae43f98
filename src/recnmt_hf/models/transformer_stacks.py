"""Stacks of Transformer layers: the bases of every Transformer encoder and decoder of the zoo."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .attention import causal_mask, self_mask
from .configuration_transformer import TransformerConfig
from .seq2seq_stacks import Seq2SeqDecoder, Seq2SeqEncoder, TokenAndPositionInput


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
