"""A training run: tokenizers, data, one or two stages of training, final model; and what a resumed run may change."""

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, EarlyStoppingCallback, GenerationConfig, set_seed

from .._loading_errors import read_small_text
from ..data.files import open_output, remove
from ..data.sharded import ShardedDataset
from ..data.tree_inputs import TREE_INPUTS
from ..errors import UserError
from ..inference.devices import keep_freed_memory
from ..options import stated
from . import checkpoints
from .building import stage_configs
from .checkpoints import BASELINE, DATA, FINAL, MANIFEST, PARTIAL_FINAL, RECIPE, RECORD, mapping_in, steps_of
from .finishing import finish
from .inputs import Inputs, changes_of, prepare_inputs
from .plan import OF_DATA, Plan, Stage, dry_run, identity_of, values_of
from .processes import Processes, logger, settings_of_one_run
from .recipe import Recipe, check_planned_steps
from .recipe_yaml import dump_yaml
from .sections import TRAINING_OPTIONS
from .trainer import TranslationTrainer


@settings_of_one_run()
def train(recipe: Recipe, output_dir: str | Path, resume: bool = False, overwrite: bool = False) -> Path:
    """
    Train a model. A killed run resumes from its newest intact checkpoint; on CPU the result is bit-identical to an
    uninterrupted run. Nothing but prepared data is written before the data is ready and the training can start.

    Args:
        recipe ([`Recipe`]): The recipe.
        output_dir (`str` or `Path`): Folder of the checkpoints, and of the final model in its subfolder `model`. With
            `training.baseline_steps` its subfolder `baseline` has the checkpoints of the first stage.
        resume (`bool`, *optional*, defaults to `False`): Resume from the newest intact checkpoint, if there is one.
        overwrite (`bool`, *optional*, defaults to `False`): Delete an earlier run in the folder, once the new one can
            start.

    Returns:
        The folder of the final model.

    Raises:
        FileExistsError: The folder contains an earlier run, and neither `resume` nor `overwrite` is set.
        UserError, FileNotFoundError: The recipe or data is wrong or differs from that of the resumed run, another run
            writes into the folder, or the disk is full.
    """
    training, folder = recipe.training, Path(output_dir)
    if training.runs_on_cpu:
        keep_freed_memory()
    processes = Processes(training.runs_on_cpu, training.ddp_timeout, training.ddp_backend)
    with ExitStack() as context:

        def claim() -> None:
            context.enter_context(checkpoints.locked(folder))
            checkpoints.check_output(folder, resume, overwrite)

        processes.on_main(claim)
        processes.find_writers(folder)
        processes.on_writers(lambda: None if processes.is_main else claim())
        checkpoint = common_checkpoint(folder, processes) if resume else None
        plan = Plan.of(recipe, folder, checkpoint)
        dry_run(plan)
        check_versions(plan, processes)
        if overwrite and not resume:
            refuse_own_files(plan)
        if checkpoint is not None:
            processes.on_main(partial(check_recipe, plan, checkpoint))
        set_seed(plan.arguments.seed)
        inputs = prepare_inputs(plan, checkpoint, processes)
        configs = stage_configs(plan.data.model, inputs.tokenizers, len(plan.stages) > 1)
        for config in configs:
            if plan.guided_alignment is not None and hasattr(config, "alignment_head"):  # for word alignment
                config.alignment_head = list(plan.guided_alignment.place(config))
        record = processes.on_main(partial(record_of, inputs, plan, processes))
        if checkpoint is not None:
            processes.on_main(partial(check_record, record, configs, plan, checkpoint))
        report(plan, inputs, configs[-1], checkpoint, processes)
        is_last = checkpoint is not None and (checkpoint.parent == folder or checkpoint == plan.stages[-1].baseline)
        done = len(plan.stages) - 1 if is_last else 0
        trainer: TranslationTrainer | None = None
        for number in range(done, len(plan.stages)):
            if trainer is not None:
                accelerator, trainer = trainer.accelerator, None
                accelerator.free_memory()
            stage = plan.stages[number]
            stage.arguments.save_on_each_node = processes.has_own_folders
            own = checkpoint if checkpoint is not None and checkpoint.parent == stage.arguments.folder else None
            trainer = trainer_of(plan, stage, configs[number], inputs, own)
            if number == done:
                processes.on_writers(partial(begin, plan, record, checkpoint, overwrite and not resume))
            fit(trainer, stage, own, processes)
        assert trainer is not None, "there is always a stage left"
        processes.on_main(partial(finish, plan, trainer))
    return folder / FINAL


def common_checkpoint(folder: Path, processes: Processes) -> Path | None:
    """Return the newest intact checkpoint that a run has in all its output folders; `UserError` if one lacks it."""
    newest = list(filter(None, processes.on_writers(partial(checkpoint_to_resume, folder))))
    if not newest:
        return None
    # A host may have been killed before it completed its newest one.
    common = min(newest, key=lambda path: (path.parent.name != BASELINE, steps_of(path)))
    has_it = processes.on_writers(lambda: (folder / common / MANIFEST).exists())
    if not all(has_it):
        reason = f"Host {has_it.index(False)} lacks {common}, which others have"
        raise UserError(f"{reason}. Copy that folder from another host.", field=folder)
    return folder / common


def check_versions(plan: Plan, processes: Processes) -> None:
    """Raise `UserError` if processes have different recipes or code, as on hosts with installations of their own."""
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    found = processes.on_chosen(True, lambda: {**values_of(plan.settings), "the code of recnmt_hf": code})
    if changes := {name: text for own in found for name, text in changes_of(found[0], own).items()}:
        raise UserError(f"All hosts need the same recipe and code; these differ: {'; '.join(changes.values())}.")


def checkpoint_to_resume(output_dir: Path) -> Path | None:
    """Return the newest intact checkpoint of a run, relative to it, or `None`, and delete incomplete files."""
    places = (output_dir, output_dir / BASELINE)
    remove(output_dir / PARTIAL_FINAL)
    for _, folder in (pair for place in places for pair in checkpoints.numbered_in(place)):
        if not (folder / MANIFEST).exists():
            checkpoints.discard(folder)
    newest = (checkpoints.newest_intact_checkpoint(place) for place in places)
    checkpoint = next(filter(None, newest), None)
    logger.info(f"Resuming from {checkpoint}." if checkpoint else "No complete checkpoint: training from the start.")
    return checkpoint and checkpoint.relative_to(output_dir)


def refuse_own_files(plan: Plan) -> None:
    """Raise `UserError` if a run starts from files of the run that it overwrites."""
    used = [plan.data.model.init_from, *plan.data.tokenizers]
    used += [file for _, corpus in plan.data.places for file in corpus.local_files()]
    folder = plan.output_dir.resolve()
    for path in filter(None, used):
        place = Path(path).resolve()
        if place.is_relative_to(folder) and not place.is_relative_to(folder / DATA):
            raise UserError(f"The run needs {path}, which --overwrite would delete.", field=path)


def report(plan: Plan, inputs: Inputs, config: Any, checkpoint: Path | None, processes: Processes) -> None:
    """Log the size of the run, and warn about what may spoil its results."""
    count = f"{processes.count} process" + "es" * (processes.count > 1)
    pairs = f"{len(inputs.train)} training pairs, {len(inputs.validation)} validation pairs"
    logger.info(f"{pairs}; {count} on {processes.state.device}.")
    for name, corpora in plan.tests.items():
        if corpora == plan.data.validation:
            logger.warning(f"Warning: test.{name} is the validation set, on which checkpoints were chosen.")
    is_first = checkpoint is None and plan.stages[-1].init_from is None and config.baseline() is not None
    if is_first and config.baseline_first:
        remedy = "Set training.baseline_steps, or model.init_from to a baseline."
        logger.warning(f"Warning: {config.baseline_first}. {remedy}")


def begin(plan: Plan, record: Mapping[str, Any], checkpoint: Path | None, overwrite: bool) -> None:
    """Write recipe and record of a run that can start, and delete the run that it overwrites."""
    if overwrite:  # the recipe goes last, so that a killed deletion can be repeated
        for path in filter(checkpoints.is_of_run, checkpoints.content_of(plan.output_dir)):
            remove(path)
    with open_output(plan.output_dir / RECIPE) as file:
        file.write(dump_yaml(plan.settings))
    with open_output(plan.output_dir / RECORD) as file:
        json.dump(record, file, indent=1)
    for stage in plan.stages if checkpoint is not None else ():
        for step, folder in checkpoints.numbered_in(stage.arguments.folder):
            if checkpoint is not None and folder.parent == checkpoint.parent and step > steps_of(checkpoint):
                checkpoints.discard(folder)  # damaged
        if checkpoints.newest_checkpoint(stage.arguments.folder) is not None:
            checkpoints.rotate_checkpoints(stage.arguments)  # a killed run may not have done so


def trainer_of(plan: Plan, stage: Stage, config: Any, inputs: Inputs, checkpoint: Path | None) -> TranslationTrainer:
    """Build model and trainer of a stage. If the stage resumes from a checkpoint, the trainer loads its weights."""
    if stage.baseline is not None:
        set_seed(stage.arguments.seed)  # the same whether or not the stage before ran in this process
    model: Any = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config))
    ids = ("decoder_start_token_id", "pad_token_id", "eos_token_id", "bos_token_id")
    settings = {"max_length": min(config.max_position_embeddings, 256), "num_beams": plan.decoding.beams}
    model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in ids}, **settings)
    logger.info(f"{type(model).__name__} with {model.num_parameters() / 1e6:.2f}M parameters.")
    if checkpoint is None and stage.init_from is not None:
        logger.info(f"Warm start from {stage.init_from}: {model.init_from_baseline(stage.init_from)}.")
    trainer = TranslationTrainer(
        model,
        stage.arguments,
        tokenizer=inputs.tokenizers.source,
        target_tokenizer=inputs.tokenizers.target,
        relations=inputs.tokenizers.relations,
        train_dataset=inputs.train,
        eval_dataset=inputs.validation,
        callbacks=[EarlyStoppingCallback(stage.patience)] if stage.patience else [],
        baseline=stage.baseline,
        last_step=stage.last_step,
        validation_decoding=stated(plan.decoding),
        bpe_dropout=plan.bpe_dropout,
        guided_alignment=plan.guided_alignment,
    )
    if stage.last_step is not None:  # a baseline's
        check_planned_steps(stage.last_step, trainer.planned_steps())
    return trainer


def fit(trainer: TranslationTrainer, stage: Stage, checkpoint: Path | None, processes: Processes) -> None:
    """Train a stage to its end, from its checkpoint if it has one, and save a checkpoint of the last step."""
    if checkpoint is not None:
        state = checkpoints.state_of(checkpoint).get("stateful_callbacks", {}).get("EarlyStoppingCallback", {})
        waited = state.get("attributes", {}).get("early_stopping_patience_counter", 0)
        # The Trainer would make one more step before it checks the limit.
        if steps_of(checkpoint) >= trainer.planned_steps() or waited >= (stage.patience or math.inf):
            logger.info(f"The run ended with {checkpoint.name}.")
            return
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # in files of other names
        if not is_sharded and not (checkpoint / "optimizer.pt").is_file():  # the Trainer would begin with a new one
            reason = "has no state of the optimizer (training.save_only_model)"
            raise UserError(f"{checkpoint} {reason}.", field=checkpoint)
    start = checkpoint or stage.baseline
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    newest = processes.on_main(partial(checkpoints.newest_checkpoint, stage.arguments.folder))
    if newest is None or steps_of(newest) != trainer.state.global_step:
        trainer._save_checkpoint(trainer.model, None)


UPDATE = "processes times training.gradient_accumulation_steps"


def check_recipe(plan: Plan, checkpoint: Path) -> None:
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
    fixed = OF_DATA.union(*(identity_of(values, plan.compares_evaluations) for values in (settings, plan.settings)))
    old, new = values_of(settings), values_of(plan.settings)
    for name in old.keys() ^ new.keys():
        entry = TRAINING_OPTIONS.get(name.removeprefix("training."))
        for values in (old, new):
            values.setdefault(name, entry and entry.default)
    if mapping_in(plan.output_dir / RECORD):  # else of an old version, so that the prepared data is not known
        old, new = ({name: values[name] for name in values.keys() - OF_DATA} for values in (old, new))
    compare(old, new, fixed, checkpoint)


def check_record(record: Mapping[str, Any], configs: list[Any], plan: Plan, checkpoint: Path) -> None:
    """Compare data, processes, versions and the model's configuration with those of the start of the run."""
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
    config = configs[-1 if checkpoint.parent == plan.output_dir else 0]
    saved = json.loads(read_small_text(checkpoint / "config.json"))
    now = json.loads(config.to_json_string(use_diff=False))
    ignored = {"dtype", "architectures", "transformers_version", "use_cache"}  # the Trainer sets the last
    names = {entry.name for entry in fields(config)} & saved.keys() & now.keys() - ignored
    compare({name: saved[name] for name in names}, {name: now[name] for name in names}, names, checkpoint)


def compare(old: Mapping[str, Any], new: Mapping[str, Any], fixed: set[str], checkpoint: Path) -> None:
    """Log what changed since the start of a run; `UserError` for `fixed` values, which give earlier steps a meaning."""
    changes = changes_of(old, new)
    if forbidden := [name for name in changes if name in fixed]:
        reason = f"These values must not change since {checkpoint}: {'; '.join(changes[name] for name in forbidden)}."
        remedy = f"Restore them (the recipe is in {RECIPE}), or start again with --overwrite or in another folder."
        raise UserError(f"{reason} {remedy}", field=", ".join(forbidden))
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
