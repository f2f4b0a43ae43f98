"""
The steps of an ON-LSTM (Shen et al., 2019), fast, with a backward pass of their own; the plain reference stands with
the model.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .fast_paths import takes_wide, wide_linear, wide_product
from .step_matmuls import StepMatmuls


# Numbers of one kind that a processor's cache holds beside a dozen others.
BLOCK = 2**17


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """What gates and states are computed in: at least float32, since sums of a softmax do not count in less."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cumulative_softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `softmax(scores)` over the last axis and its cumulative sums, of which the last one is 1 exactly.

    Args:
        scores (`torch.Tensor` of shape `(.., n)`): In at least float32.
    """
    shares = torch.softmax(scores, dim=-1)
    return shares, sums_of(shares)


def sums_of(shares: torch.Tensor) -> torch.Tensor:
    """Cumulative sums `(.., n)` of shares that add up to 1; the last one is 1 exactly."""
    sums = shares.cumsum(dim=-1)
    sums[..., -1] = 1.0
    return sums


def spread(units: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Each of `(.., n)` for all channels of its chunk, `(.., n * chunk_size)`."""
    return units if chunk_size == 1 else units.repeat_interleave(chunk_size, dim=-1)


def tanh_(values: torch.Tensor) -> torch.Tensor:
    """In place, as `2 sigmoid(2 x) - 1`: on the CPU that takes half the time, and is exact to the type's own digits."""
    return values.mul_(2).sigmoid_().mul_(2).sub_(1)


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
    """What stands at the step before, for all words of some steps; the first step, which has none, gets zeros."""
    parts = [values[starts[step - 1] : starts[step - 1] + counts[step]] for step in steps if step]
    if steps.start == 0:
        parts.insert(0, torch.zeros_like(values[: counts[0]]))
    return torch.cat(parts)


class Factors(NamedTuple):
    """
    What gradients of states and cells are multiplied by on their way back through some steps, for all their words.

    Attributes:
        through (`torch.Tensor` of shape `(words, directions, hidden_size)`): From a state's gradient to its cell's.
        to_cell (`torch.Tensor` of the same shape): From a cell's gradient to that of the step before.
        to_gates (`torch.Tensor` of shape `(words, directions, 4, hidden_size)`): From a cell's gradient to those of the
            gates; to the output gate from the state's.
        to_sums (`torch.Tensor` of shape `(words, directions, 2, hidden_size)`): From a cell's gradient to those of the
            cumulative sums, of which the master input gate is one less.
        sums (`torch.Tensor` of shape `(words, directions, 2, n)`): These sums.
    """

    through: torch.Tensor
    to_cell: torch.Tensor
    to_gates: torch.Tensor
    to_sums: torch.Tensor
    sums: torch.Tensor


def factors_of(
    kept: torch.Tensor,
    shares: torch.Tensor,
    cells: torch.Tensor,
    counts: Sequence[int],
    starts: Sequence[int],
    steps: range,
    chunk_size: int,
) -> Factors:
    """The factors of some steps, from what [`ONLSTMSteps`] kept of all of them."""
    words = slice(starts[steps.start], starts[steps.stop])
    forget, into, out, candidate = kept[words].split(cells.shape[-1], dim=-1)
    sums = sums_of(shares[words].unflatten(-1, (2, -1)))
    upper, lower = (spread(part, chunk_size) for part in (sums[..., 0, :], 1.0 - sums[..., 1, :]))
    overlap = upper * lower
    before = earlier(cells, counts, starts, steps)
    squashed = tanh_(cells[words].clone())
    closed, shut = 1 - forget, 1 - into
    shown = squashed * out
    # Of w = f~ i~: f w + f~ - w = f~ - w (1 - f), and i w + i~ - w = i~ - w (1 - i).
    to_input = torch.addcmul(lower, overlap, shut, value=-1)
    to_gates = kept.new_empty(*forget.shape[:2], 4, forget.shape[-1])
    torch.mul(before * overlap, forget * closed, out=to_gates[:, :, 0])
    torch.mul(candidate * overlap, into * shut, out=to_gates[:, :, 1])
    torch.addcmul(shown, shown, out, value=-1, out=to_gates[:, :, 2])
    torch.addcmul(to_input, to_input * candidate, candidate, value=-1, out=to_gates[:, :, 3])
    mixed = torch.addcmul(before * closed, candidate, shut)
    to_sums = kept.new_empty(*forget.shape[:2], 2, forget.shape[-1])
    torch.addcmul(before, lower, mixed, value=-1, out=to_sums[:, :, 0])
    torch.mul(upper, mixed, out=to_sums[:, :, 1]).sub_(candidate)
    return Factors(
        torch.addcmul(out, shown, squashed, value=-1),
        torch.addcmul(upper, overlap, closed, value=-1),
        to_gates,
        to_sums,
        sums,
    )


class ONLSTMSteps(torch.autograd.Function):
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
        The states `(words, directions, hidden_size)`.
    """

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], chunk_size: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs, input_weights, biases, weights = (tensors[part::4] for part in range(4))
        gates = [wide_linear(*each) for each in zip(inputs, input_weights, biases, strict=True)]
        directions = len(weights)
        words, size = gates[0].shape[0], weights[0].shape[1]
        rows = 4 * size  # those of the master gates follow
        dtype = gates[0].dtype
        wide = wide_type(dtype)
        of_inputs, matmuls = ([StepMatmuls(weight) for weight in each] for each in (input_weights, weights))
        # Transposed once for all steps: rows of the states against columns that follow each other in memory.
        columns = [matmul.weight.t().contiguous() for matmul in matmuls]
        plain = all(wide == matmul.low == dtype for matmul in matmuls)
        buffer = torch.stack(gates, dim=1).to(wide)  # becomes, step by step, what is kept of the gates
        del gates
        kept, shares = buffer[..., :rows], buffer[..., rows:]
        cells = kept.new_empty(words, directions, size)
        states = weights[0].new_empty(words, directions, size)
        start, before = 0, 0
        for step, count in enumerate(counts):
            own = slice(start, start + count)
            each, scores = kept[own], shares[own]
            for direction, weight in enumerate(columns if step else ()):
                previous, gate = states[before : before + count, direction], buffer[own, direction]
                if plain and not takes_wide(previous, weight):
                    gate.addmm_(previous, weight)
                else:
                    gate += wide_product(previous.to(weight.dtype), weight)
            each[..., : 3 * size].sigmoid_()
            forget, into, out, candidate = each.split(size, dim=-1)
            tanh_(candidate)
            own_shares, sums = cumulative_softmax(scores.unflatten(-1, (2, -1)))
            scores.copy_(own_shares.flatten(-2))
            upper, lower = (spread(part, chunk_size) for part in (sums[..., 0, :], 1.0 - sums[..., 1, :]))
            overlap = upper * lower
            cell = cells[own]
            torch.mul(torch.addcmul(lower, overlap, 1 - into, value=-1), candidate, out=cell)
            if step:
                to_cell = torch.addcmul(upper, overlap, 1 - forget, value=-1)
                cell.addcmul_(to_cell, cells[before : before + count])
            states[own] = tanh_(cell.clone()).mul_(out)
            before, start = start, start + count
        ctx.save_for_backward(buffer, cells, states, *inputs, *input_weights, *weights)
        ctx.matmuls, ctx.counts, ctx.chunk_size = (of_inputs, matmuls), counts, chunk_size
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        buffer, cells, states, *inputs = ctx.saved_tensors
        (of_inputs, matmuls), counts, chunk_size = ctx.matmuls, ctx.counts, ctx.chunk_size
        size, rows, first = cells.shape[-1], 4 * cells.shape[-1], counts[0]
        kept, shares = buffer[..., :rows], buffer[..., rows:]
        starts = list(itertools.accumulate(counts, initial=0))
        gradients = kept.new_empty(*kept.shape[:2], matmuls[0].weight.shape[0])
        grad_gates = gradients[..., :rows].unflatten(-1, (4, size))
        grad_masters = gradients[..., rows:].unflatten(-1, (2, -1))
        grad_cells, grad_states = (kept.new_zeros(first, *cells.shape[1:]) for _ in range(2))  # from the next step
        for steps in reversed(blocks_of(counts, BLOCK // (kept.shape[1] * size))):
            begin = starts[steps.start]
            factors = factors_of(kept, shares, cells, counts, starts, steps, chunk_size)
            for step in reversed(steps):
                own, count = slice(starts[step], starts[step + 1]), counts[step]
                local = slice(starts[step] - begin, starts[step + 1] - begin)
                grad_state = grad_states[:count] + gradient[own]
                grad_cell = torch.addcmul(grad_cells[:count], grad_state, factors.through[local])
                of_gates = grad_gates[own]
                torch.mul(grad_cell[..., None, :], factors.to_gates[local], out=of_gates)
                torch.mul(grad_state, factors.to_gates[local, :, 2], out=of_gates[:, :, 2])
                of_sums = grad_cell[..., None, :] * factors.to_sums[local]
                if chunk_size > 1:
                    of_sums = of_sums.unflatten(-1, (-1, chunk_size)).sum(dim=-1)
                # A share enters its own sum and all later ones.
                running = of_sums.cumsum(dim=-1)
                onward = of_sums - running
                onward += running[..., -1:] - (of_sums * factors.sums[local]).sum(dim=-1, keepdim=True)
                torch.mul(shares[own].unflatten(-1, (2, -1)), onward, out=grad_masters[own])
                if step:
                    torch.mul(grad_cell, factors.to_cell[local], out=grad_cells[:count])
                    for direction, matmul in enumerate(matmuls):
                        grad_states[:count, direction] = matmul.backward(gradients[own, direction])
        previous = earlier(states, counts, starts, range(len(counts)))
        found: list[torch.Tensor | None] = []
        for direction, (of_input, of_state) in enumerate(zip(of_inputs, matmuls, strict=True)):
            wanted = ctx.needs_input_grad[2 + 4 * direction : 6 + 4 * direction]
            each, own_inputs = gradients[:, direction], inputs[direction]
            low = each.to(of_state.low)
            across = low.t()
            if takes_wide(low, own_inputs):
                across = across.contiguous()  # once for both weights
            found += [
                of_input.backward(low).to(own_inputs.dtype) if wanted[0] else None,
                wide_product(across, own_inputs.to(low.dtype)).to(of_input.dtype) if wanted[1] else None,
                each.sum(dim=0).to(of_input.dtype) if wanted[2] else None,
                wide_product(across, previous[:, direction].to(low.dtype)).to(of_state.dtype) if wanted[3] else None,
            ]
        return None, None, *found
