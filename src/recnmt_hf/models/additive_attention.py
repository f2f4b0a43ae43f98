"""
Additive attention.

It stands apart from the models: transformers reads a modeling file for attention classes that do not go through its
attention interface, and then refuses to switch the implementation of the dot products.
"""

import torch
from torch import nn

from .attention import masked_softmax


class AdditiveAttention(nn.Module):
    """Additive attention (Bahdanau et al., 2015): `e_i = v^T tanh(W s + U h_i + b)`, `softmax` over real words."""

    def __init__(self, query_size: int, annotation_size: int, attention_size: int):
        super().__init__()
        self.q_proj = nn.Linear(query_size, attention_size, bias=False)
        self.k_proj = nn.Linear(annotation_size, attention_size)
        self.score = nn.Linear(attention_size, 1, bias=False)

    def forward(
        self, state: torch.Tensor, annotations: torch.Tensor, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            state (`torch.Tensor` of shape `(batch_size, query_size)`).
            annotations (`torch.Tensor` of shape `(batch_size, source_length, annotation_size)`).
            visible (`torch.BoolTensor` of shape `(batch_size, source_length)`, *optional*): `True` keeps.

        Returns:
            The context `(batch_size, annotation_size)` and the weights `(batch_size, source_length)`.
        """
        energies = torch.tanh(self.q_proj(state)[:, None] + self.k_proj(annotations))
        weights = masked_softmax(self.score(energies)[:, :, 0], visible, energies.dtype)
        return torch.matmul(weights[:, None].to(annotations.dtype), annotations)[:, 0], weights
