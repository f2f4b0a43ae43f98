"""The stages of a run: one model from its start, or a variant's baseline and then the variant."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from ..data.tokenizer_pair import TokenizerPair
from .arguments import baseline_arguments
from .building import build_model
from .checkpoints import newest_checkpoint, steps_of
from .output_folder import BASELINE
from .processes import say
from .recipe import Recipe
from .resuming import recipe_in, stopped_early
from .trainer import TranslationTrainer, TranslationTrainingArguments


@dataclass(frozen=True)
class Stage:
    """
    A part of a run that trains one model. Its steps are counted from the beginning of the run.

    Args:
        folder (`Path`): Gets its checkpoints.
        arguments ([`TranslationTrainingArguments`]): Of its trainer.
        patience (`int`, *optional*): Of early stopping.
        last_step (`int`, *optional*): After which it ends; `None`: as its arguments say.
        baseline (`Path`, *optional*): The last checkpoint of the stage before it, from which it starts.
    """

    folder: Path
    arguments: TranslationTrainingArguments
    patience: int | None = None
    last_step: int | None = None
    baseline: Path | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether it trains the plain model from which another stage starts."""
        return self.last_step is not None


def stages_of(
    recipe: Recipe,
    output_dir: Path,
    arguments: TranslationTrainingArguments,
    patience: int | None,
    use_cpu: bool,
) -> list[Stage]:
    """The stages of a run: one, or a baseline's before it."""
    steps = recipe.training.get("baseline_steps")
    if steps is None:
        return [Stage(output_dir, arguments, patience)]
    folder = output_dir / BASELINE
    first = Stage(folder, baseline_arguments(recipe, folder, use_cpu), last_step=steps)
    return [first, Stage(output_dir, arguments, patience, baseline=folder / f"checkpoint-{steps}")]


def with_whole_steps(recipe: Recipe, output_dir: Path, resume: bool) -> Recipe:
    """
    The recipe with `training.baseline_steps` as a whole number, where it is a share of all steps. A run keeps the
    number that it was started with, also if it is resumed with more steps.
    """
    share = recipe.training.get("baseline_steps")
    if share is None or share >= 1:
        return recipe
    most = recipe.training["max_steps"]
    before = ((recipe_in(output_dir) or {}).get("training") or {}).get("baseline_steps") if resume else None
    steps = before if isinstance(before, int) and 0 < before < most else max(int(share * most), 1)
    say(f"The first {steps} of {most} steps train the baseline.")
    recipe = copy.copy(recipe)
    recipe.training = {**recipe.training, "baseline_steps": steps}
    return recipe


def is_of(checkpoint: Path, stage: Stage) -> bool:
    return checkpoint.parent == stage.folder


def stages_left(stages: list[Stage], checkpoint: Path | None) -> list[Stage]:
    """The stages that a run has before it when it goes on from a checkpoint."""
    is_done = checkpoint is not None and (is_of(checkpoint, stages[-1]) or checkpoint == stages[-1].baseline)
    return stages[-1:] if is_done else stages


def is_from_scratch(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """Whether a variant is trained without the baseline that its paper trains first."""
    has_baseline = recipe.model.init_from or recipe.training.get("baseline_steps")
    return not has_baseline and config.baseline_first is not None and config.baseline() is not None


def stage_model(recipe: Recipe, tokenizers: TokenizerPair, stage: Stage, checkpoint: Path | None) -> PreTrainedModel:
    """The model with which a stage begins; one that goes on from a checkpoint gets its weights from the trainer."""
    if stage.baseline is not None:
        set_seed(stage.arguments.seed)  # whether the stage before it ran just now or in an earlier process
    model: Any = build_model(recipe, tokenizers.source, tokenizers.target, baseline=stage.is_baseline)
    say(f"{type(model).__name__} with {model.num_parameters() / 1e6:.2f}M parameters.")
    start = stage.baseline or recipe.model.init_from
    if checkpoint is None and start is not None:
        say(f"Warm start from {start}: {model.init_from_baseline(start)}.")
    return model


def train_stage(trainer: TranslationTrainer, stage: Stage, checkpoint: Path | None) -> None:
    """Trains to the stage's end, from its start or a checkpoint; the last step has a checkpoint of its own."""
    if checkpoint is not None:
        if trainer.args.should_save:
            trainer.rotate()  # which a killed run may have left undone
        # The Trainer would make one step more before it looks at the limit.
        if steps_of(checkpoint) >= trainer.args.max_steps > 0:
            say(f"{checkpoint.name} has all {trainer.args.max_steps} steps already.")
            return
        if stopped_early(checkpoint, stage.patience):
            say(f"{checkpoint.name} ended the run by early stopping.")
            return
    start = checkpoint or stage.baseline
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    newest = newest_checkpoint(stage.folder)
    if newest is None or steps_of(newest) != trainer.state.global_step:
        trainer._save_checkpoint(trainer.model, None)
