"""
The steps of an ON-LSTM (Shen et al., 2019) on GPUs: a matmul of both directions and one Triton kernel for each step, in
either pass. The plain reference is [`~.modeling_onlstm_transformer.on_lstm_reference`].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels_triton import block, launch, runs_triton, warps


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


if triton is not None:

    @triton.jit
    def step_forward(
        buffer, recurrent, shares, cells, states, low_states, first, words, rows,
        SIZE: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
        IS_FIRST: tl.constexpr, HAS_LOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """
        A step of one sentence and direction, from the inputs' part of its gates in `buffer` and the states' part,
        `recurrent`: the gates and cumulative sums replace the former. A block has a row for each master gate's unit, a
        column for each channel of its chunk.
        """
        row, side = tl.program_id(0), tl.program_id(1)
        word = (side * words + first + row).to(tl.int64)
        unit, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
        is_unit = unit < N
        place = unit[:, None] * CHUNK + column[None, :]
        is_place = is_unit[:, None] & (column < CHUNK)[None, :]
        gates = buffer + word * (4 * SIZE + 2 * N)
        other = recurrent + (side * rows + row).to(tl.int64) * (4 * SIZE + 2 * N)

        close = tl.load(gates + place, mask=is_place, other=0.0)
        write = tl.load(gates + SIZE + place, mask=is_place, other=0.0)
        out = tl.load(gates + 2 * SIZE + place, mask=is_place, other=0.0)
        new = tl.load(gates + 3 * SIZE + place, mask=is_place, other=0.0)
        upper = tl.load(gates + 4 * SIZE + unit, mask=is_unit, other=float("-inf"))
        lower = tl.load(gates + 4 * SIZE + N + unit, mask=is_unit, other=float("-inf"))
        if not IS_FIRST:
            close += tl.load(other + place, mask=is_place, other=0.0).to(tl.float32)
            write += tl.load(other + SIZE + place, mask=is_place, other=0.0).to(tl.float32)
            out += tl.load(other + 2 * SIZE + place, mask=is_place, other=0.0).to(tl.float32)
            new += tl.load(other + 3 * SIZE + place, mask=is_place, other=0.0).to(tl.float32)
            upper += tl.load(other + 4 * SIZE + unit, mask=is_unit, other=0.0).to(tl.float32)
            lower += tl.load(other + 4 * SIZE + N + unit, mask=is_unit, other=0.0).to(tl.float32)
        close, write, out, new = tl.sigmoid(close), tl.sigmoid(write), tl.sigmoid(out), tl.sigmoid(2 * new)
        upper, lower = tl.exp(upper - tl.max(upper, 0)), tl.exp(lower - tl.max(lower, 0))
        upper, lower = upper / tl.sum(upper, 0), lower / tl.sum(lower, 0)
        tl.store(shares + word * 2 * N + unit, upper, mask=is_unit)
        tl.store(shares + word * 2 * N + N + unit, lower, mask=is_unit)
        is_last = unit == N - 1
        upper = tl.where(is_last, 1.0, tl.cumsum(upper, 0))
        lower = 1 - tl.where(is_last, 1.0, tl.cumsum(lower, 0))
        tl.debug_barrier()  # the sums replace what other threads have read
        tl.store(gates + place, close, mask=is_place)
        tl.store(gates + SIZE + place, write, mask=is_place)
        tl.store(gates + 2 * SIZE + place, out, mask=is_place)
        tl.store(gates + 3 * SIZE + place, new, mask=is_place)
        tl.store(gates + 4 * SIZE + unit, upper, mask=is_unit)
        tl.store(gates + 4 * SIZE + N + unit, lower, mask=is_unit)

        overlap = (upper * lower)[:, None]
        cell = (lower[:, None] - overlap * (1 - write)) * (2 * new - 1)
        if not IS_FIRST:
            before = tl.load(cells + (word - rows) * SIZE + place, mask=is_place, other=0.0)
            cell += (upper[:, None] - overlap * (1 - close)) * before
        tl.store(cells + word * SIZE + place, cell, mask=is_place)
        state = out * (2 * tl.sigmoid(2 * cell) - 1)
        tl.store(states + word * SIZE + place, state, mask=is_place)
        if HAS_LOW:
            tl.store(low_states + (side * rows + row).to(tl.int64) * SIZE + place, state, mask=is_place)

    @triton.jit
    def step_backward(
        buffer, grad_buffer, low_gates, shares, cells, gradient, from_next, grad_cells, first, words, rows,
        SIZE: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
        IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, HAS_LOW: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """
        The step back: the gradients of the gates before their activations, into `grad_buffer` (which may be `buffer`)
        and in the type of matmuls into `low_gates`, from `gradient` of the states and `from_next`; `grad_cells` has the
        cell's gradient, which becomes that of the step before.
        """
        row, side = tl.program_id(0), tl.program_id(1)
        word = (side * words + first + row).to(tl.int64)
        local = (side * rows + row).to(tl.int64)
        unit, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
        is_unit = unit < N
        place = unit[:, None] * CHUNK + column[None, :]
        is_place = is_unit[:, None] & (column < CHUNK)[None, :]
        gates = buffer + word * (4 * SIZE + 2 * N)

        close = tl.load(gates + place, mask=is_place, other=0.0)
        write = tl.load(gates + SIZE + place, mask=is_place, other=0.0)
        out = tl.load(gates + 2 * SIZE + place, mask=is_place, other=0.0)
        new = 2 * tl.load(gates + 3 * SIZE + place, mask=is_place, other=0.0) - 1
        upper = tl.load(gates + 4 * SIZE + unit, mask=is_unit, other=0.0)[:, None]
        lower = tl.load(gates + 4 * SIZE + N + unit, mask=is_unit, other=0.0)[:, None]
        cell = 2 * tl.sigmoid(2 * tl.load(cells + word * SIZE + place, mask=is_place, other=0.0)) - 1
        grad_state = tl.load(gradient + word * SIZE + place, mask=is_place, other=0.0).to(tl.float32)
        grad_cell = tl.zeros_like(grad_state)
        if not IS_LAST:
            grad_state += tl.load(from_next + local * SIZE + place, mask=is_place, other=0.0).to(tl.float32)
            grad_cell = tl.load(grad_cells + local * SIZE + place, mask=is_place, other=0.0)
        before = tl.zeros_like(grad_state)
        if not IS_FIRST:
            before = tl.load(cells + (word - rows) * SIZE + place, mask=is_place, other=0.0)
        share_upper = tl.load(shares + word * 2 * N + unit, mask=is_unit, other=0.0)
        share_lower = tl.load(shares + word * 2 * N + N + unit, mask=is_unit, other=0.0)

        grad_cell += grad_state * out * (1 - cell * cell)
        overlap = upper * lower
        to_new = lower - overlap * (1 - write)
        # c' = (f w + f~ - w) c + (i w + i~ - w) c^ with w = f~ i~, and i~ = 1 - its sum
        mixed = before * (1 - close) + new * (1 - write)
        grad_upper = tl.sum(grad_cell * (before - lower * mixed), 1)
        grad_lower = -tl.sum(grad_cell * (new - upper * mixed), 1)
        # A share enters its own sum and all later ones: the total less the sums before it. To the softmax a constant
        # makes no difference.
        grad_upper -= tl.cumsum(grad_upper, 0)
        grad_lower -= tl.cumsum(grad_lower, 0)
        grad_upper = share_upper * (grad_upper - tl.sum(share_upper * grad_upper, 0))
        grad_lower = share_lower * (grad_lower - tl.sum(share_lower * grad_lower, 0))
        grad_close = grad_cell * before * overlap * close * (1 - close)
        grad_write = grad_cell * new * overlap * write * (1 - write)
        grad_out = grad_state * cell * out * (1 - out)
        grad_new = grad_cell * to_new * (1 - new * new)
        tl.store(grad_cells + local * SIZE + place, grad_cell * (upper - overlap * (1 - close)), mask=is_place)
        tl.debug_barrier()  # the gradients may replace what other threads have read
        target = grad_buffer + word * (4 * SIZE + 2 * N)
        tl.store(target + place, grad_close, mask=is_place)
        tl.store(target + SIZE + place, grad_write, mask=is_place)
        tl.store(target + 2 * SIZE + place, grad_out, mask=is_place)
        tl.store(target + 3 * SIZE + place, grad_new, mask=is_place)
        tl.store(target + 4 * SIZE + unit, grad_upper, mask=is_unit)
        tl.store(target + 4 * SIZE + N + unit, grad_lower, mask=is_unit)
        if HAS_LOW:
            low = low_gates + word * (4 * SIZE + 2 * N)
            tl.store(low + place, grad_close, mask=is_place)
            tl.store(low + SIZE + place, grad_write, mask=is_place)
            tl.store(low + 2 * SIZE + place, grad_out, mask=is_place)
            tl.store(low + 3 * SIZE + place, grad_new, mask=is_place)
            tl.store(low + 4 * SIZE + unit, grad_upper, mask=is_unit)
            tl.store(low + 4 * SIZE + N + unit, grad_lower, mask=is_unit)


def suits(counts: Sequence[int], *tensors: Tensor | None) -> bool:
    """Return whether the kernels compute these steps, if all sentences have each."""
    return counts[0] == counts[-1] and all(tensor is not None for tensor in tensors) and runs_triton(*tensors)


def settings(matrix: Tensor, rows: int, chunk_size: int) -> tuple[list[int], dict[str, int]]:
    """Return grid and constants of both kernels for recurrent weights `(directions, hidden_size, gates)`."""
    directions, size, _ = matrix.shape
    units = size // chunk_size
    sizes = {"SIZE": size, "N": units, "CHUNK": chunk_size, "BLOCK_N": block(units), "BLOCK_C": block(chunk_size)}
    return [rows, directions], {**sizes, "num_warps": warps(sizes["BLOCK_N"] * sizes["BLOCK_C"])}


def run_forward(
    gates: Tensor, matrix: Tensor, steps: int, chunk_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Run all steps from the inputs' part of all gates `(directions, words, gates)`, in float32, which the gates and sums
    replace, with recurrent weights `(directions, hidden_size, gates)` in the type of the matmuls. Return the states,
    in `dtype`, shares and cells of [`~.kernels_onlstm_transformer.ONLSTMSteps`].
    """
    directions, words, _ = gates.shape
    size, rows = matrix.shape[1], words // steps
    grid, constants = settings(matrix, rows, chunk_size)
    shares = gates.new_empty(directions, words, 2, size // chunk_size)
    cells = gates.new_empty(directions, words, size)
    states = gates.new_empty(directions, words, size, dtype=dtype)
    constants["HAS_LOW"] = has_low = matrix.dtype != dtype
    low_states = matrix.new_empty(directions, rows, size) if has_low else states
    recurrent = gates
    for step in range(steps):
        first = step * rows
        if step:
            previous = low_states if has_low else states[:, first - rows : first]
            recurrent = torch.bmm(previous, matrix)
        tensors = (gates, recurrent, shares, cells, states, low_states)
        launch(step_forward, grid, *tensors, first, words, rows, IS_FIRST=step == 0, **constants)
    return states, shares, cells


def run_backward(
    gates: Tensor, grad_gates: Tensor, shares: Tensor, cells: Tensor, gradient: Tensor, matrix: Tensor, chunk_size: int,
    steps: int,
) -> Tensor:  # fmt: skip
    """
    Fill `grad_gates`, which may be `gates`, from the states' gradient, with recurrent weights `(directions, gates,
    hidden_size)` in the type of the matmuls; return it in that type.
    """
    directions, words, size = cells.shape
    rows = words // steps
    grid, constants = settings(matrix.mT, rows, chunk_size)
    constants["HAS_LOW"] = has_low = matrix.dtype != grad_gates.dtype
    low_gates = torch.empty_like(grad_gates, dtype=matrix.dtype) if has_low else grad_gates
    grad_cells, from_next = cells.new_empty(directions, rows, size), cells
    gradient = gradient.contiguous()
    for step in reversed(range(steps)):
        first, is_last = step * rows, step == steps - 1
        if not is_last:
            from_next = torch.bmm(low_gates[:, first + rows : first + 2 * rows], matrix)
        tensors = (gates, grad_gates, low_gates, shares, cells, gradient, from_next, grad_cells)
        sides = {"IS_FIRST": step == 0, "IS_LAST": is_last}
        launch(step_backward, grid, *tensors, first, words, rows, **sides, **constants)
    return low_gates
