"""The multi-column encoder of Chen et al. (2018), "The Best of Both Worlds", with which BiARN is compared (table 4)."""

import torch
from torch import Tensor, nn

from .configuration_transformer import TransformerConfig
from .recurrent_layers import RecurrentEncoderLayer


class MultiColumn(nn.Module):
    """A column of bidirectional recurrent layers on the word embeddings, merged with the states of another encoder."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        cell, width, norm = config.recurrence_cell, config.d_model, (config.layer_norm_eps, config.normalize_before)
        self.layers = nn.ModuleList()
        for _ in range(config.multi_column_rnn_layers):
            self.layers.append(RecurrentEncoderLayer(cell, width, width, True, config.dropout, *norm))
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.normalize_before else None
        self.merge = nn.Linear(2 * width, width) if config.multi_column_merge == "concat" else None

    def forward(self, words: Tensor, encoded: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Merge word embeddings and the other encoder's states, both `(batch_size, source_length, d_model)`."""
        states = words
        for layer in self.layers:
            states = layer(states, token_mask=attention_mask)
        if self.layer_norm is not None:
            states = self.layer_norm(states)
        return encoded + states if self.merge is None else self.merge(torch.cat([encoded, states], dim=-1))
