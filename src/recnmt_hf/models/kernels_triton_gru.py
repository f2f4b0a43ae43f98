"""A GRU cell as one Triton kernel in either pass. The plain reference is torch's `GRUCell`."""

from typing import Any

import torch
from torch import Tensor

from .kernels_shared import OnceDifferentiable
from .kernels_triton import launch_rows, runs_triton, sample, with_gradients


try:
    import triton
    import triton.language as tl

    from .kernels_triton import load_gates, load_row, store_gates, tanh
except ImportError:
    triton = None


if triton is not None:

    @triton.jit
    def plus_gates(first, second, third, pointer, offset, place, inside, D):
        """Add the three rows at an offset of a pointer, if there is one."""
        if pointer is not None:
            a, b, c = load_gates(pointer + offset, place, inside, D)
            first, second, third = first + a, second + b, third + c
        return first, second, third

    @triton.jit
    def gru_forward(
        gates, reads, added, bias, recurrent, recurrent_bias, state, real, previous, output, low_output, kept,
        reads_stride, recurrent_stride, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """
        A GRU cell for one row: the input's part of its gates is the sum of what is given of `gates`, `reads`, `added`
        `(rows, 3 * d)` and `bias`. Where the word is not `real`, the output is `previous`. `kept` `(rows, 4 * d)` are
        reset and update gate, new values, and the recurrent part of these.
        """
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        zeros = tl.zeros([BLOCK], tl.float32)
        reset, update, inner = plus_gates(zeros, zeros, zeros, recurrent, row * recurrent_stride, place, inside, D)
        reset, update, inner = plus_gates(reset, update, inner, recurrent_bias, 0, place, inside, D)
        reset, update, new = plus_gates(reset, update, zeros, gates, row * 3 * D, place, inside, D)
        reset, update, new = plus_gates(reset, update, new, reads, row * reads_stride, place, inside, D)
        reset, update, new = plus_gates(reset, update, new, added, row * 3 * D, place, inside, D)
        reset, update, new = plus_gates(reset, update, new, bias, 0, place, inside, D)
        reset, update = tl.sigmoid(reset), tl.sigmoid(update)
        new = tanh(new + reset * inner)
        result = new + update * (load_row(state + row * D, place, inside) - new)
        if real is not None:
            result = tl.where(tl.load(real + row), result, load_row(previous + row * D, place, inside))
        tl.store(output + row * D + place, result, mask=inside)
        if low_output is not None:
            tl.store(low_output + row * D + place, result, mask=inside)
        if kept is not None:
            store_gates(kept + row * 4 * D, place, inside, D, reset, update, new)
            tl.store(kept + row * 4 * D + 3 * D + place, inner, mask=inside)

    @triton.jit
    def gru_backward(
        gradient, mapped, given, real, state, kept, grad_gates, grad_recurrent, carried, skipped, added_skip,
        grad_gates_stride, grad_recurrent_stride, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """
        The cell back, from the sum of `gradient`, `mapped` and `given`: the gradients of both parts of the gates, and
        of the state outside of the recurrent part, `carried`. Where the word is not `real`, the gradient passes to
        `skipped`, which a cell before this adds as `added_skip`.
        """
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        total = load_row(gradient + row * D, place, inside)
        if mapped is not None:
            total += load_row(mapped + row * D, place, inside)
        if given is not None:
            total += load_row(given + row * D, place, inside)
        rest = tl.zeros_like(total)
        if real is not None:
            is_real = tl.load(real + row)
            rest = tl.where(is_real, 0.0, total)
            total = tl.where(is_real, total, 0.0)
        reset, update, new = load_gates(kept + row * 4 * D, place, inside, D)
        inner = load_row(kept + row * 4 * D + 3 * D, place, inside)
        through_new = total * (1 - update) * (1 - new * new)
        through_reset = through_new * inner * reset * (1 - reset)
        through_update = total * (load_row(state + row * D, place, inside) - new) * update * (1 - update)
        into = grad_gates + row * grad_gates_stride
        store_gates(into, place, inside, D, through_reset, through_update, through_new)
        into = grad_recurrent + row * grad_recurrent_stride
        store_gates(into, place, inside, D, through_reset, through_update, through_new * reset)
        total = total * update
        if skipped is not None:
            tl.store(skipped + row * D + place, rest, mask=inside)
        else:
            total += rest
        if added_skip is not None:
            total += load_row(added_skip + row * D, place, inside)
        tl.store(carried + row * D + place, total, mask=inside)


class GRUStep(OnceDifferentiable):
    """
    A GRU's next state from the input's and the state's part of its gates, with their biases, `(.., 3 * d)`, and the
    state `(.., d)`, all contiguous.
    """

    @staticmethod
    def forward(gates: Tensor, recurrent: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        width = state.shape[-1]
        kept = state.new_empty(*state.shape[:-1], 4 * width, dtype=torch.float32)
        output = torch.empty_like(state)
        inputs = (gates, None, None, None, recurrent, None, state, None, None)
        launch_rows(gru_forward, state, *inputs, output, None, kept, 0, 3 * width)
        return output, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.types = inputs[0].dtype, inputs[1].dtype
        ctx.save_for_backward(inputs[2], output[1])

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor, state: Tensor, kept: Tensor) -> Any:
        width = state.shape[-1]
        grad_gates, grad_recurrent = (state.new_empty(*state.shape[:-1], 3 * width, dtype=dtype) for dtype in ctx.types)
        carried = torch.empty_like(state)
        outputs = (grad_gates, grad_recurrent, carried, None, None)
        inputs = (gradient.contiguous(), None, None, None, state, kept)
        launch_rows(gru_backward, state, *inputs, *outputs, 3 * width, 3 * width)
        return grad_gates, grad_recurrent, carried


def gru_step(gates: Tensor, recurrent: Tensor, state: Tensor) -> Tensor:
    """Compute the next state of [`GRUStep`], by torch's operators where the kernels do not run."""
    if runs_triton("GRU cells", example, gates, recurrent, state):
        return GRUStep.apply(gates.contiguous(), recurrent.contiguous(), state.contiguous())[0]
    width = state.shape[-1]
    reset, update = torch.sigmoid(gates[..., : 2 * width] + recurrent[..., : 2 * width]).chunk(2, dim=-1)
    new = torch.tanh(gates[..., 2 * width :] + reset * recurrent[..., 2 * width :])
    return new + update * (state - new)


def example(*place: Any) -> list[Tensor]:
    inputs = [sample(*place, 5, width) for width in (60, 60, 20)]
    return with_gradients([gru_step(*inputs)], inputs)
