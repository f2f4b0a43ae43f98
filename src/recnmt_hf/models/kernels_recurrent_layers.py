"""Matmuls of a recurrence: one weight that many steps multiply by, and the gradient of that weight."""

import torch
from torch import Tensor

from .kernels_cpu_matmuls import add_product, fast_linear, onednn_linear, takes_onednn
from .kernels_shared import autocast_dtype


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left.T @ right`, the form of a weight's gradient; oneDNN reads rows, so it gets a copy of one side."""
    if not takes_onednn(left.t(), right):
        return torch.mm(left.t(), right)
    if left.shape[1] <= right.shape[1]:  # copy the smaller side
        return onednn_linear(left.t().contiguous(), right.t(), None)
    return onednn_linear(right.t().contiguous(), left.t(), None).t().contiguous()


class StepMatmuls:
    """
    `states @ weight.T + bias` for the steps of a recurrence, in the data type of autocast where it is on, without
    gradients. The weight `(out_features, in_features)` is converted once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias, self.dtype = bias, weight.dtype
        self.low = autocast_dtype(weight.device) or weight.dtype
        self.weight = weight.to(self.low)
        self.columns: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        if self.low == self.dtype:
            return fast_linear(states, self.weight, self.bias)
        mapped = fast_linear(states.to(self.low), self.weight).to(self.dtype)
        return mapped if self.bias is None else mapped + self.bias

    def add_to(self, total: Tensor, states: Tensor) -> None:
        """Add `states @ weight.T` to `total`, in the type of `total`."""
        states = states.to(self.low)
        if takes_onednn(states, self.weight):
            total += onednn_linear(states, self.weight, None)
            return
        if self.columns is None:  # torch's own matmul reads contiguous columns faster
            self.columns = self.weight.t().contiguous()
        add_product(total, states, self.columns)

    def backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the states."""
        return fast_linear(gradient.to(self.low), self.weight.t()).to(self.dtype)

    def weight_gradient(self, gradients: Tensor, inputs: Tensor) -> Tensor:
        """Return the weight's gradient from the gradients of all outputs `(.., out_features)` and from all inputs."""
        gradients, inputs = (rows.flatten(0, -2).to(self.low) for rows in (gradients, inputs))
        return transposed_product(gradients, inputs).to(self.dtype)
