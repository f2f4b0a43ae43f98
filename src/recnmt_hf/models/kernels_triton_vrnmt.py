"""
The element-wise parts of VRNMT's latent variables (Su et al., 2018) in a decoder's step, as Triton kernels. The plain
reference is in `modeling_vrnmt.py`.
"""

from typing import Any

import torch
from torch import Tensor

from .kernels_triton import launch_rows


try:
    import triton
    import triton.language as tl

    from .kernels_triton import load_row, tanh
except ImportError:
    triton = None


LARGEST_LOG_VARIANCE = 10.0


if triton is not None:
    LARGEST = tl.constexpr(LARGEST_LOG_VARIANCE)

    @triton.jit
    def tanh_forward(
        mapped, reads, given, bias, output, low_output, mapped_stride, reads_stride,
        D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute `tanh(mapped + reads + given + bias)` of what is given, for one row."""
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        total = load_row(mapped + row * mapped_stride, place, inside)
        if reads is not None:
            total += load_row(reads + row * reads_stride, place, inside) + load_row(given + row * D, place, inside)
        if bias is not None:
            total += load_row(bias, place, inside)
        total = tanh(total)
        tl.store(output + row * D + place, total, mask=inside)
        if low_output is not None:
            tl.store(low_output + row * D + place, total, mask=inside)

    @triton.jit
    def tanh_backward(
        mapped, given, value, output, low_output, output_stride, low_stride, D: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Compute `(mapped + given) (1 - value^2)`, the gradient before a tanh, for one row."""
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        total = load_row(mapped + row * D, place, inside)
        if given is not None:
            total += load_row(given + row * D, place, inside)
        result = load_row(value + row * D, place, inside)
        total *= 1 - result * result
        tl.store(output + row * output_stride + place, total, mask=inside)
        tl.store(low_output + row * low_stride + place, total, mask=inside)

    @triton.jit
    def spread_of(log_variance):
        return tl.exp(tl.minimum(tl.maximum(log_variance, -LARGEST), LARGEST) / 2)

    @triton.jit
    def draw_forward(mapped, bias, noise, moments, value, low_value, D: tl.constexpr, BLOCK: tl.constexpr):
        """Store mean and log-variance v, `mapped + bias`, and `z = mean + exp(v / 2) noise` (or the mean)."""
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        width = D
        if noise is not None:
            width = 2 * D
        mean = load_row(mapped + row * width, place, inside) + load_row(bias, place, inside)
        tl.store(moments + row * width + place, mean, mask=inside)
        if noise is not None:
            log_variance = load_row(mapped + row * width + D, place, inside) + load_row(bias + D, place, inside)
            tl.store(moments + row * width + D + place, log_variance, mask=inside)
            mean += spread_of(log_variance) * load_row(noise + row * D, place, inside)
        tl.store(value + row * D + place, mean, mask=inside)
        if low_value is not None:
            tl.store(low_value + row * D + place, mean, mask=inside)

    @triton.jit
    def draw_backward(mapped, given, moments, noise, output, low_output, D: tl.constexpr, BLOCK: tl.constexpr):
        """The gradient of mean and log-variance, from those of z, `mapped`, and of themselves, `given`."""
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        width = D
        if noise is not None:
            width = 2 * D
        of_value = load_row(mapped + row * D, place, inside)
        total = of_value + load_row(given + row * width, place, inside)
        tl.store(output + row * width + place, total, mask=inside)
        tl.store(low_output + row * width + place, total, mask=inside)
        if noise is not None:
            log_variance = load_row(moments + row * width + D, place, inside)
            own = of_value * spread_of(log_variance) * load_row(noise + row * D, place, inside) / 2
            own = tl.where(tl.abs(log_variance) <= LARGEST, own, 0.0)
            own += load_row(given + row * width + D, place, inside)
            tl.store(output + row * width + D + place, own, mask=inside)
            tl.store(low_output + row * width + D + place, own, mask=inside)


def copy_for(low: torch.dtype, output: Tensor) -> Tensor:
    """Return memory for a copy of an output in the type of matmuls, or the output if that is its type."""
    return output if output.dtype == low else torch.empty(output.shape, dtype=low, device=output.device)


def tanh_of_sum(
    mapped: Tensor, dtype: torch.dtype, bias: Tensor | None, reads: Tensor | None = None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the tanh of the sum of what is given, in `dtype` and in the type of `mapped`."""
    output = torch.empty(mapped.shape, dtype=dtype, device=mapped.device)
    low = copy_for(mapped.dtype, output)
    tensors = (mapped, reads, given, bias, output, None if low is output else low)
    strides = (mapped.stride(0), 0 if reads is None else reads.stride(0))
    launch_rows(tanh_forward, mapped, *tensors, *strides)
    return output, low


def tanh_gradient(mapped: Tensor, given: Tensor | None, value: Tensor, output: Tensor, low_output: Tensor) -> None:
    """Fill the gradient before a tanh, in both types, from the parts of that after it and its value."""
    strides = (output.stride(0), low_output.stride(0))
    launch_rows(tanh_backward, value, mapped, given, value, output, low_output, *strides)


def drawn(mapped: Tensor, bias: Tensor, noise: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments, z, and z in the type of `mapped`, the moments without `bias`."""
    moments = torch.empty(mapped.shape, dtype=dtype, device=mapped.device)
    value = moments if noise is None else torch.empty(noise.shape, dtype=dtype, device=mapped.device)
    low = copy_for(mapped.dtype, value)
    tensors: Any = (mapped, bias, noise, moments, value, None if low is value else low)
    launch_rows(draw_forward, value, *tensors)
    return moments, value, low


def draw_gradient(mapped: Tensor, *tensors: Any) -> None:
    """Fill the gradient of the moments, in both types; the tensors are the arguments of [`draw_backward`]."""
    launch_rows(draw_backward, mapped, mapped, *tensors)
