"""Devices, and what makes the CPU faster: packed weights and memory that is kept."""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..models import kernels_cpu_matmuls
from ..models.seq2seq_loading import Seq2SeqPreTrainedModel


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return a device, by default CUDA if available, else the CPU; raise `UserError` if it is not available."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise UserError(f"{device} cannot be used: {str(error).splitlines()[0]}", field="device") from error
    return torch.device(device)


def keep_freed_memory() -> None:
    """
    Let glibc keep the large blocks that steps of training and decoding free and allocate again.

    By default glibc returns them to the system, and the kernel clears their pages each time, which takes a quarter of a
    small model's training step on the CPU and up to a sixth of the time of translating in int8. Has no effect with
    other allocators.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)


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
