"""A training run from a recipe: tokenizers, data, one or two stages of training, final model."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, set_seed

from ..data.tokenizer_pair import TokenizerPair
from .checkpoints import newest_checkpoint
from .checks import check_before_training, without_memory
from .finishing import finish
from .inputs import prepare_inputs
from .output_folder import (
    BASELINE,
    FINAL,
    RECIPE,
    check_free_space,
    claim_output,
    locked,
    refused_without_trace,
    sudden_ends_explained,
)
from .processes import Processes, keep_freed_memory, logger, progress_bars_on_terminals, settings_of_one_run
from .recipe import Recipe, check_planned_steps
from .resuming import RunRecord, check_config, check_record, checkpoint_to_resume, digest_of, earlier_baseline_steps
from .stages import Stage, is_of, stage_model, stages_left, stages_of, train_stage
from .trainer import TranslationTrainer, rotate_checkpoints


__all__ = ["keep_freed_memory", "train"]


@settings_of_one_run()
def train(recipe: Recipe, output_dir: str | Path, resume: bool = False, overwrite: bool = False) -> Path:
    """
    Train a model. A killed run resumes from its newest intact checkpoint; on CPU the result is bit-identical to an
    uninterrupted run.

    Args:
        recipe ([`Recipe`]): The recipe.
        output_dir (`str` or `Path`): Folder of the checkpoints, and of the final model in its subfolder `model`. With
            `training.baseline_steps` its subfolder `baseline` has the checkpoints of the first stage.
        resume (`bool`, *optional*, defaults to `False`): Resume from the newest intact checkpoint, if there is one.
        overwrite (`bool`, *optional*, defaults to `False`): Delete an earlier run in the folder.

    Returns:
        The folder of the final model.

    Raises:
        FileExistsError: The folder holds an earlier run, and neither `resume` nor `overwrite` is set.
        UserError, FileNotFoundError: The recipe or data is wrong or differs from that of the resumed run, another run
            writes into the folder, or the disk is full.
    """
    output_dir = Path(output_dir)
    recipe.check()
    training = recipe.training
    use_cpu = training.use_cpu if training.use_cpu is not None else not torch.accelerator.is_available()
    if use_cpu:
        keep_freed_memory()
    processes = Processes(use_cpu, training.ddp_timeout, training.ddp_backend)
    recipe = recipe.with_whole_steps(earlier_baseline_steps(output_dir) if resume else None)
    steps = recipe.training.baseline_steps
    if steps != training.baseline_steps:
        logger.info(f"The first {steps} of {training.max_steps} steps train the baseline.")
    stage_arguments = recipe.stage_arguments(output_dir, output_dir / BASELINE, use_cpu)
    arguments = stage_arguments[-1]
    check_before_training(recipe, arguments, from_checkpoint=resume and newest_checkpoint(output_dir) is not None)
    with ExitStack() as run_context:
        before_training = ExitStack()

        def claim() -> Path | None:
            killed = run_context.enter_context(locked(output_dir))
            run_context.enter_context(before_training)  # ends before the lock does
            if claim_output(output_dir, resume, overwrite, killed):
                before_training.enter_context(refused_without_trace(output_dir))
            return checkpoint_to_resume(recipe, output_dir) if resume else None

        checkpoint = processes.on_main(claim)
        run_context.enter_context(sudden_ends_explained(output_dir))
        run_context.enter_context(progress_bars_on_terminals(processes.is_main))
        set_seed(arguments.seed)

        def prepare() -> tuple[TokenizerPair, Dataset, Dataset, list[Stage]]:
            inputs = prepare_inputs(recipe, output_dir, checkpoint)
            return *inputs, stages_of(recipe, stage_arguments, inputs[0])

        tokenizers, train_data, validation_data, stages = processes.main_first(prepare)
        count = f"{processes.count} process" + "es" * (processes.count > 1)
        pairs = f"{len(train_data)} training pairs, {len(validation_data)} validation pairs"
        logger.info(f"{pairs}; {count} on {processes.state.device}.")
        remaining = stages_left(stages, checkpoint)

        def check_and_record() -> None:
            record = RunRecord(
                processes.count,
                arguments.gradient_accumulation_steps,
                digest_of(train_data),
                len(train_data),
                digest_of(validation_data),
                len(validation_data),
                processes.state.device.type,
            )
            if checkpoint is not None:
                check_config(next(stage.config for stage in stages if is_of(checkpoint, stage)), checkpoint)
                for change in check_record(record, recipe.compares_evaluations, output_dir, checkpoint):
                    logger.info(change)
                for stage in stages[: -len(remaining)]:
                    if newest_checkpoint(stage.folder) is not None:
                        rotate_checkpoints(stage.arguments)  # a killed run may not have done so
            check_free_space(output_dir, [(without_memory(stage.config), stage.arguments) for stage in stages])
            recipe.save(output_dir / RECIPE)
            record.save(output_dir)
            if checkpoint is None and stages[-1].is_from_scratch:
                config: Any = stages[-1].config
                logger.warning(
                    f"Warning: {config.baseline_first}. Remedy: set training.baseline_steps, or model.init_from to a "
                    "trained baseline."
                )

        processes.on_main(check_and_record)
        trainer = None
        for stage in remaining:
            if trainer is not None:
                accelerator, trainer = trainer.accelerator, None
                accelerator.free_memory()
            own_checkpoint = checkpoint if checkpoint is not None and is_of(checkpoint, stage) else None
            trainer = TranslationTrainer(
                stage_model(stage, own_checkpoint),
                stage.arguments,
                tokenizer=tokenizers.source,
                target_tokenizer=tokenizers.target,
                train_dataset=train_data,
                eval_dataset=validation_data,
                callbacks=[EarlyStoppingCallback(stage.patience)] if stage.patience else [],
                baseline=stage.baseline,
                last_step=stage.last_step,
                validation_decoding=recipe.validation_decoding,
            )
            if stage.last_step is not None:  # a baseline's
                check_planned_steps(stage.last_step, trainer.planned_steps())
            before_training.close()
            train_stage(trainer, stage, own_checkpoint)
        assert trainer is not None, "there is always a stage left"

        processes.on_main(partial(finish, recipe, output_dir, arguments, trainer))
    return output_dir / FINAL
