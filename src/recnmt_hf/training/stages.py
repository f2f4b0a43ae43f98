"""The stages of a run: one model from its start, or a variant's baseline and then the variant."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, set_seed

from ..data.tokenizer_pair import TokenizerPair
from .arguments import TranslationTrainingArguments, make_arguments
from .building import baseline_config, generation_config, model_config
from .checkpoints import newest_checkpoint, steps_of
from .output_folder import BASELINE
from .processes import logger
from .recipe import Recipe
from .resuming import recipe_in, stopped_early
from .trainer import TranslationTrainer


@dataclass(frozen=True)
class Stage:
    """
    A part of a run that trains one model. Its steps are counted from the beginning of the run.

    Args:
        folder (`Path`): Folder of its checkpoints.
        arguments ([`TranslationTrainingArguments`]): Arguments of its trainer.
        config (`PreTrainedConfig`): Configuration of its model.
        beams (`int`): Default beam size of its model.
        patience (`int`, *optional*): Patience of early stopping.
        last_step (`int`, *optional*): Step after which it ends; `None`: when its arguments say.
        init_from (`Path` or `str`, *optional*): Trained baseline that initialises its model.
        baseline (`Path`, *optional*): That baseline, if it is the last checkpoint of the stage before.
    """

    folder: Path
    arguments: TranslationTrainingArguments
    config: PreTrainedConfig
    beams: int
    patience: int | None = None
    last_step: int | None = None
    init_from: Path | str | None = None
    baseline: Path | None = None

    @property
    def is_from_scratch(self) -> bool:
        """Whether it trains a variant without the baseline that its paper trains first."""
        config: Any = self.config
        return self.init_from is None and config.baseline_first is not None and config.baseline() is not None


def training_arguments(recipe: Recipe, output_dir: Path, use_cpu: bool | None = None) -> TranslationTrainingArguments:
    """Make the Trainer's arguments of a recipe."""
    settings: dict[str, Any] = {"disable_tqdm": not sys.stderr.isatty(), **recipe.training.trainer_settings()}
    if use_cpu is not None:
        settings["use_cpu"] = use_cpu
    keep = recipe.average.keep_option
    return make_arguments({**settings, keep: max(settings.get(keep, 1), recipe.average.count)}, output_dir)


def stages_of(
    recipe: Recipe, output_dir: Path, arguments: TranslationTrainingArguments, tokenizers: TokenizerPair
) -> list[Stage]:
    """
    Plan the stages of a run: one, or a baseline's before it.

    Raises:
        UserError: The tokenizers do not suit each other or the model.
    """
    config = model_config(recipe.model, tokenizers)
    training = recipe.training
    last = Stage(
        output_dir,
        arguments,
        config,
        recipe.decoding.beams,
        training.early_stopping_patience,
        init_from=recipe.model.init_from,
    )
    if training.baseline_steps is None:
        return [last]
    folder, steps = output_dir / BASELINE, int(training.baseline_steps)
    # No checkpoints of the baseline are averaged.
    settings = {**training.trainer_settings(), "load_best_model_at_end": False}
    settings |= {"disable_tqdm": arguments.disable_tqdm, "use_cpu": arguments.use_cpu}
    first = replace(
        last,
        folder=folder,
        arguments=make_arguments(settings, folder),
        config=baseline_config(config, tokenizers),
        patience=None,
        last_step=steps,
    )
    checkpoint = folder / f"checkpoint-{steps}"
    return [first, replace(last, init_from=checkpoint, baseline=checkpoint)]


def with_whole_steps(recipe: Recipe, output_dir: Path, resume: bool) -> Recipe:
    """
    Return the recipe with `training.baseline_steps` as a whole number, if it is a share of all steps. A resumed run
    keeps the number it was started with, even if it has more steps now.
    """
    share, max_steps = recipe.training.baseline_steps, recipe.training.max_steps
    if share is None or share >= 1:
        return recipe
    earlier = ((recipe_in(output_dir) or {}).get("training") or {}).get("baseline_steps") if resume else None
    steps = max(int(share * max_steps), 1)
    if isinstance(earlier, int) and 0 < earlier < max_steps:
        steps = earlier
    logger.info(f"The first {steps} of {max_steps} steps train the baseline.")
    return recipe.with_baseline_steps(steps)


def is_of(checkpoint: Path, stage: Stage) -> bool:
    """Return whether a checkpoint belongs to a stage."""
    return checkpoint.parent == stage.folder


def stages_left(stages: list[Stage], checkpoint: Path | None) -> list[Stage]:
    """Return the stages that remain when a run resumes from a checkpoint."""
    is_done = checkpoint is not None and (is_of(checkpoint, stages[-1]) or checkpoint == stages[-1].baseline)
    return stages[-1:] if is_done else stages


def validation_decoding(decoding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given decoding options of lengths, which also hold for text generated during training."""
    names = ("max_length_factor", "max_length_extra", "max_source_length", "on_long")
    options = {name: decoding[name] for name in names if name in decoding}
    # A validation sentence that is too long must not end the training.
    return {**options, "on_long": "split"} if options.get("on_long") == "error" else options


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
            trainer.rotate()  # a killed run may not have done so
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
