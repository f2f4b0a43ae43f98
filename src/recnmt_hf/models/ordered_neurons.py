"""
The steps of an ON-LSTM (Shen et al., 2019), fast, with a backward pass of their own; the plain reference stands with
the model.
"""

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
    sums = shares.cumsum(dim=-1)
    sums[..., -1] = 1.0
    return shares, sums


def spread(units: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Each of `(.., n)` for all channels of its chunk, `(.., n * chunk_size)`."""
    return units if chunk_size == 1 else units.repeat_interleave(chunk_size, dim=-1)


class ONLSTMSteps(torch.autograd.Function):
    """
    All steps of an ON-LSTM in one or both directions, from zero states.

    The backward pass prepares for all steps at once what multiplies the gradients of a state, so that a step back is a
    few products and one matmul; the gradient of the recurrent weights is one matmul over all steps. It cannot be
    differentiated twice; with `RECNMT_FAST_PATHS=0` the steps can.

    Args:
        gates (`torch.Tensor` of shape `(length, directions, batch_size, 4 * hidden_size + 2 * n)`): The input's part of
            all gates, in the order forget, input, output, cell, master forget, master input.
        chunk_size (`int`): Channels of a master unit; `n = hidden_size // chunk_size`.
        *weights (`torch.Tensor` of shape `(4 * hidden_size + 2 * n, hidden_size)`): The recurrent ones, a direction
            each.

    Returns:
        The states `(length, directions, batch_size, hidden_size)`.
    """

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, chunk_size: int, *weights: torch.Tensor) -> torch.Tensor:
        length, directions, batch_size, _ = gates.shape
        size = weights[0].shape[1]
        wide = wide_type(gates.dtype)
        matmuls = [StepMatmuls(weight) for weight in weights]
        # Transposed once for all steps: rows of the states against columns that follow each other in memory.
        columns = [matmul.weight.t().contiguous() for matmul in matmuls]
        kept = gates.new_empty(gates.shape, dtype=wide)
        cells = kept.new_empty(length, directions, batch_size, size)
        states = weights[0].new_empty(length, directions, batch_size, size)
        cell = kept.new_zeros(directions, batch_size, size)
        for t, each in enumerate(kept.unbind(0)):
            for direction, matmul in enumerate(matmuls):
                if t and wide == matmul.low == gates.dtype:
                    before = states[t - 1, direction]
                    torch.addmm(gates[t, direction], before, columns[direction], out=each[direction])
                    continue
                each[direction] = gates[t, direction]
                if t:
                    each[direction] += torch.mm(states[t - 1, direction].to(matmul.low), columns[direction])
            of_gates, candidate, masters = each[..., : 3 * size], each[..., 3 * size : 4 * size], each[..., 4 * size :]
            forget, into, out = of_gates.sigmoid_().split(size, dim=-1)
            candidate.tanh_()
            shares, sums = cumulative_softmax(masters.unflatten(-1, (2, -1)))
            masters.copy_(shares.flatten(-2))
            upper, lower = (spread(part, chunk_size) for part in (sums[..., 0, :], 1.0 - sums[..., 1, :]))
            overlap = upper * lower
            cell = torch.addcmul(upper - overlap, overlap, forget).mul_(cell)
            cell.addcmul_(torch.addcmul(lower - overlap, overlap, into), candidate)
            cells[t] = cell
            states[t] = out * torch.tanh(cell)
        ctx.save_for_backward(kept, cells, states, *weights)
        ctx.chunk_size, ctx.matmuls, ctx.dtype = chunk_size, matmuls, gates.dtype
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept, cells, states, *_ = ctx.saved_tensors
        matmuls, chunk_size = ctx.matmuls, ctx.chunk_size
        length, size = len(cells), cells.shape[-1]
        forget, into, out, candidate = kept[..., : 4 * size].split(size, dim=-1)
        shares = kept[..., 4 * size :].unflatten(-1, (2, -1))
        sums = shares.cumsum(dim=-1)
        sums[..., -1] = 1.0
        upper, lower = (spread(part, chunk_size) for part in (sums[..., 0, :], 1.0 - sums[..., 1, :]))
        overlap = upper * lower
        before = torch.cat([torch.zeros_like(cells[:1]), cells[:-1]])
        squashed = torch.tanh(cells)

        # What the gradient of c_t is multiplied by to give those of c_{t-1} and of the parts of the gates.
        to_cell = torch.addcmul(upper - overlap, overlap, forget)
        to_parts = torch.stack(
            [
                before * overlap * forget * (1 - forget),
                candidate * overlap * into * (1 - into),
                torch.addcmul(lower - overlap, overlap, into) * (1 - candidate * candidate),
            ],
            dim=-2,
        )
        # Of the cumulative sums; that of i~ = 1 - sum has the other sign.
        closed, shut = 1 - forget, 1 - into
        to_masters = torch.stack(
            [
                before * (1 - lower * closed) - candidate * lower * shut,
                before * upper * closed - candidate * (1 - upper * shut),
            ],
            dim=-2,
        )
        # Of h_t: to c_t and to the output gate.
        through, to_out = out * (1 - squashed * squashed), squashed * out * (1 - out)

        grad_gates = torch.empty_like(kept)
        grad_cell = torch.zeros_like(cells[0])
        grad_state = gradient[-1].to(kept.dtype)
        for t in range(length - 1, -1, -1):
            each = grad_gates[t]
            grad_cell = torch.addcmul(grad_cell, grad_state, through[t])
            parts = grad_cell[..., None, :] * to_parts[t]
            each[..., : 2 * size] = parts[..., :2, :].flatten(-2)
            torch.mul(grad_state, to_out[t], out=each[..., 2 * size : 3 * size])
            each[..., 3 * size : 4 * size] = parts[..., 2, :]
            of_sums = grad_cell[..., None, :] * to_masters[t]
            if chunk_size > 1:
                of_sums = of_sums.unflatten(-1, (-1, chunk_size)).sum(dim=-1)
            running = of_sums.cumsum(dim=-1)
            onward = running[..., -1:] - running + of_sums  # a share enters its own sum and all later ones
            onward -= (of_sums * sums[t]).sum(dim=-1, keepdim=True)
            each[..., 4 * size :] = (shares[t] * onward).flatten(-2)
            if t:
                grad_cell = grad_cell * to_cell[t]
                grad_state = gradient[t - 1].to(kept.dtype)
                grad_state = grad_state + torch.stack(
                    [matmul.backward(each[direction]) for direction, matmul in enumerate(matmuls)]
                )
        grad_weights: list[torch.Tensor | None] = [None] * len(matmuls)
        for direction, matmul in enumerate(matmuls):
            if ctx.needs_input_grad[2 + direction]:
                previous, of_steps = states[:-1, direction], grad_gates[1:, direction]
                grad_weights[direction] = matmul.weight_gradient(of_steps, previous)
        return grad_gates.to(ctx.dtype), None, *grad_weights
