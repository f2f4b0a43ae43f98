"""
Dynamic routing (Sabour et al., 2017) from the words of a sentence to capsules, without the votes tensor.

A vote of word i for capsule k, `W_k h_i`, enters only into sums over words, `W_k sum_i c_ki h_i`, and into products
with a capsule, `(W_k h_i) . u_k = h_i . (W_k^T u_k)`. The plain reference is [`~.modeling_gret.route_reference`].
"""

import torch
from torch import Tensor

from .attention import masked_softmax
from .kernels_shared import Mask, wide_type


def squash(vectors: Tensor) -> Tensor:
    """`|t|^2 / (1 + |t|^2) t / |t|` over the last axis, 0 for 0 (Sabour et al., 2017, Eq. 1), in at least float32."""
    wide = vectors if vectors.dtype == torch.float64 else vectors.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide * (norm / (1 + norm.square()))


def couplings(logits: Tensor, visible: Mask, axis: str) -> Tensor:
    """Return the softmax of logits `(rows, capsules, length)` over `"positions"` or `"capsules"`, 0 if not visible."""
    if axis == "positions":
        return masked_softmax(logits, visible, logits.dtype)
    weights = torch.softmax(logits, dim=1)
    return weights if visible is None else weights.masked_fill(~visible, 0.0)


def saves_votes(length: int, num_capsules: int, capsule_dim: int, width: int, iterations: int) -> bool:
    """Return whether [`route`] needs fewer multiplications than routing with votes."""
    votes = length * num_capsules * capsule_dim * (width + 2 * iterations - 1)
    return num_capsules * width * ((2 * iterations - 1) * capsule_dim + 2 * (iterations - 1) * length) < votes


def route(states: Tensor, weight: Tensor, attention_mask: Mask, iterations: int, axis: str) -> tuple[Tensor, Tensor]:
    """Compute [`~.modeling_gret.route_reference`] from words and W `(capsules, capsule_dim, width)`."""
    dtype, (capsules, _, _), (rows, length, _) = states.dtype, weight.shape, states.shape
    wide = wide_type(dtype)
    visible = None if attention_mask is None else (attention_mask != 0)[:, None]
    # Without logits all capsules read the same sum of words.
    coupling = couplings(states.new_zeros(rows, capsules, length, dtype=wide), visible, axis)
    read = torch.matmul(coupling[:, :1].to(dtype), states)[:, 0]
    capsule = squash(torch.matmul(read, weight.flatten(0, 1).t()).unflatten(1, weight.shape[:2]).transpose(0, 1))
    total = capsule
    for step in range(1, iterations):
        # The logits add up h_i . (W_k^T u_k) over the iterations: one matmul with the sum of the capsules.
        queries = torch.matmul(total.to(dtype), weight).transpose(0, 1)
        coupling = couplings(torch.matmul(queries, states.transpose(1, 2)).to(wide), visible, axis)
        read = torch.matmul(coupling.to(dtype), states).transpose(0, 1)
        capsule = squash(torch.matmul(read, weight.transpose(1, 2)))
        if step < iterations - 1:
            total = total + capsule
    return capsule.transpose(0, 1), coupling
