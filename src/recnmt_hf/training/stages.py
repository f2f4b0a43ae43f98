"""Stages of a run: one model, or first the baseline of a variant and then the variant."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, set_seed

from ..data.tokenizer_pair import TokenizerPair
from .arguments import TranslationTrainingArguments
from .building import generation_config, stage_configs
from .checkpoints import newest_checkpoint, steps_of
from .processes import logger
from .recipe import Recipe
from .resuming import stopped_early
from .trainer import TranslationTrainer, rotate_checkpoints


@dataclass(frozen=True)
class Stage:
    """
    A part of a run that trains one model. Steps count from the beginning of the run.

    Args:
        arguments ([`TranslationTrainingArguments`]): Arguments of its trainer.
        config (`PreTrainedConfig`): Configuration of its model.
        beams (`int`): Default beam size of its model.
        patience (`int`, *optional*): Patience of early stopping.
        last_step (`int`, *optional*): Step after which it ends; `None`: at the end of its arguments.
        init_from (`Path` or `str`, *optional*): Trained baseline that initialises its model.
        baseline (`Path`, *optional*): That baseline, if it is the last checkpoint of the stage before.
    """

    arguments: TranslationTrainingArguments
    config: PreTrainedConfig
    beams: int
    patience: int | None = None
    last_step: int | None = None
    init_from: Path | str | None = None
    baseline: Path | None = None

    @property
    def folder(self) -> Path:
        """Folder of its checkpoints."""
        return self.arguments.folder

    @property
    def is_from_scratch(self) -> bool:
        """Whether it trains a variant without the baseline that its paper trains first."""
        config: Any = self.config
        return self.init_from is None and config.baseline_first is not None and config.baseline() is not None


def stages_of(
    recipe: Recipe, arguments: Sequence[TranslationTrainingArguments], tokenizers: TokenizerPair
) -> list[Stage]:
    """Plan the stages of a run, one or two, with the arguments of each. `UserError` if the tokenizers do not match."""
    steps, patience = recipe.training.baseline_steps, recipe.training.early_stopping_patience
    model, beams = recipe.model, recipe.decoding.beams
    configs = stage_configs(model, tokenizers, steps is not None)
    if steps is None:
        return [Stage(arguments[-1], configs[-1], beams, patience, init_from=model.init_from)]
    first = Stage(arguments[0], configs[0], beams, last_step=int(steps))
    checkpoint = first.folder / f"checkpoint-{int(steps)}"
    return [first, Stage(arguments[-1], configs[-1], beams, patience, init_from=checkpoint, baseline=checkpoint)]


def is_of(checkpoint: Path, stage: Stage) -> bool:
    """Whether a checkpoint belongs to a stage."""
    return checkpoint.parent == stage.folder


def stages_left(stages: list[Stage], checkpoint: Path | None) -> list[Stage]:
    """Return the stages that remain when a run resumes from a checkpoint."""
    is_done = checkpoint is not None and (is_of(checkpoint, stages[-1]) or checkpoint == stages[-1].baseline)
    return stages[-1:] if is_done else stages


def stage_model(stage: Stage, checkpoint: Path | None) -> PreTrainedModel:
    """Build the model of a stage. If the stage resumes from a checkpoint, the trainer loads its weights."""
    if stage.baseline is not None:
        set_seed(stage.arguments.seed)  # the same whether or not the stage before ran in this process
    model: Any = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(stage.config))
    model.generation_config = generation_config(stage.config, stage.beams)
    logger.info(f"{type(model).__name__} with {model.num_parameters() / 1e6:.2f}M parameters.")
    if checkpoint is None and stage.init_from is not None:
        logger.info(f"Warm start from {stage.init_from}: {model.init_from_baseline(stage.init_from)}.")
    return model


def train_stage(trainer: TranslationTrainer, stage: Stage, checkpoint: Path | None) -> None:
    """Train to the stage's end, from its start or a checkpoint, and save a checkpoint of the last step."""
    if checkpoint is not None:
        if trainer.args.should_save:
            rotate_checkpoints(trainer.args)  # a killed run may not have done so
        # The Trainer would make one more step before it checks the limit.
        if steps_of(checkpoint) >= trainer.args.max_steps > 0:
            logger.info(f"{checkpoint.name} has all {trainer.args.max_steps} steps already.")
            return
        if stopped_early(checkpoint, stage.patience):
            logger.info(f"{checkpoint.name} ended the run by early stopping.")
            return
    start = checkpoint or stage.baseline
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    newest = newest_checkpoint(stage.folder)
    if newest is None or steps_of(newest) != trainer.state.global_step:
        trainer._save_checkpoint(trainer.model, None)
