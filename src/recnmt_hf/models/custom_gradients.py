"""
What the hand-written backward passes share: a rule for `torch.func.vmap`, and an error where gradients are
differentiated.

Their operations work in place and fill buffers, which neither autograd nor `vmap` can follow.
"""

from collections.abc import Callable
from typing import Any

import torch

from .user_errors import UserError


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs, such as `grad` or `vmap`."""
    return torch._C._are_functorch_transforms_active()


class CustomGradient(torch.autograd.Function):
    """Base class of functions with a hand-written backward pass. `torch.func.vmap` runs them sample by sample."""

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        if is_transformed():
            return super().apply(*inputs)
        # What torch does too, after matching the inputs to the signature of `forward`, which takes longer than a step.
        return super(torch.autograd.Function, cls).apply(*inputs)  # type: ignore[misc]  # of its base in C

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        def sample(value: Any, dim: Any, index: int) -> Any:
            return value.select(dim, index) if isinstance(dim, int) else value

        samples = [
            cls.apply(*(sample(value, dim, index) for value, dim in zip(inputs, in_dims, strict=True)))
            for index in range(info.batch_size)
        ]
        if isinstance(samples[0], torch.Tensor):
            return torch.stack(samples), 0
        outputs = tuple(None if each[0] is None else torch.stack(each) for each in zip(*samples, strict=True))
        return outputs, tuple(None if output is None else 0 for output in outputs)


class FinalGradients(CustomGradient):
    """The results of a backward pass, which have no gradients themselves."""

    @staticmethod
    def forward(compute: Callable[..., Any], remedy: str, *tensors: torch.Tensor | None) -> Any:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.remedy = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UserError(f"This gradient cannot be differentiated again. Remedy: {ctx.remedy}.")


def final_gradients(
    compute: Callable[..., Any],
    *tensors: torch.Tensor | None,
    remedy: str = "set the environment variable RECNMT_FAST_PATHS=0",
) -> Any:
    """
    `compute(*tensors)`, for the backward pass of a [`CustomGradient`].

    Args:
        compute: Returns a tensor or a tuple of tensors and `None`.
        remedy (`str`, *optional*): What to do for a second derivative, for the error message.

    Raises:
        UserError: In a later backward pass, where the result is differentiated.
    """
    if torch.is_grad_enabled():  # create_graph=True, or a transform of torch.func
        return FinalGradients.apply(compute, remedy, *tensors)
    return compute(*tensors)
