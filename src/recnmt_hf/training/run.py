"""A training run: tokenizers, data, one or two stages of training, final model; and what a resumed run may change."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, EarlyStoppingCallback, PreTrainedConfig, PreTrainedModel, set_seed

from .._bounded_reading import read_small_text
from ..data.files import open_output, remove
from ..data.shard_blocks import ShardSettings
from ..data.sharded import ShardedDataset
from ..data.tree_inputs import TREE_INPUTS
from ..errors import UserError, short_repr
from ..inference.devices import keep_freed_memory
from ..options import stated
from .arguments import TranslationTrainingArguments
from .building import generation_config, stage_configs
from .checkpoints import (
    discard,
    newest_checkpoint,
    newest_intact_checkpoint,
    numbered_in,
    rotate_checkpoints,
    state_of,
    steps_of,
)
from .finishing import finish
from .inputs import Inputs, delete_tokenizers, prepare_inputs
from .output_folder import (
    ASIDE,
    BASELINE,
    FINAL,
    RECIPE,
    RECORD,
    bring_back,
    claim_output,
    delete_run,
    locked,
    mapping_in,
    remove_leftovers,
)
from .plan import Plan, Stage, dry_run, identity_of, values_of
from .processes import Processes, logger, progress_bars_on_terminals, settings_of_one_run
from .recipe import TRAINING_OPTIONS, Recipe, check_planned_steps
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
    dry_run(plan)
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
    return plan.output_dir / FINAL


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
                context.enter_context(locked(folder))
                self.is_new = claim_output(folder, self.resume, self.overwrite)
                checkpoint = checkpoint_to_resume(folder) if self.resume else None
                if checkpoint is None:
                    self.plan.save()  # from now on this is the folder of a run
                else:
                    check_identity(self.plan, checkpoint)
                return checkpoint

            self.checkpoint = self.processes.on_main(claim)
            context.enter_context(progress_bars_on_terminals(self.processes.is_main))
            try:
                yield
            finally:
                if self.is_new:
                    delete_run(folder)
                    bring_back(folder)

    def prepare(self) -> Inputs:
        """Prepare tokenizers and data, on the first process before the others."""
        set_seed(self.plan.arguments.seed)
        inputs = self.processes.main_first(partial(prepare_inputs, self.plan, self.checkpoint))
        count = f"{self.processes.count} process" + "es" * (self.processes.count > 1)
        pairs = f"{len(inputs.train)} training pairs, {len(inputs.validation)} validation pairs"
        logger.info(f"{pairs}; {count} on {self.processes.state.device}.")
        for test in self.plan.tests:
            if list(test.corpora) == list(self.plan.data.validation):
                logger.warning(f"Warning: test.{test.name} is the validation set, on which checkpoints were chosen.")
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
            record = record_of(inputs, plan.arguments, self.processes)
            if checkpoint is not None:
                folders = [stage.arguments.folder for stage in plan.stages]
                check_config(configs[folders.index(checkpoint.parent)], checkpoint)
                check_record(record, plan, checkpoint)
                for stage in plan.stages[: -len(stages)]:
                    if newest_checkpoint(stage.arguments.folder) is not None:
                        rotate_checkpoints(stage.arguments)  # a killed run may not have done so
            plan.save()
            with open_output(plan.output_dir / RECORD) as file:
                json.dump(record, file, indent=1)
            is_first = checkpoint is None and last.init_from is None and configs[-1].baseline() is not None
            if is_first and (reason := configs[-1].baseline_first):
                logger.warning(f"Warning: {reason}. Set training.baseline_steps, or model.init_from to a baseline.")

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
            validation_decoding=stated(plan.decoding),
            bpe_dropout=plan.bpe_dropout,
            guided_alignment=plan.guided_alignment,
        )
        planned = trainer.planned_steps()
        if stage.last_step is not None:  # a baseline's
            check_planned_steps(stage.last_step, planned)
        self.is_new = False
        if arguments.should_save:
            remove(plan.output_dir / ASIDE)
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
            if stopped_early(checkpoint, stage.patience):
                logger.info(f"Early stopping ended the run at {checkpoint.name}.")
                return trainer
            is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # in files of other names
            if not is_sharded and not (checkpoint / "optimizer.pt").is_file():  # the Trainer would begin with a new one
                raise UserError(
                    f"{checkpoint} has no state of the optimizer (training.save_only_model).", field=checkpoint
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


# -- resumed runs ------------------------------------------------------------------------------------------------------

CHANGED = "Changed since the start of the run: "
RESTORE = "Restore it, or start again with --overwrite or in another folder."
# What prepared data is made of. The data itself is compared.
OF_DATA = {f"data.{name}" for name in ("train", "validation", *ShardSettings.__dataclass_fields__)}


def record_of(inputs: Inputs, arguments: TranslationTrainingArguments, processes: Processes) -> dict[str, Any]:
    """Return circumstances of a run that its recipe does not contain."""
    return {
        "processes": processes.count,
        "accumulation": arguments.gradient_accumulation_steps,  # batches of each process in an update
        "training_data": digest_of(inputs.train),
        "training_pairs": len(inputs.train),
        "validation_data": digest_of(inputs.validation),
        "validation_pairs": len(inputs.validation),
        "device": processes.state.device.type,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "precision": arguments.precision,
    }


def digest_of(data: Dataset | ShardedDataset) -> str:
    """Return the SHA-256 sum of a prepared dataset's token ids, links and trees; of one in memory, in any chunks."""
    if isinstance(data, ShardedDataset):
        return data.digest
    digest = hashlib.sha256()
    names = ["input_ids", "labels", *(name for name in ("links", *TREE_INPUTS) if name in data.column_names)]
    for batch in data.select_columns(names).with_format("arrow").iter(10_000):
        for name in names:
            for chunk in batch.column(name).chunks:
                digest.update(np.asarray(chunk.value_lengths(), dtype=np.int64).tobytes())
                digest.update(np.asarray(chunk.flatten(), dtype=np.int64).tobytes())
    return digest.hexdigest()


def checkpoint_to_resume(output_dir: Path) -> Path | None:
    """Return the newest intact checkpoint of a run, or `None` if there is none, and delete incomplete files."""
    remove_leftovers(output_dir)
    newest = (newest_intact_checkpoint(folder, logger.info) for folder in (output_dir, output_dir / BASELINE))
    checkpoint = next(filter(None, newest), None)
    if checkpoint is None:
        delete_tokenizers(output_dir)  # they may be another recipe's
    logger.info(f"Resuming from {checkpoint}." if checkpoint else "No complete checkpoint: training from the start.")
    return checkpoint


def check_identity(plan: Plan, checkpoint: Path) -> None:
    """Log what changed since the start; `UserError` for what changes the meaning of the steps made so far."""
    max_steps, steps = plan.arguments.max_steps, steps_of(checkpoint)
    if 0 < max_steps < steps:
        field = "training.max_steps"
        raise UserError(f"{field}={max_steps} is less than the {steps} steps of {checkpoint}.", field=field)
    earlier = mapping_in(plan.output_dir / RECIPE)
    if not earlier:
        logger.info(f"{plan.output_dir} has no readable {RECIPE}, so changes of the recipe are unknown.")
        return
    settings = Recipe(**earlier).to_dict()
    old, new = values_of(settings), values_of(plan.settings)
    fixed = identity_of(settings, plan.compares_evaluations).keys() | plan.identity.keys()
    compared = old.keys() | new.keys()
    if not mapping_in(plan.output_dir / RECORD):  # of an old version, so that the prepared data is not known
        fixed |= OF_DATA
    else:
        compared -= OF_DATA - fixed
    forbidden: dict[str, str] = {}
    for name in sorted(compared):
        entry = TRAINING_OPTIONS.get(name.removeprefix("training."))
        before, now = (values.get(name, entry and entry.default) for values in (old, new))
        change = f"{name}: {short_repr(before)} -> {short_repr(now)}"
        if before != now and name in fixed:
            forbidden[name] = change
        elif before != now:
            logger.info(f"{CHANGED}{change}.")
    if forbidden:
        raise UserError(
            f"These fields must not change since {checkpoint}: {'; '.join(forbidden.values())}. "
            f"{plan.output_dir / RECIPE} has the old values. {RESTORE}",
            field=", ".join(forbidden),
        )


def check_record(now: dict[str, Any], plan: Plan, checkpoint: Path) -> None:
    """
    Compare data and processes with those of the start, and log what changed. `UserError` for other data, or another
    product of processes and accumulated batches, which determines the tokens of an update.
    """
    before = mapping_in(plan.output_dir / RECORD)
    if not before:  # of an old version
        return
    for name, matters in (("training", True), ("validation", plan.compares_evaluations)):
        if before[f"{name}_data"] != now[f"{name}_data"]:
            pairs = f"{before[f'{name}_pairs']} sentence pairs before, {now[f'{name}_pairs']} now"
            if matters:
                field = "data.train" if name == "training" else "data.validation"
                raise UserError(f"The {name} data differs from that of {checkpoint} ({pairs}). {RESTORE}", field=field)
            logger.info(f"The {name} data changed ({pairs}): evaluations before and after are not comparable.")
    batches, field = before["processes"] * before["accumulation"], "training.gradient_accumulation_steps"
    if batches != now["processes"] * now["accumulation"]:
        got = f"{now['processes']} x {now['accumulation']}"
        raise UserError(f"{field}: processes times accumulated batches must stay {batches}, got {got}.", field=field)
    precision = before.get("precision") or now["precision"]  # old versions have none
    old = {**before, **before["versions"], "precision": precision}
    for name, value in {**now, **now["versions"]}.items():
        if name in ("processes", "device", "precision", *now["versions"]) and old.get(name) != value:
            logger.info(f"{CHANGED}{name}: {old.get(name)} -> {value}; the result may not be bit-identical.")


def check_config(config: PreTrainedConfig, checkpoint: Path) -> None:
    """Raise `UserError` if the configuration made from recipe and tokenizers differs from that of the checkpoint."""
    saved = json.loads(read_small_text(checkpoint / "config.json"))
    now = json.loads(config.to_json_string(use_diff=False))
    ignored = {"dtype", "architectures", "transformers_version", "use_cache"}  # the Trainer sets the last
    names = sorted({entry.name for entry in fields(type(config))} & saved.keys() & now.keys() - ignored)
    if changes := [
        f"{name}: {short_repr(saved[name])} -> {short_repr(now[name])}" for name in names if saved[name] != now[name]
    ]:
        raise UserError(
            f"The model of {checkpoint} differs from that of the recipe: {'; '.join(changes)}. {RESTORE}",
            field=checkpoint,
        )


def stopped_early(checkpoint: Path, patience: int | None) -> bool:
    """Return whether early stopping ended the run with this checkpoint."""
    states = state_of(checkpoint).get("stateful_callbacks", {}).get("EarlyStoppingCallback", {})
    states = states if isinstance(states, list) else [states]
    counters = [state.get("attributes", {}).get("early_stopping_patience_counter", 0) for state in states]
    return patience is not None and any(counter >= patience for counter in counters)
