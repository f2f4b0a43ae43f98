"""Weights in oneDNN's order, for faster inference on the CPU with models of any package."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models import kernels_cpu_matmuls
from ..models.seq2seq_loading import Seq2SeqPreTrainedModel


def pack_weights(model: PreTrainedModel) -> None:
    """
    Let the linear layers of a model on the CPU keep a second copy of their weights in the order that oneDNN's matmuls
    read, for matmuls without gradients in float32, and in bfloat16 on processors that have instructions for it. Weights
    that change are packed again. Models of this package do this themselves in `generate`, and a
    [`~recnmt_hf.inference.Translator`] for each model that it loads.
    """
    kernels_cpu_matmuls.pack_weights(model)
    if not isinstance(model, Seq2SeqPreTrainedModel):
        for layer in kernels_cpu_matmuls.linear_layers(model):
            layer.forward = functools.partial(forward_packed, layer)


def forward_packed(layer: Any, states: torch.Tensor) -> torch.Tensor:
    """Replace the method `forward` of a layer in a model of another package."""
    packed = layer.__dict__.get("packed_weight")
    if packed is not None and packed.suits(layer, states):
        return packed.multiply(layer, states)
    return nn.Linear.forward(layer, states)
