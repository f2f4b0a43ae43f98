"""A training run from a recipe: tokenizers, data, one or two stages of training, final model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, EarlyStoppingCallback, PreTrainedModel, set_seed

from .._values import stated
from ..data.sharded import ShardedDataset
from ..data.tokenizer_pair import TokenizerPair
from ..errors import UserError
from ..inference.devices import keep_freed_memory
from . import output_folder, resuming
from .arguments import TranslationTrainingArguments
from .building import build_config, generation_config, stage_configs, with_fields_of
from .checkpoints import discard, newest_checkpoint, numbered_in, steps_of
from .checks import build_on_meta, check_before_training
from .finishing import finish
from .inputs import prepare_inputs
from .processes import Processes, logger, progress_bars_on_terminals, settings_of_one_run
from .recipe import Recipe, check_planned_steps
from .trainer import TranslationTrainer, rotate_checkpoints


@dataclass(frozen=True)
class Stage:
    """A part of a run that trains one model. Steps count from the beginning of the run."""

    arguments: TranslationTrainingArguments
    config: Any
    beams: int  # default beam size of the model
    patience: int | None = None  # of early stopping
    last_step: int | None = None  # `None`: the arguments end it
    init_from: Path | str | None = None  # trained baseline that initializes the model
    baseline: Path | None = None  # that baseline, if it is the last checkpoint of the stage before

    def build_model(self, checkpoint: Path | None) -> PreTrainedModel:
        """Build the model. If the stage resumes from a checkpoint, the trainer loads its weights."""
        if self.baseline is not None:
            set_seed(self.arguments.seed)  # the same whether or not the stage before ran in this process
        model: Any = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(self.config))
        model.generation_config = generation_config(self.config, self.beams)
        logger.info(f"{type(model).__name__} with {model.num_parameters() / 1e6:.2f}M parameters.")
        if checkpoint is None and self.init_from is not None:
            logger.info(f"Warm start from {self.init_from}: {model.init_from_baseline(self.init_from)}.")
        return model

    def train(self, trainer: TranslationTrainer, checkpoint: Path | None) -> None:
        """Train to the stage's end, from its start or a checkpoint, and save a checkpoint of the last step."""
        if checkpoint is not None:
            if trainer.args.should_save:
                for step, folder in numbered_in(checkpoint.parent):
                    if step > steps_of(checkpoint):  # damaged
                        discard(folder)
                rotate_checkpoints(trainer.args)  # a killed run may not have done so
            # The Trainer would make one more step before it checks the limit.
            if steps_of(checkpoint) >= (planned := trainer.planned_steps()):
                logger.info(f"{checkpoint.name} has all {planned} steps already.")
                return
            if resuming.stopped_early(checkpoint, self.patience):
                logger.info(f"Early stopping ended the run at {checkpoint.name}.")
                return
            if trainer.lacks_optimizer(checkpoint):
                raise UserError(
                    f"{checkpoint} has no optimizer state (training.save_only_model), so training cannot be resumed "
                    "from it. Set model.init_from to it in a run with another folder, or start again with "
                    "--overwrite.",
                    field=checkpoint,
                )
        start = checkpoint or self.baseline
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        newest = newest_checkpoint(self.arguments.folder)
        if newest is None or steps_of(newest) != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model, None)


def plan_stages(
    recipe: Recipe,
    arguments: Sequence[TranslationTrainingArguments],
    tokenizers: TokenizerPair,
    checkpoint: Path | None = None,
) -> list[Stage]:
    """
    Plan the stages of a run, one or two, with the arguments of each, from the start or a checkpoint. `UserError` if the
    tokenizers do not match.
    """
    steps, patience = recipe.training.baseline_steps, recipe.training.early_stopping_patience
    model, beams = recipe.model, recipe.decoding.beams
    if model.init_from is not None:
        plain, model = build_config(model), with_fields_of(checkpoint or model.init_from, model)
        changed = {name: value for name, value in model.fields.items() if getattr(plain, name, value) != value}
        if changed:
            added = ", ".join(f"{name}: {value}" for name, value in changed.items())
            logger.info(f"Fields of {checkpoint or model.init_from} that the recipe does not state: {added}.")
    configs = stage_configs(model, tokenizers, steps is not None)
    if recipe.guides_alignment:
        for config in configs:
            recipe.guided_alignment.record(config)
    if steps is None:
        return [Stage(arguments[-1], configs[-1], beams, patience, init_from=model.init_from)]
    first = Stage(arguments[0], configs[0], beams, last_step=int(steps))
    checkpoint = arguments[0].folder / f"checkpoint-{int(steps)}"
    return [first, Stage(arguments[-1], configs[-1], beams, patience, init_from=checkpoint, baseline=checkpoint)]


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
        FileExistsError: The folder contains an earlier run, and neither `resume` nor `overwrite` is set.
        UserError, FileNotFoundError: The recipe or data is wrong or differs from that of the resumed run, another run
            writes into the folder, or the disk is full.
    """
    output_dir = Path(output_dir)
    recipe.check()
    training = recipe.training
    use_cpu = training.runs_on_cpu
    if use_cpu:
        keep_freed_memory()
    processes = Processes(use_cpu, training.ddp_timeout, training.ddp_backend)
    recipe = recipe.with_whole_steps(resuming.earlier_baseline_steps(output_dir) if resume else None)
    steps = recipe.training.baseline_steps
    if steps != training.baseline_steps:
        logger.info(f"The first {steps} of {training.max_steps} steps train the baseline.")
    stage_arguments = recipe.stage_arguments(output_dir, output_dir / output_folder.BASELINE, use_cpu)
    arguments = stage_arguments[-1]
    check_before_training(recipe, arguments, newest_checkpoint(output_dir) if resume else None)
    with ExitStack() as run_context:
        before_training = ExitStack()

        def claim() -> Path | None:
            was_killed = run_context.enter_context(output_folder.locked(output_dir))
            run_context.enter_context(before_training)  # ends before the lock does
            if output_folder.claim_output(output_dir, resume, overwrite, was_killed):
                before_training.enter_context(output_folder.clean_up_on_failure(output_dir))
            return resuming.checkpoint_to_resume(recipe, output_dir) if resume else None

        checkpoint = processes.on_main(claim)
        run_context.enter_context(output_folder.explain_sudden_end(output_dir))
        run_context.enter_context(progress_bars_on_terminals(processes.is_main))
        set_seed(arguments.seed)

        def prepare() -> tuple[TokenizerPair, Dataset | ShardedDataset, Dataset, list[Stage]]:
            inputs = prepare_inputs(recipe, output_dir, checkpoint)
            return *inputs, plan_stages(recipe, stage_arguments, inputs[0], checkpoint)

        tokenizers, train_data, validation_data, stages = processes.main_first(prepare)
        count = f"{processes.count} process" + "es" * (processes.count > 1)
        pairs = f"{len(train_data)} training pairs, {len(validation_data)} validation pairs"
        logger.info(f"{pairs}; {count} on {processes.state.device}.")
        last = stages[-1]
        is_in_last = checkpoint and (checkpoint.parent == last.arguments.folder or checkpoint == last.baseline)
        remaining = [last] if is_in_last else stages

        def check_and_record() -> None:
            batches = processes.count, arguments.gradient_accumulation_steps
            digests = [(resuming.digest_of(data), len(data)) for data in (train_data, validation_data)]
            record = resuming.RunRecord(
                *batches, *digests[0], *digests[1], processes.state.device.type, precision=arguments.precision
            )
            if checkpoint is not None:
                config = next(stage.config for stage in stages if stage.arguments.folder == checkpoint.parent)
                resuming.check_config(config, checkpoint)
                for change in resuming.check_record(record, recipe.compares_evaluations, output_dir, checkpoint):
                    logger.info(change)
                for stage in stages[: -len(remaining)]:
                    if newest_checkpoint(stage.arguments.folder) is not None:
                        rotate_checkpoints(stage.arguments)  # a killed run may not have done so
            models = [(build_on_meta(stage.config), stage.arguments) for stage in stages]
            output_folder.check_free_space(output_dir, models)
            recipe.save(output_dir / output_folder.RECIPE)
            record.save(output_dir)
            reason = last.config.baseline_first
            if checkpoint is None and last.init_from is None and reason and last.config.baseline() is not None:
                remedy = "Set training.baseline_steps, or model.init_from to a trained baseline."
                logger.warning(f"Warning: {reason}. {remedy}")

        processes.on_main(check_and_record)
        trainer = None
        for stage in remaining:
            if trainer is not None:
                accelerator, trainer = trainer.accelerator, None
                accelerator.free_memory()
            own_checkpoint = checkpoint if checkpoint and checkpoint.parent == stage.arguments.folder else None
            trainer = TranslationTrainer(
                stage.build_model(own_checkpoint),
                stage.arguments,
                tokenizer=tokenizers.source,
                target_tokenizer=tokenizers.target,
                relations=tokenizers.relations,
                train_dataset=train_data,
                eval_dataset=validation_data,
                callbacks=[EarlyStoppingCallback(stage.patience)] if stage.patience else [],
                baseline=stage.baseline,
                last_step=stage.last_step,
                validation_decoding=stated(recipe.decoding),
                bpe_dropout=recipe.tokenizer.dropout,
                guided_alignment=recipe.guided_alignment if recipe.guides_alignment else None,
            )
            if stage.last_step is not None:  # a baseline's
                check_planned_steps(stage.last_step, trainer.planned_steps())
            before_training.close()
            stage.train(trainer, own_checkpoint)
        assert trainer is not None, "there is always a stage left"

        processes.on_main(partial(finish, recipe, output_dir, arguments, trainer))
    return output_dir / output_folder.FINAL
