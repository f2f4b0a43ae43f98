"""A training run: tokenizers, data, one or two stages of training, final model; and what a resumed run may change."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, EarlyStoppingCallback, PreTrainedModel, set_seed

from .._loading_errors import read_small_text
from ..data.files import open_output, remove
from ..data.prepared import ShardSettings
from ..data.sharded import ShardedDataset
from ..data.tree_inputs import TREE_INPUTS
from ..errors import UserError
from ..inference.devices import keep_freed_memory
from ..options import stated
from . import checkpoints, output_folder
from .building import generation_config, stage_configs
from .checkpoints import newest_checkpoint, rotate_checkpoints, steps_of
from .finishing import finish
from .inputs import Inputs, changes_of, delete_tokenizers, prepare_inputs
from .output_folder import BASELINE, RECIPE, RECORD, mapping_in
from .plan import Plan, Stage, dry_run, identity_of, values_of
from .processes import Processes, logger, settings_of_one_run
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
    run = Run(Path(output_dir), Processes(training.runs_on_cpu, training.ddp_timeout, training.ddp_backend))
    with run.claimed(resume, overwrite):
        plan = Plan.of(recipe, run.folder, run.checkpoint)
        dry_run(plan)
        inputs = run.prepare(plan)
        trainer: TranslationTrainer | None = None
        for stage, config in run.remaining_stages(plan, inputs):
            if trainer is not None:
                accelerator, trainer = trainer.accelerator, None
                accelerator.free_memory()
            trainer = run.fit(plan, stage, config, inputs)
        assert trainer is not None, "there is always a stage left"
        run.processes.on_main(partial(finish, plan, trainer))
    return run.folder / output_folder.FINAL


@dataclass
class Run:
    """A run on disk."""

    folder: Path
    processes: Processes
    checkpoint: Path | None = None  # from which it resumes
    is_new: bool = False  # and nothing has been trained yet

    @contextmanager
    def claimed(self, resume: bool, overwrite: bool) -> Iterator[None]:
        """Lock and claim the folder. If a new run fails before training, its files are deleted again."""
        with ExitStack() as context:

            def claim() -> Path | None:
                context.enter_context(output_folder.locked(self.folder))
                self.is_new = output_folder.claim_output(self.folder, resume, overwrite)
                return checkpoint_to_resume(self.folder) if resume else None

            self.checkpoint = self.processes.on_main(claim)
            try:
                yield
            finally:
                if self.is_new:
                    output_folder.delete_run(self.folder)
                    output_folder.bring_back(self.folder)

    def prepare(self, plan: Plan) -> Inputs:
        """Record the recipe, and prepare tokenizers and data, on the first process before the others."""
        checkpoint = self.checkpoint
        self.processes.on_main(plan.save if checkpoint is None else partial(check_identity, plan, checkpoint))
        set_seed(plan.arguments.seed)
        inputs = self.processes.main_first(partial(prepare_inputs, plan, checkpoint))
        count = f"{self.processes.count} process" + "es" * (self.processes.count > 1)
        pairs = f"{len(inputs.train)} training pairs, {len(inputs.validation)} validation pairs"
        logger.info(f"{pairs}; {count} on {self.processes.state.device}.")
        for test in plan.tests:
            if list(test.corpora) == list(plan.data.validation):
                logger.warning(f"Warning: test.{test.name} is the validation set, on which checkpoints were chosen.")
        return inputs

    def remaining_stages(self, plan: Plan, inputs: Inputs) -> list[tuple[Stage, Any]]:
        """Return the stages from the checkpoint on, with the configurations of their models, and record the run."""
        configs = stage_configs(plan.data.model, inputs.tokenizers, len(plan.stages) > 1)
        guided, checkpoint, last = plan.guided_alignment, self.checkpoint, plan.stages[-1]
        for config in configs:
            if guided is not None and hasattr(config, "alignment_head"):  # for word alignment
                config.alignment_head = list(guided.place(config))
        is_last = checkpoint is not None and (checkpoint.parent == self.folder or checkpoint == last.baseline)
        done = len(plan.stages) - 1 if is_last else 0

        def check_and_record() -> None:
            record = record_of(inputs, plan, self.processes)
            if checkpoint is not None:
                check_record(record, plan, checkpoint)
                check_config(configs[-1 if checkpoint.parent == self.folder else 0], checkpoint)
                for stage in plan.stages[:done]:
                    if newest_checkpoint(stage.arguments.folder) is not None:
                        rotate_checkpoints(stage.arguments)  # a killed run may not have done so
            plan.save()
            with open_output(self.folder / RECORD) as file:
                json.dump(record, file, indent=1)
            is_first = checkpoint is None and last.init_from is None and configs[-1].baseline() is not None
            if is_first and (reason := configs[-1].baseline_first):
                logger.warning(f"Warning: {reason}. Set training.baseline_steps, or model.init_from to a baseline.")

        self.processes.on_main(check_and_record)
        return list(zip(plan.stages, configs, strict=True))[done:]

    def fit(self, plan: Plan, stage: Stage, config: Any, inputs: Inputs) -> TranslationTrainer:
        """Train a stage to its end, from its checkpoint if it has one, and save a checkpoint of the last step."""
        arguments, tokenizers = stage.arguments, inputs.tokenizers
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
            remove(self.folder / output_folder.ASIDE)
        if checkpoint is not None:
            if arguments.should_save:
                for step, folder in checkpoints.numbered_in(checkpoint.parent):
                    if step > steps_of(checkpoint):  # damaged
                        checkpoints.discard(folder)
                rotate_checkpoints(arguments)  # a killed run may not have done so
            # The Trainer would make one more step before it checks the limit.
            if steps_of(checkpoint) >= planned or stopped_early(checkpoint, stage.patience):
                logger.info(f"The run ended with {checkpoint.name}.")
                return trainer
            is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # in files of other names
            if not is_sharded and not (checkpoint / "optimizer.pt").is_file():  # the Trainer would begin with a new one
                reason = "has no state of the optimizer (training.save_only_model)"
                raise UserError(f"{checkpoint} {reason}.", field=checkpoint)
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

# What prepared data is made of. The data itself is compared.
OF_DATA = {f"data.{name}" for name in ("train", "validation", *ShardSettings.__dataclass_fields__)}
UPDATE = "processes times training.gradient_accumulation_steps"


def checkpoint_to_resume(output_dir: Path) -> Path | None:
    """Return the newest intact checkpoint of a run, or `None` if there is none, and delete incomplete files."""
    output_folder.remove_leftovers(output_dir)
    places = (output_dir, output_dir / BASELINE)
    newest = (checkpoints.newest_intact_checkpoint(folder, logger.info) for folder in places)
    checkpoint = next(filter(None, newest), None)
    if checkpoint is None:
        delete_tokenizers(output_dir)  # they may be another recipe's
    logger.info(f"Resuming from {checkpoint}." if checkpoint else "No complete checkpoint: training from the start.")
    return checkpoint


def check_identity(plan: Plan, checkpoint: Path) -> None:
    """Compare a recipe with that of the start of the run."""
    max_steps, steps = plan.arguments.max_steps, steps_of(checkpoint)
    if 0 < max_steps < steps:
        field = "training.max_steps"
        raise UserError(f"{field}={max_steps} is less than the {steps} steps of {checkpoint}.", field=field)
    earlier = mapping_in(plan.output_dir / RECIPE)
    if not earlier:
        logger.info(f"{plan.output_dir} has no readable {RECIPE}, so changes of the recipe are unknown.")
        return
    settings = Recipe(**earlier).to_dict()
    fixed = identity_of(settings, plan.compares_evaluations).keys() | plan.identity.keys() | OF_DATA
    old, new = values_of(settings), values_of(plan.settings)
    for name in old.keys() ^ new.keys():
        entry = TRAINING_OPTIONS.get(name.removeprefix("training."))
        for values in (old, new):
            values.setdefault(name, entry and entry.default)
    if mapping_in(plan.output_dir / RECORD):  # else of an old version, so that the prepared data is not known
        old, new = ({name: values[name] for name in values.keys() - OF_DATA} for values in (old, new))
    compare(old, new, fixed, checkpoint)


def check_record(record: Mapping[str, Any], plan: Plan, checkpoint: Path) -> None:
    """Compare data, processes and versions with those of the start of the run."""
    if before := mapping_in(plan.output_dir / RECORD):  # else of an old version
        old, new = ({**values, **values["versions"]} for values in (before, record))
        for values in (old, new):
            for place, name in (("data.train", "training"), ("data.validation", "validation")):
                pairs, digest = values.pop(f"{name}_pairs"), values.pop(f"{name}_data")
                values[place] = f"{pairs} sentence pairs, {digest[:16]}"
            values[UPDATE] = values["processes"] * values.pop("accumulation")
            del values["versions"]
        fixed = {"data.train", UPDATE, *(["data.validation"] if plan.compares_evaluations else [])}
        compare({**new, **old}, {**old, **new}, fixed, checkpoint)


def check_config(config: Any, checkpoint: Path) -> None:
    """Compare the configuration made from recipe and tokenizers with that of a checkpoint."""
    saved = json.loads(read_small_text(checkpoint / "config.json"))
    now = json.loads(config.to_json_string(use_diff=False))
    ignored = {"dtype", "architectures", "transformers_version", "use_cache"}  # the Trainer sets the last
    names = {entry.name for entry in fields(config)} & saved.keys() & now.keys() - ignored
    compare({name: saved[name] for name in names}, {name: now[name] for name in names}, names, checkpoint)


def compare(old: Mapping[str, Any], new: Mapping[str, Any], fixed: Collection[str], checkpoint: Path) -> None:
    """Log what changed since the start of a run; `UserError` for `fixed` values, which give earlier steps a meaning."""
    changes = changes_of(old, new)
    if forbidden := [name for name in changes if name in fixed]:
        raise UserError(
            f"These values must not change since {checkpoint}: {'; '.join(changes[name] for name in forbidden)}. "
            f"Restore them (the recipe is in {RECIPE}), or start again with --overwrite or in another folder.",
            field=", ".join(forbidden),
        )
    for change in changes.values():
        logger.info(f"Changed since the start of the run: {change}.")


def record_of(inputs: Inputs, plan: Plan, processes: Processes) -> dict[str, Any]:
    """Return circumstances of a run that its recipe does not contain."""
    return {
        "processes": processes.count,
        "accumulation": plan.arguments.gradient_accumulation_steps,  # batches of each process in an update
        "training_data": digest_of(inputs.train),
        "training_pairs": len(inputs.train),
        "validation_data": digest_of(inputs.validation),
        "validation_pairs": len(inputs.validation),
        "device": processes.state.device.type,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "precision": plan.arguments.precision,
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


def stopped_early(checkpoint: Path, patience: int | None) -> bool:
    """Return whether early stopping ended the run with this checkpoint."""
    states = checkpoints.state_of(checkpoint).get("stateful_callbacks", {}).get("EarlyStoppingCallback", {})
    states = states if isinstance(states, list) else [states]
    counters = [state.get("attributes", {}).get("early_stopping_patience_counter", 0) for state in states]
    return patience is not None and any(counter >= patience for counter in counters)
