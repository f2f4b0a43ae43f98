"""Settings file of a folder that a model was exported to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig

from ..._bounded_reading import read_small_text
from ...errors import UserError


# File beside the exported model, with the configuration of the model that it was exported from.
ENGINE_SETTINGS = "recnmt_engine.json"


class ExportSettings(NamedTuple):
    """Contents of the settings file: `"ctranslate2"` or `"onnx"`, and the settings of the model."""

    format: str
    config: dict[str, Any]
    generation_config: GenerationConfig


def is_export(path: str | Path) -> bool:
    """Return whether a folder holds an exported model."""
    return (Path(path) / ENGINE_SETTINGS).is_file()


def read_export_settings(path: str | Path) -> ExportSettings:
    """Read the settings file of an exported model; `UserError` if it is missing or damaged."""
    file = Path(path) / ENGINE_SETTINGS
    try:
        settings = json.loads(read_small_text(file))
        generation_config = GenerationConfig.from_dict(settings["generation_config"])
        return ExportSettings(settings["format"], settings["config"], generation_config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}).", field=file) from error
