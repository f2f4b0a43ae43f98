"""Read whole files of others without filling the memory."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from .errors import UserError


# Limit of files that are read as a whole. Without it, a link to a device such as /dev/zero would fill the memory.
MAX_BYTES = 2**26


def read_bounded(file: IO[bytes], name: str, most: int = MAX_BYTES) -> bytes:
    """Read the rest of an open file; `UserError` if it has more than `most` bytes, before they fill the memory."""
    parts: list[bytes] = []
    while part := file.read(2**20):
        most -= len(part)
        if most < 0:
            raise UserError(f"{name} is larger than any file of this kind, or expands to more.", field=name)
        parts.append(part)
    return b"".join(parts)


def read_small_text(path: str | Path) -> str:
    """Read a file of UTF-8 text; `UserError` if it is larger than [`MAX_BYTES`], and the errors of `Path.read_text`."""
    with open(path, "rb") as file:
        return read_bounded(file, str(path)).decode()
