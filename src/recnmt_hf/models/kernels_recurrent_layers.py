"""Matmuls of a recurrence: one weight that many steps multiply by, and the gradient of that weight."""

import torch

from .kernels_shared import add_product, autocast_dtype, enabled, onednn_linear, takes_wide, wide_linear


# Smallest numbers of calls and rows for which a weight is reordered for oneDNN.
FEWEST_PACKED_CALLS, FEWEST_PACKED_ROWS = 24, 2


class RepeatedLinear:
    """`states @ weight.T + bias` for about `calls` steps; without gradients oneDNN reorders the weight only once."""

    def __init__(self, weight: torch.Tensor, calls: int):
        self.weight, self.calls = weight, calls
        self.packed: torch.Tensor | None = None

    def is_packed(self, states: torch.Tensor) -> bool:
        """Return whether the weight is in oneDNN's order; reorder it now if these states make that worthwhile."""
        if self.packed is not None:
            return True
        if not enabled() or torch.is_grad_enabled():  # first, since in a graph the number of calls is free
            return False
        if self.calls >= FEWEST_PACKED_CALLS and takes_wide(states, self.weight, FEWEST_PACKED_ROWS):
            rows = states.numel() // states.shape[-1]
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), rows)
        return self.packed is not None

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_packed(states):
            return torch.ops.mkldnn._linear_pointwise(states, self.packed, bias, "none", [], "")
        return wide_linear(states, self.weight, bias)


def transposed_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left.T @ right`, the form of a weight's gradient; oneDNN reads rows, so it gets a copy of one side."""
    if not takes_wide(left.t(), right):
        return torch.mm(left.t(), right)
    if left.shape[1] <= right.shape[1]:  # copy the smaller side
        return onednn_linear(left.t().contiguous(), right.t(), None)
    return onednn_linear(right.t().contiguous(), left.t(), None).t().contiguous()


class StepMatmuls:
    """
    `states @ weight.T + bias` for `calls` steps of a recurrence, in the data type of autocast where it is on, without
    gradients. The weight `(out_features, in_features)` is converted once.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, calls: int = 1):
        self.bias, self.dtype = bias, weight.dtype
        self.low = autocast_dtype(weight.device) or weight.dtype
        self.weight = weight.to(self.low)
        self.onward = RepeatedLinear(self.weight, calls)
        self.back = RepeatedLinear(self.weight.t(), calls)
        self.columns: torch.Tensor | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.low == self.dtype:
            return self.onward(states, self.bias)
        mapped = self.onward(states.to(self.low)).to(self.dtype)
        return mapped if self.bias is None else mapped + self.bias

    def add_to(self, total: torch.Tensor, states: torch.Tensor) -> None:
        """Add `states @ weight.T` to `total`, in the type of `total`."""
        states = states.to(self.low)
        if self.onward.is_packed(states) or takes_wide(states, self.weight):
            total += self.onward(states)
            return
        if self.columns is None:  # torch's own matmul reads contiguous columns faster
            self.columns = self.weight.t().contiguous()
        add_product(total, states, self.columns)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the states."""
        return self.back(gradient.to(self.low)).to(self.dtype)

    def weight_gradient(self, gradients: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the weight's gradient from the gradients of all outputs `(.., out_features)` and from all inputs."""
        gradients, inputs = (rows.flatten(0, -2).to(self.low) for rows in (gradients, inputs))
        return transposed_product(gradients, inputs).to(self.dtype)
