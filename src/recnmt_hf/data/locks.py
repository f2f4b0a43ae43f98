"""Locks between processes that write to the same place."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..models.user_errors import UserError


# Errors of file systems that do not support locks.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class LockedError(UserError):
    """Another process holds the lock."""


@contextmanager
def lock(
    path: Path,
    wait: float = 0.0,
    busy: str = "Another process writes here",
    remedy: str = "wait until it has finished, and try again",
) -> Iterator[OSError | None]:
    """
    Hold a lock file, which names this process. The system releases the lock when the process ends, even when it is
    killed. Forked processes do not inherit it. Only other locks are kept out: reading stays possible.

    Args:
        path (`Path`): The lock file; created, and deleted at the end.
        wait (`float`, *optional*, defaults to 0): Seconds to wait for another process.
        busy, remedy (`str`, *optional*): First and last sentence of the error, without the owner.

    Yields:
        `None`, or the error of a file system that does not support locks.

    Raises:
        LockedError: Another process still holds the lock; the message names it.
        OSError: The lock file cannot be created.
    """
    from filelock import FileLock, Timeout

    own = FileLock(path, wait, thread_local=False, fallback_to_soft=False, on_acquired=write_owner)
    unsupported = None
    try:
        own.acquire()
    except Timeout as error:
        raise LockedError(f"{busy} ({owner_of(path)}). Remedy: {remedy}.") from error
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
    if os.fstat(handle).st_size:  # of a killed process
        os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def owner_of(path: Path) -> str:
    try:
        owner = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        owner = ""
    return owner or "its process is unknown"
