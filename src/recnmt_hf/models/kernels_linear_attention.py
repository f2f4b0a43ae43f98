"""
Linear attention with gates, the recurrence of matrix memories: step by step, in chunks, by flash-linear-attention, and,
while decoding, from stored words.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels_shared import allowed, graph_operator, is_exporting, on_cpu, scan_steps, with_autocast


CHUNK = 64  # words whose pairs are computed by matmuls; a state is carried from chunk to chunk
MOST_WORDS = 32  # words that decoding stores before it writes them into the memory


def linear_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, memory: Tensor
) -> list[Tensor]:
    """
    Run word by word over the memory S `(batch_size, heads, key_dim, value_dim)`, and return the outputs and S after
    each word. Without `rate` (mLSTM, Mamba-2), and with it (the gated delta rule, Yang et al., 2024, Eq. 10):

        S_t = a_t S_{t-1} + k_t v_t^T,   S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,   o_t = S_t^T q_t

    The arguments are those of [`linear_attention`].
    """

    def step(carry: Sequence[Tensor], *inputs: Tensor) -> Any:
        query, key, value, decay, *rate = (tensor[:, :, None] for tensor in inputs)
        memory = carry[0] * decay[..., None].exp()
        if rate:
            value = (value - key @ memory) * rate[0][..., None]
        add = torch.addcmul if torch.is_grad_enabled() or is_exporting() else torch.Tensor.addcmul_
        memory = add(memory, key.transpose(2, 3), value)
        return [memory], [(query @ memory).squeeze(2), memory]

    inputs = [tensor.transpose(0, 1) for tensor in (query, key, value, decay, rate) if tensor is not None]
    return [steps.transpose(0, 1) for steps in scan_steps(step, [memory], *inputs)]


def linear_attention_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, memory: Tensor | None
) -> list[Tensor]:
    """
    Compute the outputs of [`linear_attention_reference`] and the last memory by matmuls within chunks. With
    A_t = log a_1 + ... + log a_t in a chunk, and S the memory before it (Yang et al., 2024, section 3):

        o_t = exp(A_t) S^T q_t + sum_{s<=t} exp(A_t - A_s) (q_t . k_s) u_s
        S' = exp(A_n) S + sum_s exp(A_n - A_s) k_s u_s^T

    u is v, or with `rate` the solution of

        u_t + b_t sum_{s<t} exp(A_t - A_s) (k_t . k_s) u_s = b_t (v_t - exp(A_t) S^T k_t)
    """
    length, size = value.shape[1], min(CHUNK, value.shape[1])
    tensors = [query, key, value, decay[..., None], *([] if rate is None else [rate[..., None]])]
    parts = []
    for tensor in tensors:  # to (batch_size, heads, chunks, size, ...)
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, -length % size))
        parts.append(padded.transpose(1, 2).unflatten(2, (-1, size)))
    query, key, value, decay = parts[:4]
    total = decay.cumsum(dim=3)
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    weights = (total - total.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    scores = (query @ key.transpose(-1, -2)) * weights
    chunks, reads = value.shape[2], None
    if rate is not None:
        rate = parts[4]
        links = (key * rate @ key.transpose(-1, -2)) * weights  # the solver ignores the diagonal and what is above it
        given = value * rate
        if chunks > 1 or memory is not None:
            given = torch.cat([given, key * (rate * total.exp())], dim=-1)
        solved = torch.linalg.solve_triangular(links, given, upper=False, unitriangular=True)
        value, reads = solved.split([value.shape[-1], solved.shape[-1] - value.shape[-1]], dim=-1)
    ends = total[:, :, :, -1:]
    entering, leaving, kept = query * total.exp(), key * (ends - total).exp(), ends.exp()
    outputs = []
    for chunk in range(chunks):
        own = value[:, :, chunk]
        if memory is not None and reads is not None:
            own = own - reads[:, :, chunk] @ memory
        output, written = scores[:, :, chunk] @ own, leaving[:, :, chunk].transpose(-1, -2) @ own
        if memory is not None:
            output = output + entering[:, :, chunk] @ memory
            written = written + kept[:, :, chunk] * memory
        memory = written
        outputs.append(output)
    assert memory is not None
    return [torch.cat(outputs, dim=2).transpose(1, 2)[:, :length], memory]


def read_words(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    memory: Tensor | None,
    words: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Compute [`linear_attention_reference`] word by word without writing to the memory, which is larger than a word:

        o_t = exp(A_t) S^T q_t + sum_{s<=t} exp(A_t - A_s) (q_t . k_s) u_s

    S is the memory before the stored `words`, A and u are those of [`linear_attention_in_chunks`]. Return the outputs
    and the words with the new ones: `keys` k `(batch_size, heads or 1, words, key_dim)`, `values` u and `total` A
    `(batch_size, heads, words)`. The first stored word is zero.
    """
    outputs = []
    for t in range(value.shape[1]):
        own_query, own_key, own, own_decay = (tensor[:, t, :, None] for tensor in (query, key, value, decay))
        if not words:
            zeros = map(torch.zeros_like, (own_key, own, own_decay))
            words = dict(zip(("keys", "values", "total"), zeros, strict=True))
        keys = torch.cat([words["keys"], own_key], dim=2)
        total = torch.cat([words["total"], words["total"][:, :, -1:] + own_decay], dim=2)
        asked = own_query if rate is None else torch.cat([own_query, own_key], dim=2)
        scores = asked @ keys.transpose(2, 3) * (total[:, :, -1:] - total).exp()[:, :, None]
        read = scores[..., :-1] @ words["values"]
        if memory is not None:
            read = read + asked * total[:, :, -1:, None].exp() @ memory
        if rate is not None:
            own = (own - read[:, :, 1:]) * rate[:, t, :, None, None]
        outputs.append(read[:, :, :1] + scores[:, :, :1, -1:] * own)
        words = {"keys": keys, "values": torch.cat([words["values"], own], dim=2), "total": total}
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2), words


def fold_words(memory: Tensor | None, keys: Tensor, values: Tensor, total: Tensor) -> Tensor:
    """Return the memory after the words that [`read_words`] stored."""
    end = total[:, :, -1:]
    written = (keys * (end - total).exp()[..., None]).transpose(-1, -2) @ values
    return written if memory is None else written + end.exp()[..., None] * memory


@functools.cache
def flash_linear_attention(has_rate: bool) -> Any:
    """Return the kernel of the package flash-linear-attention, or `None` where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    return chunk_gated_delta_rule if has_rate else chunk_simple_gla


def shapes_of(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Any, memory: Any) -> Any:
    state = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    return [(value.shape, value.dtype), (state, value.dtype)]


@graph_operator(shapes_of)
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, memory: Tensor | None
) -> list[Tensor]:
    """
    Compute [`linear_attention_reference`] from `memory`, or from zeros.

    Args:
        query, key (`torch.Tensor` of shape `(batch_size, length, heads or 1, key_dim)`): q and k.
        value (`torch.Tensor` of shape `(batch_size, length, heads, value_dim)`): v.
        decay (`torch.Tensor` of shape `(batch_size, length, heads)`): log a, at most 0.
        rate (`torch.Tensor` of shape `(batch_size, length, heads)`, *optional*): b of the delta rule.
        memory (`torch.Tensor` of shape `(batch_size, heads, key_dim, value_dim)`, *optional*): S before the first word.

    Returns:
        The outputs, of the shape of `value`, and the last memory, of the shape of `memory`.
    """
    if value.shape[1] == 1 or is_exporting() or not allowed():
        shape = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
        start = value.new_zeros(shape) if memory is None else memory
        outputs, memories = linear_attention_reference(query, key, value, decay, rate, start)
        return [outputs, memories[:, -1].contiguous()]
    kernel = None if on_cpu(value) or value.dtype == torch.float64 else flash_linear_attention(rate is not None)
    with with_autocast(value.device, None):
        if kernel is None:
            return linear_attention_in_chunks(query, key, value, decay, rate, memory)
        query, key = (tensor.expand(-1, -1, value.shape[2], -1).contiguous() for tensor in (query, key))
        inputs = (query, key, value, decay) if rate is None else (query, key, value, decay, rate)
        outputs, last = kernel(*inputs, scale=1.0, initial_state=memory, output_final_state=True)
        return [outputs, last]
