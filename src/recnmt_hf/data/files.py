"""Write files and folders atomically: incomplete output never appears under its name."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from ..errors import ExistingFileError, UserError


# System errors while a file is written, which are never bugs of the program.
MEDIUM_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
# Only writing fails for lack of space, even if the error names another file (copying names the source).
SPACE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Unfinished output: a folder with a lock file and the content.
PREFIX, PARTIAL = ".recnmt-", ".partial"
LOCK, CONTENT = "lock", "content"
# Errors of file systems that do not support locks.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")


class UnwritableError(UserError):
    """A file or folder that cannot be written; `field` is its path."""


class LockedError(UserError):
    """Another process holds the lock."""


def digest_of_file(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def open_output(
    path: str | Path | None, inputs: Iterable[str | Path | None] = (), binary: bool = False
) -> Iterator[IO[Any]]:
    """
    Open a file for writing that replaces an existing one atomically: it is written beside it and renamed, so that an
    error, an interrupt or a kill leaves the old file. Missing folders are made. Pipes, devices and standard output
    (`None`) are written directly, a symbolic link remains one.

    The file has UTF-8 text, gzipped if its name ends in `.gz`, or bytes if it is `binary`. `inputs` are the files that
    are being read (`None`: standard input). `UserError` if `path` is a folder or one of them, or cannot be written.
    """
    refuse_inputs(path, inputs)
    if path is None:
        yield sys.stdout.buffer if binary else sys.stdout
        return
    user_path, partial = str(path), None
    with ExitStack() as stack:
        with explained_preparation(user_path):
            path = check_replaceable(user_path)
            # A pipe, a device, or another name of an open file cannot be replaced.
            special = os.path.abspath(user_path).startswith(("/dev/", "/proc/")) or (
                path.exists() and not path.is_file()
            )
            if not special:
                stack.enter_context(folders_made(path.parent))
                partial = stack.enter_context(partial_folder(path.parent)) / CONTENT
            place = partial or user_path
            mode = {"mode": "wb"} if binary else {"mode": "wt", "encoding": "utf-8", "newline": "\n"}
            opener: Any = gzip.open if path.suffix == ".gz" and not (special or binary) else open
            file = opener(place, **mode)
        with explained_writing(user_path, partial):
            with file:
                yield file
            if partial is not None:
                if path.exists():
                    os.chmod(partial, stat.S_IMODE(path.stat().st_mode))
                os.replace(partial, path)


@contextmanager
def open_output_folder(path: str | Path, must_be_new: bool = False) -> Iterator[Path]:
    """
    Yield an empty temporary folder, whose files move to the folder `path` when all of them are complete. Its other
    files remain; those of the same names are replaced. `UserError` if `path` is a file, contains a model, or cannot be
    written, and with `must_be_new` if it is not empty.
    """
    user_path = str(path)
    with ExitStack() as stack:
        with explained_preparation(user_path):
            path = real_path(path)
            is_new = not path.exists()
            if not is_new and not path.is_dir():
                raise ExistingFileError(f"{user_path} is a file, but the output is a folder.", field=user_path)
            if must_be_new and not is_new and any(not entry.name.startswith(PREFIX) for entry in path.iterdir()):
                raise ExistingFileError(f"{user_path} is not empty.", field=user_path)
            reject_model_folder(Path(user_path))
            # A new folder is renamed as a whole. An existing one may be on another disk than its parent.
            place = path.parent if is_new else path
            stack.enter_context(folders_made(place))
            working = stack.enter_context(partial_folder(place)) / CONTENT
            working.mkdir()
        with explained_writing(user_path, working):
            yield working
            if is_new:
                os.rename(working, path)
            else:
                move_files(working, path, user_path)


def check_replaceable(user_path: str) -> Path:
    """Return the real place of an output file; `UserError` if it is a folder, `PermissionError` if it is protected."""
    path = real_path(user_path)
    if path.is_dir() or user_path.endswith(os.sep):
        raise UserError(f"{user_path} is a folder.", field=user_path)
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path


@contextmanager
def explained_preparation(user_path: str | Path) -> Iterator[None]:
    """Turn system errors before anything is written into an [`UnwritableError`]."""
    try:
        yield
    except UserError:  # some are errors of the system too
        raise
    except OSError as error:
        raise UnwritableError(f"{user_path} cannot be written ({error.strerror}).", field=user_path) from error


@contextmanager
def explained_writing(user_path: str, working: Path | None) -> Iterator[None]:
    """Turn system errors about an output (`working` while unfinished) into an [`UnwritableError`]."""
    try:
        yield
    except UserError as error:
        if isinstance(error, UnwritableError) and working and Path(str(error.field)).is_relative_to(working):
            raise UnwritableError(error.message.replace(str(error.field), user_path), field=user_path) from error
        raise
    except Exception as error:
        number, file = number_of(error), getattr(error, "filename", None)
        is_own = str(file).startswith(str(working)) if file is not None and working else number in MEDIUM_ERRORS
        if number in SPACE_ERRORS or (isinstance(error, OSError) and is_own and number is not None):
            raise UnwritableError(f"{user_path} cannot be written ({os.strerror(number)}).", field=user_path) from error
        raise


def number_of(error: BaseException) -> int | None:
    """Return the errno of an error; libraries in Rust and `shutil` put it into the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\[Errno (\d+)\]|\(os error (\d+)\)", str(error))
    return int(match[1] or match[2]) if match else None


# -- locks and unfinished output ---------------------------------------------------------------------------------------


@contextmanager
def lock(path: Path, wait: float = 0.0, field: object = None) -> Iterator[OSError | None]:
    """
    Hold a lock file, which names this process. The system releases the lock when the process ends, even when it is
    killed. Forked processes do not inherit it. It excludes other locks only; the files can still be read. Yield `None`,
    or the error of a file system that does not support locks.

    If another process still holds the lock after `wait` seconds, raise [`LockedError`] about `field` (by default
    `path`), which names the owner. `OSError` if the lock file cannot be created.
    """
    own = FileLock(path, wait, thread_local=False, fallback_to_soft=False, on_acquired=write_owner)
    unsupported = None
    try:
        own.acquire()
    except Timeout as error:
        owner = "unknown process"
        with suppress(OSError):
            owner = path.read_text(encoding="utf-8", errors="replace").strip() or owner
        raise LockedError(f"{field or path} is in use ({owner}).", field=field or path) from error
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        unsupported = error
    try:
        yield unsupported
    finally:
        if own.is_locked or unsupported is not None:  # not in a forked process
            path.unlink(missing_ok=True)  # before the release: afterwards it could belong to another process
            own.release()


def write_owner(handle: int) -> None:
    """Write this process into a lock file."""
    if os.fstat(handle).st_size:  # of a killed process
        os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


@contextmanager
def partial_folder(place: Path) -> Iterator[Path]:
    """
    Make a folder in `place` for unfinished output, and delete it at the end. Folders of killed processes in `place` are
    deleted first. `OSError` if the folder cannot be made.
    """
    remove_abandoned(place)
    with ExitStack() as stack:
        while True:
            working = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=PARTIAL, dir=place))
            stack.callback(shutil.rmtree, working, ignore_errors=True)
            # Until the folder is locked, another process may consider it abandoned and delete it.
            with suppress(LockedError):
                stack.enter_context(lock(working / LOCK))
                break
        yield working


def remove_abandoned(place: Path) -> None:
    """Delete unfinished output of killed processes from a folder; that of living processes is locked."""
    for path in place.glob(f"{PREFIX}*{PARTIAL}"):
        own = path / LOCK if path.is_dir() else path
        with suppress(LockedError, OSError), lock(own) as unsupported:
            if unsupported is None and not path.is_symlink():
                remove(path)


def remove(path: Path) -> None:
    """Delete a file, or a folder as far as possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """
    Keep other processes from replacing a file while this one reads it, changes it and replaces it. `UserError` if
    another process does not release it within a minute, or the folder cannot be written.
    """
    with ExitStack() as stack:
        with explained_preparation(path):
            path = real_path(path)
            stack.enter_context(lock(path.with_name(f".{path.name}.lock"), 60, field=path))
        yield


def reject_model_folder(folder: Path) -> None:
    """Raise [`ExistingFileError`] if a folder for output contains a model, a tokenizer or a training run."""
    for part in (folder, folder / "model", *folder.glob("checkpoint-*")):
        for file in (part / name for name in MODEL_FILES):
            if file.is_file():
                raise ExistingFileError(f"{folder} contains a model ({file.relative_to(folder)}).", field=folder)


def move_files(working: Path, path: Path, user_path: str) -> None:
    """Move all files of a folder into another one, or none if a folder is in the way."""
    names = [file.relative_to(working) for file in sorted(working.rglob("*")) if not file.is_dir()]
    for name in names:
        if (path / name).is_dir():
            raise ExistingFileError(f"{Path(user_path) / name} is a folder.", field=Path(user_path) / name)
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(working / name, path / name)


def refuse_inputs(path: str | Path | None, inputs: Iterable[str | Path | None]) -> None:
    """
    Raise `UserError` if an output (`None`: standard output) is one of the inputs (`None`: standard input), under
    any name: a link, a path through another folder, the target of a redirection.
    """
    output = identity(1 if path is None else path)
    if output is not None and output in [identity(0 if source is None else source) for source in inputs]:
        raise UserError(
            f"{'standard output' if path is None else str(path)} is also an input and would be overwritten.",
            field="standard output" if path is None else str(path),
        )


def identity(path: str | Path | int) -> tuple[int, int] | None:
    """
    Return device and inode of a regular file (or file descriptor); `None` for pipes, devices and missing files. A path
    is resolved first, since writing makes the missing folders of `new/../in.txt`.
    """
    try:
        status = os.stat(path if isinstance(path, int) else os.path.realpath(path))
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def real_path(path: str | Path) -> Path:
    """Follow all links of a path."""
    if not str(path):
        raise UserError("The name of a file is empty.")
    real = Path(os.path.realpath(path))
    if real.is_symlink():  # of a loop
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return real


@contextmanager
def folders_made(path: Path) -> Iterator[None]:
    """Make a folder and its parents, and delete at the end those that were missing and are empty."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
