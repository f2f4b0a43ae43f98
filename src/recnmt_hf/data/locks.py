"""Locks between processes that write to the same place."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


# Errors of file systems that do not support locks.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class LockedError(UserError):
    """Another process holds the lock."""


@contextmanager
def lock(path: Path, wait: float = 0.0, field: object = None) -> Iterator[OSError | None]:
    """
    Hold a lock file, which names this process. The system releases the lock when the process ends, even when it is
    killed. Forked processes do not inherit it. It excludes other locks only; the files can still be read. Yield `None`,
    or the error of a file system that does not support locks.

    If another process still holds the lock after `wait` seconds, raise [`LockedError`] about `field` (by default
    `path`), which names the owner. `OSError` if the lock file cannot be created.
    """
    from filelock import FileLock, Timeout

    own = FileLock(path, wait, thread_local=False, fallback_to_soft=False, on_acquired=write_owner)
    unsupported = None
    try:
        own.acquire()
    except Timeout as error:
        raise LockedError(f"{field or path} is in use ({owner_of(path)}).", field=field or path) from error
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


def owner_of(path: Path) -> str:
    """Return the process that a lock file names."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "unknown process"
    except OSError:
        return "unknown process"
