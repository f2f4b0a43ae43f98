"""Writing files and folders that are whole or not there."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeGuard

from ..models.user_errors import ExistingFileError, UserError
from .locks import LockedError, lock


# Errors of the system while a file is written. They are never faults of the program.
MEDIUM_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
# There is no room: only writing can meet this, whatever file the error names (copying names the one that is read).
SPACE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Unfinished output: a folder with a lock file and the content.
PREFIX, PARTIAL = ".recnmt-", ".partial"
LOCK, CONTENT = "lock", "content"
SIGNS_OF_A_MODEL = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")


class UnwritableError(UserError):
    """A file or folder that cannot be written."""

    def __init__(self, path: str | Path, reason: str | None):
        super().__init__(
            f"{path} cannot be written ({reason}). Remedy: choose a place where files may be written, with room for "
            "them."
        )
        self.path, self.reason = path, reason


@contextmanager
def open_output(
    path: str | Path | None, inputs: Iterable[str | Path | None] = (), binary: bool = False
) -> Iterator[IO[Any]]:
    """
    A file to write that takes its place when it is whole: it is written beside and renamed, so that an error, an
    interrupt or a kill leaves what stood there before. Folders on the way are made. Pipes and devices are written
    directly, a symbolic link stays one.

    Args:
        path (`str` or `Path`, *optional*): The file; `None`: standard output.
        inputs (iterable of `str` or `Path`): Files that are being read (`None`: standard input): none of them may be
            `path`.
        binary (`bool`, *optional*, defaults to `False`): Bytes; otherwise UTF-8 text, gzipped where the name ends in
            `.gz`.

    Raises:
        UserError: `path` is a folder or one of `inputs`, or cannot be written.
    """
    refuse_inputs(path, inputs)
    if path is None:
        yield sys.stdout.buffer if binary else sys.stdout
        return
    given = path
    partial: Path | None = None
    with ExitStack() as held:
        try:
            path = real_path(given)
            if path.is_dir() or str(given).endswith(os.sep):
                raise UserError(f"{given} is a folder. Remedy: name a file in it.")
            special = is_special(given, path)
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            if not special:
                held.callback(remove_empty, make_folders(path.parent))
                partial = held.enter_context(partial_folder(path.parent)) / CONTENT
            place = given if partial is None else partial
            file: IO[Any]
            if binary:
                file = open(place, "wb")  # noqa: SIM115
            elif path.suffix == ".gz" and not special:
                file = gzip.open(place, "wt", encoding="utf-8", newline="\n")  # noqa: SIM115
            else:
                file = open(place, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        except OSError as error:
            raise cannot_write(given, error) from error
        try:
            with file:
                yield file
            if partial is not None:
                if path.exists():
                    os.chmod(partial, stat.S_IMODE(path.stat().st_mode))
                os.replace(partial, path)
        except BaseException as error:
            if concerns(error, partial):
                raise cannot_write(given, error) from error
            raise


@contextmanager
def open_output_folder(path: str | Path, must_be_new: bool = False) -> Iterator[Path]:
    """
    A folder to write files into, which take their places when all of them are whole.

    Args:
        path (`str` or `Path`): The folder. What it holds stays, apart from files of the same names.
        must_be_new (`bool`, *optional*, defaults to `False`): Whether the folder must not hold anything.

    Returns:
        An empty folder beside, whose files move to `path` at the end.

    Raises:
        UserError: `path` is a file, holds a model, or cannot be written; with `must_be_new`, it is not empty.
    """
    given = path
    with ExitStack() as held:
        try:
            path = real_path(given)
            is_new = not path.exists()
            if not is_new and not path.is_dir():
                raise ExistingFileError(f"{given} is a file, and a folder is to be written. Remedy: name a new folder.")
            if must_be_new and not is_new and any(not each.name.startswith(PREFIX) for each in path.iterdir()):
                raise ExistingFileError(f"{given} is not empty. Remedy: choose a new folder.")
            refuse_model_folder(path, given)
            # A new folder is renamed as a whole; one that is there may be a mounted disk, to which nothing can be
            # renamed.
            place = path.parent if is_new else path
            held.callback(remove_empty, make_folders(place))
            working = held.enter_context(partial_folder(place)) / CONTENT
            working.mkdir()
        except UserError:
            raise
        except OSError as error:
            raise cannot_write(given, error) from error
        try:
            yield working
            if is_new:
                os.rename(working, path)
            else:
                move_files(working, path, given)
        except BaseException as error:
            if isinstance(error, UnwritableError) and Path(error.path).is_relative_to(working):
                raise UnwritableError(given, error.reason) from error  # nobody knows the folder beside
            if not isinstance(error, UserError) and (number := room_error(error)) is not None:
                raise UnwritableError(given, os.strerror(number)) from error
            if concerns(error, working):
                raise cannot_write(given, error) from error
            raise


@contextmanager
def partial_folder(place: Path) -> Iterator[Path]:
    """
    Make a folder in `place` for unfinished output, and delete it at the end. What killed processes left in `place` is
    deleted first.

    Raises:
        OSError: The folder cannot be made.
    """
    remove_abandoned(place)
    with ExitStack() as held:
        while True:
            working = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=PARTIAL, dir=place))
            held.callback(shutil.rmtree, working, ignore_errors=True)
            # Until the folder is locked, another process may take it for an abandoned one and delete it.
            with suppress(LockedError):
                held.enter_context(lock(working / LOCK))
                break
        yield working


def remove_abandoned(place: Path) -> None:
    """Delete unfinished output of killed processes from a folder; that of living processes is locked, and stays."""
    for path in place.glob(f"{PREFIX}*{PARTIAL}"):
        own = path / LOCK if path.is_dir() else path
        with suppress(LockedError, OSError), lock(own) as unsupported:
            if unsupported is None and not path.is_symlink():
                remove(path)


def remove(path: Path) -> None:
    """Delete a file, or a folder as far as that is possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """
    Keep other processes from replacing a file while this one reads it, changes it and replaces it.

    Raises:
        UserError: Another process does not release the file within a minute, or the folder cannot be written.
    """
    path = real_path(path)
    with ExitStack() as held:
        try:
            held.enter_context(lock(path.with_name(f".{path.name}.lock"), 60, f"Another process changes {path}"))
        except OSError as error:
            raise cannot_write(path, error) from error
        yield


def refuse_model_folder(folder: Path, given: str | Path | None = None) -> None:
    """
    Raise [`ExistingFileError`] where output would be written into a folder that holds a model, a tokenizer or a
    training run.

    Args:
        folder (`Path`): The folder.
        given (`str` or `Path`, *optional*): Its name in the message.
    """
    for part in (folder, folder / "model", *folder.glob("checkpoint-*")):
        for name in SIGNS_OF_A_MODEL:
            if (part / name).is_file():
                raise ExistingFileError(
                    f"{given or folder} holds a model ({(part / name).relative_to(folder)}). Remedy: choose another "
                    "folder."
                )


def move_files(working: Path, path: Path, given: str | Path) -> None:
    """Moves all files of a folder into another one, none of them where one cannot go."""
    names = [file.relative_to(working) for file in sorted(working.rglob("*")) if not file.is_dir()]
    for name in names:
        if (path / name).is_dir():
            raise ExistingFileError(f"{Path(given) / name} is a folder. Remedy: choose a new folder.")
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(working / name, path / name)


def refuse_inputs(path: str | Path | None, inputs: Iterable[str | Path | None]) -> None:
    """
    Raises `UserError` where the file to be written (`None`: standard output) is one of those that are read (`None`:
    standard input), under whatever name: a link, a path through another folder, the target of a redirection.
    """
    written = identity(1 if path is None else path)
    if written is None:
        return
    for read in inputs:
        if identity(0 if read is None else read) == written:
            name = "standard output" if path is None else path
            raise UserError(f"{name} is also read: writing would destroy it. Remedy: choose another output file.")


def identity(path: str | Path | int) -> tuple[int, int] | None:
    """Return device and inode of a regular file (or file descriptor); `None` for pipes, devices and missing files."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def is_special(given: str | Path, path: Path) -> bool:
    """Whether a path is a pipe or device, or another name of an open file: they are no places to rename to."""
    return (path.exists() and not path.is_file()) or os.path.abspath(given).startswith(("/dev/", "/proc/"))


def real_path(path: str | Path) -> Path:
    """Where a path leads, with all links followed."""
    if not str(path):
        raise UserError("The name of the output is empty. Remedy: name a place to write to.")
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise UserError(f"{path} is a link that leads back to itself. Remedy: remove it, or choose another output.")
    return real


def make_folders(path: Path) -> list[Path]:
    """Makes a folder and those above it; returns those that were not there, deepest first."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def concerns(error: BaseException, partial: str | Path | None) -> TypeGuard[OSError]:
    """Whether an error is the system's answer to writing an output, not to reading an input."""
    if not isinstance(error, OSError) or isinstance(error, UserError):
        return False
    if error.filename is None:
        return error.errno in MEDIUM_ERRORS
    return partial is not None and str(error.filename).startswith(str(partial))


def cannot_write(path: str | Path, error: OSError) -> UserError:
    return UnwritableError(path, error.strerror)


def room_error(error: BaseException) -> int | None:
    """The number of [`SPACE_ERRORS`] that an error names; libraries in Rust and `shutil` put it into words."""
    number = getattr(error, "errno", None)
    if number is None:
        found = re.search(r"\[Errno (\d+)\]|\(os error (\d+)\)", str(error))
        number = int(found[1] or found[2]) if found else None
    return number if number in SPACE_ERRORS else None
