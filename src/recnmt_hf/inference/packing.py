"""Weights in oneDNN's order, for faster inference on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedModel

from ..models.kernels_shared import allowed, has_wide_matmul, is_amd, is_plain, setting
from ..models.seq2seq_loading import Seq2SeqPreTrainedModel


# Number of rows for which oneDNN orders a weight, with the same result for all numbers from 4; and the size from which
# a single row, as in greedy search of one sentence, is faster too.
PACKED_ROWS, SMALLEST_FOR_ONE_ROW = 64, 2**20


@functools.cache
def packed_types() -> tuple[torch.dtype, ...]:
    """Return the types that oneDNN takes; bfloat16 needs instructions that some processors lack."""
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,)


def suits_packing() -> bool:
    """Return whether packed weights measured faster on this kind of processor (`RECNMT_FAST_PATHS=1`: on any)."""
    return allowed() and has_wide_matmul() and (is_amd() or setting() == "1")


class PackedWeight:
    """
    The weight of a linear layer in oneDNN's order, for matmuls without gradients in [`packed_types`]. It is made
    when it is first used, and again after each change of the weight.
    """

    def __init__(self) -> None:
        self.content: tuple[Any, ...] = (None, None)

    def suits(self, linear: nn.Linear, states: torch.Tensor) -> bool:
        """Return whether this may compute the layer: nothing trains, casts, observes or replaces its operations."""
        weight: Any = linear._parameters["weight"]
        return (
            type(linear) is nn.Linear
            and not torch.is_grad_enabled()
            and states.dtype == weight.dtype
            and states.dtype in packed_types()
            and type(states) is torch.Tensor
            and type(weight) is nn.Parameter
            and weight.is_cpu
            and states.is_cpu
            and not weight.is_inference()  # it has no version
            and (states.numel() > weight.shape[1] or weight.numel() >= SMALLEST_FOR_ONE_ROW)
            and not (linear._forward_hooks or linear._forward_pre_hooks)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not torch.is_autocast_enabled("cpu")
            and _get_current_dispatch_mode() is None
        )

    def multiply(self, linear: nn.Linear, states: torch.Tensor, activation: Any = None) -> torch.Tensor:
        """Return `activation(states @ weight.T + bias)` of a layer that this suits."""
        weight: Any = linear._parameters["weight"]
        version = (weight.data_ptr(), weight._version)
        packed_version, packed = self.content
        if packed_version != version:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_ROWS)
            self.content = version, packed  # at once, since threads may share a model
        has_relu = is_plain(activation, nn.ReLU)
        fused = "relu" if has_relu else "none"
        # Naming the overload saves the choice among several at each call.
        multiply = torch.ops.mkldnn._linear_pointwise.default
        product = multiply(states, packed, linear._parameters["bias"], fused, [], "")
        return product if activation is None or has_relu else activation(product)

    def __reduce__(self) -> Any:
        return PackedWeight, ()  # a copy of the layer has another weight


def pack_weights(model: PreTrainedModel) -> None:
    """
    Let the linear layers of a model on the CPU keep a second copy of their weights in the order that oneDNN's matmuls
    read, for matmuls without gradients in float32, and in bfloat16 on processors that have instructions for it. Weights
    that change are packed again. A [`~recnmt_hf.inference.Translator`] that loads a model calls this itself on
    processors where it is faster.

    Example:

    ```python
    >>> from recnmt_hf import NMTTransformerConfig, NMTTransformerForConditionalGeneration
    >>> from recnmt_hf.inference import pack_weights
    >>> config = NMTTransformerConfig(vocab_size=100, d_model=32, encoder_attention_heads=2, decoder_attention_heads=2)
    >>> model = NMTTransformerForConditionalGeneration(config).eval()
    >>> pack_weights(model)
    >>> model.generate(model.dummy_inputs["input_ids"], max_new_tokens=5).shape[0]
    3

    ```
    """
    calls_project = isinstance(model, Seq2SeqPreTrainedModel)
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.packed_weight = PackedWeight()
        if not calls_project:
            layer.forward = functools.partial(forward_packed, layer)


def forward_packed(linear: Any, states: torch.Tensor) -> torch.Tensor:
    """Replace the method `forward` of a layer in a model of another package."""
    packed = linear.packed_weight
    return packed.multiply(linear, states) if packed.suits(linear, states) else nn.Linear.forward(linear, states)
