"""The output folder of a run: lock, ownership, remains of killed runs, disk space."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import yaml

from ..data.files import remove, remove_abandoned
from ..data.locks import lock
from ..data.tokenizer_pair import TARGET_TOKENIZER
from ..errors import ExistingFileError, UserError
from .arguments import TranslationTrainingArguments
from .checkpoints import MANIFEST, PARTIAL, discard, newest_checkpoint, numbered_in
from .inputs import DATA, PARTIAL_TOKENIZERS, SOURCE_TOKENIZER
from .processes import logger
from .recipe import SECTIONS


FINAL = "model"
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

_WRITTEN_BY_RUNS = re.compile(
    rf"checkpoint-\d+|{FINAL}|{FINAL}\.partial|{FINAL}\.old|{FINAL}-[\w.-]+\.\w+|{SOURCE_TOKENIZER}|{TARGET_TOKENIZER}"
    rf"|{re.escape(PARTIAL_TOKENIZERS)}|{re.escape(RECIPE)}|{re.escape(RECORD)}|{re.escape(RESULTS)}|runs|\..+\.partial"
)
# Files that a run writes into the folder of a baseline.
_WRITTEN_BY_BASELINES = re.compile(r"checkpoint-\d+|runs")
# Files that a run writes before its recipe.
_WRITTEN_EARLY = re.compile(rf"{SOURCE_TOKENIZER}|{TARGET_TOKENIZER}|{re.escape(PARTIAL_TOKENIZERS)}|\..+\.partial")


# -- the lock --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """
    Exclude other runs from a folder, and yield whether a killed run left its lock file. The system releases the lock
    when the process ends. Reading stays possible. `UserError` if another run holds it, or the folder is not writable.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            killed = (folder / LOCK).is_file()
            unsupported = held.enter_context(lock(folder / LOCK, LOCK_PATIENCE, "output.in_use", folder))
        except OSError as error:
            raise UserError("output.not_writable", field=str(folder), reason=error.strerror) from error
        if unsupported is not None:
            logger.info(
                f"{folder / LOCK} cannot be locked ({unsupported.strerror}). Make sure that no other run writes into "
                f"{folder}."
            )
        yield killed


# -- ownership -------------------------------------------------------------------------------------------------------


def traces_in(output_dir: Path) -> list[Path]:
    """Return the contents of a folder, except prepared data and the lock."""
    return [path for path in output_dir.glob("*") if path.name not in (DATA, LOCK)] if output_dir.is_dir() else []


def all_checkpoints_in(output_dir: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the checkpoints of all stages, complete or not, in the order of training."""
    return [*numbered_in(output_dir / BASELINE), *numbered_in(output_dir)]


def is_written_by_runs(path: Path) -> bool:
    """Whether a path has a name that runs give; a baseline's folder must not contain anything else."""
    if path.name == BASELINE:
        return path.is_dir() and all(_WRITTEN_BY_BASELINES.fullmatch(inner.name) for inner in path.iterdir())
    return _WRITTEN_BY_RUNS.fullmatch(path.name) is not None


def holds_run(output_dir: Path) -> bool:
    """
    Whether a run of ours wrote into a folder: there is its recipe with all sections, its record, or a checkpoint with a
    manifest. Names alone prove nothing: others too call a folder `model`, `runs` or `checkpoint-500`.
    """
    return (
        is_mapping_with(output_dir / RECIPE, SECTIONS)
        or is_mapping_with(output_dir / RECORD, ("processes", "training_data"))
        or any((folder / MANIFEST).is_file() for _, folder in all_checkpoints_in(output_dir))
    )


def is_mapping_with(path: Path, names: Iterable[str]) -> bool:
    """Whether a YAML or JSON file is a mapping with all names."""
    if not path.is_file():  # reading a pipe would block
        return False
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and set(names) <= content.keys()


def claim_output(output_dir: Path, resume: bool, overwrite: bool, killed: bool = False) -> bool:
    """
    Make sure that the run may write into its folder: it is new, resumed, or deleted on demand. Return whether it is
    empty now, except for prepared data. `ExistingFileError` for an earlier run that is neither resumed nor overwritten,
    and for files of others. The folder of a killed run may have only tokenizers, which are written before the recipe.
    """
    traces, field = traces_in(output_dir), str(output_dir)
    names = ", ".join(sorted(path.name for path in traces)[:4])
    if traces and not resume and not overwrite:
        raise ExistingFileError("output.has_files", field=field, names=names)
    foreign = ", ".join([path.name for path in traces if not is_written_by_runs(path)][:4])
    if foreign and overwrite and not resume:
        raise ExistingFileError("output.foreign_files", field=field, names=foreign)
    is_early = killed and all(_WRITTEN_EARLY.fullmatch(path.name) for path in traces)
    if traces and not is_early and not holds_run(output_dir):
        raise ExistingFileError("output.not_a_run", field=field, names=names)
    if overwrite and not resume:
        delete_run(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    return not traces or (overwrite and not resume)


def delete_run(output_dir: Path) -> None:
    """Delete the files of runs. Recipe and record are last, so that an interrupted deletion can be repeated."""
    for _, folder in all_checkpoints_in(output_dir):
        discard(folder)
    for path in sorted(traces_in(output_dir), key=lambda path: path.name in (RECIPE, RECORD)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def refused_without_trace(output_dir: Path) -> Iterator[None]:
    """
    For an empty folder: if a run fails before training, delete what it wrote, so that the corrected run may use the
    folder. Prepared data stays for that run.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for name in (SOURCE_TOKENIZER, TARGET_TOKENIZER, PARTIAL_TOKENIZERS, RECIPE, RECORD):
                remove(output_dir / name)
            (output_dir / BASELINE).rmdir()  # made by the trainer, and empty
        raise


def remove_leftovers(output_dir: Path) -> None:
    """Delete incomplete files of a killed run."""
    if holds_run(output_dir):  # checkpoints of other programs have no manifest
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
    checkpoints, needed = [], bytes_of(stages[-1][0].parameters())
    for model, arguments in stages:
        size: float = bytes_of(model.parameters())
        if not arguments.save_only_model:
            size += bytes_of(p for p in model.parameters() if p.requires_grad) * state_per_parameter(arguments)
        most = most_checkpoints(arguments)
        needed += most * round(size)
        checkpoints.append(f"{most} x {in_words(size)}")
    needed -= sum(file.stat().st_size for _, folder in all_checkpoints_in(output_dir) for file in folder.rglob("*"))
    free = shutil.disk_usage(output_dir).free
    if needed > free:
        raise UserError(
            "output.no_space",
            field=str(output_dir),
            free=in_words(free),
            needed=in_words(needed),
            checkpoints=" and ".join(checkpoints),
        )


def bytes_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the size of parameters in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def most_checkpoints(arguments: TranslationTrainingArguments) -> int:
    """Return the maximum number of checkpoints that a stage has at a time."""
    if arguments.save_strategy == "no":
        return 1
    # The next one is written before an old one is deleted.
    most = max(arguments.keep_last, 1) + (arguments.keep_best if arguments.metric_for_best_model else 0) + 1
    if arguments.max_steps > 0 and arguments.save_strategy == "steps" and arguments.save_steps >= 1:
        return min(most, -(-arguments.max_steps // int(arguments.save_steps)))
    return most


def state_per_parameter(arguments: TranslationTrainingArguments) -> float:
    """Return the size of the optimizer's state relative to the parameters, by its name; Adam's if it is unknown."""
    name = "adadelta" if arguments.optimizer == "adadelta" else str(getattr(arguments.optim, "value", arguments.optim))
    if "adafactor" in name:
        return 0.01
    if "8bit" in name:
        return 0.5
    return 1.0 if name.startswith(("sgd", "adagrad", "rmsprop", "lion")) else 2.0


def in_words(count: float) -> str:
    """Return a number of bytes with a suitable unit."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


# -- interrupted runs ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sudden_ends_explained(output_dir: Path) -> Iterator[None]:
    """
    Report the newest checkpoint if the user interrupts the run, or the disk is full (`UserError`), and delete partial
    files.
    """
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
        raise UserError("output.disk_full", field=str(output_dir), reason=reason, progress=progress) from error


def progress_of(output_dir: Path) -> str:
    """Describe from where a run resumes."""
    newest = None
    with contextlib.suppress(OSError):
        newest = newest_checkpoint(output_dir) or newest_checkpoint(output_dir / BASELINE)
    if newest is None:
        return "There is no complete checkpoint yet; --resume starts from the beginning."
    return f"The newest complete checkpoint is {newest}; --resume continues from it."


def disk_full(error: BaseException | None) -> str | None:
    """Return the system's message if an error, or its cause, is that a file could not grow; else `None`."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    while error is not None:
        if isinstance(error, OSError) and error.errno in codes:
            return os.strerror(error.errno)
        # Libraries written in Rust and C++ have errors of their own.
        for code in codes:
            if f"os error {code})" in str(error) or os.strerror(code) in str(error):
                return os.strerror(code)
        of_torch = "PytorchStreamWriter failed writing" in str(error) or "unexpected pos" in str(error)
        if isinstance(error, RuntimeError) and of_torch:
            return "the disk is full, or writing failed"
        error = error.__cause__ or error.__context__
    return None
