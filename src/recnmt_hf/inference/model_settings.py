"""Read token ids, length limits and the task of a model from its configuration and its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import hf_hub_download

from .._bounded_reading import read_small_text
from .._loading_errors import looks_local
from ..errors import UserError


EVIDENCE = "evidence.json"


class LengthLimits(NamedTuple):
    """Most source tokens and most new target tokens (control tokens included) that a model has positions for."""

    source: int | None  # None: any number
    target: int | None


def length_limits(config: Any) -> LengthLimits:
    """Return the limits of a model's configuration."""
    sides = getattr(config, "sides_with_positions", ("source", "target"))  # transformers' own models have both
    source, target = (number_of_positions(config, side) for side in ("encoder", "decoder"))
    return LengthLimits(
        source if "source" in sides else None, target - 1 if "target" in sides and target is not None else None
    )


def number_of_positions(config: Any, side: str) -> int | None:
    """Return the number of positions of the encoder or decoder, which may have a configuration of its own."""
    for settings, name in (
        (config, f"max_{side}_position_embeddings"),
        (config, "max_position_embeddings"),
        (getattr(config, side, None), "max_position_embeddings"),
    ):
        positions = getattr(settings, name, None)
        if positions is not None:
            return positions
    return None


def end_ids(model: Any) -> set[int]:
    """Return the ids of the tokens that end a sentence; none if the model has no such token."""
    end = setting(model, "eos_token_id")
    return set(end) if isinstance(end, (list, tuple)) else {end} - {None}


def start_id(model: Any) -> int:
    """Return the id of the decoder's first input token, by the rule of `generate`; `UserError` if there is none."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        if (start := setting(model, name)) is not None:
            return start
    raise UserError("The model has no decoder_start_token_id in generation_config.json. Set it or target_lang.")


def complete_token_ids(model: Any) -> None:
    """Take from a model's configuration the token ids that its `generation_config.json` lacks."""
    for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, setting(model, name))


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
    """
    Read the task from the `evidence.json` of a folder or model id; `kwargs` are those of `from_pretrained`. A missing
    or damaged file gives the defaults.
    """
    try:
        if looks_local(str(path)):
            file = Path(path) / EVIDENCE
        else:
            known = {"revision", "token", "cache_dir", "local_files_only"}
            file = Path(hf_hub_download(str(path), EVIDENCE, **{k: v for k, v in kwargs.items() if k in known}))
        evidence = json.loads(read_small_text(file))
        languages = evidence.get("languages") or [None, None]
        is_rouge = evidence.get("recipe", {}).get("training", {}).get("text_metric") == "rouge"
        source_lang, target_lang = (code if isinstance(code, str) else None for code in languages)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return ModelTask()
    is_monolingual = source_lang is not None and source_lang == target_lang
    return ModelTask(source_lang, is_rouge or is_monolingual, target_lang)
