"""What hand-written recurrences share: the matmuls of a step under autocast, and the elements of a GRU."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .fast_paths import RepeatedLinear, add_product, takes_wide, transposed_product


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast switched off, on devices that have it."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class StepMatmuls:
    """
    `states @ weight.T + bias` in the type that autocast names, if it is on, without gradients: what the steps of a
    recurrence would do to the weight each time is done once.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`).
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*).
        calls (`int`, *optional*, defaults to 1): How many steps there will be.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, calls: int = 1):
        device = weight.device.type
        self.bias, self.dtype = bias, weight.dtype
        self.low = weight.dtype
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self.low = torch.get_autocast_dtype(device)
        self.weight = weight.to(self.low)
        self.onward = RepeatedLinear(self.weight, calls)
        self.back = RepeatedLinear(self.weight.t(), calls)
        self.columns: torch.Tensor | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.low == self.dtype:
            return self.onward(states, self.bias)
        mapped = self.onward(states.to(self.low)).to(self.dtype)
        return mapped if self.bias is None else mapped + self.bias

    def by_columns(self, states: torch.Tensor) -> torch.Tensor | None:
        """The weight with columns that follow each other in memory, if that is what rows of states gain by."""
        if self.onward.is_packed(states) or takes_wide(states, self.weight):
            return None
        if self.columns is None:
            self.columns = self.weight.t().contiguous()
        return self.columns

    def product(self, states: torch.Tensor) -> torch.Tensor:
        """`states @ weight.T` of states `(rows, in_features)`."""
        states = states.to(self.low)
        columns = self.by_columns(states)
        return (self.onward(states) if columns is None else torch.mm(states, columns)).to(self.dtype)

    def add_to(self, total: torch.Tensor, states: torch.Tensor) -> None:
        """`total += states @ weight.T`, in the type of `total`."""
        states = states.to(self.low)
        columns = self.by_columns(states)
        if columns is None:
            total += self.onward(states)
        else:
            add_product(total, states, columns)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the states."""
        return self.back(gradient.to(self.low)).to(self.dtype)

    def weight_gradient(self, gradients: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """
        The gradient of the weight from those of all steps.

        Args:
            gradients (`torch.Tensor` of shape `(.., out_features)`).
            inputs (`torch.Tensor` of shape `(.., in_features)`).
        """
        gradients, inputs = (each.flatten(0, -2).to(self.low) for each in (gradients, inputs))
        return transposed_product(gradients, inputs).to(self.dtype)


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
