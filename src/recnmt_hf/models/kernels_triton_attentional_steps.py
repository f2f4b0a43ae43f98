"""
The steps of recurrent decoders with additive attention (Zhang et al., 2018, Eqs. 2-5, 13) on GPUs: a Triton kernel for
each GRU cell and for the attention, in either pass, and one matmul where two read the same state. The plain reference
is in `modeling_rnmt.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .additive_attention import values_gradient
from .kernels_shared import Mask
from .kernels_triton import block, launch, launch_rows


try:
    import triton
    import triton.language as tl

    from .kernels_triton import load_row, tanh
    from .kernels_triton_gru import gru_backward, gru_forward
except ImportError:
    triton = None

# Elements of a tile of source positions times channels.
TILE = 1024


if triton is not None:

    @triton.jit
    def load_tile(pointer, start, word, is_word, SIZE: tl.constexpr, BLOCK: tl.constexpr):
        """Load some channels of all words; return also these channels, and which of them exist."""
        place = start + tl.arange(0, BLOCK)
        inside = place < SIZE
        values = load_row(pointer, word[:, None] * SIZE + place[None, :], is_word[:, None] & inside[None, :])
        return values, place, inside

    @triton.jit
    def attention_forward(
        query, keys, score, visible, values, attention, reads, query_stride, length, group,
        D: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ):  # fmt: skip
        """
        Additive attention of one query: its weights and the weighted sums of the values. The programs of a query's
        parts compute the same weights, and each some channels of the sums.
        """
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        source = row // group
        word = tl.arange(0, BLOCK_N)
        is_word = word < length
        keys += source * length * D
        values += source * length * V
        energy = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, D, BLOCK_D):
            key, place, inside = load_tile(keys, start, word, is_word, D, BLOCK_D)
            asked = load_row(query + row * query_stride, place, inside)
            factor = load_row(score, place, inside)
            energy += tl.sum(tanh(key + asked[None, :]) * factor[None, :], 1)
        sees = is_word
        if visible is not None:
            sees = is_word & tl.load(visible + source * length + word, mask=is_word, other=0).to(tl.int1)
        energy = tl.where(sees, energy, -3.4e38)
        weight = tl.where(sees, tl.exp(energy - tl.max(energy, 0)), 0.0)
        total = tl.sum(weight, 0)
        weight = weight / tl.where(total > 0, total, 1.0)
        if part == 0:
            tl.store(attention + row * length + word, weight, mask=is_word)
        for start in range(part * BLOCK_V, V, PARTS * BLOCK_V):
            value, place, inside = load_tile(values, start, word, is_word, V, BLOCK_V)
            tl.store(reads + row * V + place, tl.sum(weight[:, None] * value, 0), mask=inside)

    @triton.jit
    def attention_backward(
        query, keys, score, values, attention, grad_reads, grad_attention, grad_query, slopes, of_score,
        query_stride, grad_query_stride, length, group,
        D: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ):  # fmt: skip
        """
        The attention of one source's queries back: their gradients, and added to earlier steps' `slopes`, which times
        the score are the gradient of the keys, and the score's gradient `of_score`, for each source.
        """
        source, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        word = tl.arange(0, BLOCK_N)
        is_word = word < length
        keys += source * length * D
        values += source * length * V
        slopes += source * length * D
        for member in range(group):
            row = source * group + member
            grad_weight = load_row(grad_attention + row * length, word, is_word)
            for start in range(0, V, BLOCK_V):
                value, place, inside = load_tile(values, start, word, is_word, V, BLOCK_V)
                read = load_row(grad_reads + row * V, place, inside)
                grad_weight += tl.sum(value * read[None, :], 1)
            weight = load_row(attention + row * length, word, is_word)
            grad_energy = weight * (grad_weight - tl.sum(weight * grad_weight, 0))
            for start in range(part * BLOCK_D, D, PARTS * BLOCK_D):
                key, place, inside = load_tile(keys, start, word, is_word, D, BLOCK_D)
                asked = load_row(query + row * query_stride, place, inside)
                factor = load_row(score, place, inside)
                energies = tanh(key + asked[None, :])
                own = grad_energy[:, None] * (1 - energies * energies)
                tl.store(grad_query + row * grad_query_stride + place, tl.sum(own, 0) * factor, mask=inside)
                into, is_key = slopes + word[:, None] * D + place[None, :], is_word[:, None] & inside[None, :]
                tl.store(into, tl.load(into, mask=is_key, other=0.0) + own, mask=is_key)
                into_score = of_score + source * D + place
                earlier = tl.load(into_score, mask=inside, other=0.0)
                tl.store(into_score, earlier + tl.sum(grad_energy[:, None] * energies, 0), mask=inside)


class Attention:
    """The launch of both kernels with keys, values, the score's weights, and which keys are visible."""

    def __init__(self, keys: Tensor, values: Tensor, score: Tensor, visible: Mask, rows: int):
        self.keys, self.values, self.score = keys.contiguous(), values.contiguous(), score.contiguous()
        self.sources, self.length, width = keys.shape
        self.visible = None if visible is None else visible.reshape(self.sources, self.length)
        self.group = rows // self.sources
        words = block(self.length)
        channels = max(TILE // words, 1)
        self.constants = {"D": width, "V": values.shape[-1], "BLOCK_N": words, "num_warps": 4}
        self.constants |= {"BLOCK_D": min(channels, block(width)), "BLOCK_V": min(channels, block(values.shape[-1]))}

    def run(self, kernel: Any, programs: int, *arguments: Any) -> None:
        """Launch a kernel for each query or source; several programs share its channels if a device has enough."""
        parts = min(max(256 // programs, 1), 4)
        launch(kernel, (programs, parts), *arguments, self.length, self.group, PARTS=parts, **self.constants)


def joint_weights(weights: Any, part: Any, low: torch.dtype) -> Tensor:
    """Return the weights of what is read from the state of the attention: query, second GRU, and hidden layer."""
    matrices = [weights.query_weight.to(low), weights.context_weight.to(low)]
    return torch.cat(matrices if part is None or part.hidden is None else [*matrices, part.hidden.weight])


def run_forward(
    tensors: Sequence[Any], weights: Any, part: Any, low: torch.dtype, saved: list[Any] | None
) -> list[Tensor]:
    """Compute [`~.kernels_attentional_steps.steps_forward`], with matmuls in the type `low`."""
    gates, keys, values, visible, state, real, *_ = tensors
    (steps, rows, _), width, dtype = gates.shape, keys.shape[2], keys.dtype
    is_conditional, has_low = weights.word_weight is not None, low != dtype
    joint = joint_weights(weights, part, low).t()
    word: Any = weights.word_weight.to(low).t() if is_conditional else None
    attention = Attention(keys, values, weights.score, visible, rows)
    gates, new = gates.contiguous(), keys.new_empty
    real = [None] * steps if real is None else real.contiguous()
    given = [] if part is None else part.inputs
    given = [tensor if tensor[0].is_contiguous() else tensor.contiguous() for tensor in given]
    states, all_weights = new(steps, rows, width), new(steps, rows, keys.shape[1])
    count = 1 if saved is None else steps  # of what only the backward pass reads
    middles = new(count, rows, width) if is_conditional else None
    kept: list[Any] = [[None] * steps if saved is None else new(steps, rows, 4 * width) for _ in range(2)]
    mapped, reads = new(count, rows, joint.shape[1], dtype=low), new(rows, values.shape[-1])
    low_state = state.to(low)
    low_middle = torch.empty_like(low_state) if has_low else None
    others: list[Any] = []
    kept_by_part: list[Any] = []
    state = state.contiguous()
    inputs: tuple[Any, ...]
    for j in range(steps):
        at = j % count
        middle, low_input = state, low_state
        if middles is not None:
            recurrent = torch.mm(low_state, word)
            middle = middles[at]
            low_input = low_middle if has_low else middle
            inputs = (gates[j], None, None, None, recurrent, weights.word_bias, state, None, None)
            launch_rows(gru_forward, state, *inputs, middle, low_middle, kept[0][j], 0, 3 * width)
        both = torch.mm(low_input, joint, out=mapped[at])
        inputs = (both, attention.keys, attention.score, attention.visible, attention.values)
        attention.run(attention_forward, rows, *inputs, all_weights[j], reads, both.stride(0))
        added = None
        if part is not None:
            inputs = (middle, reads[:, 3 * width :], *(tensor[j] for tensor in given))
            added, results, of_part = part.step(*inputs, mapped=both[:, 4 * width :])
            others.append(results)
            kept_by_part.append(of_part)
        own = None if is_conditional else gates[j]
        inputs = (own, reads, added, weights.gate_bias, both[:, width:], weights.context_bias, middle, real[j], state)
        outputs = (states[j], low_state if has_low else None, kept[1][j], values.shape[-1], joint.shape[1])
        launch_rows(gru_forward, state, *inputs, *outputs)
        state, low_state = states[j], low_state if has_low else states[j]
    if saved is not None:
        before = torch.cat([tensors[4][None], states[:-1]])
        saved += [(before, middles, mapped, *kept), *kept_by_part]
    return [states, all_weights, *(torch.stack(column) for column in zip(*others, strict=True))]


def run_backward(
    saved: Sequence[Any],
    gradients: Sequence[Tensor],
    tensors: Sequence[Any],
    weights: Any,
    part: Any,
    low: torch.dtype,
    attention: Tensor,
    others: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of [`~.kernels_attentional_steps.AttentionalSteps`]."""
    (before, middles, mapped, kept_first, kept_second), *by_part = saved
    grad_states, grad_weights, *grad_others = (gradient.contiguous() for gradient in gradients)
    _, keys, values, _, _, real, *_ = tensors
    (steps, rows, width), is_conditional = before.shape, middles is not None
    states = middles if is_conditional else before
    new, holds = keys.new_empty, real is not None
    real = real.contiguous() if holds else [None] * steps
    joint = joint_weights(weights, part, low)
    word: Any = weights.word_weight.to(low) if is_conditional else None
    grad_gates, grad_first = (new(steps, rows, 3 * width, dtype=kind) for kind in (keys.dtype, low))
    grad_joint, grad_reads = new(steps, rows, len(joint), dtype=low), new(steps, rows, values.shape[-1])
    carried, skipped = keys.new_zeros(2, rows, width, dtype=torch.float32)
    kernels = Attention(keys, values, weights.score, None, rows)
    slopes = torch.zeros_like(kernels.keys, dtype=torch.float32)
    of_score = slopes.new_zeros(kernels.sources, width)
    grad_context = grad_reads[..., : 3 * width]
    if part is not None:
        part.start_backward(others, grad_others, grad_context, grad_reads[..., 3 * width :])
    recurrent: Any = None
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    for j in reversed(range(steps)):
        inputs = (carried, recurrent, grad_states[j], real[j], states[j], kept_second[j])
        outputs = (grad_reads[j], grad_joint[j, :, width:], carried, skipped if is_conditional else None, None)
        launch_rows(gru_backward, carried, *inputs, *outputs, values.shape[-1], len(joint))
        given = None
        if part is not None and part.hidden is not None:
            part.step_backward(j, None, by_part[j])
            grad_joint[j, :, 4 * width :], given = part.grad_hidden[j], part.of_queries[j]
        inputs = (mapped[j], kernels.keys, kernels.score, kernels.values, attention[j], grad_reads[j], grad_weights[j])
        outputs = (grad_joint[j], slopes, of_score, joint.shape[0], joint.shape[0])
        kernels.run(attention_backward, kernels.sources, *inputs, *outputs)
        recurrent = torch.mm(grad_joint[j], joint)
        if is_conditional:
            inputs = (carried, recurrent, given, None, before[j], kept_first[j])
            outputs = (grad_gates[j], grad_first[j], carried, None, skipped if holds else None)
            launch_rows(gru_backward, carried, *inputs, *outputs, 3 * width, 3 * width)
            recurrent = torch.mm(grad_first[j], word)
        elif given is not None:
            carried += given
    carried += recurrent
    dtype = keys.dtype

    def weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
        return torch.mm(gradient.flatten(0, 1).t(), inputs.flatten(0, 1).to(low)).to(dtype)

    of_joint = weight_gradient(grad_joint, states)
    return (
        grad_gates if is_conditional else grad_context,
        (slopes * weights.score).to(dtype),
        values_gradient(kernels.sources, attention, grad_reads),
        None,
        carried.to(dtype),
        None,
        weight_gradient(grad_first, before) if is_conditional else None,
        grad_first.sum(dim=(0, 1), dtype=torch.float32).to(dtype) if is_conditional else None,
        of_joint[:width],
        of_score.sum(dim=0).to(dtype),
        of_joint[width : 4 * width],
        grad_joint[..., width : 4 * width].sum(dim=(0, 1), dtype=torch.float32).to(dtype),
        grad_context.sum(dim=(0, 1)),
        *(() if part is None else part.gradients(states, by_part)),
    )
