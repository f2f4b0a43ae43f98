"""Folders of runs: names, the lock and what may be deleted; checkpoints, their manifests and averages of several."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .._loading_errors import FINAL as FINAL
from .._loading_errors import read_small_text
from .._plain_card import CARD, write_plain_card
from ..data.files import PREFIX, digest_of_file, lock, open_output_folder
from ..errors import ExistingFileError, MissingFileError, UserError, short_repr
from ..families import MODEL_TYPES
from ..inference.model_settings import EVIDENCE
from .metrics import higher_is_better
from .processes import logger
from .recipe import SECTIONS
from .recipe_yaml import load_yaml


RECIPE, RECORD, RESULTS = "recipe.yaml", "run.json", "results.json"
DATA, LOCK = "data", ".lock"
# Folder of the first of two stages, with the checkpoints of its baseline.
BASELINE = "baseline"
# A final model that is not complete.
PARTIAL_FINAL = f"{FINAL}.partial"
# File of a complete checkpoint; folder of a finished model with its translations of test sets, NAME.LANGUAGE.
MANIFEST, TRANSLATIONS = "complete.json", "translations"
# Seconds that the processes of a killed run may need to end.
LOCK_PATIENCE = 3.0

# Names that runs give to files and folders, those of old versions last, except to prepared data and the lock.
_OF_RUNS = re.compile(
    rf"checkpoint-\d+|{FINAL}(\.partial|\.old)?|{FINAL}-[\w.-]+\.\w+|recipe\.yaml|(run|results|relations)\.json|runs|"
    r"\.overwritten|\..+\.partial|(target_)?tokenizer|tokenizers\.partial"
)
# Files of a checkpoint that only resuming needs.
_STATE = re.compile(r"(optimizer|scheduler|scaler|rng_state|trained_weights|trainer_state|training_args)[^/]*$")
_NOT_COPIED = ("*.safetensors*", "*.pt", "*.pth", "*.bin", "*.md", "trainer_state.json")  # into an average


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other runs from a folder, which exists meanwhile. Reading stays possible."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder / LOCK, LOCK_PATIENCE, folder) as unsupported:
            if unsupported is not None:
                remedy = f"Make sure that no other run writes into {folder}."
                logger.info(f"{folder / LOCK} cannot be locked ({unsupported.strerror}). {remedy}")
            yield
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def mapping_in(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file; empty if there is none that can be read."""
    if not path.is_file():  # reading a pipe would block
        return {}
    try:
        content = load_yaml(read_small_text(path), str(path))  # JSON is YAML
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def check_output(output_dir: Path, resume: bool, overwrite: bool) -> None:
    """Raise `ExistingFileError` for a run that is neither resumed nor overwritten, and for files of other programs."""
    paths = content_of(output_dir)
    if not paths:
        return
    # Names alone prove nothing: a run has a recipe with all sections, or a checkpoint with a manifest.
    manifests = (output_dir.glob(f"{place}checkpoint-*/{MANIFEST}") for place in ("", f"{BASELINE}/"))
    is_run = set(SECTIONS) <= mapping_in(output_dir / RECIPE).keys() or any(map(any, manifests))
    foreign = [path for path in paths if overwrite and not is_of_run(path)]
    some = ", ".join(path.name for path in (foreign or paths)[:4])
    if not resume and not overwrite:
        remedy = "Use another folder, --resume, or --overwrite (deletes the run)."
        raise ExistingFileError(f"{output_dir} is not empty ({some}). {remedy}", field=output_dir)
    if not is_run or foreign:
        reason = "contains files that recnmt did not create" if foreign else "is not a training run"
        raise ExistingFileError(f"{output_dir} {reason} ({some}); nothing was deleted.", field=output_dir)


def content_of(output_dir: Path) -> list[Path]:
    """Return the content of an output folder, the recipe last, without data, the lock and unfinished files."""
    paths = (path for path in output_dir.iterdir() if path.name not in (DATA, LOCK))
    return sorted((path for path in paths if not path.name.startswith(PREFIX)), key=lambda path: path.name == RECIPE)


def is_of_run(path: Path) -> bool:
    """Return whether a path has a name that runs give; a baseline's folder has nothing else than its checkpoints."""
    return all(map(is_of_run, path.iterdir())) if path.name == BASELINE else bool(_OF_RUNS.fullmatch(path.name))


def mark_complete(folder: str | Path) -> None:
    """Write the manifest of a complete checkpoint, atomically: names, sizes and SHA-256 sums of its files."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): path for path in paths}
    files = {name: path for name, path in files.items() if name not in (MANIFEST, CARD)}  # a card may be replaced
    manifest = {"files": {name: path.stat().st_size for name, path in files.items()}, "sha256": sums_of(files)}
    partial = Path(folder) / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(partial, Path(folder) / MANIFEST)


def sums_of(files: dict[str, Path]) -> dict[str, str]:
    """Return the SHA-256 sums of files by name, computed in parallel."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(files, pool.map(digest_of_file, files.values()), strict=True))


def faults_of(folder: str | Path, contents: bool = True, training_state: bool = True) -> list[str]:
    """Describe the faults of a checkpoint; `contents` compares sums too, `training_state` files for resuming too."""
    folder = Path(folder)
    try:
        manifest = json.loads(read_small_text(folder / MANIFEST))
        sizes, sums = dict(manifest["files"]), dict(manifest.get("sha256", {}))  # old versions wrote no sums
    except FileNotFoundError:
        return [f"{MANIFEST} is missing, because saving was interrupted"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    # Manifests of earlier versions may list the card, and their own partial file.
    names = [name for name in sizes if name != CARD and not name.endswith(".partial")]
    names = [name for name in names if training_state or not _STATE.search(name)]
    found = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
    whole = {name: folder / name for name in names if found.get(name) == sizes[name]}
    current = sums_of({name: file for name, file in whole.items() if contents and name in sums})
    faults = [f"{name} has {found.get(name, 'no')} bytes, not {sizes[name]}" for name in names if name not in whole]
    return faults + [f"{name} has changed since it was saved" for name in current if current[name] != sums[name]]


def numbered_in(run: str | Path) -> list[tuple[int, Path]]:
    """Return steps and folders of all checkpoints of a run, complete or not, oldest first."""
    matches = ((re.fullmatch(r"checkpoint-(\d+)", folder.name), folder) for folder in Path(run).glob("checkpoint-*"))
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def checkpoints_in(run: str | Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the complete checkpoints of a run, oldest first."""
    return [(step, folder) for step, folder in numbered_in(run) if not faults_of(folder, contents=False)]


def newest_checkpoint(run: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or `None`."""
    return next((folder for _, folder in reversed(checkpoints_in(run))), None)


def newest_intact_checkpoint(run: str | Path) -> Path | None:
    """Return a run's newest intact checkpoint, if it has any; report damaged ones; `UserError` if all are damaged."""
    damaged: list[str] = []
    for _, folder in reversed(numbered_in(run)):
        if (folder / MANIFEST).exists():  # else saving was interrupted
            if not (faults := faults_of(folder)):
                return folder
            damaged.append(f"{folder} is damaged: {'; '.join(faults[:3])}.")
            logger.info(damaged[-1])
    if damaged:
        raise UserError(f"{run} has no intact checkpoint. {' '.join(damaged)}", field=run)
    return None


def discard(folder: str | Path) -> None:
    """Delete a checkpoint, its manifest first, so that a half-deleted checkpoint is never complete."""
    (Path(folder) / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def state_of(checkpoint: Path) -> Any:
    """Return the Trainer's state in a checkpoint, a mapping: steps, log, callbacks."""
    return json.loads(read_small_text(checkpoint / "trainer_state.json"))


def steps_of(checkpoint: Path) -> int:
    """Return the number of training steps in the name of a checkpoint."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def by_metric(complete: Sequence[tuple[int, Path]], metric: str, greater_is_better: bool) -> list[Path]:
    """Return those of complete checkpoints with a value of a metric of evaluations, the best and newest first."""
    name, sign = f"eval_{metric.removeprefix('eval_')}", 1 if greater_is_better else -1
    log = state_of(complete[-1][1]).get("log_history", [])
    values = {entry["step"]: sign * entry[name] for entry in log if isinstance(entry.get(name), (int, float))}
    ranked = sorted(((values[step], step, folder) for step, folder in complete if step in values), reverse=True)
    return [folder for _, _, folder in ranked]


def choose_checkpoints(
    run: str | Path, count: int, which: str = "last", metric: str = "eval_bleu", greater_is_better: bool | None = None
) -> list[Path]:
    """Choose at most `count` complete checkpoints to average: the last ones, or the best by a metric."""
    chosen, wanted = [folder for _, folder in checkpoints_in(run)][-count:], ""
    if which != "last":
        is_better = higher_is_better(metric) if greater_is_better is None else greater_is_better
        chosen, wanted = by_metric(checkpoints_in(run), metric, is_better)[:count], f" with {short_repr(metric)}"
    if not chosen:
        raise UserError(f"{run} has no complete checkpoint{wanted}.", field=run)
    return chosen


def rotate_checkpoints(args: Any) -> None:
    """Delete checkpoints except the `keep_last` newest, the `keep_best` best, and the Trainer's best."""
    complete, metric = checkpoints_in(args.folder), args.metric_for_best_model
    keep = [folder for _, folder in complete[-max(args.keep_last, 1) :]]
    if best := state_of(keep[-1]).get("best_model_checkpoint"):
        keep.append(args.folder / Path(best).name)  # the run may have moved since
    if metric:
        keep += by_metric(complete, metric, args.greater_is_better is not False)[: args.keep_best]
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
    paths = [Path(folder) for folder in folders]
    marked = [folder for folder in paths if (folder / MANIFEST).exists()]
    with open_output_folder(output, must_be_new=True) as working:
        for folder in marked:
            if faults := faults_of(folder, training_state=False):
                raise UserError(f"The checkpoint {folder} is damaged: {'; '.join(faults[:3])}.", field=folder)
        mean = mean_of(paths)
        ignored = shutil.ignore_patterns(*_NOT_COPIED, MANIFEST, EVIDENCE, TRANSLATIONS)
        shutil.copytree(paths[-1], working, dirs_exist_ok=True, ignore=ignored)
        settings = json.loads(read_small_text(working / "config.json")) if (working / "config.json").is_file() else {}
        if settings.get("model_type") in MODEL_TYPES:  # the cards of the averaged models do not describe their mean
            write_plain_card(SimpleNamespace(**settings), working)
        save_file(mean, working / "model.safetensors", metadata={"format": "pt"})
        for folder in marked:
            if not (folder / MANIFEST).exists():  # deleted before the other files, so that some may not be copied
                raise MissingFileError(f"{folder} was deleted by a training run meanwhile; retry.", field=folder)
    return Path(output)


def mean_of(folders: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return the mean of each parameter over several checkpoints, in the parameter's own dtype."""
    models: list[dict[str, Any]] = []  # of each checkpoint, the file of each tensor
    for folder in folders:
        files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        if not files:
            raise MissingFileError(f"{folder} contains no .safetensors file.", field=folder)
        models.append({name: file for file in files for name in file.keys()})  # noqa: SIM118
    shapes = [{name: file.get_slice(name).get_shape() for name, file in model.items()} for model in models]
    for folder, own in zip(folders, shapes, strict=True):
        if different := sorted(name for name in own | shapes[0] if own.get(name) != shapes[0].get(name)):
            raise UserError(f"{folder} and {folders[0]} differ in {', '.join(different[:3])} ...", field=folder)
    mean: dict[str, torch.Tensor] = {}
    for name in models[0]:
        first, *others = (model[name].get_tensor(name) for model in models)
        if not first.is_floating_point():
            mean[name] = [first, *others][-1]
            continue
        total = first.to(torch.float64 if first.dtype == torch.float64 else torch.float32, copy=True)
        for tensor in others:
            total += tensor
        mean[name] = (total / len(models)).to(first.dtype)
    return mean
