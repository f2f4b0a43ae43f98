"""
The steps of an ON-LSTM (Shen et al., 2019), fast, with a backward pass of their own; the plain reference stands with
the model.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .step_matmuls import StepMatmuls


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


class ONLSTMSteps(torch.autograd.Function):
    """
    All steps of an ON-LSTM in one or both directions, from zero states.

    Words are packed: those of the first step for all sentences, then those of the second step for the sentences that
    have one, and so on, longer sentences first, as in `torch.nn.utils.rnn.PackedSequence`. The backward pass prepares
    for all words at once what multiplies the gradient of a state, so that a step back is a few products and one
    matmul; the gradient of the recurrent weights is one matmul over all words. It cannot be differentiated twice; with
    `RECNMT_FAST_PATHS=0` the steps can.

    Args:
        counts (sequence of `int`): How many sentences have each step; it never rises.
        chunk_size (`int`): Channels of a master unit; `n = hidden_size // chunk_size`.
        *tensors (`torch.Tensor`): For each direction the input's part of the gates, `(words, 4 * hidden_size + 2 * n)`,
            in the order forget, input, output, new values, master forget, master input; then for each direction the
            recurrent weight, `(4 * hidden_size + 2 * n, hidden_size)`.

    Returns:
        The states `(words, directions, hidden_size)`.
    """

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], chunk_size: int, *tensors: torch.Tensor) -> torch.Tensor:
        directions = len(tensors) // 2
        gates, weights = tensors[:directions], tensors[directions:]
        words, size = gates[0].shape[0], weights[0].shape[1]
        rows = 4 * size  # those of the master gates follow
        dtype = gates[0].dtype
        wide = wide_type(dtype)
        matmuls = [StepMatmuls(weight) for weight in weights]
        # Transposed once for all steps: rows of the states against columns that follow each other in memory.
        columns = [matmul.weight.t().contiguous() for matmul in matmuls]
        plain = all(wide == matmul.low == dtype for matmul in matmuls)
        kept = gates[0].new_empty(words, directions, rows, dtype=wide)
        shares = kept.new_empty(words, directions, gates[0].shape[1] - rows)
        cells = kept.new_empty(words, directions, size)
        states = weights[0].new_empty(words, directions, size)
        start, before = 0, 0
        for step, count in enumerate(counts):
            own = slice(start, start + count)
            each, scores = kept[own], shares[own]
            for direction, weight in enumerate(columns):
                previous = states[before : before + count, direction]
                for found, part in ((each[:, direction], slice(rows)), (scores[:, direction], slice(rows, None))):
                    given = gates[direction][own, part]
                    if step and plain:
                        torch.addmm(given, previous, weight[:, part], out=found)
                    else:
                        found.copy_(given)
                        if step:
                            found += torch.mm(previous.to(weight.dtype), weight[:, part])
            each[..., : 3 * size].sigmoid_()
            forget, into, out, candidate = each.split(size, dim=-1)
            tanh_(candidate)
            own_shares, sums = cumulative_softmax(scores.unflatten(-1, (2, -1)))
            scores.copy_(own_shares.flatten(-2))
            upper, lower = (spread(part, chunk_size) for part in (sums[..., 0, :], 1.0 - sums[..., 1, :]))
            overlap = upper * lower
            cell = cells[own]
            torch.mul(torch.addcmul(lower - overlap, overlap, into), candidate, out=cell)
            if step:
                cell.addcmul_(torch.addcmul(upper - overlap, overlap, forget), cells[before : before + count])
            states[own] = tanh_(cell.clone()).mul_(out)
            before, start = start, start + count
        ctx.save_for_backward(kept, shares, cells, states, *weights)
        ctx.matmuls, ctx.counts, ctx.chunk_size, ctx.dtype = matmuls, counts, chunk_size, dtype
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept, shares, cells, states, *weights = ctx.saved_tensors
        matmuls, counts, chunk_size = ctx.matmuls, ctx.counts, ctx.chunk_size
        size, rows = cells.shape[-1], kept.shape[-1]
        starts = list(itertools.accumulate(counts, initial=0))
        # Where the step before a word stands: c_{t-1} and h_{t-1} of all words but the first ones, which have none.
        earlier = [slice(start, start + count) for start, count in zip(starts, counts[1:], strict=False)]
        first = counts[0]

        forget, into, out, candidate = kept.split(size, dim=-1)
        shares = shares.unflatten(-1, (2, -1))
        sums = sums_of(shares)
        upper, lower = (spread(part, chunk_size) for part in (sums[..., 0, :], 1.0 - sums[..., 1, :]))
        overlap = upper * lower
        before = torch.cat([torch.zeros_like(cells[:first]), *(cells[place] for place in earlier)])
        squashed = tanh_(cells.clone())

        # What the gradient of c_t is multiplied by to give those of c_{t-1} and of the gates.
        to_cell = torch.addcmul(upper - overlap, overlap, forget)
        closed, shut = 1 - forget, 1 - into
        to_gates = torch.stack(
            [
                before * overlap * forget * closed,
                candidate * overlap * into * shut,
                squashed * out * (1 - out),  # of h_t, in place of c_t
                torch.addcmul(lower - overlap, overlap, into) * (1 - candidate * candidate),
            ],
            dim=-2,
        )
        # Of the cumulative sums; that of i~ = 1 - sum has the other sign.
        to_sums = torch.stack(
            [
                before * (1 - lower * closed) - candidate * lower * shut,
                before * upper * closed - candidate * (1 - upper * shut),
            ],
            dim=-2,
        )
        through = out * (1 - squashed * squashed)  # of h_t, to c_t

        gradients = kept.new_empty(*kept.shape[:2], matmuls[0].weight.shape[0])
        grad_gates = gradients[..., :rows].unflatten(-1, (4, size))
        grad_masters = gradients[..., rows:].unflatten(-1, (2, -1))
        grad_cells, grad_states = (kept.new_zeros(first, *cells.shape[1:]) for _ in range(2))  # from the next step
        for step in range(len(counts) - 1, -1, -1):
            own, count = slice(starts[step], starts[step + 1]), counts[step]
            grad_state = grad_states[:count] + gradient[own]
            grad_cell = torch.addcmul(grad_cells[:count], grad_state, through[own])
            of_gates = grad_gates[own]
            torch.mul(grad_cell[..., None, :], to_gates[own], out=of_gates)
            torch.mul(grad_state, to_gates[own, :, 2], out=of_gates[:, :, 2])
            of_sums = grad_cell[..., None, :] * to_sums[own]
            if chunk_size > 1:
                of_sums = of_sums.unflatten(-1, (-1, chunk_size)).sum(dim=-1)
            # A share enters its own sum and all later ones.
            running = of_sums.cumsum(dim=-1)
            onward = of_sums - running
            onward += running[..., -1:] - (of_sums * sums[own]).sum(dim=-1, keepdim=True)
            torch.mul(shares[own], onward, out=grad_masters[own])
            if step:
                torch.mul(grad_cell, to_cell[own], out=grad_cells[:count])
                for direction, matmul in enumerate(matmuls):
                    grad_states[:count, direction] = matmul.backward(gradients[own, direction])
        grad_weights: list[torch.Tensor | None] = [None] * len(matmuls)
        if earlier:
            previous = torch.cat([states[place] for place in earlier])
            for direction, matmul in enumerate(matmuls):
                if ctx.needs_input_grad[2 + len(matmuls) + direction]:
                    of_words = gradients[None, first:, direction]
                    grad_weights[direction] = matmul.weight_gradient(of_words, previous[None, :, direction])
        else:  # a single step reads no earlier state
            grad_weights = [torch.zeros_like(weight) for weight in weights]
        return None, None, *(gradients[:, direction].to(ctx.dtype) for direction in range(len(matmuls))), *grad_weights
