"""What hand-written recurrences share: the matmuls of a step under autocast, and the elements of a GRU."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .fast_paths import wide_linear, wide_product


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast switched off, on devices that have it."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class StepMatmuls:
    """
    `states @ weight.T + bias` in the type that autocast names, if it is on: weights are converted once for all steps.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        device = weight.device.type
        self.bias, self.dtype = bias, weight.dtype
        self.low = weight.dtype
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self.low = torch.get_autocast_dtype(device)
        self.weight = weight.to(self.low)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.low == self.dtype:
            return wide_linear(states, self.weight, self.bias)
        mapped = torch.mm(states.to(self.low), self.weight.t()).to(self.dtype)
        return mapped if self.bias is None else mapped + self.bias

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the states."""
        return wide_product(gradient.to(self.low), self.weight).to(self.dtype)

    def weight_gradient(self, gradients: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight from those of all steps `(steps, batch_size, ..)`."""
        gradients, inputs = gradients.flatten(0, 1).to(self.low), inputs.flatten(0, 1).to(self.low)
        return wide_product(gradients.t(), inputs).to(self.dtype)


def gru_step(
    gates: torch.Tensor, recurrent: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The elements of a GRU: `r, z = sigmoid(..)`, `n = tanh(W x + b + r (U h + b'))`, `h' = (1 - z) n + z h`.

    Args:
        gates, recurrent (`torch.Tensor` of shape `(batch_size, 3 * d)`): `W x + b` and `U h + b'` of r, z and n.

    Returns:
        h', and for the backward pass `[r; z]` and n.
    """
    width = state.shape[-1]
    both = torch.sigmoid(gates[:, : 2 * width] + recurrent[:, : 2 * width])
    new = torch.tanh(torch.addcmul(gates[:, 2 * width :], both[:, :width], recurrent[:, 2 * width :]))
    return torch.lerp(new, state, both[:, width:]), both, new


def gru_step_backward(
    gradient: torch.Tensor,
    state: torch.Tensor,
    both: torch.Tensor,
    new: torch.Tensor,
    recurrent: torch.Tensor,
    grad_gates: torch.Tensor,
    grad_recurrent: torch.Tensor,
) -> torch.Tensor:
    """
    Backward through [`gru_step`]; fills `grad_gates` and `grad_recurrent` `(batch_size, 3 * d)`.

    Args:
        recurrent (`torch.Tensor` of shape `(batch_size, d)`): `U h + b'` of n.

    Returns:
        The part of the old state's gradient that does not go through `recurrent`.
    """
    width = state.shape[-1]
    reset, update = both[:, :width], both[:, width:]
    through_new = gradient * (1 - update) * (1 - new * new)
    grad_gates[:, 2 * width :] = through_new
    torch.mul(through_new, recurrent, out=grad_gates[:, :width])
    torch.mul(gradient, state - new, out=grad_gates[:, width : 2 * width])
    grad_gates[:, : 2 * width] *= both * (1 - both)
    grad_recurrent[:, : 2 * width] = grad_gates[:, : 2 * width]
    torch.mul(through_new, reset, out=grad_recurrent[:, 2 * width :])
    return gradient * update
