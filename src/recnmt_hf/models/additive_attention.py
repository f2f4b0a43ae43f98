"""
Additive attention: the module, and for the steps of recurrent decoders a fast path with its gradients.

It has its own file because transformers searches a modeling file for attention classes that do not use its attention
interface, and then does not let users switch the implementation of the dot products.
"""

import torch
from torch import Tensor, nn

from .attention import masked_softmax
from .kernels_shared import Mask, is_exporting, on_cpu


# Below this number of values torch's own tanh is as fast.
FEW_VALUES = 2**12


class AdditiveAttention(nn.Module):
    """Additive attention (Bahdanau et al., 2015): `e_i = v^T tanh(W s + U h_i + b)`, `softmax` over real words."""

    def __init__(self, query_size: int, annotation_size: int, attention_size: int):
        super().__init__()
        self.q_proj = nn.Linear(query_size, attention_size, bias=False)
        self.k_proj = nn.Linear(annotation_size, attention_size)
        self.score = nn.Linear(attention_size, 1, bias=False)

    def forward(self, state: Tensor, annotations: Tensor, visible: Mask) -> tuple[Tensor, Tensor]:
        """
        Return the context `(batch_size, annotation_size)` and the weights for states `(batch_size, query_size)` and
        annotations `(batch_size, source_length, annotation_size)`.
        """
        energies = torch.tanh(self.q_proj(state)[:, None] + self.k_proj(annotations))
        weights = masked_softmax(self.score(energies)[:, :, 0], visible, energies.dtype)
        return torch.matmul(weights[:, None].to(annotations.dtype), annotations)[:, 0], weights


def tanh_(values: Tensor) -> Tensor:
    """Compute tanh in place; in large float32 tensors on the CPU as `2 sigmoid(2 x) - 1`, a quarter of the time."""
    if is_exporting() or not on_cpu(values) or values.dtype != torch.float32 or values.requires_grad:
        return values.tanh_()
    return values.tanh_() if values.numel() < FEW_VALUES else values.mul_(2).sigmoid_().mul_(2).sub_(1)


def attend(query: Tensor, keys: Tensor, visible: Mask, score: Tensor) -> Tensor:
    """Return the weights of additive attention, `(num_sources, g, source_length)`, for queries W s, keys U h_i + b."""
    sources, _, width = keys.shape
    energies = tanh_(query.view(sources, -1, 1, width) + keys[:, None])
    return masked_softmax(torch.matmul(energies, score), visible, keys.dtype)


class AttentionGradients:
    """Gradients of additive attention ([`attend`]) to `values`, summed over steps; the energies are computed again."""

    def __init__(self, keys: Tensor, values: Tensor, score: Tensor):
        self.keys, self.score = keys, score
        self.transposed = values.transpose(1, 2)
        self.slopes = torch.zeros_like(keys)  # sum over steps of (gradient of the score) * (1 - tanh^2)
        self.one = keys.new_ones(())
        self.of_score = torch.zeros_like(score)

    def add_step(
        self, query: Tensor, attention: Tensor, grad_reads: Tensor, grad_attention: Tensor, grad_query: Tensor
    ) -> None:
        """Add a step, from the gradients of the weighted sums of the values and of the weights; fill `grad_query`."""
        sources, length, width = self.keys.shape
        rows = query.shape[0]
        group = rows // sources
        # the softmax over e_ij
        weight = attention.view(sources, group, length)
        grad_weight = torch.matmul(grad_reads.view(sources, group, -1), self.transposed)
        grad_weight += grad_attention.view(sources, group, length)
        grad_score = weight * (grad_weight - (weight * grad_weight).sum(dim=-1, keepdim=True))  # (S, g, n)
        # e_ij = v^T tanh(q_j + k_i): d tanh = 1 - tanh^2
        energies = tanh_(query.view(sources, group, 1, width) + self.keys[:, None])  # (S, g, n, d)
        row = grad_score.reshape(rows, 1, length)
        self.of_score += torch.matmul(row, energies.view(rows, length, width)).sum(dim=(0, 1))
        slopes = torch.addcmul(self.one, energies, energies, value=-1, out=energies)
        torch.mul(torch.matmul(row, slopes.view(rows, length, width))[:, 0], self.score, out=grad_query)
        if group == 1:
            self.slopes.addcmul_(grad_score.view(sources, length, 1), slopes[:, 0])
        else:
            self.slopes += (grad_score[..., None] * slopes).sum(dim=1)


def values_gradient(sources: int, attention: Tensor, grad_reads: Tensor) -> Tensor:
    """Return the gradient of the values from the weights and the gradients of the sums, `(steps, rows, ..)`."""
    steps, rows = grad_reads.shape[:2]
    by_source = attention.view(steps, sources, rows // sources, -1).permute(1, 3, 0, 2).flatten(2)  # (S, n, T g)
    return torch.matmul(by_source, grad_reads.view(steps, sources, rows // sources, -1).transpose(0, 1).flatten(1, 2))
