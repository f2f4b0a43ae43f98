"""Read from a model's folder which task it was trained for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from .._bounded_reading import read_small_text
from .._loading_errors import looks_local


EVIDENCE = "evidence.json"


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
