"""Complete checkpoints, what is wrong with damaged ones, which are kept, and averages of several."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .._loading_errors import without_remedy
from .._values import check_value
from ..families import MODEL_TYPES
from ..inference.model_task import EVIDENCE
from ..models.seq2seq_loading import CARD, write_plain_card
from ..models.user_errors import ExistingFileError, MissingFileError, UserError
from .metrics import higher_is_better


MANIFEST = "complete.json"
# Folder of a finished model's translations of test sets, NAME.LANGUAGE each.
TRANSLATIONS = "translations"
PARTIAL = ".partial"
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
# Files of a checkpoint beside the model: resuming needs them, translating and averaging do not.
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler|rng_state|trainer_state|training_args)[^/]*$")


def mark_complete(folder: str | Path) -> None:
    """
    Write the manifest that marks a checkpoint as complete: names, sizes and SHA-256 sums of its files. It is written
    last and moved into place atomically, so a checkpoint whose writing was cut off never has a manifest.

    The manifest does not cover the card, which `recnmt card` may replace at any time.

    The files are read once more for the sums, mostly from the system's cache: about a second for each gigabyte.
    """
    folder = Path(folder)
    files = {
        str(file.relative_to(folder)): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file not in (folder / MANIFEST, folder / CARD) and file.suffix != PARTIAL
    }
    manifest = {"files": {name: file.stat().st_size for name, file in files.items()}, "sha256": sums_of(files)}
    partial = folder / f"{MANIFEST}{PARTIAL}"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / MANIFEST)


def sums_of(files: dict[str, Path]) -> dict[str, str]:
    """The SHA-256 sums of named files, taken side by side."""

    def sum_of(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(files, pool.map(sum_of, files.values()), strict=True))


def faults_of(folder: str | Path, contents: bool = True, training_state: bool = True) -> list[str]:
    """
    Return the faults of a checkpoint in words; an empty list for an intact one.

    Args:
        folder (`str` or `Path`): The checkpoint.
        contents (`bool`, *optional*, defaults to `True`): Compares the files' sums too, as far as the manifest has them
            (older ones have sizes alone). That reads every file; without it only sizes are looked at.
        training_state (`bool`, *optional*, defaults to `True`): Also of the files that only going on needs.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes, sums = dict(manifest["files"]), dict(manifest.get("sha256", {}))
    except FileNotFoundError:
        return [f"{MANIFEST} is missing, so its saving was cut off"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    faults, whole = [], {}
    for name, size in sizes.items():
        # Manifests of earlier versions may list the card, and a partial file of their own writing.
        if name == CARD or name.endswith(PARTIAL) or (not training_state and _TRAINING_STATE.search(name)):
            continue
        try:
            found = (folder / name).stat().st_size
        except (OSError, ValueError):  # a name that no file can have
            faults.append(f"{name} is missing")
            continue
        if found != size:
            faults.append(f"{name} has {found} bytes, not {size}")
        elif name in sums:
            whole[name] = folder / name
    if contents:
        try:
            found_sums = sums_of(whole)
        except OSError as error:
            return [*faults, f"{error.filename} cannot be read ({error.strerror})"]
        faults += [f"{name} has changed since it was saved" for name in whole if found_sums[name] != sums[name]]
    return faults


def is_complete(folder: str | Path) -> bool:
    """Whether a checkpoint's manifest is there and the sizes in it are those of its files."""
    return not faults_of(folder, contents=False)


def numbered_in(run: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of all of a run's checkpoints, whole or not, oldest first."""
    matches = ((_CHECKPOINT.match(folder.name), folder) for folder in Path(run).glob("checkpoint-*"))
    return sorted((int(match.group(1)), folder) for match, folder in matches if match)


def checkpoints_in(run: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of a run's complete checkpoints, oldest first."""
    return [(step, folder) for step, folder in numbered_in(run) if is_complete(folder)]


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or `None`."""
    found = checkpoints_in(run)
    return found[-1][1] if found else None


def newest_intact_checkpoint(run: str | Path, report: Callable[[str], None] = lambda text: None) -> Path | None:
    """
    The newest checkpoint of a run whose files are as they were saved, or `None` if none was ever saved whole.

    Args:
        run (`str` or `Path`): A run's output folder.
        report (`Callable`, *optional*): Called with a sentence for each newer checkpoint that is damaged.

    Raises:
        ValueError: There are checkpoints, and all are damaged.
    """
    damaged: list[str] = []
    for _, folder in reversed(numbered_in(run)):
        if not (folder / MANIFEST).exists():
            continue  # its saving was cut off
        faults = faults_of(folder)
        if not faults:
            for text in damaged:
                report(f"{text} An older checkpoint is taken.")
            return folder
        damaged.append(f"{folder} is damaged: {'; '.join(faults[:3])}.")
    if damaged:
        raise UserError(
            f"{run} has no intact checkpoint. {' '.join(damaged)} Remedy: bring the files back from a copy, or start "
            "anew with --overwrite or in another folder."
        )
    return None


def discard(folder: str | Path) -> None:
    """Deletes a checkpoint; the manifest goes first, so a half-deleted one never counts."""
    folder = Path(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def metric_of_steps(run: str | Path, metric: str) -> dict[int, float]:
    """A validation metric by step, from the newest checkpoint's log."""
    newest = newest_checkpoint(run)
    if newest is None:
        return {}
    log = state_of(newest).get("log_history", [])
    return {entry["step"]: entry[metric] for entry in log if isinstance(entry.get(metric), (int, float))}


def state_of(checkpoint: Path) -> dict[str, Any]:
    """
    Return the Trainer's own state in a checkpoint: steps, log, callbacks.

    Raises:
        UserError: The file is damaged.
    """
    path = checkpoint / "trainer_state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        for number, entry in enumerate(state.get("log_history", [])):
            for name in {"step", *entry}:
                if name == "step" or type(entry[name]) is int:
                    check_value(f"log_history[{number}].{name}", entry.get(name), int)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({without_remedy(error)}). Remedy: delete this checkpoint, or copy the file again."
        ) from error
    return state


def steps_of(checkpoint: Path) -> int:
    """The training steps in a checkpoint's name."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def choose_checkpoints(
    run: str | Path,
    count: int,
    which: str = "last",
    metric: str = "eval_bleu",
    greater_is_better: bool | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """
    Choose the checkpoints to average.

    Args:
        run (`str` or `Path`): A run's output folder.
        count (`int`): How many; fewer if there are fewer.
        which (`str`, *optional*, defaults to `"last"`): `"last"` or `"best"` by `metric`.
        greater_is_better (`bool`, *optional*): Its direction; `None`: what is known of the metric.
        report (`Callable`, *optional*): Called with a sentence for each incomplete checkpoint that is skipped.

    Raises:
        ValueError: There is no complete checkpoint, or no value of the metric.
    """
    if count < 1:
        raise UserError(f"count={count} is not allowed; at least 1 checkpoint is needed. Remedy: give a larger number.")
    found = []
    for step, folder in numbered_in(run):
        if faults := faults_of(folder, contents=False):
            report(f"{folder} is incomplete and skipped: {'; '.join(faults[:3])}.")
        else:
            found.append((step, folder))
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


def rotate(run: str | Path, keep_last: int, keep_best: int, metric: str | None, greater_is_better: bool) -> None:
    """Deletes a run's checkpoints except the newest, those best by a metric, and the one the Trainer calls its best."""
    run = Path(run)
    keep = choose_checkpoints(run, max(keep_last, 1))
    newest = keep[-1]
    if metric and keep_best > 0:
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        evaluated = metric_of_steps(run, metric)
        if any(step in evaluated for step, _ in checkpoints_in(run)):
            keep += choose_checkpoints(run, keep_best, "best", metric, greater_is_better)
    if best := state_of(newest).get("best_model_checkpoint"):
        keep.append(run / Path(best).name)  # the run may have moved since
    remove_superfluous(run, keep)


def remove_superfluous(run: str | Path, keep: Iterable[Path]) -> None:
    """Deletes a run's checkpoints except those to keep."""
    kept = {Path(folder).resolve() for folder in keep}
    for _, folder in numbered_in(run):
        if folder.resolve() not in kept:
            discard(folder)


def average_checkpoints(folders: Sequence[str | Path], output: str | Path) -> Path:
    """
    Writes the mean of several checkpoints' parameters, with the last one's configuration and tokenizers.

    Tensors are read one at a time and summed in float32 (float64 for float64), so memory stays at one model. The output
    folder is there when it is whole; and a run may go on training into the folders' parent meanwhile.

    Args:
        folders (sequence of `str` or `Path`): Folders with `model.safetensors`, or its shards.
        output (`str` or `Path`): A new folder.

    Returns:
        The output folder.

    Raises:
        FileNotFoundError: A folder has no safetensors weights.
        FileExistsError: The output folder is there and not empty.
        ValueError: No folder is given, the models differ in parameters, or a file is damaged.
    """
    if not folders:
        raise UserError("There is nothing to average. Remedy: name at least one checkpoint.")
    paths = [Path(folder) for folder in folders]
    output = Path(output)
    if output.is_dir() and any(output.iterdir()):
        raise ExistingFileError(f"{output} is not empty. Remedy: choose a new folder.")
    marked = [folder for folder in paths if (folder / MANIFEST).exists()]
    for folder in marked:
        faults = faults_of(folder, training_state=False)
        if faults and (folder / MANIFEST).exists():
            raise UserError(
                f"{folder} is damaged: {'; '.join(faults[:3])}. Remedy: delete it and average the others, or bring its "
                "files back from a copy."
            )
    # Remains of a killed process are deleted; with a single name there is never more than one.
    working = output.parent / f".{output.name}{PARTIAL}"
    shutil.rmtree(working, ignore_errors=True)
    try:
        mean = mean_of(paths)
        working.mkdir(parents=True)
        copy_beside_weights(paths[-1], working)
        write_card_of_mean(working)
        save_file(mean, working / "model.safetensors", metadata={"format": "pt"})
        check_still_there(marked)
        os.replace(working, output)
    except (OSError, UserError):
        check_still_there(marked)
        raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return output


def write_card_of_mean(folder: Path) -> None:
    """The plain card of a model of the zoo: what was written about one of the averaged models does not hold for it."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(settings, dict) and settings.get("model_type") in MODEL_TYPES:
        write_plain_card(SimpleNamespace(**settings), folder)


def check_still_there(marked: Sequence[Path]) -> None:
    """
    Whether checkpoints that had a manifest have it still: it goes before any other file, so what was read was whole.

    Raises:
        FileNotFoundError: One was deleted meanwhile.
    """
    for folder in marked:
        if not (folder / MANIFEST).exists():
            raise MissingFileError(
                f"{folder} was deleted while it was read, by a run that goes on training. Remedy: average again."
            )


def mean_of(folders: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The mean of each parameter over several checkpoints, in the parameter's own dtype."""
    shards = [weight_files(folder) for folder in folders]
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
    return mean


def copy_beside_weights(folder: str | Path, output: str | Path) -> None:
    """Copies configuration, code and tokenizers of a checkpoint; not its weights and training state."""
    for file in Path(folder).iterdir():
        if file.is_dir() and file.name != TRANSLATIONS:
            shutil.copytree(file, Path(output) / file.name, dirs_exist_ok=True)
        elif file.suffix in (".json", ".py", ".txt", ".model", ".spm") and file.name not in (
            MANIFEST,
            EVIDENCE,
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
