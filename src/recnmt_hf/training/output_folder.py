"""The output folder of a run: lock, ownership, remains of killed runs, disk space."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_bytes

from .._bounded_reading import read_small_text
from .._loading_errors import FINAL as FINAL
from ..data.files import SPACE_ERRORS, lock, number_of, remove, remove_abandoned
from ..data.tokenizer_pair import TARGET_TOKENIZER
from ..data.tree_inputs import RELATIONS_FILE
from ..errors import ExistingFileError, UserError
from .arguments import TranslationTrainingArguments
from .checkpoints import MANIFEST, PARTIAL, discard, newest_checkpoint, numbered_in
from .processes import logger
from .recipe import SECTIONS
from .recipe_yaml import load_yaml


# Prepared data.
DATA = "data"
SOURCE_TOKENIZER = "tokenizer"
PARTIAL_TOKENIZERS = "tokenizers.partial"
# Files and folders of the tokenizers, in the order in which they are written.
TOKENIZER_FILES = (RELATIONS_FILE, TARGET_TOKENIZER, SOURCE_TOKENIZER)
RECIPE = "recipe.yaml"
RECORD = "run.json"
RESULTS = "results.json"
# Folder of the first of two stages, with the checkpoints of its baseline.
BASELINE = "baseline"
LOCK = ".lock"
# Name of a final model while the next one replaces it.
REPLACED = f"{FINAL}.old"
# Seconds that the processes of a killed run may need to end.
LOCK_PATIENCE = 3.0

# Files that a run writes before its recipe.
_TOKENIZERS = (*TOKENIZER_FILES, PARTIAL_TOKENIZERS)
_EARLY = re.compile(rf"{'|'.join(map(re.escape, _TOKENIZERS))}|\..+\.partial")
_OF_RUNS = re.compile(
    rf"checkpoint-\d+|{FINAL}(\.partial|\.old|-[\w.-]+\.\w+)?|{'|'.join(map(re.escape, (RECIPE, RECORD, RESULTS)))}"
    rf"|runs|{_EARLY.pattern}"
)
# Contents of the folder of a baseline.
_OF_BASELINES = re.compile(r"checkpoint-\d+|runs")


# -- the lock --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """
    Exclude other runs from a folder, and yield whether a killed run left its lock file. The system releases the lock
    when the process ends. Reading stays possible. `UserError` if another run holds it, or the folder is not writable.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            was_killed = (folder / LOCK).is_file()
            unsupported = stack.enter_context(lock(folder / LOCK, LOCK_PATIENCE, folder))
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}).", field=folder) from error
        if unsupported is not None:
            remedy = f"Make sure that no other run writes into {folder}."
            logger.info(f"{folder / LOCK} cannot be locked ({unsupported.strerror}). {remedy}")
        yield was_killed


# -- ownership -------------------------------------------------------------------------------------------------------


def contents_of(output_dir: Path) -> list[Path]:
    """Return the contents of a folder, except prepared data and the lock."""
    return [path for path in output_dir.glob("*") if path.name not in (DATA, LOCK)] if output_dir.is_dir() else []


def all_checkpoints_in(output_dir: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the checkpoints of all stages, complete or not, in the order of training."""
    return [*numbered_in(output_dir / BASELINE), *numbered_in(output_dir)]


def is_of_run(path: Path) -> bool:
    """Return whether a path has a name that runs give; a baseline's folder must not contain anything else."""
    if path.name == BASELINE:
        return path.is_dir() and all(_OF_BASELINES.fullmatch(inner.name) for inner in path.iterdir())
    return _OF_RUNS.fullmatch(path.name) is not None


def contains_run(output_dir: Path) -> bool:
    """
    Return whether a folder contains a run: a recipe with all sections, a record, or a checkpoint with a manifest. Names
    prove nothing: other programs also use `model`, `runs` or `checkpoint-500`.
    """
    return (
        set(SECTIONS) <= mapping_in(output_dir / RECIPE).keys()
        or {"processes", "training_data"} <= mapping_in(output_dir / RECORD).keys()
        or any((folder / MANIFEST).is_file() for _, folder in all_checkpoints_in(output_dir))
    )


def mapping_in(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file; empty if there is none that can be read."""
    if not path.is_file():  # reading a pipe would block
        return {}
    try:
        content = load_yaml(read_small_text(path), str(path))  # JSON is YAML
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def claim_output(output_dir: Path, resume: bool, overwrite: bool, was_killed: bool = False) -> bool:
    """
    Make sure that the run may write into its folder: it is new, resumed, or deleted on demand. Return whether it is
    empty now, except for prepared data. `ExistingFileError` for an earlier run that is neither resumed nor overwritten,
    and for files of other programs. A killed run may have left only tokenizers, which are written before the recipe.
    """
    overwrite = overwrite and not resume
    contents, field = contents_of(output_dir), str(output_dir)
    names = ", ".join(sorted(path.name for path in contents)[:4])
    if contents and not resume and not overwrite:
        raise ExistingFileError(
            f"{field} is not empty ({names}). Use another folder, --resume, or --overwrite (deletes the run).",
            field=field,
        )
    foreign = ", ".join([path.name for path in contents if not is_of_run(path)][:4])
    if foreign and overwrite:
        raise ExistingFileError(
            f"{field} contains files that recnmt did not create ({foreign}); nothing was deleted.", field=field
        )
    is_early = was_killed and all(_EARLY.fullmatch(path.name) for path in contents)
    if contents and not is_early and not contains_run(output_dir):
        raise ExistingFileError(f"{field} is not a training run ({names}); nothing was deleted.", field=field)
    if overwrite:
        delete_run(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    return not contents or overwrite


def delete_run(output_dir: Path) -> None:
    """Delete the files of runs. Recipe and record are last, so that an interrupted deletion can be repeated."""
    for _, folder in all_checkpoints_in(output_dir):
        discard(folder)
    for path in sorted(contents_of(output_dir), key=lambda path: path.name in (RECIPE, RECORD)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def clean_up_on_failure(output_dir: Path) -> Iterator[None]:
    """
    For an empty folder: if a run fails before training, delete what it wrote, so that the corrected run may use the
    folder. Prepared data stays for that run.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for name in (*_TOKENIZERS, RECIPE, RECORD):
                remove(output_dir / name)
            (output_dir / BASELINE).rmdir()  # made by the trainer, and empty
        raise


def remove_leftovers(output_dir: Path) -> None:
    """Delete incomplete files of a killed run."""
    if contains_run(output_dir):  # checkpoints of other programs have no manifest
        for _, folder in all_checkpoints_in(output_dir):
            if not (folder / MANIFEST).exists():
                discard(folder)
    for name in (f"{FINAL}.partial", REPLACED, PARTIAL_TOKENIZERS):
        shutil.rmtree(output_dir / name, ignore_errors=True)
    for path in output_dir.glob(f".*{PARTIAL}"):
        remove(path)
    remove_abandoned(output_dir / DATA)


def replace_folder(new: Path, place: Path, replaced: Path) -> None:
    """Replace a folder by another; if this is interrupted, one of the two is complete."""
    shutil.rmtree(replaced, ignore_errors=True)
    if place.exists():
        os.replace(place, replaced)
    os.replace(new, place)
    shutil.rmtree(replaced, ignore_errors=True)


# -- disk space ------------------------------------------------------------------------------------------------------


def check_free_space(output_dir: Path, stages: Sequence[tuple[torch.nn.Module, TranslationTrainingArguments]]) -> None:
    """
    Raise `UserError` unless there is space for the checkpoints that the run keeps, the one being written, and the final
    model. `stages` are models and arguments; the last model is the final one.
    """
    checkpoints, needed = [], sum(p.nbytes for p in stages[-1][0].parameters())
    for model, arguments in stages:
        # The optimizer's averages are counted for Adam and Adadelta alone, which have two of each parameter.
        name = arguments.optimizer or str(getattr(arguments.optim, "value", arguments.optim))
        has_averages = name.startswith(("adam", "adadelta")) and "bit" not in name and not arguments.save_only_model
        weights = 1 if arguments.ema_decay is None else 2  # the moving average, and the weights that are trained
        size = sum(p.nbytes * (weights + 2 * (has_averages and p.requires_grad)) for p in model.parameters())
        count = most_checkpoints(arguments)
        needed += count * size
        checkpoints.append(f"{count} x {convert_bytes(size)}")
    needed -= sum(file.stat().st_size for _, folder in all_checkpoints_in(output_dir) for file in folder.rglob("*"))
    free = shutil.disk_usage(output_dir).free
    if needed > free:
        raise UserError(
            f"{output_dir} has {convert_bytes(free)} free; checkpoints ({' and '.join(checkpoints)}) and the final "
            f"model need about {convert_bytes(needed)}. Free space, lower training.keep_last and average.count, or "
            "choose another folder.",
            field=output_dir,
        )


def most_checkpoints(arguments: TranslationTrainingArguments) -> int:
    """Return the maximum number of checkpoints that a stage has at a time."""
    if arguments.save_strategy == "no":
        return 1
    # The next one is written before an old one is deleted.
    most = max(arguments.keep_last, 1) + (arguments.keep_best if arguments.metric_for_best_model else 0) + 1
    if arguments.max_steps > 0 and arguments.save_strategy == "steps" and arguments.save_steps >= 1:
        return min(most, -(-arguments.max_steps // int(arguments.save_steps)))
    return most


# -- interrupted runs ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explain_sudden_end(output_dir: Path) -> Iterator[None]:
    """Report the newest checkpoint after an interrupt, or a full disk (`UserError`), and then delete partial files."""
    try:
        yield
    except KeyboardInterrupt:
        logger.info(f"Interrupted. {progress_of(output_dir)}")
        raise
    except Exception as error:
        reason = disk_full(error)
        if reason is None:
            raise
        with contextlib.suppress(OSError):
            remove_leftovers(output_dir)
        progress = progress_of(output_dir)
        raise UserError(
            f"A file in {output_dir} cannot be written ({reason}). {progress} Free space first.", field=output_dir
        ) from error


def progress_of(output_dir: Path) -> str:
    """Describe from where a run resumes."""
    newest = newest_checkpoint(output_dir) or newest_checkpoint(output_dir / BASELINE)
    if newest is None:
        return "There is no complete checkpoint yet; --resume starts from the beginning."
    return f"The newest complete checkpoint is {newest}; --resume continues from it."


def disk_full(error: BaseException | None) -> str | None:
    """Return the reason if an error, or its cause, is that a file could not grow; else `None`."""
    while error is not None:
        number = number_of(error)
        if number in SPACE_ERRORS:
            return os.strerror(number)
        text = str(error)  # of torch, whose errors have no number
        signs = ("PytorchStreamWriter failed writing", "unexpected pos")
        if isinstance(error, RuntimeError) and any(sign in text for sign in signs):
            return "the disk is full, or writing failed"
        error = error.__cause__ or error.__context__
    return None
