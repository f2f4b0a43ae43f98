"""Weights in oneDNN's order, for faster inference on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.kernels_shared import PackedWeight, allowed, has_wide_matmul, prefers_onednn, setting
from ..models.seq2seq_loading import Seq2SeqPreTrainedModel


def suits_packing() -> bool:
    """Return whether packed weights measured faster on this kind of processor (`RECNMT_FAST_PATHS=1`: on any)."""
    return allowed() and has_wide_matmul() and (prefers_onednn() or setting() == "1")


def pack_weights(model: PreTrainedModel) -> None:
    """
    Let the linear layers of a model on the CPU keep a second copy of their weights in the order that oneDNN's matmuls
    read, for matmuls without gradients in float32 or bfloat16. Weights that change are packed again. A
    [`~recnmt_hf.inference.Translator`] that loads a model calls this itself on processors where it is faster.

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
