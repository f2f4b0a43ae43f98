"""Write files and folders atomically: incomplete output never appears under its name."""

import errno
import gzip
import hashlib
import json
import os
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


UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}  # of file systems without locks
# Unfinished output: a folder with a lock file and the content.
PREFIX, PARTIAL, LOCK, CONTENT = ".recnmt-", ".partial", "lock", "content"
MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")


class LockedError(UserError):
    """Another process holds the lock."""


def digest_of_file(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, which identifies settings and records."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """
    Yield a place for a new file or folder, which replaces `path` at the end; an error, an interrupt or a kill leaves
    what was there. A new folder that replaces an existing one only replaces files of the same names. Missing parents
    are made, and a symbolic link remains one. `OSError` at once if `path` cannot be written.
    """
    real = Path(os.path.realpath(path))
    if real.is_file():
        real.open("ab").close()  # fails if it is protected
    place = real if real.is_dir() else real.parent  # an existing folder may be on another disk than its parent
    place.mkdir(parents=True, exist_ok=True)
    with partial_folder(place) as folder:
        yield (new := folder / CONTENT)
        if not real.is_dir():
            if real.is_file():
                os.chmod(new, stat.S_IMODE(real.stat().st_mode))
            os.replace(new, real)
            return
        for file in sorted(file for file in new.rglob("*") if not file.is_dir()):
            target = real / file.relative_to(new)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)


@contextmanager
def open_output(
    path: str | Path | None, inputs: Iterable[str | Path | None] = (), binary: bool = False
) -> Iterator[IO[Any]]:
    """
    Open a file for writing that replaces an existing one as [`replacing`] does. Pipes, devices and standard output
    (`None`) are written directly. The file has UTF-8 text, gzipped if its name ends in `.gz`, or bytes if it is
    `binary`. `UserError` if `path` is one of the files that are being read (`inputs`; `None`: standard input).
    """
    refuse_inputs(path, inputs)
    if path is None:
        yield sys.stdout.buffer if binary else sys.stdout
        return
    mode: dict[str, Any] = {"mode": "wb"} if binary else {"mode": "wt", "encoding": "utf-8", "newline": "\n"}
    # A pipe, a device, or another name of an open file cannot be replaced, and a folder is an error now.
    real = os.path.realpath(path)
    if os.path.abspath(path).startswith(("/dev/", "/proc/")) or (os.path.exists(real) and not os.path.isfile(real)):
        with open(path, **mode) as file:
            yield file
        return
    opener: Any = gzip.open if str(path).endswith(".gz") and not binary else open
    with replacing(path) as partial, opener(partial, **mode) as file:
        yield file


@contextmanager
def open_output_folder(path: str | Path, must_be_new: bool = False) -> Iterator[Path]:
    """
    Yield a temporary folder, whose files move to the folder `path` when all of them are complete; its other files
    remain. [`ExistingFileError`] if `path` contains a model, and with `must_be_new` if it is not empty.
    """
    path = Path(path)
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(PREFIX)] if path.exists() else []
    if entries and must_be_new:
        raise ExistingFileError(f"{path} is not empty.", field=path)
    reject_model_folder(path)
    with replacing(path) as working:
        working.mkdir()
        yield working


def reject_model_folder(folder: Path) -> None:
    """Raise [`ExistingFileError`] if a folder for output contains a model, a tokenizer or a training run."""
    for part in (folder, folder / "model", *folder.glob("checkpoint-*")):
        for file in (part / name for name in MODEL_FILES):
            if file.is_file():
                raise ExistingFileError(f"{folder} contains a model ({file.relative_to(folder)}).", field=folder)


def refuse_inputs(path: str | Path | None, inputs: Iterable[str | Path | None]) -> None:
    """Raise `UserError` if an output is one of the inputs under any name; `None` are the standard streams."""

    def identity(file: str | Path | None, stream: int) -> tuple[int, int] | None:
        try:  # a path is resolved first, since writing makes the missing folders of `new/../in.txt`
            status = os.stat(stream if file is None else os.path.realpath(file))
        except (OSError, ValueError):
            return None
        return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None

    output = identity(path, 1)
    if output is not None and output in [identity(source, 0) for source in inputs]:
        name = "standard output" if path is None else str(path)
        raise UserError(f"{name} is also an input and would be overwritten.", field=name)


@contextmanager
def lock(path: Path, wait: float = 0.0, field: object = None) -> Iterator[OSError | None]:
    """
    Hold a lock file that names this process, also if it is killed; forked processes do not inherit it. Yield `None`, or
    the error of a file system without locks. [`LockedError`] about `field` if it is held after `wait` seconds.
    """

    def write_owner(handle: int) -> None:
        os.truncate(handle, 0)  # of a killed process
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

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


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Keep other processes from replacing a file while this one changes it; [`LockedError`] after a minute."""
    path = Path(os.path.realpath(path))
    with lock(path.with_name(f".{path.name}.lock"), 60, field=path):
        yield


@contextmanager
def partial_folder(place: Path) -> Iterator[Path]:
    """Make a folder in `place` for unfinished output, deleted at the end, like those of killed processes."""
    for path in place.glob(f"{PREFIX}*{PARTIAL}"):
        with suppress(LockedError, OSError), lock(path / LOCK if path.is_dir() else path) as unsupported:
            if unsupported is None and not path.is_symlink():  # that of a living process is locked
                remove(path)
    with ExitStack() as stack:
        while True:
            working = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=PARTIAL, dir=place))
            stack.callback(shutil.rmtree, working, ignore_errors=True)
            # Until the folder is locked, another process may consider it abandoned and delete it.
            with suppress(LockedError):
                stack.enter_context(lock(working / LOCK))
                break
        yield working


def remove(path: Path) -> None:
    """Delete a file, or a folder as far as possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
