"""A model as another version of the zoo computes it, beside the installed one in one process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..families import FAMILIES
from ..models.user_errors import UserError


def build_other_model(folder: str, model_type: str, model: torch.nn.Module) -> torch.nn.Module:
    """
    The twin of a model, with its configuration and weights, by the model files of another version. These import each
    other by relative names alone, so that they make a package of their own wherever they lie.

    Args:
        folder (`str`): `src/recnmt_hf/models` of the other version.
        model_type (`str`): One of the zoo.
        model (`PreTrainedModel`): Of the installed version.

    Raises:
        UserError: The folder holds no such model, or its weights have other names or shapes.
    """
    if model_type not in FAMILIES:
        raise UserError(f"{model_type!r} is no model of the zoo. Remedy: --against takes model types of the zoo alone.")
    family = FAMILIES[model_type]
    prefix, configuration, modeling = family.prefix, f"configuration_{model_type}", f"modeling_{model_type}"
    if not (Path(folder) / f"{modeling}.py").is_file():
        raise UserError(f"{folder} holds no {modeling}.py. Remedy: name the src/recnmt_hf/models of another version.")
    package = f"recnmt_other_{abs(hash(str(Path(folder).resolve())))}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(Path(folder).resolve())]
    config_class = getattr(importlib.import_module(f"{package}.{configuration}"), f"{prefix}Config")
    model_class = getattr(importlib.import_module(f"{package}.{modeling}"), f"{prefix}ForConditionalGeneration")
    config: Any = model.config
    other = model_class(config_class.from_dict(config.to_dict()))
    try:
        other.load_state_dict(model.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{folder} has another {model_type}: {reason}. Remedy: choose a version with its names."
        ) from error
    return other
