"""The recurrence of an SSRU over a whole sentence as one Triton kernel; `light_decoders.py` has the plain reference."""

import torch
from torch import Tensor

from .kernels_triton import launch


try:
    import triton
    import triton.language as tl

    from .kernels_triton import load_row
except ImportError:
    triton = None

# Channels of a program.
CHANNELS = 128


if triton is not None:

    @triton.jit
    def scan(decay, values, initial, states, length, D: tl.constexpr, BLOCK: tl.constexpr):
        """Compute `c_t = decay_t c_{t-1} + values_t` for one row and some channels."""
        row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < D
        state = load_row(initial + row * D, place, inside)
        for step in range(length):
            word = (row * length + step) * D
            state = load_row(decay + word, place, inside) * state + load_row(values + word, place, inside)
            tl.store(states + word + place, state, mask=inside)


def run_scan(decay: Tensor, values: Tensor, initial: Tensor) -> Tensor:
    """Return the states `(batch_size, length, d)`."""
    states = torch.empty_like(values, memory_format=torch.contiguous_format)
    rows, length, width = values.shape
    tensors = (decay.contiguous(), values.contiguous(), initial.contiguous(), states)
    launch(scan, (rows, -(-width // CHANNELS)), *tensors, length, D=width, BLOCK=CHANNELS, num_warps=1)
    return states
