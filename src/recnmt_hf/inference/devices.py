"""Devices, and what makes the CPU faster: packed weights, memory that is kept, and weights in int8."""

from __future__ import annotations

import copy
import ctypes
import functools
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import explained
from ..models import kernels_cpu_matmuls
from ..models.kernels_shared import allowed, is_plain
from ..models.recurrent_layers import MaskedRNN, RecurrentLayer
from ..models.seq2seq_loading import Seq2SeqPreTrainedModel


Device = str | torch.device | None


def resolve_device(device: Device = None) -> torch.device:
    """Return a device, by default CUDA if available, else the CPU; raise `UserError` if it is not available."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with explained(f"{device} cannot be used", "device"):
        torch.empty(1, device=device).item()
    return torch.device(device)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: getting it anew takes a quarter of a small model's training step."""
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)


def pack_weights(model: PreTrainedModel) -> None:
    """
    Let the linear layers of a model on the CPU keep a second copy of their weights in the order that oneDNN's matmuls
    read, for matmuls without gradients in float32, and in bfloat16 on processors that have instructions for it. Weights
    that change are packed again. `generate` of models of this package and [`~recnmt_hf.inference.Translator`] do this.
    """
    kernels_cpu_matmuls.pack_weights(model)
    if not isinstance(model, Seq2SeqPreTrainedModel):
        for layer in kernels_cpu_matmuls.linear_layers(model):
            layer.forward = functools.partial(forward_packed, layer)


def forward_packed(layer: Any, states: torch.Tensor) -> torch.Tensor:
    """Replace the method `forward` of a layer in a model of another package."""
    packed = layer.__dict__.get("packed_weight")
    is_packed = packed is not None and packed.suits(layer, states)
    return packed.multiply(layer, states) if is_packed else nn.Linear.forward(layer, states)


@functools.cache
def has_wide_sums() -> bool:
    """Return whether the processor adds products of 8-bit numbers in 32 bits, where 16 could overflow."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("avx512_vnni", False)


# Layers of at least so many outputs, such as that of the vocabulary, are faster with oneDNN from this number of rows.
WIDE_LAYER, MANY_ROWS = 4000, 32


@functools.cache
def has_wide_product() -> bool:
    """Return whether this build of torch has oneDNN's matmul in int8, and the processor its sums."""
    has_operators = all(hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise"))
    return has_wide_sums() and kernels_cpu_matmuls.has_onednn() and has_operators


class Int8Product:
    """Computes an [`Int8Linear`] without its call as a module, with a ReLU in the same operator, for `project`."""

    def __init__(self) -> None:
        self.wide: Any = None  # the weight in oneDNN's order, a second copy; scales, zeros and bias of the rows

    def suits(self, linear: Int8Linear, states: torch.Tensor) -> bool:
        return not (linear._forward_hooks or linear._forward_pre_hooks)

    def multiply_wide(self, linear: Int8Linear, states: torch.Tensor) -> torch.Tensor:
        """Return the product of `(.., in_features)` by the rule of torch's dynamic layers."""
        if self.wide is None:
            weight = linear.weight()
            scales = weight.q_per_channel_scales().float()
            packed = torch.ops.onednn.qlinear_prepack(weight.int_repr(), None)
            self.wide = packed, scales, torch.zeros(scales.shape, dtype=torch.int32), linear.bias()
        scale, zero = torch._choose_qparams_per_tensor(states, False)
        rows = torch.quantize_per_tensor(states.flatten(0, -2), scale, zero, torch.quint8).int_repr()
        settings: Any = (1.0, 0, torch.float32, "none", [], "")
        product = torch.ops.onednn.qlinear_pointwise.default(rows, scale, zero, *self.wide, *settings)
        return product.view(*states.shape[:-1], -1)

    def multiply(self, linear: Int8Linear, states: torch.Tensor, activation: Any = None) -> torch.Tensor:
        is_wide = linear.out_features >= WIDE_LAYER and states.numel() >= MANY_ROWS * linear.in_features
        if is_wide and allowed() and has_wide_product():
            product = self.multiply_wide(linear, states)
            return product if activation is None else activation(product)
        weight: Any = linear._packed_params
        has_relu = is_plain(activation, nn.ReLU)
        operator = torch.ops.quantized.linear_relu_dynamic if has_relu else torch.ops.quantized.linear_dynamic
        # Naming the overload saves the choice among several at each call.
        product = operator.default(states, weight._packed_params, not has_wide_sums())
        return product if activation is None or has_relu else activation(product)

    def __reduce__(self) -> Any:
        return Int8Product, ()  # a copy orders its weight itself


class Int8Linear(torch.ao.nn.quantized.dynamic.Linear):
    """A linear layer with weights in int8 whose inputs have all 256 levels, where torch's own layer leaves half out."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.packed_weight = Int8Product()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.packed_weight.multiply(self, states)


def linear_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return a linear layer with this weight and bias."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    values = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    linear.load_state_dict({key: value.detach() for key, value in values.items()}, assign=True)
    return linear


def add_step_layers(recurrence: Any) -> None:
    """Add linear layers with the weights that the steps of RNMT's decoder read."""
    attention, cell, context = recurrence.attention, recurrence.context_cell, recurrence.readout.context_proj
    width, annotation = attention.q_proj.in_features, context.in_features
    parts = {
        "query": (attention.q_proj.weight, None),
        "context": (cell.weight_hh, cell.bias_hh),
        "source_keys": (attention.k_proj.weight, attention.k_proj.bias),
        "source_values": (torch.cat([cell.weight_ih[:, -annotation:], context.weight]), None),
    }
    if recurrence.is_conditional:
        first = recurrence.word_cell
        parts |= {"words": (first.weight_ih, first.bias_ih), "state": (first.weight_hh, first.bias_hh)}
    else:
        parts["words"] = cell.weight_ih[:, :width].contiguous(), None
    recurrence.step_layers = nn.ModuleDict({name: linear_layer(*values) for name, values in parts.items()})


class Int8RecurrentLayer(nn.Module):
    """A [`RecurrentLayer`] whose input matmul is in int8. In the recurrent one errors add up: RNMT lost 0.7 BLEU."""

    def __init__(self, layer: RecurrentLayer):
        super().__init__()
        self.layer, self.inputs = layer, linear_layer(layer.weight_ih_l0, layer.bias_ih_l0)
        for name in ("weight_ih_l0", "bias_ih_l0"):
            layer.register_parameter(name, None)

    def forward(self, inputs: torch.Tensor, initial: torch.Tensor | None = None) -> torch.Tensor:
        state = inputs.new_zeros(inputs.shape[0], self.layer.hidden_size) if initial is None else initial
        return self.layer.run_steps(self.inputs(inputs.transpose(0, 1)), [state])[0].transpose(0, 1)


def quantize_model(model: PreTrainedModel) -> PreTrainedModel:
    """
    Return a copy of a model with dynamic quantization: weights in int8 with a scale for each row, inputs converted to
    int8 at each call. It covers linear layers, all matmuls of RNMT's decoder, and the input matmuls of GRUs, RNNs and
    ON-LSTMs. Embeddings, norms, attention, LSTMs and other recurrent matmuls stay in float32, and so do layers whose
    weights a fast path reads, because GRET and RNMT lose more without that path than int8 gains.
    """
    copied: Any = copy.deepcopy(model).float()
    for module in list(copied.modules()):
        if hasattr(module, "step_layers"):
            add_step_layers(module)
        if isinstance(module, MaskedRNN):
            sides = ("forward_rnn", "backward_rnn")
            layers: dict[str, Any] = {name: layer for name in sides if (layer := getattr(module, name)) is not None}
            if hasattr(module, "input_layers"):
                module.input_layers = nn.ModuleList([linear_layer(one.weight_ih, one.bias) for one in layers.values()])
            for name, layer in layers.items():
                if type(layer) is RecurrentLayer and layer.cell != "lstm":  # an LSTM is one fused kernel
                    setattr(module, name, Int8RecurrentLayer(layer))
    # A module's attribute `read_layers` names the linear layers whose weights its fast path reads.
    parts = [one.get_submodule(name) for one in copied.modules() for name in getattr(one, "read_layers", ())]
    read = {layer for part in parts for layer in part.modules()}
    # Recurrences read their weights themselves, cell by cell.
    names = [name for name, one in copied.named_modules() if type(one) is nn.Linear and one not in read]
    linear: Any = dict.fromkeys(names, torch.ao.quantization.per_channel_dynamic_qconfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao moves to a package of its own
        return torch.ao.quantization.quantize_dynamic(copied, linear, mapping={nn.Linear: Int8Linear})
