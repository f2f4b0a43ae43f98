"""Matmuls of a recurrence: one weight that many steps multiply by, and the gradient of that weight."""

import torch

from .kernels_shared import add_product, autocast_dtype, enabled, onednn_linear, takes_wide, wide_linear


# Smallest numbers of calls and rows for which a weight is reordered for oneDNN.
FEWEST_PACKED_CALLS, FEWEST_PACKED_ROWS = 24, 2


class RepeatedLinear:
    """
    `states @ weight.T + bias` for all steps of a recurrence. Where oneDNN multiplies and no gradient is recorded, the
    weight is put into oneDNN's own order once instead of at every call.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`).
        calls (`int`): Number of calls to expect.
    """

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
    """
    Return `left.T @ right` of `(m, k)` and `(m, n)`, the form of a weight's gradient; no gradient is recorded. oneDNN
    reads its left side row by row: the smaller of the two is copied for it.
    """
    if not takes_wide(left.t(), right):
        return torch.mm(left.t(), right)
    if left.shape[1] <= right.shape[1]:
        return onednn_linear(left.t().contiguous(), right.t(), None)
    return onednn_linear(right.t().contiguous(), left.t(), None).t().contiguous()


class StepMatmuls:
    """
    `states @ weight.T + bias` for all steps of a recurrence, in the data type of autocast where it is on, without
    gradients. Conversions of the weight are made once.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`).
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*).
        calls (`int`, *optional*, defaults to 1): Number of steps.
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

    def by_columns(self, states: torch.Tensor) -> torch.Tensor | None:
        """Return the weight with contiguous columns where that is faster, else `None`."""
        if self.onward.is_packed(states) or takes_wide(states, self.weight):
            return None
        if self.columns is None:
            self.columns = self.weight.t().contiguous()
        return self.columns

    def product(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states @ weight.T` of states `(rows, in_features)`."""
        states = states.to(self.low)
        columns = self.by_columns(states)
        return (self.onward(states) if columns is None else torch.mm(states, columns)).to(self.dtype)

    def add_to(self, total: torch.Tensor, states: torch.Tensor) -> None:
        """Add `states @ weight.T` to `total`, in the type of `total`."""
        states = states.to(self.low)
        columns = self.by_columns(states)
        if columns is None:
            total += self.onward(states)
        else:
            add_product(total, states, columns)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the states."""
        return self.back(gradient.to(self.low)).to(self.dtype)

    def weight_gradient(self, gradients: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """
        Return the gradient of the weight from gradients `(.., out_features)` and inputs `(.., in_features)` of all
        steps.
        """
        gradients, inputs = (each.flatten(0, -2).to(self.low) for each in (gradients, inputs))
        return transposed_product(gradients, inputs).to(self.dtype)
