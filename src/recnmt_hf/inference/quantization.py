"""Quantize models to int8 for faster inference on the CPU."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from .._values import check_value
from ..errors import UserError
from ..models.kernels_shared import is_plain


def check_quantization(kind: str, device: str | torch.device | None, dtype: torch.dtype | str | None) -> None:
    """Raise `UserError` unless the kind exists and the model would be on the CPU in float32."""
    check_value("quantization", kind, Literal["int8"])
    for name, value, needed in (("device", device, "cpu"), ("dtype", dtype, "float32")):
        if value is not None and str(value).removeprefix("torch.").partition(":")[0] != needed:
            raise UserError("quantization.on_cpu_in_float32", field=name, value=str(value))
    if torch.backends.quantized.engine == "none":
        raise UserError("quantization.no_kernels")


@functools.cache
def has_wide_sums() -> bool:
    """Return whether the processor adds products of 8-bit numbers in 32 bits, where 16 could overflow."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("avx512_vnni", False)


class Int8Product:
    """Computes an [`Int8Linear`] without its call as a module, with a ReLU in the same operator, for `project`."""

    def suits(self, linear: Int8Linear, states: torch.Tensor) -> bool:
        return not (linear._forward_hooks or linear._forward_pre_hooks)

    def multiply(self, linear: Int8Linear, states: torch.Tensor, activation: Any = None) -> torch.Tensor:
        weight: Any = linear._packed_params
        has_relu = is_plain(activation, nn.ReLU)
        operator = torch.ops.quantized.linear_relu_dynamic if has_relu else torch.ops.quantized.linear_dynamic
        # Naming the overload saves the choice among several at each call.
        product = operator.default(states, weight._packed_params, not has_wide_sums())
        return product if activation is None or has_relu else activation(product)


class Int8Linear(torch.ao.nn.quantized.dynamic.Linear):
    """A linear layer with weights in int8 whose inputs have all 256 levels, where torch's own layer leaves half out."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.packed_weight = Int8Product()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.packed_weight.multiply(self, states)


def layers_read(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers that a module's attribute `read_layers` names: its fast path reads their weights."""
    parts = [module.get_submodule(name) for name in getattr(module, "read_layers", ())]
    return [layer for part in parts for layer in (part if isinstance(part, nn.ModuleList) else [part])]


def quantize_model(model: PreTrainedModel) -> PreTrainedModel:
    """
    Return a copy of a model with dynamic quantization: linear layers, and what a step of RNMT's decoder multiplies by,
    store their weights in int8, each with a scale, and convert their inputs to int8 at each call. Embeddings, norms,
    other recurrent cells and attention stay in float32, and so do layers whose weights a fast path reads, because GRET
    and RNMT lose more without that path than int8 gains.
    """
    copied: Any = copy.deepcopy(model).float()
    for module in list(copied.modules()):
        if hasattr(module, "add_step_layers"):
            module.add_step_layers()
    read = {layer for module in copied.modules() for layer in layers_read(module)}
    # Recurrences read their weights themselves, cell by cell.
    linear: Any = {name for name, one in copied.named_modules() if type(one) is nn.Linear and one not in read}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao moves to a package of its own
        return torch.ao.quantization.quantize_dynamic(copied, linear, mapping={nn.Linear: Int8Linear})
