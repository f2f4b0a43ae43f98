"""Checks of resumed runs: identity, data and processes are compared with those of the start."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import PreTrainedConfig

from .._bounded_reading import read_small_text
from ..data.files import open_output
from ..data.shard_blocks import ShardSettings
from ..data.sharded import ShardedDataset
from ..data.tree_inputs import TREE_INPUTS
from ..errors import UserError, short_repr
from .arguments import TranslationTrainingArguments
from .checkpoints import newest_intact_checkpoint, state_of, steps_of
from .inputs import Inputs, delete_tokenizers
from .output_folder import BASELINE, RECIPE, RECORD, mapping_in, remove_leftovers
from .plan import Plan, identity_of, values_of
from .processes import Processes, logger
from .recipe import TRAINING_OPTIONS, Recipe


CHANGED = "Changed since the start of the run: "
RESTORE = "Restore it, or start again with --overwrite or in another folder."
# What prepared data is made of. The data itself is compared.
OF_DATA = {f"data.{name}" for name in ("train", "validation", *ShardSettings.__dataclass_fields__)}


@dataclass
class RunRecord:
    """Circumstances of a run that its recipe does not contain."""

    processes: int
    accumulation: int  # batches of each process in an update
    training_data: str  # digest of the prepared token ids
    training_pairs: int
    validation_data: str
    validation_pairs: int
    device: str  # "cpu", "cuda", ...
    versions: dict[str, str] = field(
        default_factory=lambda: {"torch": torch.__version__, "transformers": transformers.__version__}
    )
    precision: str | None = None  # of runs by older versions

    @classmethod
    def of(cls, inputs: Inputs, arguments: TranslationTrainingArguments, processes: Processes) -> RunRecord:
        """Return the record of the present run."""
        return cls(
            processes=processes.count,
            accumulation=arguments.gradient_accumulation_steps,
            training_data=digest_of(inputs.train),
            training_pairs=len(inputs.train),
            validation_data=digest_of(inputs.validation),
            validation_pairs=len(inputs.validation),
            device=processes.state.device.type,
            precision=arguments.precision,
        )

    def save(self, output_dir: Path) -> None:
        """Write the record into a run's folder."""
        with open_output(output_dir / RECORD) as file:
            json.dump(asdict(self), file, indent=1)

    @classmethod
    def load(cls, output_dir: Path) -> RunRecord | None:
        """Load the record of an earlier run; `None` if there is none, as in runs of old versions."""
        content = mapping_in(output_dir / RECORD)
        return cls(**content) if content else None


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
    """
    Return the newest intact checkpoint of a run, or `None` if there is none, and delete incomplete files. `UserError`
    if all checkpoints are damaged.
    """
    remove_leftovers(output_dir)
    newest = (newest_intact_checkpoint(folder, logger.info) for folder in (output_dir, output_dir / BASELINE))
    checkpoint = next(filter(None, newest), None)
    if checkpoint is None:
        delete_tokenizers(output_dir)  # they may be another recipe's
    logger.info(f"Resuming from {checkpoint}." if checkpoint else "No complete checkpoint: training from the start.")
    return checkpoint


def check_identity(plan: Plan, checkpoint: Path) -> None:
    """
    Compare a plan with the recipe of its folder, and log what changed. `UserError` if this would change the meaning of
    the steps that are trained already.
    """
    max_steps, steps = plan.arguments.max_steps, steps_of(checkpoint)
    if 0 < max_steps < steps:
        raise UserError(
            f"training.max_steps={max_steps} is less than the {steps} steps of {checkpoint}.",
            field="training.max_steps",
        )
    if checkpoint.parent != plan.output_dir and len(plan.stages) == 1:
        raise UserError(
            f"{checkpoint} belongs to a baseline, but training.baseline_steps is not set. {RESTORE}",
            field="training.baseline_steps",
        )
    earlier = mapping_in(plan.output_dir / RECIPE)
    if not earlier:
        logger.info(f"{plan.output_dir} has no readable {RECIPE}, so changes of the recipe are unknown.")
        return
    settings = Recipe(**earlier).to_dict()
    old, new = values_of(settings), values_of(plan.settings)
    fixed = identity_of(settings, plan.compares_evaluations).keys() | plan.identity.keys()
    compared = old.keys() | new.keys()
    if RunRecord.load(plan.output_dir) is None:  # of an old version, so that the prepared data is not known
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


def check_record(new: RunRecord, plan: Plan, checkpoint: Path) -> None:
    """
    Compare data and processes with those of the start, and log what changed. `UserError` for other data.

    Processes times accumulated batches determine the tokens of an update, and so learning rate, schedule and position
    in the data. With the same product, another number of processes only distributes the data in another way. The run
    resumes, but is not bit-identical. With another product, the recipe has another meaning.
    """
    old = RunRecord.load(plan.output_dir)
    if old is None:
        return
    for name, matters in (("training", True), ("validation", plan.compares_evaluations)):
        if getattr(old, f"{name}_data") != getattr(new, f"{name}_data"):
            pairs = f"{getattr(old, f'{name}_pairs')} sentence pairs before, {getattr(new, f'{name}_pairs')} now"
            if matters:
                field = "data.train" if name == "training" else "data.validation"
                raise UserError(f"The {name} data differs from that of {checkpoint} ({pairs}). {RESTORE}", field=field)
            logger.info(f"The {name} data changed ({pairs}): evaluations before and after are not comparable.")
    batches = old.processes * old.accumulation
    if batches != new.processes * new.accumulation:
        raise UserError(
            f"The batches per update differ from those of {checkpoint}: processes times gradient_accumulation_steps "
            f"must stay {batches}, got {new.processes} x {new.accumulation}.",
            field="training.gradient_accumulation_steps",
        )
    before = {**asdict(old), **old.versions, "precision": old.precision or new.precision}
    now = {**asdict(new), **new.versions}
    for name in ("processes", "device", "precision", *new.versions):
        if before.get(name) != now[name]:
            logger.info(f"{CHANGED}{name}: {before.get(name)} -> {now[name]}; the result may not be bit-identical.")


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
