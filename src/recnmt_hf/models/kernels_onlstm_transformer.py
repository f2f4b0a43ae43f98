"""
The steps of an ON-LSTM (Shen et al., 2019) with a hand-written backward pass. The plain reference is
[`~.modeling_onlstm_transformer.on_lstm_reference`].
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels_cpu_matmuls import StepMatmuls, fast_linear
from .kernels_shared import OnceDifferentiable, autocast_dtype, on_cpu, wide_type, with_autocast
from .kernels_triton import runs_triton, sample, with_gradients
from .kernels_triton_onlstm_transformer import run_backward, run_forward


# Size of a tensor that fits into a processor's cache with a dozen others; on accelerators, which launch each operation,
# as many steps at a time as memory allows.
BLOCK, LARGE_BLOCK = 2**15, 2**24
# Words of one matmul of inputs where its result is copied.
ROWS = 512


def spread(units: Tensor, chunk_size: int) -> Tensor:
    """Repeat each unit of `(.., n)` for all channels of its chunk, `(.., n * chunk_size)`."""
    return units if chunk_size == 1 else units.repeat_interleave(chunk_size, dim=-1)


def doubled_sigmoid(values: Tensor) -> Tensor:
    """Return `s = sigmoid(2 x)`, where `2 s - 1` is tanh(x): half the time of tanh on CPU, at the type's precision."""
    return torch.add(values, values).sigmoid_()


def input_gates(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Return the inputs' part of all gates, `(directions, words, gates)`, in the data type of the gates."""
    if weights[0] is None:
        return torch.stack(tuple(inputs))
    wide = wide_type(weights[0].dtype)
    if len(inputs) == 1:
        return fast_linear(inputs[0], weights[0], biases[0])[None].to(wide)
    # In pieces, to limit the size of the copy.
    rows = ROWS if on_cpu(inputs[0]) else inputs[0].shape[0]
    all_gates = weights[0].new_empty(len(inputs), inputs[0].shape[0], weights[0].shape[0], dtype=wide)
    for gates, words, weight, bias in zip(all_gates, inputs, weights, biases, strict=True):
        for target, piece in zip(gates.split(rows), words.split(rows), strict=True):
            target.copy_(fast_linear(piece, weight, bias))
    return all_gates


def blocks_of(counts: Sequence[int], words: int) -> list[range]:
    """Cut the steps into blocks of at most that number of words, but at least one step."""
    blocks, start, total = [], 0, 0
    for step, count in enumerate(counts):
        if total and total + count > words:
            blocks.append(range(start, step))
            start, total = step, 0
        total += count
    return [*blocks, range(start, len(counts))]


def previous_rows(values: Tensor, counts: Sequence[int], starts: Sequence[int], steps: range) -> Tensor:
    """Return the rows of `values` `(directions, words, ..)` one step before the words of `steps`, without step 0."""
    steps = range(max(steps.start, 1), steps.stop)
    if not steps:
        return values[:, :0]
    if counts[steps.start - 1] == counts[steps.stop - 1]:  # one piece of memory
        return values[:, starts[steps.start - 1] : starts[steps.stop - 1]]
    pieces = [values[:, starts[step - 1] : starts[step - 1] + counts[step]] for step in steps]
    return torch.cat(pieces, dim=1)


def step_factors(
    gates: Tensor,
    masters: Tensor,
    cells: Tensor,
    counts: Sequence[int],
    starts: Sequence[int],
    steps: range,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Return the factors of gradients on their way back through `steps`, for all words of these steps:

    - from a state's gradient to its cell's, `(directions, words, hidden_size)`;
    - from a cell's gradient to that of the step before, of the same shape;
    - from a cell's gradient to the gates' (to the output gate's: from the state's), `(.., 4, hidden_size)`;
    - from a cell's gradient to the cumulative sums', `(.., 2, hidden_size)`; the master input gate is 1 - its sum.
    """
    words = slice(starts[steps.start], starts[steps.stop])
    gates, masters = gates[:, words].unflatten(-1, (4, -1)), spread(masters[:, words], chunk_size)
    (closing, (out, doubled)), (upper, lower) = (gates[:, :, :2], gates[:, :, 2:].unbind(2)), masters.unbind(2)
    overlap = (upper * lower)[:, :, None]
    both = torch.empty_like(masters)  # the previous cell, zeros at the first step, and the new values
    previous, candidate = both.unbind(2)
    before = previous_rows(cells, counts, starts, steps)
    if not steps.start:
        previous[:, : counts[0]] = 0.0
    previous[:, previous.shape[1] - before.shape[1] :] = before
    torch.mul(doubled, 2, out=candidate).sub_(1)
    squashed = doubled_sigmoid(cells[:, words]).mul_(2).sub_(1)
    rest = 1 - closing
    # With w = f~ i~: f w + f~ - w = f~ - w (1 - f), and i w + i~ - w = i~ - w (1 - i).
    to_cell, to_input = torch.addcmul(masters, overlap, rest, value=-1).unbind(2)
    to_gates = torch.empty_like(gates)
    through_sigmoid, through_tanh = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
    through_sigmoid.grad_input(both * overlap, closing, grad_input=to_gates[:, :, :2])
    through_sigmoid.grad_input(squashed, out, grad_input=to_gates[:, :, 2])
    through_tanh.grad_input(to_input, candidate, grad_input=to_gates[:, :, 3])
    mixed = torch.addcmul(previous * rest[:, :, 0], candidate, rest[:, :, 1])
    to_sums = torch.empty_like(both)
    torch.addcmul(previous, lower, mixed, value=-1, out=to_sums[:, :, 0])
    torch.mul(upper, mixed, out=to_sums[:, :, 1]).sub_(candidate)
    return through_tanh(out, squashed), to_cell, to_gates, to_sums


def backward_steps(
    buffer: Tensor,
    grad_buffer: Tensor,
    shares: Tensor,
    cells: Tensor,
    gradient: Tensor,
    matmuls: Sequence[StepMatmuls],
    counts: Sequence[int],
    chunk_size: int,
) -> None:
    """Fill `grad_buffer`, which may be `buffer`, from the states' gradient; other arguments as in [`ONLSTMSteps`]."""
    size, rows, first = cells.shape[-1], 4 * cells.shape[-1], counts[0]
    gates, masters = buffer[..., :rows], buffer[..., rows:].unflatten(-1, (2, -1))
    starts = list(itertools.accumulate(counts, initial=0))
    grad_gates = grad_buffer[..., :rows].unflatten(-1, (4, size))
    grad_masters = grad_buffer[..., rows:].unflatten(-1, (2, -1))
    # From the next step.
    grad_cells, grad_states = (cells.new_zeros(len(cells), first, size) for _ in range(2))
    block = BLOCK if on_cpu(cells) else LARGE_BLOCK
    for steps in reversed(blocks_of(counts, block // (len(cells) * size))):
        begin = starts[steps.start]
        through, to_cell, to_gates, to_sums = step_factors(gates, masters, cells, counts, starts, steps, chunk_size)
        for step in reversed(steps):
            words, count = slice(starts[step], starts[step + 1]), counts[step]
            local = slice(starts[step] - begin, starts[step + 1] - begin)
            grad_state = grad_states[:, :count] + gradient[:, words]
            grad_cell = torch.addcmul(grad_cells[:, :count], grad_state, through[:, local])
            step_gates = grad_gates[:, words]
            torch.mul(grad_cell[..., None, :], to_gates[:, local], out=step_gates)
            torch.mul(grad_state, to_gates[:, local, 2], out=step_gates[..., 2, :])
            grad_sums = grad_cell[..., None, :] * to_sums[:, local]
            if chunk_size > 1:
                grad_sums = grad_sums.unflatten(-1, (-1, chunk_size)).sum(dim=-1)
            # A share enters its own sum and all later ones: the total less the sums before it. To the softmax a
            # constant makes no difference, and the total is one.
            grad_shares = grad_sums - grad_sums.cumsum(dim=-1)
            grad_masters[:, words] = torch.ops.aten._softmax_backward_data(
                grad_shares, shares[:, words], -1, grad_shares.dtype
            )
            if step:
                torch.mul(grad_cell, to_cell[:, local], out=grad_cells[:, :count])
                for target, source, matmul in zip(grad_states[:, :count], grad_buffer[:, words], matmuls, strict=True):
                    target.copy_(matmul.backward(source))


def runs_kernels(counts: Sequence[int], *tensors: Tensor) -> bool:
    """Return whether Triton kernels compute the steps: only if all sentences have each."""
    return counts[0] == counts[-1] and runs_triton("ON-LSTM", example, *tensors)


def example(*place: Any) -> list[Tensor]:
    """Return the results and gradients of a small ON-LSTM for `runs_triton`."""
    tensors = [sample(*place, *shape) for shape in ((10, 6), (60, 6), (60,), (60, 12))]
    return with_gradients(ONLSTMSteps.apply((5, 5), 2, *tensors)[:1], tensors)


class ONLSTMSteps(OnceDifferentiable):
    """
    All steps of an ON-LSTM in one or both directions, from zero states.

    Words are packed, longer sentences first, as in `torch.nn.utils.rnn.PackedSequence`; `counts` of the sentences have
    each step. The backward pass first computes the factors of a state's gradient for all words, so that a step back is
    a few products and one matmul; the gradients of inputs and weights are one matmul each over all words.

    For each direction `tensors` are the inputs `(words, input_size)`, their weight `(4 * hidden_size + 2 * n,
    input_size)` and bias, in the order forget, input, output, new values, master forget, master input, and the
    recurrent weight. Without gradients, weight and bias may be `None` and the inputs already mapped to the gates. The
    results are the states `(directions, words, hidden_size)`, and for the backward pass `buffer` `(directions, words,
    4 * hidden_size + 2 * n)` with the gates (the doubled sigmoid of the new values) and the cumulative sums, `shares`
    `(directions, words, 2, n)` with the softmax of the master gates, and `cells`.
    """

    @staticmethod
    def forward(counts: Sequence[int], chunk_size: int, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, input_weights, biases, weights = (tensors[part::4] for part in range(4))
        directions, words, size = len(weights), inputs[0].shape[0], weights[0].shape[1]
        rows = 4 * size  # the master gates follow
        matmuls = [StepMatmuls(weight) for weight in weights]
        buffer = input_gates(inputs, input_weights, biases)
        if runs_kernels(counts, buffer, *weights):
            matrix = torch.stack([matmul.weight.t() for matmul in matmuls])
            states, shares, cells = run_forward(buffer, matrix, len(counts), chunk_size, weights[0].dtype)
            return states, buffer, shares, cells
        shares = buffer.new_empty(directions, words, 2, (buffer.shape[-1] - rows) // 2)
        cells = buffer.new_empty(directions, words, size)
        states = weights[0].new_empty(directions, words, size)
        one = buffer.new_ones(())  # of the right type, so that no step converts it
        start, before = 0, 0
        for step, count in enumerate(counts):
            step_words, previous = slice(start, start + count), slice(before, before + count)
            step_gates = buffer[:, step_words]
            if step:
                for gate, state, matmul in zip(step_gates, states[:, previous], matmuls, strict=True):
                    matmul.add_to(gate, state)
            gates, masters = step_gates[..., :rows], step_gates[..., rows:].unflatten(-1, (2, -1))
            closing = gates[..., : 2 * size].unflatten(-1, (2, size))
            out, doubled = gates[..., 2 * size :].chunk(2, -1)
            doubled.mul_(2)
            gates.sigmoid_()
            torch.softmax(masters, dim=-1, out=shares[:, step_words])
            torch.cumsum(shares[:, step_words], dim=-1, out=masters)
            masters[..., -1] = 1.0
            torch.sub(one, masters[..., 1, :], out=masters[..., 1, :])
            masters = spread(masters, chunk_size)
            overlap = masters[..., :1, :] * masters[..., 1:, :]
            # With w = f~ i~: f w + f~ - w = f~ - w (1 - f), and i w + i~ - w = i~ - w (1 - i).
            to_cell, to_new = torch.addcmul(masters, overlap, torch.sub(one, closing), value=-1).unbind(dim=-2)
            cell = torch.addcmul(to_new.neg(), to_new, doubled, value=2, out=cells[:, step_words])
            if step:
                cell.addcmul_(to_cell, cells[:, previous])
            torch.addcmul(out.neg(), out, doubled_sigmoid(cell), value=2, out=states[:, step_words])
            before, start = start, start + count
        return states, buffer, shares, cells

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.counts, ctx.chunk_size, *tensors = inputs
        ctx.autocast_dtype = autocast_dtype(tensors[0].device)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors[::4], *tensors[1::4], *tensors[3::4])

    @staticmethod
    def gradients(
        ctx: Any, gradient: Tensor, states: Tensor, buffer: Tensor, shares: Tensor, cells: Tensor, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        counts, chunk_size, needed = ctx.counts, ctx.chunk_size, ctx.needs_input_grad[2:]
        inputs, input_weights, weights = (tensors[part * len(states) : (part + 1) * len(states)] for part in range(3))
        with with_autocast(gradient.device, ctx.autocast_dtype):
            input_matmuls = [StepMatmuls(weight) for weight in input_weights]
            matmuls = [StepMatmuls(weight) for weight in weights]
        # A step reads its gates before their gradients replace them. With retain_graph=True the gates must stay.
        retains_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        grad_buffer = torch.empty_like(buffer) if retains_graph else buffer
        all_low = grad_buffer
        if runs_kernels(counts, buffer, *weights):
            matrix = torch.stack([matmul.weight for matmul in matmuls])
            all_low = run_backward(buffer, grad_buffer, shares, cells, gradient, matrix, chunk_size, len(counts))
        else:
            backward_steps(buffer, grad_buffer, shares, cells, gradient, matmuls, counts, chunk_size)
        first, starts = counts[0], list(itertools.accumulate(counts, initial=0))
        previous = previous_rows(states, counts, starts, range(len(counts)))
        results: list[Tensor | None] = [None, None]
        for direction, (input_matmul, matmul) in enumerate(zip(input_matmuls, matmuls, strict=True)):
            need_inputs, need_input_weight, need_bias, need_weight = needed[4 * direction : 4 + 4 * direction]
            words, grad_gates = inputs[direction], grad_buffer[direction]
            low = all_low[direction].to(matmul.low)
            results += [
                input_matmul.backward(low).to(words.dtype) if need_inputs else None,
                input_matmul.weight_gradient(low, words) if need_input_weight else None,
                grad_gates.sum(dim=0).to(input_matmul.dtype) if need_bias else None,
                matmul.weight_gradient(low[first:], previous[direction]) if need_weight else None,
            ]
        return tuple(results)
