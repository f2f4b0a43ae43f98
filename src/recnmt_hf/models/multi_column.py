"""The multi-column encoder of Chen et al. (2018), "The Best of Both Worlds", as a part of other encoders."""

import torch
from torch import nn

from .configuration_transformer import TransformerConfig
from .recurrent_layers import RecurrentEncoderLayer


class MultiColumn(nn.Module):
    """
    A column of bidirectional recurrent layers on the word embeddings, merged with the Transformer encoder's states into
    one memory (the multi-column encoder of Chen et al., 2018, as the paper's table 4 compares it).
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                RecurrentEncoderLayer(
                    config.recurrence_cell,
                    config.d_model,
                    config.d_model,
                    True,
                    config.dropout,
                    config.layer_norm_eps,
                    config.normalize_before,
                )
                for _ in range(config.multi_column_rnn_layers)
            ]
        )
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None
        concat = config.multi_column_merge == "concat"
        self.merge = nn.Linear(2 * config.d_model, config.d_model) if concat else None

    def forward(self, words: torch.Tensor, encoded: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Word embeddings and the Transformer encoder's states, both `(batch_size, source_length, d_model)`."""
        states = words
        for layer in self.layers:
            states = layer(states, token_mask=attention_mask)
        if self.layer_norm is not None:
            states = self.layer_norm(states)
        return encoded + states if self.merge is None else self.merge(torch.cat([encoded, states], dim=-1))
