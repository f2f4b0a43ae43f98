"""Settings file of a folder that a model was exported to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..._loading_errors import shorten
from ...models.user_errors import UserError


# File beside the exported model, with the configuration of the model that it was exported from.
ENGINE_SETTINGS = "recnmt_engine.json"


@dataclass(frozen=True)
class ExportSettings:
    """
    Contents of the settings file.

    Attributes:
        format (`str`): `"ctranslate2"` or `"onnx"`.
        config (`dict`): Configuration of the model.
        generation_config (`GenerationConfig`): Generation settings of the model.
    """

    format: str
    config: dict[str, Any]
    generation_config: GenerationConfig


def is_export(path: str | Path) -> bool:
    """Return whether a folder holds an exported model."""
    return (Path(path) / ENGINE_SETTINGS).is_file()


def read_export_settings(path: str | Path) -> ExportSettings:
    """
    Read the settings file of an exported model.

    Raises:
        UserError: The file is missing or damaged.
    """
    file = Path(path) / ENGINE_SETTINGS
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings["config"], dict) or "model_type" not in settings["config"]:
            raise ValueError("config is not that of a model")
        generation_config = GenerationConfig.from_dict(settings["generation_config"])
        return ExportSettings(str(settings["format"]), settings["config"], generation_config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({shorten(str(error))}). Remedy: export the model again.") from error


def cannot_be_inspected(name: str, format_name: str) -> UserError:
    """Return the error for reading attentions, states or weights of an exported model."""
    return UserError(
        f"{name} was exported to {format_name}, which gives no alignments, attentions or states: it translates and "
        "scores only. Remedy: use the model that it was exported from."
    )
