"""Models with weights of whole numbers, for processors that multiply these faster."""

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
    Raises `UserError` where a model cannot be quantized so: there is no such kind, or it is not on the CPU in float32.
    """
    if kind not in KINDS:
        raise UserError(f"There is no quantization {kind!r}. Remedy: choose one of {', '.join(KINDS)}.")
    if device is not None and torch.device(device).type != "cpu":
        raise UserError(f"int8 is for the CPU here, not for {device}. Remedy: leave --device or --quantization out.")
    if dtype is not None and str(dtype).removeprefix("torch.") != "float32":
        raise UserError(f"int8 and {dtype} exclude each other. Remedy: leave --dtype or --quantization out.")
    if torch.backends.quantized.engine == "none":
        raise UserError("This build of torch has no kernels for int8. Remedy: leave --quantization out.")


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """
    A copy of a model whose linear layers hold their weights in int8, with a scale for each, and turn their inputs into
    int8 at each call (dynamic quantization). Embeddings, norms, recurrent cells and attention stay in float32.

    Args:
        model (`PreTrainedModel`): On the CPU; it stays as it is.
    """
    own: Any = copy.deepcopy(model).float()
    # Recurrences read their weights themselves, cell by cell.
    chosen: Any = {name for name, module in own.named_modules() if type(module) is nn.Linear}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao moves to a package of its own
        return torch.ao.quantization.quantize_dynamic(own, chosen, dtype=torch.qint8)
