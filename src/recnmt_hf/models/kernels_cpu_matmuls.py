"""
Matmuls on the CPU: oneDNN's for shapes with which they are faster than torch's own. Without gradients, it reads weights
in an order of its own, of which layers keep a second copy while a model generates.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .kernels_shared import CustomGradient, allowed, autocast_dtype, enabled, has_bfloat16, is_plain, on_cpu


ORDINARY = (Tensor, nn.Parameter)
# oneDNN computes a matmul if the left side has so many rows, and rows * elements of the right side reach this number.
FEWEST_ROWS, SMALLEST_MATMUL = 16, 2**21
# The same for a weight in oneDNN's order; several rows need only a weight of this size.
SMALLEST_PACKED_MATMUL = {torch.float32: 2**21, torch.bfloat16: 2**13}
SMALLEST_WEIGHT_FOR_ROWS = 2**18
# Number of rows for which oneDNN orders a weight, with the same result for all numbers from 4.
PACKED_ROWS = 64


@functools.cache
def has_onednn() -> bool:
    """Return whether this build of torch has oneDNN's linear layer."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def onednn_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer by oneDNN; a weight with gaps between its rows is slow to read, so copy it."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        by_columns = weight.stride(0) < weight.stride(1)
        weight = weight.t().contiguous().t() if by_columns else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def takes_onednn(left: Tensor, right: Tensor) -> bool:
    """Return whether a matmul of `left` `(.., k)` with the elements of `right` uses oneDNN."""
    return (
        enabled()
        and type(left) in ORDINARY
        and type(right) in ORDINARY
        and left.dtype == right.dtype == torch.float32
        and left.is_cpu
        and right.is_cpu
        # Shapes are read late, since that makes conditions of a graph.
        and left.numel() >= FEWEST_ROWS * left.shape[-1] > 0
        and left.numel() * right.numel() >= SMALLEST_MATMUL * left.shape[-1]
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and _get_current_dispatch_mode() is None
        and has_onednn()
    )


def fast_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` of `(m, k)` and `(k, n)` in any memory order; no gradient is recorded."""
    if takes_onednn(left, right):
        return onednn_linear(left, right.t(), None)
    return torch.mm(left, right)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, in the type of `total`; see [`fast_product`]."""
    if total.dtype == left.dtype and not takes_onednn(left, right):
        total.addmm_(left, right)
    else:
        total += fast_product(left, right)


class OneDNNLinear(CustomGradient):
    """`states @ weight.T + bias` with its gradients by oneDNN; second derivatives use torch's own matmuls."""

    @staticmethod
    def forward(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return onednn_linear(states, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        states, weight = ctx.saved_tensors
        multiply = torch.mm if torch.is_grad_enabled() else fast_product
        grad_states = multiply(gradient, weight) if ctx.needs_input_grad[0] else None
        grad_weight = multiply(gradient.t(), states) if ctx.needs_input_grad[1] else None
        return grad_states, grad_weight, gradient.sum(dim=0) if ctx.needs_input_grad[2] else None


def fast_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, with its gradients, by oneDNN where that is faster."""
    if not takes_onednn(states, weight):
        return nn.functional.linear(states, weight, bias)
    flat = states.reshape(-1, states.shape[-1])
    multiply = OneDNNLinear.apply if torch.is_grad_enabled() else onednn_linear
    return multiply(flat, weight, bias).view(*states.shape[:-1], weight.shape[0])


def project(layer: nn.Module, states: Tensor, activation: Any = None) -> Tensor:
    """Apply a linear layer to states `(.., in_features)` by the fastest matmul, then an activation; call adapters."""
    packed = None if torch.compiler.is_compiling() else layer.__dict__.get("packed_weight")
    if packed is not None and packed.suits(layer, states):
        return packed.multiply(layer, states, activation)
    if type(layer) is nn.Linear and takes_onednn(states, layer.weight) and is_plain(layer, nn.Linear):
        projected = fast_linear(states, layer.weight, layer.bias)
    else:
        projected = layer(states)
    return projected if activation is None else activation(projected)


def project_together(layers: Sequence[nn.Linear], states: Tensor) -> Sequence[Tensor]:
    """Apply linear layers of one width to the same states; where launches cost, in training by one matmul."""
    joins = torch.is_grad_enabled() and not on_cpu(states) and enabled()
    if not joins or not all(is_plain(layer, nn.Linear) for layer in layers):
        return [project(layer, states) for layer in layers]
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    return nn.functional.linear(states, weight, bias).chunk(len(layers), dim=-1)


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left.T @ right`, the form of a weight's gradient; oneDNN reads rows, so it gets a copy of one side."""
    if not takes_onednn(left.t(), right):
        return torch.mm(left.t(), right)
    if left.shape[1] <= right.shape[1]:  # copy the smaller side
        return onednn_linear(left.t().contiguous(), right.t(), None)
    return onednn_linear(right.t().contiguous(), left.t(), None).t().contiguous()


class StepMatmuls:
    """`states @ weight.T + bias` for the steps of a recurrence in autocast's type, without gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias, self.dtype = bias, weight.dtype
        self.low = autocast_dtype(weight.device) or weight.dtype
        self.weight = weight.to(self.low)
        self.columns: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        if self.low == self.dtype:
            return fast_linear(states, self.weight, self.bias)
        mapped = fast_linear(states.to(self.low), self.weight)
        return mapped.to(self.dtype) if self.bias is None else mapped + self.bias

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


class PackedWeight:
    """A linear layer's weight in oneDNN's order, for matmuls without gradients; made again after each change."""

    def __init__(self) -> None:
        self.content: tuple[Any, ...] = (None, None)

    def suits(self, layer: nn.Linear, states: Tensor) -> bool:
        """Return whether this is faster, and nothing trains, casts, observes or replaces the layer's operations."""
        weight: Any = layer._parameters["weight"]
        size = weight.numel()
        return (
            type(layer) is nn.Linear
            and not torch.is_grad_enabled()
            and (
                states.numel() * size >= SMALLEST_PACKED_MATMUL.get(states.dtype, 2**63) * weight.shape[1]
                or (size >= SMALLEST_WEIGHT_FOR_ROWS and states.numel() > weight.shape[1])
            )
            and states.dtype == weight.dtype
            and (states.dtype == torch.float32 or (states.dtype == torch.bfloat16 and has_bfloat16()))
            and type(states) is Tensor
            and type(weight) is nn.Parameter
            and weight.is_cpu
            and states.is_cpu
            and not weight.is_inference()  # it has no version
            and not (layer._forward_hooks or layer._forward_pre_hooks)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not torch.is_autocast_enabled("cpu")
            and _get_current_dispatch_mode() is None
        )

    def multiply(self, layer: nn.Linear, states: Tensor, activation: Any = None) -> Tensor:
        """Return `activation(states @ weight.T + bias)` of a layer that this suits."""
        weight: Any = layer._parameters["weight"]
        version = (weight.data_ptr(), weight._version)
        packed_version, packed = self.content
        if packed_version != version:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_ROWS)
            self.content = version, packed  # at once, since threads may share a model
        has_relu = is_plain(activation, nn.ReLU)
        fused = "relu" if has_relu else "none"
        # Naming the overload saves the choice among several at each call.
        multiply = torch.ops.mkldnn._linear_pointwise.default
        projected = multiply(states, packed, layer._parameters["bias"], fused, [], "")
        return projected if activation is None or has_relu else activation(projected)

    def __reduce__(self) -> Any:
        return PackedWeight, ()  # a copy of the layer has another weight


def linear_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers of a model that a [`PackedWeight`] could compute."""
    return [module for module in model.modules() if type(module) is nn.Linear]


def pack_weights(model: nn.Module) -> None:
    """Let the linear layers of a model use a [`PackedWeight`], which takes as much memory as their weights."""
    if allowed() and has_onednn():
        for layer in linear_layers(model):
            layer.__dict__.setdefault("packed_weight", PackedWeight())


def unpack_weights(model: nn.Module) -> None:
    """Free the memory of [`pack_weights`]."""
    for layer in linear_layers(model):
        layer.__dict__.pop("packed_weight", None)
