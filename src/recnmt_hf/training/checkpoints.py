"""Complete checkpoints, and averages of several."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..models.user_errors import MissingFileError, UserError
from .metrics import higher_is_better


MANIFEST = "complete.json"
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def mark_complete(folder: str | Path) -> None:
    """
    Writes the manifest that makes a checkpoint count: names and sizes of all its files. It is written last, and at
    once (renamed into place), so a checkpoint whose writing was cut off never has a manifest that fits.
    """
    folder = Path(folder)
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"files": sizes}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / MANIFEST)


def is_complete(folder: str | Path) -> bool:
    """Whether a checkpoint's manifest is there and fits its files."""
    folder = Path(folder)
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def checkpoints_in(run: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of a run's complete checkpoints, oldest first."""
    found = []
    for folder in Path(run).glob("checkpoint-*"):
        match = _CHECKPOINT.match(folder.name)
        if match and is_complete(folder):
            found.append((int(match.group(1)), folder))
    return sorted(found)


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or `None`."""
    found = checkpoints_in(run)
    return found[-1][1] if found else None


def metric_of_steps(run: str | Path, metric: str) -> dict[int, float]:
    """A validation metric by step, from the newest checkpoint's log."""
    newest = newest_checkpoint(run)
    if newest is None:
        return {}
    state = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))
    return {entry["step"]: entry[metric] for entry in state.get("log_history", []) if metric in entry}


def choose_checkpoints(
    run: str | Path,
    count: int,
    which: str = "last",
    metric: str = "eval_bleu",
    greater_is_better: bool | None = None,
) -> list[Path]:
    """
    The checkpoints to average.

    Args:
        run (`str` or `Path`): A run's output folder.
        count (`int`): How many; fewer if there are fewer.
        which (`str`, *optional*, defaults to `"last"`): `"last"` or `"best"` by `metric`.
        greater_is_better (`bool`, *optional*): Its direction; `None`: what is known of the metric.

    Raises:
        ValueError: There is no complete checkpoint, or no value of the metric.
    """
    found = checkpoints_in(run)
    if not found:
        raise UserError(f"{run} has no complete checkpoint. Remedy: train first, or name the right folder.")
    if which == "last":
        return [folder for _, folder in found[-count:]]
    if which != "best":
        raise UserError(f'which={which!r} is not allowed; it must be "last" or "best".')
    values = metric_of_steps(run, metric)
    ranked = [(values[step], step, folder) for step, folder in found if step in values]
    if not ranked:
        raise UserError(
            f"No checkpoint in {run} has a value of {metric}. Remedy: name a metric that was evaluated, or average the "
            "last ones."
        )
    better = higher_is_better(metric) if greater_is_better is None else greater_is_better
    ranked.sort(key=lambda entry: (entry[0] if better else -entry[0], entry[1]), reverse=True)
    return [folder for _, _, folder in ranked[:count]]


def remove_superfluous(run: str | Path, keep: Iterable[Path]) -> None:
    """Deletes a run's checkpoints except those to keep; the manifest goes first, so a half-deleted one never counts."""
    kept = {Path(folder).resolve() for folder in keep}
    for folder in Path(run).glob("checkpoint-*"):
        if _CHECKPOINT.match(folder.name) and folder.resolve() not in kept:
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def average_checkpoints(folders: Sequence[str | Path], output: str | Path) -> Path:
    """
    Writes the mean of several checkpoints' parameters, with the last one's configuration and tokenizers.

    Tensors are read one at a time and summed in float32 (float64 for float64), so memory stays at one model.

    Args:
        folders (sequence of `str` or `Path`): Folders with `model.safetensors`, or its shards.
        output (`str` or `Path`): A new folder.

    Returns:
        The output folder.

    Raises:
        FileNotFoundError: A folder has no safetensors weights.
        ValueError: No folder is given, the models differ in parameters, or a file is damaged.
    """
    if not folders:
        raise UserError("There is nothing to average. Remedy: name at least one checkpoint.")
    shards = [weight_files(folder) for folder in folders]
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    reference = index_of(shards[0])
    for folder, files in zip(folders[1:], shards[1:], strict=True):
        if index_of(files).keys() != reference.keys():
            different = sorted(index_of(files).keys() ^ reference.keys())
            raise UserError(
                f"{folder} and {folders[0]} hold different parameters ({', '.join(different[:3])} ...). Remedy: "
                "average checkpoints of one run only."
            )
    opened = [{file: safe_open(file, framework="pt") for file in files} for files in shards]
    places = [index_of(files) for files in shards]
    mean: dict[str, torch.Tensor] = {}
    for name in reference:
        tensors = [handles[place[name]].get_tensor(name) for handles, place in zip(opened, places, strict=True)]
        first = tensors[0]
        if any(tensor.shape != first.shape for tensor in tensors):
            raise UserError(f"{name} has different shapes in the checkpoints. Remedy: average one run's only.")
        if not first.is_floating_point():
            mean[name] = tensors[-1]
            continue
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        total = first.to(wide, copy=True)
        for tensor in tensors[1:]:
            total += tensor
        mean[name] = (total / len(tensors)).to(first.dtype)
    copy_beside_weights(folders[-1], output)
    partial = output / "model.safetensors.partial"
    save_file(mean, partial, metadata={"format": "pt"})
    os.replace(partial, output / "model.safetensors")
    return output


def copy_beside_weights(folder: str | Path, output: str | Path) -> None:
    """Copies configuration, code and tokenizers of a checkpoint; not its weights and training state."""
    for file in Path(folder).iterdir():
        if file.is_dir():
            shutil.copytree(file, Path(output) / file.name, dirs_exist_ok=True)
        elif file.suffix in (".json", ".py", ".txt", ".model") and file.name not in (
            MANIFEST,
            "trainer_state.json",
            "model.safetensors.index.json",
        ):
            shutil.copy2(file, output)


def weight_files(folder: str | Path) -> list[Path]:
    """A checkpoint's safetensors files."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise MissingFileError(
            f"{folder} has no .safetensors weights. Remedy: name a checkpoint folder; pickled weights (.bin, .pt) are "
            "not read."
        )
    return files


def index_of(files: Sequence[Path]) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                index.update(dict.fromkeys(handle.keys(), file))
        except SafetensorError as error:
            raise UserError(
                f"{file} cannot be read ({error}): it is cut short or damaged. Remedy: use another checkpoint."
            ) from error
    return index
