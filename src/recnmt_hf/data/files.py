"""Writing files that are whole or not there."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..models.user_errors import UserError


@contextmanager
def open_output(path: str | Path, inputs: Iterable[str | Path] = ()) -> Iterator[IO[str]]:
    """
    A UTF-8 text file to write, gzipped where its name ends in `.gz`, that takes its place when it is whole: it is
    written beside and renamed, so that an error, an interrupt or a kill leaves what stood there before. Folders on the
    way are made. Pipes and devices are written directly.

    Args:
        path (`str` or `Path`): The file.
        inputs (iterable of `str` or `Path`): Files that are being read: none of them may be `path`.

    Raises:
        UserError: `path` is a folder or one of `inputs`, or cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder. Remedy: name a file in it.")
    for read in inputs:
        if path.exists() and os.path.exists(read) and os.path.samefile(path, read):
            raise UserError(f"{path} is also read: writing would destroy it. Remedy: choose another output file.")
    compressed = path.suffix == ".gz"
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}). Remedy: choose a place where files may be written."
        ) from error
    os.close(handle)
    try:
        with (gzip.open if compressed else open)(partial, "wt", encoding="utf-8") as file:
            yield file
            file.flush()
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
