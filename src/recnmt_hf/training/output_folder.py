"""The output folder of a run: who may write there, what a killed run left, whether there is room."""

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
from ..models.user_errors import ExistingFileError, UserError
from .arguments import TranslationTrainingArguments
from .checkpoints import MANIFEST, PARTIAL, discard, newest_checkpoint, numbered_in
from .inputs import DATA, PARTIAL_TOKENIZERS, SOURCE_TOKENIZER
from .processes import logger
from .recipe import SECTIONS


FINAL = "model"
RECIPE = "recipe.yaml"
RECORD = "run.json"
RESULTS = "results.json"
# The first stage of a run in two: the checkpoints of its baseline.
BASELINE = "baseline"
LOCK = ".lock"
# Name of a final model while the next one takes its place.
REPLACED = f"{FINAL}.old"
# Seconds in which the processes of a run that was just killed may still be ending.
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
    Keeps every other run out of a folder. The lock is the system's on an open file, so it ends with the process that
    holds it, however that ends. Reading the folder stays free to all.

    Yields:
        Whether the file was there before, as a run leaves it that is killed.

    Raises:
        ValueError: Another run holds it.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            was_there = (folder / LOCK).is_file()
            unsupported = held.enter_context(
                lock(
                    folder / LOCK,
                    LOCK_PATIENCE,
                    f"Another run writes into {folder}",
                    "wait for it or end it, or choose another output folder",
                )
            )
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}). Remedy: choose a folder where files may be written."
            ) from error
        if unsupported is not None:
            logger.info(
                f"{folder / LOCK} cannot be locked ({unsupported.strerror}): see that no second run writes into "
                f"{folder}."
            )
        yield was_there


# -- what is there ---------------------------------------------------------------------------------------------------


def traces_in(output_dir: Path) -> list[Path]:
    """Return the contents of a folder beside prepared data and the lock."""
    return [path for path in output_dir.glob("*") if path.name not in (DATA, LOCK)] if output_dir.is_dir() else []


def all_checkpoints_in(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints of all stages of a run, whole or not, in the order of training."""
    return [*numbered_in(output_dir / BASELINE), *numbered_in(output_dir)]


def is_written_by_runs(path: Path) -> bool:
    """Whether something in a run's folder has a name that runs give, and as a baseline's folder holds nothing else."""
    if path.name == BASELINE:
        return path.is_dir() and all(_WRITTEN_BY_BASELINES.fullmatch(inner.name) for inner in path.iterdir())
    return _WRITTEN_BY_RUNS.fullmatch(path.name) is not None


def holds_run(output_dir: Path) -> bool:
    """
    Whether a run of ours wrote into a folder: its recipe with all sections, its record, or a checkpoint with a manifest
    is there. Names alone are no sign: others too call a folder `model`, `runs` or `checkpoint-500`.
    """
    return (
        is_mapping_with(output_dir / RECIPE, SECTIONS)
        or is_mapping_with(output_dir / RECORD, ("processes", "training_data"))
        or any((folder / MANIFEST).is_file() for _, folder in all_checkpoints_in(output_dir))
    )


def is_mapping_with(path: Path, names: Iterable[str]) -> bool:
    """Whether a YAML or JSON file is a mapping that has all these names."""
    if not path.is_file():  # a pipe would have it wait
        return False
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and set(names) <= content.keys()


def claim_output(output_dir: Path, resume: bool, overwrite: bool, killed: bool = False) -> bool:
    """
    Makes sure the run may write into its folder: it is new, or resumed, or deleted on demand.

    Args:
        output_dir (`Path`): The folder.
        resume, overwrite (`bool`): What the user demands.
        killed (`bool`, *optional*, defaults to `False`): Whether a killed run's lock is there. Before its recipe a run
            writes tokenizers alone; where nothing else is there, they are that run's.

    Returns:
        Whether the folder is empty now, but for prepared data.

    Raises:
        FileExistsError: The folder holds an earlier run that is neither to be resumed nor overwritten, or files that no
            run wrote.
    """
    traces = traces_in(output_dir)
    listed = ", ".join(sorted(path.name for path in traces)[:4])
    if traces and not resume and not overwrite:
        raise ExistingFileError(
            f"{output_dir} is not empty ({listed}). Remedy: go on with --resume, delete it with --overwrite, or choose "
            "another folder."
        )
    foreign = [path.name for path in traces if not is_written_by_runs(path)]
    if foreign and overwrite and not resume:
        raise ExistingFileError(
            f"{output_dir} holds files that no training run wrote ({', '.join(foreign[:4])}); they stay. "
            "Remedy: choose another folder."
        )
    begun = killed and all(_WRITTEN_EARLY.fullmatch(path.name) for path in traces)
    if traces and not begun and not holds_run(output_dir):
        raise ExistingFileError(
            f"{output_dir} is not empty ({listed}), and nothing there shows that a training run wrote it (a "
            f"{RECIPE} with all sections, {RECORD}, or a checkpoint with {MANIFEST}); all of it stays. Remedy: choose "
            "another folder, or empty this one yourself."
        )
    if overwrite and not resume:
        delete_run(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    return not traces or (overwrite and not resume)


def delete_run(output_dir: Path) -> None:
    """Deletes what runs wrote. What shows that it is a run goes last: cut off, it can be deleted again."""
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
    For a folder that was empty: where a run ends before its training begins, what it wrote goes, so that the corrected
    run may have the folder. Prepared data stays: it is of use to that one.
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
    """Deletes what a killed run had half written or half deleted; what is whole stays."""
    if holds_run(output_dir):  # or they are others' checkpoints, which have no manifest
        for _, folder in all_checkpoints_in(output_dir):
            if not (folder / MANIFEST).exists():
                discard(folder)
    for name in (f"{FINAL}.partial", REPLACED, PARTIAL_TOKENIZERS):
        shutil.rmtree(output_dir / name, ignore_errors=True)
    for path in output_dir.glob(f".*{PARTIAL}"):
        remove(path)
    remove_abandoned(output_dir / DATA)


def replace_folder(new: Path, place: Path, replaced: Path) -> None:
    """Puts a folder in the place of another; whenever this is cut off, one of the two is whole."""
    shutil.rmtree(replaced, ignore_errors=True)
    if place.exists():
        os.replace(place, replaced)
    os.replace(new, place)
    shutil.rmtree(replaced, ignore_errors=True)


# -- room ------------------------------------------------------------------------------------------------------------


def check_free_space(output_dir: Path, stages: Sequence[tuple[torch.nn.Module, TranslationTrainingArguments]]) -> None:
    """
    Whether the checkpoints that the run keeps, the one being written and the final model have room.

    Args:
        output_dir (`Path`): The run's folder.
        stages (sequence): Model and arguments of each stage; the last model is the final one.

    Raises:
        ValueError: They have not; the message says how many bytes are missing.
    """
    described, needed = [], bytes_of(stages[-1][0].parameters())
    for model, arguments in stages:
        one = bytes_of(model.parameters())
        if not arguments.save_only_model:
            one += round(bytes_of(p for p in model.parameters() if p.requires_grad) * state_per_parameter(arguments))
        most = most_checkpoints(arguments)
        needed += most * one
        described.append(f"at most {most} checkpoint{'s' * (most > 1)} of {in_words(one)}")
    needed -= sum(file.stat().st_size for _, folder in all_checkpoints_in(output_dir) for file in folder.rglob("*"))
    free = shutil.disk_usage(output_dir).free
    if needed > free:
        arguments = stages[-1][1]
        raise UserError(
            f"{output_dir} has {in_words(free)} free, and this run needs about {in_words(needed)} more there: "
            f"{' of the baseline, '.join(described)} at a time (keep_last={arguments.keep_last}, "
            f"keep_best={arguments.keep_best}, and the one being written) and the final model. Remedy: free space, "
            "lower training.keep_last and average.count, or choose another output folder."
        )


def bytes_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def most_checkpoints(arguments: TranslationTrainingArguments) -> int:
    """How many checkpoints of a stage there are at a time, at most."""
    kept = max(arguments.keep_last, 1) + (arguments.keep_best if arguments.metric_for_best_model else 0)
    most = kept + 1  # the next one is written before one goes
    if arguments.save_strategy == "no":
        return 1
    if arguments.max_steps > 0 and arguments.save_strategy == "steps" and arguments.save_steps >= 1:
        return min(most, -(-arguments.max_steps // int(arguments.save_steps)))
    return most


def state_per_parameter(arguments: TranslationTrainingArguments) -> float:
    """How many times the parameters' bytes the optimizer's state takes, as far as its name says; else Adam's."""
    name = "adadelta" if arguments.optimizer == "adadelta" else str(getattr(arguments.optim, "value", arguments.optim))
    if "adafactor" in name:
        return 0.01
    if "8bit" in name:
        return 0.5
    return 1.0 if name.startswith(("sgd", "adagrad", "rmsprop", "lion")) else 2.0


def in_words(count: float) -> str:
    """A number of bytes with a unit that suits it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


# -- ends before the end ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sudden_ends_explained(output_dir: Path) -> Iterator[None]:
    """
    Says, when the disk is full or the user interrupts, where the run stands and how it goes on.

    Raises:
        ValueError: The disk is full. What was half written is deleted.
    """
    try:
        yield
    except KeyboardInterrupt:
        logger.info(f"Interrupted. {where_it_stands(output_dir)}")
        raise
    except Exception as error:
        reason = disk_full(error)
        if reason is None:
            raise
        with contextlib.suppress(OSError):
            remove_leftovers(output_dir)
        raise UserError(
            f"A file in {output_dir} could not be written ({reason}). {where_it_stands(output_dir)} Remedy: free space "
            "first."
        ) from error


def where_it_stands(output_dir: Path) -> str:
    try:
        newest = newest_checkpoint(output_dir) or newest_checkpoint(output_dir / BASELINE)
    except OSError:
        newest = None
    if newest is None:
        return "There is no complete checkpoint yet; --resume starts from the beginning."
    return f"The newest complete checkpoint is {newest}; --resume goes on from there."


def disk_full(error: BaseException | None) -> str | None:
    """Return the system's message if an error, or its cause, is that a file could not grow; else `None`."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return os.strerror(error.errno)
        # Libraries written in Rust and C++ have errors of their own.
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if f"os error {code})" in str(error) or os.strerror(code) in str(error):
                return os.strerror(code)
        of_torch = "PytorchStreamWriter failed writing" in str(error) or "unexpected pos" in str(error)
        if isinstance(error, RuntimeError) and of_torch:
            return "the disk is full, or writing failed"
        error = error.__cause__ or error.__context__
    return None
