"""
What the Triton kernels of several families share: whether they run, their launch, and parts of a row.

Triton comes with torch's CUDA builds. Where it is missing, and on other devices, torch's operators compute the same.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels_shared import allowed, autocast_dtype, is_exporting, with_autocast


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Called before each launch with the kernel; returns whether it is to run. With any, kernels are chosen on all devices.
observers: list[Callable[[Any], bool]] = []
# Whether the kernels of a family agree with the reference, by name, device and data type.
agreements: dict[tuple[str, torch.device, torch.dtype], bool] = {}


def runs_triton(name: str, example: Callable[[torch.device, torch.dtype], list[Tensor]], *tensors: Tensor) -> bool:
    """
    Return whether a family's kernels compute with tensors: on a CUDA device, if the results and gradients of an
    `example`, compared once per process, device and data type, agree with the reference in float32. A warning says if
    they do not.
    """
    if triton is None or not allowed() or is_exporting() or torch.compiler.is_compiling():
        return False
    if any(tensor.dtype not in TYPES for tensor in tensors):
        return False
    if observers or not all(tensor.is_cuda for tensor in tensors):
        return bool(observers)
    place = device, dtype = tensors[0].device, autocast_dtype(tensors[0].device) or tensors[0].dtype
    if (name, *place) not in agreements:
        known, agrees, reason = dict(agreements), False, "differ from the reference"
        try:
            with torch.enable_grad(), with_autocast(device, None):
                # In lower precision the reference, which rounds more often, is the less exact of both.
                agreements[name, device, torch.float32] = False
                expected = example(device, torch.float32)
                agreements[name, device, dtype] = True
                agrees = all(map(is_close, example(device, dtype), expected))
        except Exception as error:  # of the compiler or the driver
            reason = f"cannot be used ({type(error).__name__}: {error})"
        agreements.clear()
        agreements.update(known | {(name, *place): agrees})
        if not agrees:
            warnings.warn(f"The Triton kernels of {name} {reason}; torch's operators are used.", stacklevel=2)
    return agreements[name, device, dtype]


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two results agree to the precision of their type and of matmuls in lower precision."""
    tolerance = 1e-2 if found.dtype == torch.float32 else 2e-1
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def sample(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return an example's tensor, with a gradient; its values are the same in all data types."""
    values = torch.arange(math.prod(shape), device=device, dtype=torch.float32).mul(0.7).sin()
    return values.bfloat16().to(dtype).view(shape).requires_grad_()


def with_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs and the gradients of their sum to inputs."""
    total: Any = sum(output.float().square().sum() for output in outputs)
    return [*outputs, *torch.autograd.grad(total, inputs)]


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on a grid of programs, on the device of its tensors."""
    if all(observe(kernel) for observe in observers):
        with torch.cuda.device_of(next(argument for argument in arguments if isinstance(argument, Tensor))):
            kernel[tuple(grid)](*arguments, **constants)


def launch_rows(kernel: Any, rows: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with a program for each row of a tensor `(.., d)`."""
    width = rows.shape[-1]
    launch(kernel, (rows.shape[:-1].numel(),), *arguments, D=width, **row_constants(width), **constants)


def block(size: int) -> int:
    """Return the power of two that holds so many elements."""
    return 1 << max(size - 1, 0).bit_length()


def row_constants(width: int) -> dict[str, int]:
    """Return the constants of a kernel whose programs compute rows of this width."""
    return {"BLOCK": block(width), "num_warps": min(max(block(width) // 256, 1), 8)}


if triton is not None:

    @triton.jit
    def load_row(pointer, place, inside):
        """Load the elements of a row that are `inside`, in float32, 0 beside them."""
        return tl.load(pointer + place, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def load_gates(pointer, place, inside, D):
        """Load three rows that follow each other."""
        first, second = load_row(pointer, place, inside), load_row(pointer + D, place, inside)
        return first, second, load_row(pointer + 2 * D, place, inside)

    @triton.jit
    def store_gates(pointer, place, inside, D, first, second, third):
        """Store three rows that follow each other."""
        tl.store(pointer + place, first, mask=inside)
        tl.store(pointer + D + place, second, mask=inside)
        tl.store(pointer + 2 * D + place, third, mask=inside)

    @triton.jit
    def tanh(values):
        return 2 * tl.sigmoid(2 * values) - 1
