"""A training run from a recipe, in its order: tokenizers, data, one or two stages of training, final model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, set_seed

from ..data.corpora import prepare_dataset
from ..data.tokenizer_pair import TokenizerPair
from ..models.user_errors import UserError
from .arguments import training_arguments
from .building import build_model, model_config
from .checkpoints import newest_checkpoint, newest_intact_checkpoint
from .checks import check_before_training, check_planned_steps, without_memory
from .finishing import finish
from .output_folder import (
    BASELINE,
    DATA,
    FINAL,
    check_free_space,
    claim_output,
    locked,
    refused_without_trace,
    remove_leftovers,
    sudden_ends_explained,
)
from .processes import Processes, keep_freed_memory, progress_bars_on_terminals, say, settings_of_one_run
from .recipe import Recipe
from .resuming import RECIPE, RunRecord, check_config, check_recipe, check_record, digest_of
from .stages import is_from_scratch, is_of, stage_model, stages_left, stages_of, train_stage, with_whole_steps
from .tokenizers import forget_tokenizers, prepare_tokenizers, tokenizers_of
from .trainer import TranslationTrainer, rotate_as_said


__all__ = ["build_model", "keep_freed_memory", "train", "training_arguments"]


@settings_of_one_run()
def train(recipe: Recipe, output_dir: str | Path, resume: bool = False, overwrite: bool = False) -> Path:
    """
    Trains a model.

    A run may be killed at any moment: resumed, it goes on from the newest intact checkpoint to the very weights that it
    would have had (where it computes alike, as on the CPU).

    Args:
        recipe ([`Recipe`]): What to do.
        output_dir (`str` or `Path`): Gets checkpoints, and the final model in the subfolder `model`. With
            `training.baseline_steps` the checkpoints of the first stage stand in the subfolder `baseline`.
        resume (`bool`, *optional*, defaults to `False`): Goes on from the newest intact checkpoint, if there is one.
        overwrite (`bool`, *optional*, defaults to `False`): Deletes what an earlier run left there.

    Returns:
        The folder of the final model.

    Raises:
        FileExistsError: The folder holds an earlier run, and neither `resume` nor `overwrite` is set.
        ValueError, FileNotFoundError: Something is wrong with recipe or data, a resumed run was made with other ones,
            another run writes into the folder, or the disk is full.
    """
    output_dir = Path(output_dir)
    settings = recipe.training
    use_cpu = bool(settings.get("use_cpu", not torch.accelerator.is_available()))
    if use_cpu:
        keep_freed_memory()
    processes = Processes(use_cpu, settings.get("ddp_timeout", 1800), settings.get("ddp_backend"))
    recipe = with_whole_steps(recipe, output_dir, resume)
    arguments, patience = training_arguments(recipe, output_dir, use_cpu)
    check_before_training(recipe, arguments, from_checkpoint=resume and newest_checkpoint(output_dir) is not None)
    with ExitStack() as held:
        before_training = ExitStack()

        def claim() -> Path | None:
            killed = held.enter_context(locked(output_dir))
            held.enter_context(before_training)  # ends before the lock does
            if claim_output(output_dir, resume, overwrite, killed):
                before_training.enter_context(refused_without_trace(output_dir))
            return point_of_return(recipe, output_dir) if resume else None

        checkpoint = processes.on_main(claim)
        held.enter_context(sudden_ends_explained(output_dir))
        held.enter_context(progress_bars_on_terminals(processes.is_main))
        set_seed(arguments.seed)

        tokenizers, train_data, validation_data = processes.main_first(
            lambda: prepare_inputs(recipe, output_dir, checkpoint)
        )
        count = f"{processes.count} process" + "es" * (processes.count > 1)
        pairs = f"{len(train_data)} training pairs, {len(validation_data)} validation pairs"
        say(f"{pairs}; {count} on {processes.state.device}.")

        stages = stages_of(recipe, output_dir, arguments, patience, use_cpu)
        left = stages_left(stages, checkpoint)

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
            configs = [model_config(recipe, tokenizers, stage.is_baseline) for stage in stages]
            if checkpoint is not None:
                own = next(config for config, stage in zip(configs, stages, strict=True) if is_of(checkpoint, stage))
                check_config(own, checkpoint)
                for sentence in check_record(record, recipe, output_dir, checkpoint):
                    say(sentence)
                for stage in stages[: -len(left)]:
                    if newest_checkpoint(stage.folder) is not None:
                        rotate_as_said(stage.arguments)  # which a killed run may have left undone
            models = map(without_memory, configs)
            check_free_space(output_dir, list(zip(models, (stage.arguments for stage in stages), strict=True)))
            recipe.save(output_dir / RECIPE)
            record.save(output_dir)
            if checkpoint is None and is_from_scratch(recipe, configs[-1]):
                say(
                    f"Warning: {configs[-1].baseline_first}. Remedy: set training.baseline_steps, or model.init_from "
                    "to a trained baseline."
                )

        processes.on_main(check_and_record)
        trainer = None
        for stage in left:
            if trainer is not None:
                accelerator, trainer = trainer.accelerator, None
                accelerator.free_memory()
            own_checkpoint = checkpoint if checkpoint is not None and is_of(checkpoint, stage) else None
            trainer = TranslationTrainer(
                stage_model(recipe, tokenizers, stage, own_checkpoint),
                stage.arguments,
                tokenizer=tokenizers.source,
                target_tokenizer=tokenizers.target,
                train_dataset=train_data,
                eval_dataset=validation_data,
                callbacks=[EarlyStoppingCallback(stage.patience)] if stage.patience else [],
                baseline=stage.baseline,
                last_step=stage.last_step,
                validation_decoding=validation_decoding(recipe),
            )
            if stage.last_step is not None:  # a baseline's
                check_planned_steps(stage.last_step, trainer.planned_steps())
            before_training.close()
            train_stage(trainer, stage, own_checkpoint)
        assert trainer is not None, "there is always a stage left"
        final = output_dir / FINAL
        processes.on_main(lambda: finish(recipe, output_dir, arguments, final, trainer))
    return final


def validation_decoding(recipe: Recipe) -> dict[str, Any]:
    """What the recipe says of lengths, which holds for the text generated during training too."""
    names = ("max_length_factor", "max_length_extra", "max_source_length", "on_long")
    stated = {name: recipe.decoding[name] for name in names if name in recipe.decoding}
    # A validation sentence that is too long ends no training.
    return {**stated, "on_long": "split"} if stated.get("on_long") == "error" else stated


def point_of_return(recipe: Recipe, output_dir: Path) -> Path | None:
    """
    The checkpoint from which a run goes on; what a killed one left half-done is deleted.

    Raises:
        ValueError: All checkpoints are damaged, or the recipe is not the one they were made with.
    """
    remove_leftovers(output_dir)
    checkpoint = newest_intact_checkpoint(output_dir, say) or newest_intact_checkpoint(output_dir / BASELINE, say)
    if checkpoint is None:
        say("No complete checkpoint: training from the start.")
        forget_tokenizers(output_dir)  # they may be another recipe's
        return None
    for sentence in check_recipe(recipe, output_dir, checkpoint):
        say(sentence)
    if checkpoint.parent != output_dir and recipe.training.get("baseline_steps") is None:
        raise UserError(
            f"{checkpoint} is of a baseline, and the recipe has no training.baseline_steps. Remedy: set it as it was, "
            "or start anew in another folder or with --overwrite."
        )
    say(f"Resuming from {checkpoint}.")
    return checkpoint


def prepare_inputs(recipe: Recipe, output_dir: Path, checkpoint: Path | None) -> tuple[TokenizerPair, Dataset, Dataset]:
    """Tokenizers (a resumed run's are those of its checkpoint), training and validation data."""
    tokenizers = prepare_tokenizers(recipe, output_dir) if checkpoint is None else tokenizers_of(checkpoint)
    cache_dir = recipe.data.cache_dir or str(output_dir / DATA)
    train_data, validation_data = (prepare(recipe, split, tokenizers, cache_dir) for split in ("train", "validation"))
    return tokenizers, train_data, validation_data


def prepare(
    recipe: Recipe,
    split: str,
    tokenizers: TokenizerPair,
    cache_dir: str,
) -> Dataset:
    """The tokenized training or validation data."""
    data, training = recipe.data, split == "train"
    # Validation keeps its long sentences, as far as the model has positions for them.
    room = recipe.model.fields.get("max_position_embeddings", 1024) - 1
    whole = not training and data.on_long == "skip"
    return prepare_dataset(
        data.train if training else data.validation,
        data.source_lang,
        data.target_lang,
        tokenizers.source,
        tokenizers.target,
        cache_dir,
        max_source_length=max(room, data.max_source_length) if whole else data.max_source_length,
        max_target_length=max(room, data.max_target_length) if whole else data.max_target_length,
        max_length_ratio=data.max_length_ratio if training else None,
        on_empty=data.on_empty,
        num_proc=data.num_proc,
        keep_text=not training,
        on_long=data.on_long,
    )
