"""Checkpoints: manifests of complete ones, faults of damaged ones, rotation, and averages of several."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .._bounded_reading import read_small_text
from .._plain_card import CARD, write_plain_card
from ..data.files import digest_of_file
from ..errors import ExistingFileError, MissingFileError, UserError, short_repr
from ..families import MODEL_TYPES
from ..inference.model_settings import EVIDENCE
from ..options import Range, check_value
from .metrics import higher_is_better


MANIFEST = "complete.json"
# Folder of a finished model with its translations of test sets, NAME.LANGUAGE.
TRANSLATIONS = "translations"
PARTIAL = ".partial"
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
# Files of a checkpoint that only resuming needs.
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|trained_weights|trainer_state|training_args)[^/]*$"
)


def mark_complete(folder: str | Path) -> None:
    """
    Write the manifest that marks a checkpoint as complete: names, sizes and SHA-256 sums of its files. It is written
    last and moved into place atomically, so an interrupted checkpoint never has one. It does not cover the card, which
    `recnmt publish --card-only` may replace at any time.
    """
    folder = Path(folder)
    excluded = (folder / MANIFEST, folder / CARD)
    files = {
        str(file.relative_to(folder)): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file not in excluded and file.suffix != PARTIAL
    }
    manifest = {"files": {name: file.stat().st_size for name, file in files.items()}, "sha256": sums_of(files)}
    partial = folder / f"{MANIFEST}{PARTIAL}"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / MANIFEST)


def sums_of(files: dict[str, Path]) -> dict[str, str]:
    """Return the SHA-256 sums of files by name, computed in parallel."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(files, pool.map(digest_of_file, files.values()), strict=True))


def faults_of(folder: str | Path, contents: bool = True, training_state: bool = True) -> list[str]:
    """
    Describe the faults of a checkpoint; an intact one has none. Without `contents` only sizes are compared, not sums;
    without `training_state` the files that only resuming needs are ignored. Manifests of old versions have no sums.
    """
    folder = Path(folder)
    try:
        manifest = json.loads(read_small_text(folder / MANIFEST))
        sizes, sums = dict(manifest["files"]), dict(manifest.get("sha256", {}))
    except FileNotFoundError:
        return [f"{MANIFEST} is missing, because saving was interrupted"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    faults, complete = [], {}
    for name, size in sizes.items():
        # Manifests of earlier versions may list the card, and their own partial file.
        if name == CARD or name.endswith(PARTIAL) or (not training_state and _TRAINING_STATE.search(name)):
            continue
        file = folder / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{name} has {file.stat().st_size} bytes, not {size}")
        elif name in sums and contents:
            complete[name] = file
    current_sums = sums_of(complete)
    return faults + [f"{name} has changed since it was saved" for name in complete if current_sums[name] != sums[name]]


def numbered_in(run: str | Path) -> list[tuple[int, Path]]:
    """Return steps and folders of all checkpoints of a run, complete or not, oldest first."""
    matches = ((_CHECKPOINT.match(folder.name), folder) for folder in Path(run).glob("checkpoint-*"))
    return sorted((int(match.group(1)), folder) for match, folder in matches if match)


def checkpoints_in(run: str | Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the complete checkpoints of a run, oldest first."""
    return [(step, folder) for step, folder in numbered_in(run) if not faults_of(folder, contents=False)]


def newest_checkpoint(run: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or `None`."""
    complete = checkpoints_in(run)
    return complete[-1][1] if complete else None


def newest_intact_checkpoint(run: str | Path, report: Callable[[str], None] = lambda text: None) -> Path | None:
    """
    Return the newest checkpoint of a run whose files are unchanged, or `None` if no checkpoint was ever completed.
    Damaged newer ones are reported; `UserError` if all are damaged.
    """
    damaged: list[str] = []
    for _, folder in reversed(numbered_in(run)):
        if not (folder / MANIFEST).exists():
            continue  # saving was interrupted
        faults = faults_of(folder)
        if not faults:
            for text in damaged:
                report(f"{text} An older checkpoint is used.")
            return folder
        damaged.append(f"{folder} is damaged: {'; '.join(faults[:3])}.")
    if damaged:
        raise UserError(f"{run} has no intact checkpoint. {' '.join(damaged)}", field=run)
    return None


def discard(folder: str | Path) -> None:
    """Delete a checkpoint, its manifest first, so that a half-deleted checkpoint is never complete."""
    folder = Path(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def metric_of_steps(run: str | Path, metric: str) -> dict[int, float]:
    """Return a validation metric by step, from the log of the newest checkpoint."""
    newest = newest_checkpoint(run)
    log = state_of(newest).get("log_history", []) if newest is not None else []
    return {entry["step"]: entry[metric] for entry in log if isinstance(entry.get(metric), (int, float))}


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return the Trainer's state in a checkpoint: steps, log, callbacks."""
    state: dict[str, Any] = json.loads(read_small_text(checkpoint / "trainer_state.json"))
    return state


def steps_of(checkpoint: Path) -> int:
    """Return the number of training steps in the name of a checkpoint."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def choose_checkpoints(
    run: str | Path,
    count: int,
    which: Literal["last", "best"] = "last",
    metric: str = "eval_bleu",
    greater_is_better: bool | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """
    Choose `count` checkpoints to average, or all if there are fewer: the `"last"` ones, or the `"best"` by a metric
    (without `greater_is_better` it must have a known direction). Incomplete checkpoints are reported and skipped;
    `UserError` if there is no complete one, or no value of the metric.
    """
    check_value("count", count, int, Range(least=1))
    check_value("which", which, Literal["last", "best"])
    complete = []
    for step, folder in numbered_in(run):
        if faults := faults_of(folder, contents=False):
            report(f"{folder} is incomplete and skipped: {'; '.join(faults[:3])}.")
        else:
            complete.append((step, folder))
    if not complete:
        raise UserError(f"{run} has no complete checkpoint.", field=run)
    if which == "last":
        return [folder for _, folder in complete[-count:]]
    values = metric_of_steps(run, metric)
    ranked = [(values[step], step, folder) for step, folder in complete if step in values]
    if not ranked:
        raise UserError(f"No checkpoint in {run} has a value of {short_repr(metric)}.", field=run)
    better = higher_is_better(metric) if greater_is_better is None else greater_is_better
    ranked.sort(key=lambda entry: (entry[0] if better else -entry[0], entry[1]), reverse=True)
    return [folder for _, _, folder in ranked[:count]]


def rotate_checkpoints(args: Any) -> None:
    """Delete checkpoints except the `keep_last` newest, the `keep_best` best, and the Trainer's best."""
    keep, metric = choose_checkpoints(args.folder, max(args.keep_last, 1)), args.metric_for_best_model
    if best := state_of(keep[-1]).get("best_model_checkpoint"):
        keep.append(args.folder / Path(best).name)  # the run may have moved since
    if metric and args.keep_best > 0:
        metric = f"eval_{metric.removeprefix('eval_')}"
        evaluated = metric_of_steps(args.folder, metric)
        if any(step in evaluated for step, _ in checkpoints_in(args.folder)):
            is_better = args.greater_is_better is not False
            keep += choose_checkpoints(args.folder, args.keep_best, "best", metric, is_better)
    for _, folder in numbered_in(args.folder):
        if folder not in keep:
            discard(folder)


def average_checkpoints(folders: Sequence[str | Path], output: str | Path) -> Path:
    """
    Write the mean of the parameters of several checkpoints, with the configuration and tokenizers of the last one.

    Tensors are read one at a time and summed in float32 (float64 for float64), so memory holds one model. The output
    folder appears when it is complete. A run may continue training in the folder of the checkpoints.

    Args:
        folders (sequence of `str` or `Path`): Folders with `model.safetensors`, or its shards.
        output (`str` or `Path`): A new folder.

    Returns:
        The output folder.

    Raises:
        FileNotFoundError: A folder has no safetensors weights.
        FileExistsError: The output folder exists and is not empty.
        UserError: The models differ in parameters, or a checkpoint is damaged.
    """
    paths, output = [Path(folder) for folder in folders], Path(output)
    if output.is_dir() and any(output.iterdir()):
        raise ExistingFileError(f"{output} is not empty.", field=output)
    marked = [folder for folder in paths if (folder / MANIFEST).exists()]
    for folder in marked:
        if faults := faults_of(folder, training_state=False):
            raise UserError(f"The checkpoint {folder} is damaged: {'; '.join(faults[:3])}.", field=folder)
    # Remains of a killed process are deleted; a fixed name allows only one.
    working = output.parent / f".{output.name}{PARTIAL}"
    shutil.rmtree(working, ignore_errors=True)
    try:
        mean = mean_of(paths)
        working.mkdir(parents=True)
        copy_beside_weights(paths[-1], working)
        settings = json.loads(read_small_text(working / "config.json")) if (working / "config.json").is_file() else {}
        if settings.get("model_type") in MODEL_TYPES:  # the cards of the averaged models do not describe their mean
            write_plain_card(SimpleNamespace(**settings), working)
        save_file(mean, working / "model.safetensors", metadata={"format": "pt"})
        for folder in marked:
            if not (folder / MANIFEST).exists():  # deleted before the other files, so that some may not be copied
                raise MissingFileError(f"{folder} was deleted while it was read, by a run that trains.", field=folder)
        os.replace(working, output)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return output


def mean_of(folders: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return the mean of each parameter over several checkpoints, in the parameter's own dtype."""
    handles = [open_tensors(folder) for folder in folders]
    shapes = [{name: file.get_slice(name).get_shape() for name, file in names.items()} for names in handles]
    for folder, own in zip(folders, shapes, strict=True):
        if different := sorted(name for name in own | shapes[0] if own.get(name) != shapes[0].get(name)):
            raise UserError(f"{folder} and {folders[0]} differ in {', '.join(different[:3])} ...", field=folder)
    mean: dict[str, torch.Tensor] = {}
    for name in handles[0]:
        first, *others = (handle[name].get_tensor(name) for handle in handles)
        if not first.is_floating_point():
            mean[name] = [first, *others][-1]
            continue
        total = first.to(torch.float64 if first.dtype == torch.float64 else torch.float32, copy=True)
        for tensor in others:
            total += tensor
        mean[name] = (total / len(folders)).to(first.dtype)
    return mean


def open_tensors(folder: Path) -> dict[str, Any]:
    """Open the safetensors files of a checkpoint. Return the file of each tensor by the tensor's name."""
    handles: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        handle = safe_open(file, framework="pt")
        handles |= dict.fromkeys(handle.keys(), handle)
    if not handles:
        raise MissingFileError(f"{folder} contains no .safetensors file.", field=folder)
    return handles


def copy_beside_weights(folder: Path, output: Path) -> None:
    """Copy configuration, code and tokenizers of a checkpoint, without weights and training state."""
    excluded = (MANIFEST, EVIDENCE, "trainer_state.json", "model.safetensors.index.json")
    for file in folder.iterdir():
        if file.is_dir() and file.name != TRANSLATIONS:
            shutil.copytree(file, output / file.name, dirs_exist_ok=True)
        elif file.suffix in (".json", ".py", ".txt", ".model", ".spm") and file.name not in excluded:
            shutil.copy2(file, output)
