"""Checks of resumed runs: recipe, data and processes are compared with those of the start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import PreTrainedConfig

from .._bounded_reading import read_small_text
from .._values import default_of, stated
from ..data.corpora import parse_corpora
from ..data.files import open_output
from ..data.sharded import ShardedDataset
from ..data.sharding import ShardSettings
from ..data.tree_inputs import TREE_INPUTS
from ..errors import UserError
from ..models.user_errors import masked
from .arguments import TranslationTrainingArguments
from .checkpoints import newest_intact_checkpoint, state_of, steps_of
from .inputs import delete_tokenizers
from .output_folder import BASELINE, RECIPE, RECORD, mapping_in, remove_leftovers
from .processes import logger
from .recipe import NO_EFFECT, Recipe, without_obsolete
from .recipe_yaml import dump_yaml, load_yaml


def training_fields(names: str) -> set[str]:
    """Return the places of fields of the section `training`."""
    return {f"training.{name}" for name in names.split()}


# Fields that do not affect training.
FREE = {"data.cache_dir", "data.num_proc", *(f"training.{name}" for name in NO_EFFECT)}
FREE |= training_fields("""
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout disable_tqdm eval_delay eval_on_start
    eval_steps eval_strategy include_num_input_tokens_seen include_tokens_per_second keep_best keep_last
    project report_to restore_callback_states_from_checkpoint run_name save_on_each_node save_steps save_strategy
    skip_memory_metrics torch_empty_cache_steps
""")
FREE_PREFIXES = ("average.", "decoding.", "test.", "training.hub_", "training.log", "training.push_to_hub")
# Fields that may change from the checkpoint on.
FROM_CHECKPOINT = training_fields(
    "early_stopping_patience learning_rate max_grad_norm max_steps num_train_epochs warmup_ratio warmup_steps"
)
# Fields that change rounding.
ROUNDING = training_fields("use_cpu tf32 torch_compile torch_compile_backend")
# Fields after whose change evaluations are not comparable.
OF_EVALUATIONS = {"data.validation"} | training_fields(
    "bleu_beams bleu_lowercase bleu_samples bleu_tokenize greater_is_better metric_for_best_model rouge_units "
    "text_metric"
)
# Fields of the prepared data and of an update. If the run has a record, `check_record` compares their results instead.
RECORDED = {"training.gradient_accumulation_steps", "data.train", "data.validation", "data.prepared"}
RECORDED |= {f"data.{entry.name}" for entry in fields(ShardSettings)}
CHANGED = "Changed since the start of the run: "


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

    def save(self, output_dir: Path) -> None:
        """Write the record into a run's folder."""
        with open_output(output_dir / RECORD) as file:
            json.dump(asdict(self), file, indent=1)

    @classmethod
    def load(cls, output_dir: Path) -> RunRecord | None:
        """Load the record of an earlier run; `None` if there is none, as in runs of old versions."""
        try:
            return cls(**mapping_in(output_dir / RECORD))
        except TypeError:
            return None


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


def earlier_baseline_steps(output_dir: Path) -> Any:
    """Return `training.baseline_steps` of the recipe of the run in a folder, or `None`."""
    return (mapping_in(output_dir / RECIPE).get("training") or {}).get("baseline_steps")


def checkpoint_to_resume(recipe: Recipe, output_dir: Path) -> Path | None:
    """
    Return the checkpoint from which a run resumes, and delete incomplete files. `UserError` if all checkpoints are
    damaged, or were made with another recipe.
    """
    remove_leftovers(output_dir)
    newest = (newest_intact_checkpoint(folder, logger.info) for folder in (output_dir, output_dir / BASELINE))
    checkpoint = next(filter(None, newest), None)
    if checkpoint is None:
        logger.info("No complete checkpoint: training from the start.")
        delete_tokenizers(output_dir)  # they may be another recipe's
        return None
    for change in check_recipe(recipe, output_dir, checkpoint):
        logger.info(change)
    if checkpoint.parent != output_dir and recipe.training.baseline_steps is None:
        raise UserError(
            f"{checkpoint} belongs to a baseline, but training.baseline_steps is not set. Set it as before, or start "
            "again with --overwrite or in another folder.",
            field="training.baseline_steps",
        )
    logger.info(f"Resuming from {checkpoint}.")
    return checkpoint


def changes_of_recipe(recipe: Recipe, output_dir: Path) -> dict[str, str] | None:
    """Return the fields of a recipe that differ from the folder's, with `"old -> new"`; `None` if it cannot be read."""
    old = masked(mapping_in(output_dir / RECIPE))
    if not old:
        return None
    old["data"] = without_obsolete(old.get("data"))
    new = load_yaml(dump_yaml(recipe.to_dict()), RECIPE)
    changes = {}
    sides = fields_of(old), fields_of(new)
    for name in sorted(sides[0].keys() | sides[1].keys()):
        before, now = (values[name] if name in values else recipe_default(name) for values in sides)
        if before != now:
            changes[name] = f"{display(before)} -> {display(now)}"
    if not torch.accelerator.is_available():
        changes.pop("training.use_cpu", None)  # the CPU is used anyway
    return changes


def fields_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe by `section.field` and `model.fields.field`."""
    result: dict[str, Any] = {}
    for section, values in recipe.items():
        for name, value in (values or {}).items():
            place = f"{section}.{name}"
            if place == "model.fields":
                result |= {f"{place}.{inner}": inner_value for inner, inner_value in (value or {}).items()}
            elif section == "test" or place in ("data.train", "data.validation"):
                result[place] = comparable_corpora(value)
            else:
                result[place] = value
    return result


def comparable_corpora(corpora: Any) -> Any:
    """Return corpora in a form that can be compared, or unchanged if they are not valid."""
    try:
        return [stated(replace(corpus)) for corpus in parse_corpora(corpora)]  # a copy forgets which fields were given
    except UserError:
        return corpora


def recipe_default(name: str) -> Any:
    """Return the default of a field that a recipe (perhaps of an earlier version) leaves out."""
    section, _, last = name.partition(".")
    defaults = {**vars(Recipe()), "training": TranslationTrainingArguments}.get(section)
    entries = fields(defaults) if is_dataclass(defaults) else ()
    return next((default_of(entry) for entry in entries if entry.name == last), None)


def display(value: Any) -> str:
    """Return a value for messages, at most 100 characters."""
    text = "unset" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_recipe(recipe: Recipe, output_dir: Path, checkpoint: Path) -> list[str]:
    """Return a line for each changed field; `UserError` with all changes that are not allowed."""
    max_steps, steps = recipe.training.max_steps, steps_of(checkpoint)
    if 0 < max_steps < steps:
        raise UserError(
            f"training.max_steps={max_steps} is less than the {steps} steps of {checkpoint}.",
            field="training.max_steps",
        )
    changes = changes_of_recipe(recipe, output_dir)
    if changes is None:
        return [f"{output_dir} has no readable {RECIPE}, so changes of the recipe are unknown."]
    has_record = RunRecord.load(output_dir) is not None
    allowed, not_allowed = [], []
    for name, change in changes.items():
        if name in FREE or name.startswith(FREE_PREFIXES):
            allowed.append(f"{name}: {change}.")
        elif name in FROM_CHECKPOINT:
            allowed.append(f"{name}: {change} (from step {steps} on).")
        elif name in ROUNDING:
            allowed.append(f"{name}: {change}; the result will not be bit-identical.")
        elif name in RECORDED and has_record:
            continue
        elif name in OF_EVALUATIONS and not recipe.compares_evaluations:
            allowed.append(f"{name}: {change}; evaluations before and after are not comparable.")
        else:
            not_allowed.append(f"{name}: {change}")
    if not_allowed:
        raise UserError(
            f"These fields must not change since {checkpoint}: {'; '.join(not_allowed)}. Resume with the old values "
            f"({output_dir / RECIPE}), or start again with --overwrite or in another folder.",
            field=", ".join(line.partition(":")[0] for line in not_allowed),
        )
    return [f"{CHANGED}{line}" for line in allowed]


def check_record(new: RunRecord, compares_evaluations: bool, output_dir: Path, checkpoint: Path) -> list[str]:
    """
    Return a line for each change of data and processes; `UserError` if one is not allowed.

    Processes times accumulated batches determine the tokens of an update, and so learning rate, schedule and position
    in the data. With the same product, another number of processes only distributes the data in another way. The run
    resumes, but is not bit-identical. With another product, the recipe has another meaning.
    """
    old = RunRecord.load(output_dir)
    if old is None:
        return []
    if old.training_data != new.training_data:
        raise UserError(
            f"The training data differs from that of {checkpoint} ({old.training_pairs} sentence pairs before, "
            f"{new.training_pairs} now). Restore the old data and settings ({output_dir / RECIPE}), or start again "
            "with --overwrite or in another folder.",
            field="data.train",
        )
    lines = []
    if old.validation_data != new.validation_data:
        change = f"{old.validation_pairs} sentence pairs before, {new.validation_pairs} now"
        if compares_evaluations:
            raise UserError(
                f"The validation data changed ({change}), but this run compares evaluations. Restore it, or set "
                "average.which: last and remove early_stopping_patience.",
                field="data.validation",
            )
        lines.append(f"The validation data changed ({change}): evaluations before and after are not comparable.")
    batches = old.processes * old.accumulation
    change = f"processes: {old.processes} -> {new.processes}"
    change += f", gradient_accumulation_steps: {old.accumulation} -> {new.accumulation}"
    if batches != new.processes * new.accumulation:
        needed = batches / new.processes
        remedy = f"Set it to {needed:.0f}" if needed.is_integer() else "Use another number of processes"
        raise UserError(
            f"The batches per update differ from those of {checkpoint} ({change}); the product must stay {batches}. "
            f"{remedy}.",
            field="training.gradient_accumulation_steps",
        )
    if old.processes != new.processes:
        lines.append(f"{CHANGED}{change}. An update has as many batches; the result will not be bit-identical.")
    before = {"device": old.device, "precision": old.precision or new.precision, **old.versions}
    lines += [
        f"{CHANGED}{name}: {before.get(name)} -> {now}; the result may not be bit-identical."
        for name, now in {"device": new.device, "precision": new.precision, **new.versions}.items()
        if before.get(name) != now
    ]
    return lines


def check_config(config: PreTrainedConfig, checkpoint: Path) -> None:
    """Raise `UserError` if the configuration made from recipe and tokenizers differs from that of the checkpoint."""
    path = checkpoint / "config.json"
    try:
        saved = json.loads(read_small_text(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}).", field=path) from error
    ignored = {"dtype", "architectures", "transformers_version", "use_cache"}  # the Trainer sets the last
    own = {entry.name for entry in fields(type(config))} - ignored
    now = json.loads(config.to_json_string(use_diff=False))
    differing = [name for name in sorted(own & saved.keys() & now.keys()) if saved[name] != now[name]]
    if differing:
        changes = "; ".join(f"{name}: {display(saved[name])} -> {display(now[name])}" for name in differing)
        raise UserError(
            f"The model of {checkpoint} differs from that of the recipe: {changes}. Resume with the old recipe, or "
            "start again with --overwrite or in another folder.",
            field=checkpoint,
        )


def stopped_early(checkpoint: Path, patience: int | None) -> bool:
    """Return whether early stopping ended the run with this checkpoint."""
    states = state_of(checkpoint).get("stateful_callbacks", {}).get("EarlyStoppingCallback", {})
    states = states if isinstance(states, list) else [states]
    counters = [state.get("attributes", {}).get("early_stopping_patience_counter", 0) for state in states]
    return patience is not None and any(counter >= patience for counter in counters)
