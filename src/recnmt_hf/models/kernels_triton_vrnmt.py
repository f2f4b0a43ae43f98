"""The draw of VRNMT's latent variables (Su et al., 2018) as Triton kernels. `kernels_vrnmt.py` has the reference."""

import torch
from torch import Tensor

from .kernels_triton import launch_rows


try:
    import triton
    import triton.language as tl

    from .kernels_triton import load_row
except ImportError:
    triton = None


LARGEST_LOG_VARIANCE = 10.0


if triton is not None:
    LARGEST = tl.constexpr(LARGEST_LOG_VARIANCE)

    @triton.jit
    def spread_of(log_variance):
        return tl.exp(tl.minimum(tl.maximum(log_variance, -LARGEST), LARGEST) / 2)

    @triton.jit
    def draw_forward(moments, noise, value, D: tl.constexpr, BLOCK: tl.constexpr):
        """Compute `z = mean + exp(v / 2) noise` for one row, from mean and log-variance v side by side."""
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        spread = spread_of(load_row(moments + row * 2 * D + D, place, inside))
        drawn = load_row(moments + row * 2 * D, place, inside) + spread * load_row(noise + row * D, place, inside)
        tl.store(value + row * D + place, drawn, mask=inside)

    @triton.jit
    def draw_backward(gradient, given, moments, noise, output, D: tl.constexpr, BLOCK: tl.constexpr):
        """Compute the gradient of mean and log-variance: what is `given`, and what the `gradient` of z adds."""
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = place < D
        of_value, start = load_row(gradient + row * D, place, inside), row * 2 * D
        log_variance = load_row(moments + start + D, place, inside)
        own = of_value * spread_of(log_variance) * load_row(noise + row * D, place, inside) / 2
        own = tl.where(tl.abs(log_variance) <= LARGEST, own, 0.0)
        tl.store(output + start + place, of_value + load_row(given + start, place, inside), mask=inside)
        tl.store(output + start + D + place, own + load_row(given + start + D, place, inside), mask=inside)


def draw_on_gpu(moments: Tensor, noise: Tensor) -> Tensor:
    """Compute [`~.kernels_vrnmt.draw`]."""
    value = torch.empty_like(noise)
    launch_rows(draw_forward, value, moments, noise, value)
    return value


def draw_gradient(gradient: Tensor, *tensors: Tensor) -> None:
    """Fill the gradient of the moments; the tensors are the other arguments of [`draw_backward`]."""
    launch_rows(draw_backward, gradient, gradient, *tensors)
