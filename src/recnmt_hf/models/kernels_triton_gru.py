"""A GRU cell as one Triton kernel in either pass. The plain reference is torch's `GRUCell`."""

from typing import Any

import torch
from torch import Tensor

from .kernels_shared import CustomGradient, final_gradients
from .kernels_triton import block, launch, warps


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


if triton is not None:

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
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, BLOCK)
        inside = place < D
        mapped = recurrent + row * recurrent_stride + place
        reset = tl.load(mapped, mask=inside, other=0.0).to(tl.float32)
        update = tl.load(mapped + D, mask=inside, other=0.0).to(tl.float32)
        inner = tl.load(mapped + 2 * D, mask=inside, other=0.0).to(tl.float32)
        if recurrent_bias is not None:
            reset += tl.load(recurrent_bias + place, mask=inside, other=0.0).to(tl.float32)
            update += tl.load(recurrent_bias + D + place, mask=inside, other=0.0).to(tl.float32)
            inner += tl.load(recurrent_bias + 2 * D + place, mask=inside, other=0.0).to(tl.float32)
        new = tl.zeros_like(inner)
        if gates is not None:
            reset += tl.load(gates + row * 3 * D + place, mask=inside, other=0.0).to(tl.float32)
            update += tl.load(gates + row * 3 * D + D + place, mask=inside, other=0.0).to(tl.float32)
            new += tl.load(gates + row * 3 * D + 2 * D + place, mask=inside, other=0.0).to(tl.float32)
        if reads is not None:
            reset += tl.load(reads + row * reads_stride + place, mask=inside, other=0.0).to(tl.float32)
            update += tl.load(reads + row * reads_stride + D + place, mask=inside, other=0.0).to(tl.float32)
            new += tl.load(reads + row * reads_stride + 2 * D + place, mask=inside, other=0.0).to(tl.float32)
        if added is not None:
            reset += tl.load(added + row * 3 * D + place, mask=inside, other=0.0).to(tl.float32)
            update += tl.load(added + row * 3 * D + D + place, mask=inside, other=0.0).to(tl.float32)
            new += tl.load(added + row * 3 * D + 2 * D + place, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            reset += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
            update += tl.load(bias + D + place, mask=inside, other=0.0).to(tl.float32)
            new += tl.load(bias + 2 * D + place, mask=inside, other=0.0).to(tl.float32)
        reset, update = tl.sigmoid(reset), tl.sigmoid(update)
        new = 2 * tl.sigmoid(2 * (new + reset * inner)) - 1
        before = tl.load(state + row * D + place, mask=inside, other=0.0).to(tl.float32)
        result = new + update * (before - new)
        if real is not None:
            is_real = tl.load(real + row)
            result = tl.where(is_real, result, tl.load(previous + row * D + place, mask=inside, other=0.0))
        tl.store(output + row * D + place, result, mask=inside)
        if low_output is not None:
            tl.store(low_output + row * D + place, result, mask=inside)
        if kept is not None:
            tl.store(kept + row * 4 * D + place, reset, mask=inside)
            tl.store(kept + row * 4 * D + D + place, update, mask=inside)
            tl.store(kept + row * 4 * D + 2 * D + place, new, mask=inside)
            tl.store(kept + row * 4 * D + 3 * D + place, inner, mask=inside)

    @triton.jit
    def gru_backward(
        gradient, mapped, given, real, state, kept, grad_gates, grad_recurrent, carried, skipped, added_skip,
        grad_gates_stride, grad_recurrent_stride, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """
        The cell back, from the sum of `gradient`, `mapped` and `given`: the gradients of both parts of the gates, and of
        the state outside of the recurrent part, `carried`. Where the word is not `real`, the gradient passes to
        `skipped`, which a cell before this adds as `added_skip`.
        """
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, BLOCK)
        inside = place < D
        total = tl.load(gradient + row * D + place, mask=inside, other=0.0).to(tl.float32)
        if mapped is not None:
            total += tl.load(mapped + row * D + place, mask=inside, other=0.0).to(tl.float32)
        if given is not None:
            total += tl.load(given + row * D + place, mask=inside, other=0.0).to(tl.float32)
        rest = tl.zeros_like(total)
        if real is not None:
            is_real = tl.load(real + row)
            rest = tl.where(is_real, 0.0, total)
            total = tl.where(is_real, total, 0.0)
        reset = tl.load(kept + row * 4 * D + place, mask=inside, other=0.0).to(tl.float32)
        update = tl.load(kept + row * 4 * D + D + place, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(kept + row * 4 * D + 2 * D + place, mask=inside, other=0.0).to(tl.float32)
        inner = tl.load(kept + row * 4 * D + 3 * D + place, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(state + row * D + place, mask=inside, other=0.0).to(tl.float32)
        through_new = total * (1 - update) * (1 - new * new)
        through_reset = through_new * inner * reset * (1 - reset)
        through_update = total * (before - new) * update * (1 - update)
        into = grad_gates + row * grad_gates_stride + place
        tl.store(into, through_reset, mask=inside)
        tl.store(into + D, through_update, mask=inside)
        tl.store(into + 2 * D, through_new, mask=inside)
        into = grad_recurrent + row * grad_recurrent_stride + place
        tl.store(into, through_reset, mask=inside)
        tl.store(into + D, through_update, mask=inside)
        tl.store(into + 2 * D, through_new * reset, mask=inside)
        total = total * update
        if skipped is not None:
            tl.store(skipped + row * D + place, rest, mask=inside)
        else:
            total += rest
        if added_skip is not None:
            total += tl.load(added_skip + row * D + place, mask=inside, other=0.0)
        tl.store(carried + row * D + place, total, mask=inside)


class GRUStep(CustomGradient):
    """
    A GRU's next state from the input's and the state's part of its gates, with their biases, `(.., 3 * d)`, and the
    state `(.., d)`, in the state's type.
    """

    @staticmethod
    def forward(gates: Tensor, recurrent: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        width = state.shape[-1]
        kept = state.new_empty(*state.shape[:-1], 4 * width, dtype=torch.float32)
        output = torch.empty_like(state)
        tensors = (gates, None, None, None, recurrent, None, state, None, None, output, None, kept, 0, 3 * width)
        launch_rows(gru_forward, state, *tensors)
        return output, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.types = inputs[0].dtype, inputs[1].dtype
        ctx.save_for_backward(inputs[2], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, unused: Any) -> Any:
        return final_gradients(lambda *tensors: GRUStep.gradients(*ctx.types, *tensors), gradient, *ctx.saved_tensors)

    @staticmethod
    def gradients(of_gates: torch.dtype, of_recurrent: torch.dtype, gradient: Tensor, *saved: Tensor) -> Any:
        state, kept = saved
        width = state.shape[-1]
        shape = (*state.shape[:-1], 3 * width)
        grad_gates, grad_recurrent = (
            torch.empty(shape, dtype=of, device=state.device) for of in (of_gates, of_recurrent)
        )
        carried = torch.empty_like(state)
        tensors = (
            gradient.contiguous(),
            None,
            None,
            None,
            state,
            kept,
            grad_gates,
            grad_recurrent,
            carried,
            None,
            None,
        )
        launch_rows(gru_backward, state, *tensors, 3 * width, 3 * width)
        return grad_gates, grad_recurrent, carried


def launch_rows(kernel: Any, state: Tensor, *arguments: Any) -> None:
    """Launch a kernel of a cell with one program for each row of the states `(.., d)`."""
    width = state.shape[-1]
    constants = {"D": width, "BLOCK": block(width), "num_warps": warps(block(width))}
    launch(kernel, (state.shape[:-1].numel(),), *arguments, **constants)
