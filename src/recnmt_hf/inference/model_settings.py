"""Read token ids, length limits, the task of a model and the settings of exported ones."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig
from transformers.utils import cached_file

from .._loading_errors import PLACE_ARGUMENTS, read_small_text
from ..errors import explained


EVIDENCE = "evidence.json"
ENGINE_SETTINGS = "recnmt_engine.json"  # beside an exported model: the configuration of the original


class LengthLimits(NamedTuple):
    """Most source tokens and most new target tokens (control tokens included) that a model has positions for."""

    source: int | None  # None: any number
    target: int | None


def length_limits(config: Any) -> LengthLimits:
    """Return the limits of a model's configuration."""
    limits: dict[str, int | None] = {}
    for name, side in (("source", "encoder"), ("target", "decoder")):
        own, shared = getattr(config, side, None), "max_position_embeddings"  # sides may have their own configuration
        places = [(config, f"max_{side}_position_embeddings"), (config, shared), (own, shared)]
        found = (getattr(*place, None) for place in places)
        limits[name] = next((positions for positions in found if positions is not None), None)
    sides = getattr(config, "sides_with_positions", tuple(limits))  # transformers' own models have both
    source, target = (limit if name in sides else None for name, limit in limits.items())
    return LengthLimits(source, None if target is None else target - 1)


def end_ids(model: Any) -> set[int]:
    """Return the ids of the tokens that end a sentence; none if the model has no such token."""
    end = setting(model, "eos_token_id")
    return set(end) if isinstance(end, (list, tuple)) else {end} - {None}


def start_id(model: Any) -> int:
    """Return the id of the decoder's first input token, by the rule of `generate`."""
    start = setting(model, "decoder_start_token_id")
    return setting(model, "bos_token_id") if start is None else start


def setting(model: Any, name: str) -> Any:
    """Return a generation setting of a model; its configuration may contain those of older releases."""
    value = getattr(model.generation_config, name, None)
    return getattr(model.config, name, None) if value is None else value


@dataclass(frozen=True)
class ModelTask:
    """Task that a model was trained for, as far as its files record it."""

    source_lang: str | None = None  # language code of the source
    summarizes: bool = False  # a whole text is one input: the model writes summaries, or both languages are the same
    target_lang: str | None = None  # language code of the target


def read_model_task(path: str | Path, **kwargs: Any) -> ModelTask:
    """Read the task from `evidence.json` of a folder or model id; a missing or damaged file gives the defaults."""
    try:
        place = {name: kwargs[name] for name in PLACE_ARGUMENTS if name in kwargs}
        evidence = json.loads(read_small_text(str(cached_file(str(path), EVIDENCE, **place))))
        languages = evidence.get("languages") or [None, None]
        source, target = (code if isinstance(code, str) else None for code in languages)
        is_rouge = evidence.get("recipe", {}).get("training", {}).get("text_metric") == "rouge"
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return ModelTask()
    return ModelTask(source, is_rouge or (source is not None and source == target), target)


def is_export(path: str | Path) -> bool:
    """Return whether a folder holds an exported model."""
    return (Path(path) / ENGINE_SETTINGS).is_file()


def read_export_settings(path: str | Path) -> tuple[str, dict[str, Any], GenerationConfig]:
    """Return the format of an exported model (`"ctranslate2"` or `"onnx"`) and the settings of the original."""
    file = Path(path) / ENGINE_SETTINGS
    with explained(f"{file} is damaged", file, (ValueError, KeyError, TypeError)):
        settings = json.loads(read_small_text(file))
        generation_config = GenerationConfig.from_dict(settings["generation_config"])
        return settings["format"], settings["config"], generation_config
