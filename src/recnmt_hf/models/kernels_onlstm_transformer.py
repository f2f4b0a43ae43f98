"""
The steps of an ON-LSTM (Shen et al., 2019) with a hand-written backward pass. The plain reference is
[`~.modeling_onlstm_transformer.on_lstm_reference`].
"""

import functools
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from .kernels_recurrent_layers import StepMatmuls
from .kernels_shared import CustomGradient, final_gradients, wide_linear


# Numbers of one kind that a processor's cache holds beside a dozen others.
BLOCK = 2**15
# Words of one matmul of inputs where its result is copied.
ROWS = 512


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """
    Return the type of gates and states: at least float32, since half precision is too coarse for sums of a softmax.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def cumulative_softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `softmax(scores)` over the last axis and its cumulative sums, of which the last one is exactly 1."""
    shares = torch.softmax(scores, dim=-1)
    sums = shares.cumsum(dim=-1)
    sums[..., -1] = 1.0
    return shares, sums


def spread(units: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Repeat each unit of `(.., n)` for all channels of its chunk, `(.., n * chunk_size)`."""
    return units if chunk_size == 1 else units.repeat_interleave(chunk_size, dim=-1)


def masters_of(sums: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """The master gates of all channels from the cumulative sums `(.., 2, n)`, which become those of the units."""
    sums[..., -1] = 1.0
    torch.sub(sums.new_ones(()), sums[..., 1, :], out=sums[..., 1, :])
    return spread(sums, chunk_size)


def doubled_sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Return `s = sigmoid(2 x)`, where `2 s - 1` is tanh(x): half the time of tanh on the CPU, as exact as the type."""
    return torch.add(values, values).sigmoid_()


def input_gates(
    inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The inputs' part of all gates, `(directions, words, gates)`, in the type that gates are computed in."""
    wide = wide_type(weights[0].dtype)
    if len(inputs) == 1:
        return wide_linear(inputs[0], weights[0], biases[0])[None].to(wide)
    # A part of the words at a time: what is copied is then never as large as the whole.
    rows = ROWS if inputs[0].device.type == "cpu" else inputs[0].shape[0]
    total = weights[0].new_empty(len(inputs), inputs[0].shape[0], weights[0].shape[0], dtype=wide)
    for gates, words, weight, bias in zip(total, inputs, weights, biases, strict=True):
        for own, part in zip(gates.split(rows), words.split(rows), strict=True):
            own.copy_(wide_linear(part, weight, bias))
    return total


def blocks_of(counts: Sequence[int], words: int) -> list[range]:
    """Consecutive steps, as many as have about that number of words, one at least."""
    blocks, start, held = [], 0, 0
    for step, count in enumerate(counts):
        if held and held + count > words:
            blocks.append(range(start, step))
            start, held = step, 0
        held += count
    return [*blocks, range(start, len(counts))]


def earlier(values: torch.Tensor, counts: Sequence[int], starts: Sequence[int], steps: range) -> torch.Tensor:
    """
    What stands at the step before, for all words of some steps, of which the first one is not among them.

    Args:
        values (`torch.Tensor` of shape `(directions, words, ..)`).
    """
    if counts[steps.start - 1] == counts[steps.stop - 1]:  # one piece of memory
        return values[:, starts[steps.start - 1] : starts[steps.stop - 1]]
    parts = [values[:, starts[step - 1] : starts[step - 1] + counts[step]] for step in steps]
    return torch.cat(parts, dim=1)


def graph_is_kept() -> bool:
    """Whether the backward pass under way leaves what was saved for another one (`retain_graph=True`)."""
    try:
        return torch._C._autograd._get_current_graph_task_keep_graph()
    except AttributeError:  # a torch that does not say it
        return True


class Factors(NamedTuple):
    """
    What gradients of states and cells are multiplied by on their way back through some steps, for all their words.

    Attributes:
        through (`torch.Tensor` of shape `(directions, words, hidden_size)`): From a state's gradient to its cell's.
        to_cell (`torch.Tensor` of the same shape): From a cell's gradient to that of the step before.
        to_gates (`torch.Tensor` of shape `(directions, words, 4, hidden_size)`): From a cell's gradient to those of the
            gates; to the output gate from the state's.
        to_sums (`torch.Tensor` of shape `(directions, words, 2, hidden_size)`): From a cell's gradient to those of the
            cumulative sums, of which the master input gate is one less.
    """

    through: torch.Tensor
    to_cell: torch.Tensor
    to_gates: torch.Tensor
    to_sums: torch.Tensor


def factors_of(
    kept: torch.Tensor,
    masters: torch.Tensor,
    cells: torch.Tensor,
    counts: Sequence[int],
    starts: Sequence[int],
    steps: range,
    chunk_size: int,
) -> Factors:
    """The factors of some steps, from what [`ONLSTMSteps`] kept of all of them."""
    words = slice(starts[steps.start], starts[steps.stop])
    gates, masters = kept[:, words].unflatten(-1, (4, -1)), spread(masters[:, words], chunk_size)
    (closing, (out, doubled)), (upper, lower) = (gates[:, :, :2], gates[:, :, 2:].unbind(2)), masters.unbind(2)
    overlap = (upper * lower)[:, :, None]
    both = torch.empty_like(masters)  # the cell before, from zeros at the first step, and the new values
    before, candidate = both.unbind(2)
    if steps.start:
        before.copy_(earlier(cells, counts, starts, steps))
    else:
        before[:, : counts[0]] = 0.0
        if steps.stop > 1:
            before[:, counts[0] :] = earlier(cells, counts, starts, range(1, steps.stop))
    torch.mul(doubled, 2, out=candidate).sub_(1)
    squashed = doubled_sigmoid(cells[:, words]).mul_(2).sub_(1)
    rest = 1 - closing
    # Of w = f~ i~: f w + f~ - w = f~ - w (1 - f), and i w + i~ - w = i~ - w (1 - i).
    to_cell, to_input = torch.addcmul(masters, overlap, rest, value=-1).unbind(2)
    to_gates = torch.empty_like(gates)
    through_sigmoid, through_tanh = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
    through_sigmoid.grad_input(both * overlap, closing, grad_input=to_gates[:, :, :2])
    through_sigmoid.grad_input(squashed, out, grad_input=to_gates[:, :, 2])
    through_tanh.grad_input(to_input, candidate, grad_input=to_gates[:, :, 3])
    mixed = torch.addcmul(before * rest[:, :, 0], candidate, rest[:, :, 1])
    to_sums = torch.empty_like(both)
    torch.addcmul(before, lower, mixed, value=-1, out=to_sums[:, :, 0])
    torch.mul(upper, mixed, out=to_sums[:, :, 1]).sub_(candidate)
    return Factors(through_tanh(out, squashed), to_cell, to_gates, to_sums)


def forward_steps(
    buffer: torch.Tensor,
    shares: torch.Tensor,
    cells: torch.Tensor,
    states: torch.Tensor,
    matmuls: Sequence[StepMatmuls],
    counts: Sequence[int],
    chunk_size: int,
) -> None:
    """
    All steps of an ON-LSTM onward.

    Args:
        buffer (`torch.Tensor` of shape `(directions, words, 4 * hidden_size + 2 * n)`): The inputs' part of the gates;
            becomes, step by step, the gates, of the new values their doubled sigmoid.
        shares (`torch.Tensor` of shape `(directions, words, 2, n)`): To be filled with the softmax of the master gates.
        cells, states (`torch.Tensor` of shape `(directions, words, hidden_size)`): To be filled.
        matmuls (sequence of [`StepMatmuls`]): Of each direction the states' part of the gates.
        counts (sequence of `int`): As in [`ONLSTMSteps`].
    """
    size, rows = cells.shape[-1], 4 * cells.shape[-1]
    one = buffer.new_ones(())  # what has the type already need not be converted at every step
    start, before = 0, 0
    for step, count in enumerate(counts):
        own, previous = slice(start, start + count), slice(before, before + count)
        each = buffer[:, own]
        if step:
            for gate, state, matmul in zip(each, states[:, previous], matmuls, strict=True):
                matmul.add_to(gate, state)
        kept, scores = each[..., :rows], each[..., rows:].unflatten(-1, (2, -1))
        closing, (out, doubled) = kept[..., : 2 * size].unflatten(-1, (2, size)), kept[..., 2 * size :].chunk(2, -1)
        doubled.mul_(2)
        kept.sigmoid_()
        torch.softmax(scores, dim=-1, out=shares[:, own])
        torch.cumsum(shares[:, own], dim=-1, out=scores)
        masters = masters_of(scores, chunk_size)
        overlap = masters[..., :1, :] * masters[..., 1:, :]
        # Of w = f~ i~: f w + f~ - w = f~ - w (1 - f), and i w + i~ - w = i~ - w (1 - i).
        of_cell, of_new = torch.addcmul(masters, overlap, torch.sub(one, closing), value=-1).unbind(dim=-2)
        cell = torch.addcmul(of_new.neg(), of_new, doubled, value=2, out=cells[:, own])
        if step:
            cell.addcmul_(of_cell, cells[:, previous])
        torch.addcmul(out.neg(), out, doubled_sigmoid(cell), value=2, out=states[:, own])
        before, start = start, start + count


def backward_steps(
    buffer: torch.Tensor,
    gradients: torch.Tensor,
    shares: torch.Tensor,
    cells: torch.Tensor,
    gradient: torch.Tensor,
    matmuls: Sequence[StepMatmuls],
    counts: Sequence[int],
    chunk_size: int,
) -> None:
    """
    All steps of an ON-LSTM back.

    Args:
        buffer, shares, cells (`torch.Tensor`): As [`forward_steps`] left them.
        gradients (`torch.Tensor` of the shape of `buffer`, or `buffer` itself): To be filled with the gradients of what
            the gates are made of.
        gradient (`torch.Tensor` of shape `(directions, words, hidden_size)`): Of the states.
    """
    size, rows, first = cells.shape[-1], 4 * cells.shape[-1], counts[0]
    kept, masters = buffer[..., :rows], buffer[..., rows:].unflatten(-1, (2, -1))
    starts = list(itertools.accumulate(counts, initial=0))
    grad_gates = gradients[..., :rows].unflatten(-1, (4, size))
    grad_masters = gradients[..., rows:].unflatten(-1, (2, -1))
    # From the next step.
    grad_cells, grad_states = (cells.new_zeros(len(cells), first, size) for _ in range(2))
    for steps in reversed(blocks_of(counts, BLOCK // (len(cells) * size))):
        begin = starts[steps.start]
        factors = factors_of(kept, masters, cells, counts, starts, steps, chunk_size)
        for step in reversed(steps):
            own, count = slice(starts[step], starts[step + 1]), counts[step]
            local = slice(starts[step] - begin, starts[step + 1] - begin)
            grad_state = grad_states[:, :count] + gradient[:, own]
            grad_cell = torch.addcmul(grad_cells[:, :count], grad_state, factors.through[:, local])
            of_gates = grad_gates[:, own]
            torch.mul(grad_cell[..., None, :], factors.to_gates[:, local], out=of_gates)
            torch.mul(grad_state, factors.to_gates[:, local, 2], out=of_gates[..., 2, :])
            of_sums = grad_cell[..., None, :] * factors.to_sums[:, local]
            if chunk_size > 1:
                of_sums = of_sums.unflatten(-1, (-1, chunk_size)).sum(dim=-1)
            # A share enters its own sum and all later ones: the total less the sums before it. To the softmax a
            # constant makes no difference, and the total is one.
            onward = of_sums - of_sums.cumsum(dim=-1)
            grad_masters[:, own] = torch.ops.aten._softmax_backward_data(onward, shares[:, own], -1, onward.dtype)
            if step:
                torch.mul(grad_cell, factors.to_cell[:, local], out=grad_cells[:, :count])
                for found, each, matmul in zip(grad_states[:, :count], gradients[:, own], matmuls, strict=True):
                    found.copy_(matmul.backward(each))


class ONLSTMSteps(CustomGradient):
    """
    All steps of an ON-LSTM in one or both directions, from zero states.

    Words are packed: those of the first step for all sentences, then those of the second step for the sentences that
    have one, and so on, longer sentences first, as in `torch.nn.utils.rnn.PackedSequence`. The input's part of the
    gates is one matmul for all words. The backward pass prepares for all words at once what multiplies the gradient of
    a state, so that a step back is a few products and one matmul; the gradients of inputs and weights are one matmul
    each over all words. It cannot be differentiated twice; with `RECNMT_FAST_PATHS=0` the steps can.

    Args:
        counts (sequence of `int`): How many sentences have each step; it never rises.
        chunk_size (`int`): Channels of a master unit; `n = hidden_size // chunk_size`.
        *tensors (`torch.Tensor`): For each direction the inputs `(words, input_size)`, their weight `(4 * hidden_size +
            2 * n, input_size)` and bias, in the order forget, input, output, new values, master forget, master input,
            and the recurrent weight `(4 * hidden_size + 2 * n, hidden_size)`.

    Returns:
        The states `(directions, words, hidden_size)`, and for the backward pass `buffer`, `shares` and `cells` of
        [`forward_steps`].
    """

    @staticmethod
    def forward(
        counts: Sequence[int], chunk_size: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, input_weights, biases, weights = (tensors[part::4] for part in range(4))
        directions = len(weights)
        words, size = inputs[0].shape[0], weights[0].shape[1]
        rows = 4 * size  # those of the master gates follow
        matmuls = [StepMatmuls(weight, calls=len(counts) - 1) for weight in weights]
        # Becomes, step by step, what is kept of the gates; of the new values, that is their doubled sigmoid.
        buffer = input_gates(inputs, input_weights, biases)
        shares = buffer.new_empty(directions, words, 2, (buffer.shape[-1] - rows) // 2)
        cells = buffer.new_empty(directions, words, size)
        states = weights[0].new_empty(directions, words, size)
        forward_steps(buffer, shares, cells, states, matmuls, counts, chunk_size)
        return states, buffer, shares, cells

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.settings, tensors = inputs[:2], inputs[2:]
        device = tensors[0].device.type
        is_low = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ctx.autocast_dtype = torch.get_autocast_dtype(device) if is_low else None
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors[::4], *tensors[1::4], *tensors[3::4])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, *of_kept: None) -> Any:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        compute = functools.partial(ONLSTMSteps.gradients, *ctx.settings, ctx.autocast_dtype, ctx.needs_input_grad[2:])
        return None, None, *final_gradients(compute, gradient, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        counts: Sequence[int],
        chunk_size: int,
        autocast_dtype: torch.dtype | None,
        needed: Sequence[bool],
        gradient: torch.Tensor,
        states: torch.Tensor,
        buffer: torch.Tensor,
        shares: torch.Tensor,
        cells: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        inputs, input_weights, weights = (tensors[part * len(states) : (part + 1) * len(states)] for part in range(3))
        with nullcontext() if autocast_dtype is None else torch.autocast(gradient.device.type, autocast_dtype):
            of_inputs = [StepMatmuls(weight) for weight in input_weights]
            matmuls = [StepMatmuls(weight, calls=len(counts) - 1) for weight in weights]
        # Each step reads its gates before it writes their gradients: these take their place, unless somebody wants to
        # come this way again.
        gradients = torch.empty_like(buffer) if graph_is_kept() else buffer
        backward_steps(buffer, gradients, shares, cells, gradient, matmuls, counts, chunk_size)
        first, starts = counts[0], list(itertools.accumulate(counts, initial=0))
        # The first step has no state before it.
        previous = earlier(states, counts, starts, range(1, len(counts))) if len(counts) > 1 else states[:, :0]
        results: list[torch.Tensor | None] = []
        for direction, (of_input, of_state) in enumerate(zip(of_inputs, matmuls, strict=True)):
            wanted = needed[4 * direction : 4 + 4 * direction]
            each, own_inputs = gradients[direction], inputs[direction]
            low = each.to(of_state.low)
            results += [
                of_input.backward(low).to(own_inputs.dtype) if wanted[0] else None,
                of_input.weight_gradient(low, own_inputs) if wanted[1] else None,
                each.sum(dim=0).to(of_input.dtype) if wanted[2] else None,
                of_state.weight_gradient(low[first:], previous[direction]) if wanted[3] else None,
            ]
        return tuple(results)
