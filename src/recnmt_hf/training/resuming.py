"""Whether a run may resume: its recipe, data and processes are compared with those it was started with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from datasets import Dataset
from transformers import PreTrainedConfig

from .._values import default_of, stated
from ..data.corpora import parse_corpora
from ..data.files import open_output
from ..inference.options import DecodingOptions
from ..models.user_errors import UserError
from .arguments import TranslationTrainingArguments
from .building import ModelSection
from .checkpoints import newest_intact_checkpoint, state_of, steps_of
from .inputs import forget_tokenizers
from .output_folder import BASELINE, RECIPE, RECORD, remove_leftovers
from .processes import logger
from .recipe import WITHOUT_EFFECT, AverageSection, DataSection, Recipe, TokenizerSection


# Nothing of the training depends on these.
FREE = {
    "data.cache_dir",
    "data.num_proc",
    "training.dataloader_num_workers",
    "training.dataloader_persistent_workers",
    "training.dataloader_pin_memory",
    "training.dataloader_prefetch_factor",
    "training.ddp_backend",
    "training.ddp_broadcast_buffers",
    "training.ddp_bucket_cap_mb",
    "training.ddp_find_unused_parameters",
    "training.ddp_timeout",
    "training.disable_tqdm",
    "training.eval_delay",
    "training.eval_on_start",
    "training.eval_steps",
    "training.eval_strategy",
    "training.include_num_input_tokens_seen",
    "training.include_tokens_per_second",
    "training.keep_best",
    "training.keep_last",
    "training.load_best_model_at_end",
    "training.per_device_eval_batch_size",
    "training.per_device_train_batch_size",
    "training.project",
    "training.report_to",
    "training.restore_callback_states_from_checkpoint",
    "training.run_name",
    "training.save_on_each_node",
    "training.save_steps",
    "training.save_strategy",
    "training.skip_memory_metrics",
    "training.torch_empty_cache_steps",
}
FREE |= {f"training.{name}" for name in WITHOUT_EFFECT}
FREE_PREFIXES = ("average.", "decoding.", "test.", "training.hub_", "training.log", "training.push_to_hub")
# These hold from the checkpoint on: what it has learnt stays meaningful.
FROM_HERE = {
    "training.early_stopping_patience",
    "training.learning_rate",
    "training.max_grad_norm",
    "training.max_steps",
    "training.num_train_epochs",
    "training.warmup_ratio",
    "training.warmup_steps",
}
# Other devices and kernels round differently.
ROUNDING = {"training.use_cpu", "training.tf32", "training.torch_compile", "training.torch_compile_backend"}
# Values of the evaluations before and after such a change are no longer comparable.
MEASURES = {
    "data.validation",
    "training.bleu_beams",
    "training.bleu_lowercase",
    "training.bleu_samples",
    "training.greater_is_better",
    "training.metric_for_best_model",
    "training.rouge_units",
    "training.text_metric",
}
# What the prepared data and an update are made of. Where the run has a record, what came of them is compared, which
# says more than the recipe's words.
LOOKED_AT = {
    "data.max_length_ratio",
    "data.max_source_length",
    "data.max_target_length",
    "data.on_empty",
    "data.on_long",
    "data.source_lang",
    "data.target_lang",
    "data.train",
    "data.validation",
    "training.gradient_accumulation_steps",
}


@dataclass
class RunRecord:
    """
    Circumstances of a run beside its recipe.

    Args:
        processes (`int`): How many processes trained.
        accumulation (`int`): Batches of each process that make an update.
        training_data, validation_data (`str`): Digests of the prepared token ids.
        training_pairs, validation_pairs (`int`): Their numbers of sentence pairs.
        device (`str`): `"cpu"`, `"cuda"`, ...
        versions (`dict`): Of the libraries that compute.
    """

    processes: int
    accumulation: int
    training_data: str
    training_pairs: int
    validation_data: str
    validation_pairs: int
    device: str
    versions: dict[str, str] = field(
        default_factory=lambda: {"torch": torch.__version__, "transformers": transformers.__version__}
    )

    def save(self, output_dir: Path) -> None:
        with open_output(output_dir / RECORD) as file:
            json.dump(asdict(self), file, indent=1)

    @classmethod
    def load(cls, output_dir: Path) -> RunRecord | None:
        """Load the record of an earlier run; `None` if there is none, as in runs of old versions."""
        try:
            content = json.loads((output_dir / RECORD).read_text(encoding="utf-8"))
            return cls(**content)
        except (OSError, ValueError, TypeError):
            return None


def digest_of(data: Dataset) -> str:
    """Return the SHA-256 sum of a prepared dataset's token ids, however it is divided into files."""
    digest = hashlib.sha256()
    for batch in data.select_columns(["input_ids", "labels"]).with_format("arrow").iter(10_000):
        for name in ("input_ids", "labels"):
            for chunk in batch.column(name).chunks:
                digest.update(np.asarray(chunk.value_lengths(), dtype=np.int64).tobytes())
                digest.update(np.asarray(chunk.flatten(), dtype=np.int64).tobytes())
    return digest.hexdigest()


def recipe_in(output_dir: Path) -> Mapping[str, Any] | None:
    """Read the recipe that a run was started with; `None` if there is none that can be read."""
    try:
        content = yaml.safe_load((output_dir / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, Mapping) else None


def earlier_baseline_steps(output_dir: Path) -> Any:
    """Return `training.baseline_steps` of the recipe that a run was started with; `None` if there is none."""
    return ((recipe_in(output_dir) or {}).get("training") or {}).get("baseline_steps")


def checkpoint_to_resume(recipe: Recipe, output_dir: Path) -> Path | None:
    """
    Return the checkpoint from which a run resumes, and delete what a killed run left incomplete.

    Raises:
        ValueError: All checkpoints are damaged, or they were made with another recipe.
    """
    remove_leftovers(output_dir)
    checkpoint = newest_intact_checkpoint(output_dir, logger.info) or newest_intact_checkpoint(
        output_dir / BASELINE, logger.info
    )
    if checkpoint is None:
        logger.info("No complete checkpoint: training from the start.")
        forget_tokenizers(output_dir)  # they may be another recipe's
        return None
    for change in check_recipe(recipe, output_dir, checkpoint):
        logger.info(change)
    if checkpoint.parent != output_dir and recipe.training.baseline_steps is None:
        raise UserError(
            f"{checkpoint} is of a baseline, and the recipe has no training.baseline_steps. Remedy: set it as it was, "
            "or start anew in another folder or with --overwrite."
        )
    logger.info(f"Resuming from {checkpoint}.")
    return checkpoint


def changes_of_recipe(recipe: Recipe, output_dir: Path) -> dict[str, str] | None:
    """
    Return the fields of a recipe that differ from the one its run was started with, each with `"old -> new"`; `None` if
    there is no earlier recipe that can be read.
    """
    old = recipe_in(output_dir)
    if old is None:
        return None
    new = yaml.safe_load(yaml.safe_dump(recipe.to_dict()))
    old_fields, new_fields = fields_of(old), fields_of(new)
    changes = {}
    for name in sorted(old_fields.keys() | new_fields.keys()):
        old_value, new_value = (
            values[name] if name in values else recipe_default(name) for values in (old_fields, new_fields)
        )
        if old_value != new_value:
            changes[name] = f"{display(old_value)} -> {display(new_value)}"
    if not torch.accelerator.is_available():
        changes.pop("training.use_cpu", None)  # there is nothing else to use
    return changes


def fields_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe by `section.field` and `model.fields.field`."""
    result: dict[str, Any] = {}
    for section, values in recipe.items():
        for name, value in (values or {}).items():
            place = f"{section}.{name}"
            if place == "model.fields":
                result |= {f"{place}.{inner}": inner_value for inner, inner_value in (value or {}).items()}
            else:
                names_corpora = section == "test" or place in ("data.train", "data.validation")
                result[place] = comparable_corpora(value) if names_corpora else value
    return result


def comparable_corpora(corpora: Any) -> Any:
    """Return corpora in one form, so that they can be compared, or unchanged if they are not valid."""
    try:
        return [stated(replace(corpus)) for corpus in parse_corpora(corpora)]  # a copy forgets which fields were given
    except UserError:
        return corpora


def recipe_default(name: str) -> Any:
    """Return the default of a field that a recipe (perhaps of an earlier version) leaves out."""
    section, _, last = name.partition(".")
    kinds = {
        "model": ModelSection,
        "data": DataSection,
        "tokenizer": TokenizerSection,
        "average": AverageSection,
        "training": TranslationTrainingArguments,
        "decoding": DecodingOptions,
    }
    entries = fields(kinds[section]) if section in kinds else ()
    return next((default_of(entry) for entry in entries if entry.name == last), None)


def display(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_recipe(recipe: Recipe, output_dir: Path, checkpoint: Path) -> list[str]:
    """
    Check that a run may resume with a recipe.

    Returns:
        A line for each change, all of them allowed.

    Raises:
        ValueError: A change is not allowed; the message has all of these, with old and new value.
    """
    max_steps, steps = recipe.training.max_steps, steps_of(checkpoint)
    if 0 < max_steps < steps:
        raise UserError(
            f"training.max_steps={max_steps} is fewer than the {steps} steps that {checkpoint} has. Remedy: set it to "
            f"{steps} or more, or start anew in another folder or with --overwrite."
        )
    changes = changes_of_recipe(recipe, output_dir)
    if changes is None:
        return [f"{output_dir} has no readable {RECIPE}: what changed since the run began cannot be told."]
    known_data = RunRecord.load(output_dir) is not None
    sentences, refused = [], []
    for name, change in changes.items():
        if name in FREE or name.startswith(FREE_PREFIXES):
            sentences.append(f"{name}: {change}.")
        elif name in FROM_HERE:
            sentences.append(f"{name}: {change} (from step {steps} on).")
        elif name in ROUNDING:
            sentences.append(f"{name}: {change}; the run goes on, but not bit by bit as it would have.")
        elif name in LOOKED_AT and known_data:
            continue  # by `check_record`
        elif name in MEASURES and not recipe.compares_evaluations:
            sentences.append(f"{name}: {change}; evaluations before and after are not comparable.")
        else:
            refused.append(f"{name}: {change}")
    if refused:
        raise UserError(
            f"{checkpoint} was trained with another recipe, and a run cannot go on with other values of these fields: "
            f"{'; '.join(refused)}. Remedy: resume with the old values ({output_dir / RECIPE} has them), or start "
            "anew in another folder or with --overwrite."
        )
    return [f"Changed since the run began: {sentence}" for sentence in sentences]


def check_record(new: RunRecord, compares_evaluations: bool, output_dir: Path, checkpoint: Path) -> list[str]:
    """
    Check that a run may resume with its data and processes.

    Processes times accumulated batches determine the tokens of an update, and so learning rate, schedule and place in
    the data. If the product stays, another number of processes only divides the same data in another way: the run
    resumes, but not bit by bit. If it changes, the recipe has another meaning.

    Args:
        new ([`RunRecord`]): The record of the resumed run.
        compares_evaluations (`bool`): Whether the run compares scores of evaluations at different steps.
        output_dir (`Path`): The run's folder.
        checkpoint (`Path`): The checkpoint.

    Returns:
        A line for each change, all of them allowed.

    Raises:
        ValueError: A change is not allowed.
    """
    old = RunRecord.load(output_dir)
    if old is None:
        return []
    sentences = []
    if old.training_data != new.training_data:
        raise UserError(
            f"The training data is not what {checkpoint} was trained on ({old.training_pairs} sentence pairs then, "
            f"{new.training_pairs} now, other tokens). Remedy: bring the old data and settings back "
            f"({output_dir / RECIPE} names them), or start anew in another folder or with --overwrite."
        )
    if old.validation_data != new.validation_data:
        text = (
            f"The validation data changed ({old.validation_pairs} sentence pairs then, {new.validation_pairs} now): "
            "evaluations before and after are not comparable"
        )
        if compares_evaluations:
            raise UserError(
                f"{text}, and this run compares them. Remedy: bring the old data back, or set average.which: last and "
                "no early_stopping_patience."
            )
        sentences.append(f"{text}.")
    before, after = old.processes * old.accumulation, new.processes * new.accumulation
    change = (
        f"processes: {old.processes} -> {new.processes}, gradient_accumulation_steps: {old.accumulation} -> "
        f"{new.accumulation}"
    )
    if before != after:
        raise UserError(
            f"Another number of batches would make an update than in {checkpoint} ({change}). Remedy: keep the product "
            f"of processes and gradient_accumulation_steps at {before}"
            + (
                f", here with training.gradient_accumulation_steps={before // new.processes}."
                if before % new.processes == 0
                else f"; {new.processes} processes cannot."
            )
        )
    if old.processes != new.processes or old.accumulation != new.accumulation:
        sentences.append(
            f"Changed since the run began: {change}; an update has as many batches as before, dealt in other shares: "
            "the run goes on, but not bit by bit as it would have."
        )
    machine: list[tuple[str, str | None, str]] = [("device", old.device, new.device)]
    machine += [(name, old.versions.get(name), version) for name, version in new.versions.items()]
    for name, was, now in machine:
        if was != now:
            sentences.append(
                f"Changed since the run began: {name}: {was} -> {now}; the run goes on, but perhaps not bit by bit as "
                "it would have."
            )
    return sentences


def check_config(config: PreTrainedConfig, checkpoint: Path) -> None:
    """
    Check that the configuration made from recipe and tokenizers is that of the checkpoint.

    Raises:
        ValueError: A field differs.
    """
    try:
        saved = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        path = checkpoint / "config.json"
        raise UserError(f"{path} cannot be read ({error}). Remedy: use another checkpoint.") from error
    passing = {"dtype", "architectures", "transformers_version", "use_cache"}  # the Trainer sets the last
    own = {entry.name for entry in fields(type(config))} - passing
    now = json.loads(config.to_json_string(use_diff=False))
    differing = [name for name in sorted(own & saved.keys() & now.keys()) if saved[name] != now[name]]
    if differing:
        listed = "; ".join(f"{name}: {display(saved[name])} -> {display(now[name])}" for name in differing)
        raise UserError(
            f"The model of {checkpoint} is not the one that the recipe describes: {listed}. Remedy: resume with the "
            "recipe it was started with, or start anew in another folder or with --overwrite."
        )


def stopped_early(checkpoint: Path, patience: int | None) -> bool:
    """Return whether early stopping ended the run with this checkpoint."""
    states = state_of(checkpoint).get("stateful_callbacks", {}).get("EarlyStoppingCallback", {})
    states = states if isinstance(states, list) else [states]
    counters = [state.get("attributes", {}).get("early_stopping_patience_counter", 0) for state in states]
    return patience is not None and any(counter >= patience for counter in counters)
