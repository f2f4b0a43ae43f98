"""
The steps of an ON-LSTM (Shen et al., 2019) on GPUs: a matmul of both directions and one Triton kernel for each step, in
either pass. The plain reference is [`~.modeling_onlstm_transformer.on_lstm_reference`].
"""

import torch
from torch import Tensor

from .kernels_triton import block, launch, row_constants


try:
    import triton
    import triton.language as tl

    from .kernels_triton import load_gates, load_row, store_gates, tanh
except ImportError:
    triton = None


if triton is not None:

    @triton.jit
    def words_of(first, words, rows):
        """Return the program's word among all words, and among those of a step."""
        row, side = tl.program_id(0), tl.program_id(1)
        return (side * words + first + row).to(tl.int64), (side * rows + row).to(tl.int64)

    @triton.jit
    def places(N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
        """Return the units of the master gates and the channels of their chunks, and which of both exist."""
        unit, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
        is_place = (unit < N)[:, None] & (column < CHUNK)[None, :]
        return unit, unit < N, unit[:, None] * CHUNK + column[None, :], is_place

    @triton.jit
    def load_all(pointer, place, is_place, unit, is_unit, SIZE, N):
        """Load the four gates and the two master gates of a word."""
        close, write, out = load_gates(pointer, place, is_place, SIZE)
        new, masters = load_row(pointer + 3 * SIZE, place, is_place), pointer + 4 * SIZE
        return close, write, out, new, load_row(masters, unit, is_unit), load_row(masters + N, unit, is_unit)

    @triton.jit
    def store_all(pointer, place, is_place, unit, is_unit, SIZE, N, close, write, out, new, upper, lower):
        """Store what [`load_all`] loads."""
        store_gates(pointer, place, is_place, SIZE, close, write, out)
        tl.store(pointer + 3 * SIZE + place, new, mask=is_place)
        tl.store(pointer + 4 * SIZE + unit, upper, mask=is_unit)
        tl.store(pointer + 4 * SIZE + N + unit, lower, mask=is_unit)

    @triton.jit
    def cumax(scores, is_unit, is_last):
        """Return a softmax and its cumulative sums, of which the last is 1."""
        scores = tl.where(is_unit, scores, float("-inf"))
        shares = tl.exp(scores - tl.max(scores, 0))
        shares = shares / tl.sum(shares, 0)
        return shares, tl.where(is_last, 1.0, tl.cumsum(shares, 0))

    @triton.jit
    def cumax_backward(gradient, shares):
        # A share enters its own sum and all later ones: the total less the sums before it. To the softmax a constant
        # makes no difference.
        gradient -= tl.cumsum(gradient, 0)
        return shares * (gradient - tl.sum(shares * gradient, 0))

    @triton.jit
    def step_forward(
        buffer, recurrent, shares, cells, states, low_states, first, words, rows,
        SIZE: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
        IS_FIRST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """
        A step of one sentence and direction, from the inputs' part of its gates in `buffer` and the states' part,
        `recurrent`: the gates and cumulative sums replace the former. A block has a row for each master gate's unit, a
        column for each channel of its chunk.
        """
        word, local = words_of(first, words, rows)
        unit, is_unit, place, is_place = places(N, CHUNK, BLOCK_N, BLOCK_C)
        width = 4 * SIZE + 2 * N
        gates = buffer + word * width
        close, write, out, new, upper, lower = load_all(gates, place, is_place, unit, is_unit, SIZE, N)
        if not IS_FIRST:
            a, b, c, d, e, f = load_all(recurrent + local * width, place, is_place, unit, is_unit, SIZE, N)
            close, write, out, new, upper, lower = close + a, write + b, out + c, new + d, upper + e, lower + f
        close, write, out, new = tl.sigmoid(close), tl.sigmoid(write), tl.sigmoid(out), tl.sigmoid(2 * new)
        share_upper, upper = cumax(upper, is_unit, unit == N - 1)
        share_lower, lower = cumax(lower, is_unit, unit == N - 1)
        lower = 1 - lower
        tl.store(shares + word * 2 * N + unit, share_upper, mask=is_unit)
        tl.store(shares + word * 2 * N + N + unit, share_lower, mask=is_unit)
        tl.debug_barrier()  # the sums replace what other threads have read
        store_all(gates, place, is_place, unit, is_unit, SIZE, N, close, write, out, new, upper, lower)
        overlap = (upper * lower)[:, None]
        cell = (lower[:, None] - overlap * (1 - write)) * (2 * new - 1)
        if not IS_FIRST:
            before = load_row(cells + (word - rows) * SIZE, place, is_place)
            cell += (upper[:, None] - overlap * (1 - close)) * before
        tl.store(cells + word * SIZE + place, cell, mask=is_place)
        state = out * tanh(cell)
        tl.store(states + word * SIZE + place, state, mask=is_place)
        if low_states is not None:
            tl.store(low_states + local * SIZE + place, state, mask=is_place)

    @triton.jit
    def step_backward(
        buffer, grad_buffer, low_gates, shares, cells, gradient, from_next, grad_cells, first, words, rows,
        SIZE: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
        IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """
        The step back: the gradients of the gates before their activations, into `grad_buffer` (which may be `buffer`)
        and in the type of matmuls into `low_gates`, from `gradient` of the states and `from_next`; `grad_cells` has the
        cell's gradient, which becomes that of the step before.
        """
        word, local = words_of(first, words, rows)
        unit, is_unit, place, is_place = places(N, CHUNK, BLOCK_N, BLOCK_C)
        width = 4 * SIZE + 2 * N
        gates = buffer + word * width
        close, write, out, new, upper, lower = load_all(gates, place, is_place, unit, is_unit, SIZE, N)
        new, upper, lower = 2 * new - 1, upper[:, None], lower[:, None]
        cell = tanh(load_row(cells + word * SIZE, place, is_place))
        grad_state = load_row(gradient + word * SIZE, place, is_place)
        grad_cell, before = tl.zeros_like(grad_state), tl.zeros_like(grad_state)
        if not IS_LAST:
            grad_state += load_row(from_next + local * SIZE, place, is_place)
            grad_cell = load_row(grad_cells + local * SIZE, place, is_place)
        if not IS_FIRST:
            before = load_row(cells + (word - rows) * SIZE, place, is_place)
        share_upper = load_row(shares + word * 2 * N, unit, is_unit)
        share_lower = load_row(shares + word * 2 * N + N, unit, is_unit)
        grad_cell += grad_state * out * (1 - cell * cell)
        # c' = (f w + f~ - w) c + (i w + i~ - w) c^ with w = f~ i~, and i~ = 1 - its sum
        overlap, mixed = upper * lower, before * (1 - close) + new * (1 - write)
        grad_upper = cumax_backward(tl.sum(grad_cell * (before - lower * mixed), 1), share_upper)
        grad_lower = cumax_backward(-tl.sum(grad_cell * (new - upper * mixed), 1), share_lower)
        grad_close = grad_cell * before * overlap * close * (1 - close)
        grad_write = grad_cell * new * overlap * write * (1 - write)
        grad_out = grad_state * cell * out * (1 - out)
        grad_new = grad_cell * (lower - overlap * (1 - write)) * (1 - new * new)
        tl.store(grad_cells + local * SIZE + place, grad_cell * (upper - overlap * (1 - close)), mask=is_place)
        tl.debug_barrier()  # the gradients may replace what other threads have read
        store_all(
            grad_buffer + word * width, place, is_place, unit, is_unit, SIZE, N,
            grad_close, grad_write, grad_out, grad_new, grad_upper, grad_lower,
        )  # fmt: skip
        if low_gates is not None:
            store_all(
                low_gates + word * width, place, is_place, unit, is_unit, SIZE, N,
                grad_close, grad_write, grad_out, grad_new, grad_upper, grad_lower,
            )  # fmt: skip


def settings(matrix: Tensor, rows: int, chunk_size: int) -> tuple[list[int], dict[str, int]]:
    """Return grid and constants of both kernels for recurrent weights `(directions, hidden_size, gates)`."""
    directions, size, _ = matrix.shape
    sizes = {"SIZE": size, "N": size // chunk_size, "CHUNK": chunk_size}
    sizes |= {"BLOCK_N": block(size // chunk_size), "BLOCK_C": block(chunk_size)}
    sizes["num_warps"] = row_constants(sizes["BLOCK_N"] * sizes["BLOCK_C"])["num_warps"]
    return [rows, directions], sizes


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
    low_states = None if matrix.dtype == dtype else matrix.new_empty(directions, rows, size)
    recurrent = gates
    for step in range(steps):
        first = step * rows
        if step:
            recurrent = torch.bmm(states[:, first - rows : first] if low_states is None else low_states, matrix)
        tensors = (gates, recurrent, shares, cells, states, low_states)
        launch(step_forward, grid, *tensors, first, words, rows, IS_FIRST=step == 0, **constants)
    return states, shares, cells


def run_backward(
    gates: Tensor,
    grad_gates: Tensor,
    shares: Tensor,
    cells: Tensor,
    gradient: Tensor,
    matrix: Tensor,
    chunk_size: int,
    steps: int,
) -> Tensor:
    """
    Fill `grad_gates`, which may be `gates`, from the states' gradient, with recurrent weights `(directions, gates,
    hidden_size)` in the type of the matmuls; return it in that type.
    """
    directions, words, size = cells.shape
    rows = words // steps
    grid, constants = settings(matrix.mT, rows, chunk_size)
    low_gates = None if matrix.dtype == grad_gates.dtype else torch.empty_like(grad_gates, dtype=matrix.dtype)
    results = grad_gates if low_gates is None else low_gates
    grad_cells, from_next = cells.new_empty(directions, rows, size), cells
    gradient = gradient.contiguous()
    for step in reversed(range(steps)):
        first, is_last = step * rows, step == steps - 1
        if not is_last:
            from_next = torch.bmm(results[:, first + rows : first + 2 * rows], matrix)
        tensors = (gates, grad_gates, low_gates, shares, cells, gradient, from_next, grad_cells)
        sides = {"IS_FIRST": step == 0, "IS_LAST": is_last}
        launch(step_backward, grid, *tensors, first, words, rows, **sides, **constants)
    return results
