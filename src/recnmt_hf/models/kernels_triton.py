"""
What the Triton kernels of several families share: whether they run, their launch, and sizes of blocks.

Triton comes with torch's CUDA builds. With `TRITON_INTERPRET=1` the kernels run on the CPU, one operation at a time,
for tests. Without Triton the paths of torch's own operators remain.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels_shared import allowed, is_exporting


try:
    import triton
except ImportError:
    triton = None

# Called before each launch, with the kernel; returns whether it is to be launched.
observers: list[Callable[[Any], bool]] = []


def runs_triton(*tensors: Tensor) -> bool:
    """Return whether kernels may run on tensors, which are on one device and of ordinary types."""
    if triton is None or not allowed() or is_exporting() or torch.compiler.is_compiling():
        return False
    is_readable = all(tensor.is_cuda for tensor in tensors) or os.environ.get("TRITON_INTERPRET") == "1"
    return (is_readable or bool(observers)) and all(
        tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors
    )


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on a grid of programs."""
    if all(observe(kernel) for observe in observers):
        kernel[tuple(grid)](*arguments, **constants)


def block(size: int) -> int:
    """Return the power of two that holds so many elements."""
    return 1 << max(size - 1, 0).bit_length()


def warps(elements: int) -> int:
    """Return the number of warps for a block of elements."""
    return min(max(elements // 256, 1), 8)
