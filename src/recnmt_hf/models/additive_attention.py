"""
Additive attention.

It has its own file because transformers searches a modeling file for attention classes that do not use its attention
interface, and then does not let users switch the implementation of the dot products.
"""

import torch
from torch import Tensor, nn

from .attention import masked_softmax


class AdditiveAttention(nn.Module):
    """Additive attention (Bahdanau et al., 2015): `e_i = v^T tanh(W s + U h_i + b)`, `softmax` over real words."""

    def __init__(self, query_size: int, annotation_size: int, attention_size: int):
        super().__init__()
        self.q_proj = nn.Linear(query_size, attention_size, bias=False)
        self.k_proj = nn.Linear(annotation_size, attention_size)
        self.score = nn.Linear(attention_size, 1, bias=False)

    def forward(self, state: Tensor, annotations: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Return the context `(batch_size, annotation_size)` and the weights for states `(batch_size, query_size)` and
        annotations `(batch_size, source_length, annotation_size)`.
        """
        energies = torch.tanh(self.q_proj(state)[:, None] + self.k_proj(annotations))
        weights = masked_softmax(self.score(energies)[:, :, 0], visible, energies.dtype)
        return torch.matmul(weights[:, None].to(annotations.dtype), annotations)[:, 0], weights
