"""The Trainer's arguments of a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .._values import options_of, shown
from ..models.user_errors import UserError
from .recipe import Recipe, RunSection
from .trainer import TranslationTrainingArguments


def training_arguments(
    recipe: Recipe, output_dir: Path, use_cpu: bool | None = None
) -> tuple[TranslationTrainingArguments, int | None]:
    """The Trainer's arguments, and the patience of early stopping."""
    settings = settings_of(recipe, use_cpu)
    kept = "keep_best" if recipe.average.which == "best" else "keep_last"
    settings[kept] = max(settings.get(kept, 1), recipe.average.count)
    return arguments_of(settings, output_dir), recipe.training.get("early_stopping_patience")


def baseline_arguments(recipe: Recipe, output_dir: Path, use_cpu: bool | None = None) -> TranslationTrainingArguments:
    """The Trainer's arguments for the baseline of a run in two stages, of which no checkpoints are averaged."""
    return arguments_of({**settings_of(recipe, use_cpu), "load_best_model_at_end": False}, output_dir)


def settings_of(recipe: Recipe, use_cpu: bool | None) -> dict[str, Any]:
    """What the recipe says of the Trainer's arguments."""
    own = options_of(RunSection)
    settings = {name: value for name, value in recipe.training.items() if name not in own}
    settings.setdefault("disable_tqdm", not sys.stderr.isatty())
    return settings if use_cpu is None else {**settings, "use_cpu": use_cpu}


def arguments_of(settings: dict[str, Any], output_dir: Path) -> TranslationTrainingArguments:
    try:
        return TranslationTrainingArguments(output_dir=str(output_dir), **settings)
    except UserError as error:
        raise UserError(f"training.{error}") from error
    except Exception as error:  # of whatever transformers calls to make sense of a value
        what = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"{blamed(settings, str(output_dir))}: {what}. Remedy: correct it, or leave it out.") from error


def blamed(settings: dict[str, Any], output_dir: str) -> str:
    """Those fields, with their values, without any one of which the Trainer's arguments can be made."""
    found = []
    for name, value in settings.items():
        try:
            TranslationTrainingArguments(output_dir=output_dir, **{n: v for n, v in settings.items() if n != name})
        except Exception:
            continue
        found.append(f"training.{name}={shown(value)}")
    return ", ".join(found) or "training"
