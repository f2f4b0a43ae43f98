"""A training run: tokenizers, data, one or two stages of training, final model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, EarlyStoppingCallback, PreTrainedModel, set_seed

from ..errors import UserError
from ..inference.devices import keep_freed_memory
from . import output_folder, resuming
from .building import generation_config, stage_configs
from .checkpoints import discard, newest_checkpoint, newest_intact_checkpoint, numbered_in, rotate_checkpoints, steps_of
from .checks import dry_run
from .finishing import finish
from .inputs import Inputs, prepare_inputs
from .plan import Plan, Stage
from .processes import Processes, logger, progress_bars_on_terminals, settings_of_one_run
from .recipe import Recipe, check_planned_steps
from .trainer import TranslationTrainer


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
    training = recipe.training
    if training.runs_on_cpu:
        keep_freed_memory()
    processes = Processes(training.runs_on_cpu, training.ddp_timeout, training.ddp_backend)
    resumed_from = processes.on_main(lambda: newest_intact_checkpoint(output_dir) if resume else None)
    plan = Plan.of(recipe, output_dir, resumed_from)
    dry_run(plan, resumes=resumed_from is not None)
    run = Run(plan, processes, resume, overwrite)
    with run.claimed():
        inputs = run.prepare()
        trainer: TranslationTrainer | None = None
        for stage, config in run.remaining_stages(inputs):
            if trainer is not None:
                accelerator, trainer = trainer.accelerator, None
                accelerator.free_memory()
            trainer = run.fit(stage, config, inputs)
        assert trainer is not None, "there is always a stage left"
        processes.on_main(partial(finish, plan, trainer))
    return plan.output_dir / output_folder.FINAL


@dataclass
class Run:
    """A run on disk."""

    plan: Plan
    processes: Processes
    resume: bool
    overwrite: bool
    checkpoint: Path | None = None  # from which it resumes
    is_new: bool = False  # and nothing has been trained yet

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock and claim the folder. If a new run fails before training, its files are deleted again."""
        folder = self.plan.output_dir
        with ExitStack() as context:

            def claim() -> Path | None:
                context.enter_context(output_folder.locked(folder))
                self.is_new = output_folder.claim_output(folder, self.resume, self.overwrite)
                checkpoint = resuming.checkpoint_to_resume(folder) if self.resume else None
                if checkpoint is None:
                    self.plan.save()  # from now on this is the folder of a run
                else:
                    resuming.check_identity(self.plan, checkpoint)
                return checkpoint

            self.checkpoint = self.processes.on_main(claim)
            context.enter_context(progress_bars_on_terminals(self.processes.is_main))
            try:
                yield
            except BaseException:
                if self.is_new:
                    output_folder.delete_run(folder)
                raise

    def prepare(self) -> Inputs:
        """Prepare tokenizers and data, on the first process before the others."""
        set_seed(self.plan.arguments.seed)
        inputs = self.processes.main_first(partial(prepare_inputs, self.plan, self.checkpoint))
        count = f"{self.processes.count} process" + "es" * (self.processes.count > 1)
        pairs = f"{len(inputs.train)} training pairs, {len(inputs.validation)} validation pairs"
        logger.info(f"{pairs}; {count} on {self.processes.state.device}.")
        return inputs

    def remaining_stages(self, inputs: Inputs) -> list[tuple[Stage, Any]]:
        """Return the stages from the checkpoint on, with the configurations of their models, and record the run."""
        plan, checkpoint = self.plan, self.checkpoint
        configs = stage_configs(plan.data.model, inputs.tokenizers, len(plan.stages) > 1)
        if plan.guided_alignment is not None:
            for config in configs:
                plan.guided_alignment.record(config)
        stages = list(zip(plan.stages, configs, strict=True))
        last = plan.stages[-1]
        if checkpoint is not None and (checkpoint.parent == plan.output_dir or checkpoint == last.baseline):
            stages = stages[-1:]

        def check_and_record() -> None:
            record = resuming.RunRecord.of(inputs, plan.arguments, self.processes)
            if checkpoint is not None:
                folders = [stage.arguments.folder for stage in plan.stages]
                resuming.check_config(configs[folders.index(checkpoint.parent)], checkpoint)
                resuming.check_record(record, plan, checkpoint)
                for stage in plan.stages[: -len(stages)]:
                    if newest_checkpoint(stage.arguments.folder) is not None:
                        rotate_checkpoints(stage.arguments)  # a killed run may not have done so
            plan.save()
            record.save(plan.output_dir)
            reason = configs[-1].baseline_first
            if checkpoint is None and last.init_from is None and reason and configs[-1].baseline() is not None:
                remedy = "Set training.baseline_steps, or model.init_from to a trained baseline."
                logger.warning(f"Warning: {reason}. {remedy}")

        self.processes.on_main(check_and_record)
        return stages

    def fit(self, stage: Stage, config: Any, inputs: Inputs) -> TranslationTrainer:
        """Train a stage to its end, from its checkpoint if it has one, and save a checkpoint of the last step."""
        plan, arguments, tokenizers = self.plan, stage.arguments, inputs.tokenizers
        is_own = self.checkpoint is not None and self.checkpoint.parent == arguments.folder
        checkpoint = self.checkpoint if is_own else None
        trainer = TranslationTrainer(
            build_model(stage, config, plan.decoding.beams, checkpoint),
            arguments,
            tokenizer=tokenizers.source,
            target_tokenizer=tokenizers.target,
            relations=tokenizers.relations,
            train_dataset=inputs.train,
            eval_dataset=inputs.validation,
            callbacks=[EarlyStoppingCallback(stage.patience)] if stage.patience else [],
            baseline=stage.baseline,
            last_step=stage.last_step,
            validation_decoding=plan.validation_decoding,
            bpe_dropout=plan.bpe_dropout,
            guided_alignment=plan.guided_alignment,
        )
        planned = trainer.planned_steps()
        if stage.last_step is not None:  # a baseline's
            check_planned_steps(stage.last_step, planned)
        self.is_new = False
        if checkpoint is not None:
            if arguments.should_save:
                for step, folder in numbered_in(checkpoint.parent):
                    if step > steps_of(checkpoint):  # damaged
                        discard(folder)
                rotate_checkpoints(arguments)  # a killed run may not have done so
            # The Trainer would make one more step before it checks the limit.
            if steps_of(checkpoint) >= planned:
                logger.info(f"{checkpoint.name} has all {planned} steps already.")
                return trainer
            if resuming.stopped_early(checkpoint, stage.patience):
                logger.info(f"Early stopping ended the run at {checkpoint.name}.")
                return trainer
            is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # in files of other names
            if not is_sharded and not (checkpoint / "optimizer.pt").is_file():  # the Trainer would begin with a new one
                raise UserError(
                    f"{checkpoint} has no optimizer state (training.save_only_model), so training cannot be resumed "
                    "from it. Start a run with model.init_from in another folder, or use --overwrite.",
                    field=checkpoint,
                )
        start = checkpoint or stage.baseline
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        newest = newest_checkpoint(arguments.folder)
        if newest is None or steps_of(newest) != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model, None)
        return trainer


def build_model(stage: Stage, config: Any, beams: int, checkpoint: Path | None) -> PreTrainedModel:
    """Build the model of a stage. If the stage resumes from a checkpoint, the trainer loads its weights."""
    if stage.baseline is not None:
        set_seed(stage.arguments.seed)  # the same whether or not the stage before ran in this process
    model: Any = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config))
    model.generation_config = generation_config(config, beams)
    logger.info(f"{type(model).__name__} with {model.num_parameters() / 1e6:.2f}M parameters.")
    if checkpoint is None and stage.init_from is not None:
        logger.info(f"Warm start from {stage.init_from}: {model.init_from_baseline(stage.init_from)}.")
    return model
