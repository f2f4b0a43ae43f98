"""Quantize models to int8 for faster inference on the CPU."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.user_errors import UserError


KINDS = ("int8",)


def check_quantization(kind: str, device: str | torch.device | None, dtype: torch.dtype | str | None) -> None:
    """
    Check that a model can be quantized.

    Raises:
        UserError: The kind does not exist, or the model would not be on the CPU in float32.
    """
    if kind not in KINDS:
        raise UserError(f"There is no quantization {kind!r}. Remedy: choose one of {', '.join(KINDS)}.")
    if device is not None and torch.device(device).type != "cpu":
        raise UserError(f"int8 is for the CPU here, not for {device}. Remedy: leave --device or --quantization out.")
    if dtype is not None and str(dtype).removeprefix("torch.") != "float32":
        raise UserError(f"int8 and {dtype} exclude each other. Remedy: leave --dtype or --quantization out.")
    if torch.backends.quantized.engine == "none":
        raise UserError("This build of torch has no kernels for int8. Remedy: leave --quantization out.")


def quantize_model(model: PreTrainedModel) -> PreTrainedModel:
    """
    Return a copy of a model with dynamic quantization: linear layers store their weights in int8, each with a scale,
    and convert their inputs to int8 at each call. Embeddings, norms, recurrent cells and attention stay in float32.

    Args:
        model (`PreTrainedModel`): On the CPU; not changed.
    """
    own: Any = copy.deepcopy(model).float()
    # Recurrences read their weights themselves, cell by cell.
    chosen: Any = {name for name, module in own.named_modules() if type(module) is nn.Linear}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao moves to a package of its own
        return torch.ao.quantization.quantize_dynamic(own, chosen, dtype=torch.qint8)
