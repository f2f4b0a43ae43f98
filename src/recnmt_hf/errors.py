"""Errors that the user can correct."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .models.user_errors import UserError, short_repr


__all__ = ["ExistingFileError", "MissingFileError", "UserError", "explained", "packages_of_extra", "short_repr"]


LONGEST = 240  # characters of a quoted reason


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that does not exist."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder that exists and must not be overwritten."""


@contextmanager
def packages_of_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import into a [`UserError`] with the command that installs the extra; `purpose` needs it."""
    try:
        yield
    except ImportError as error:
        remedy = f'Run pip install "recnmt-hf[{extra}]"'
        raise UserError(f"{purpose} requires the package {error.name}. {remedy}.") from error


@contextmanager
def explained(
    claim: str, field: Any, kinds: type[BaseException] | tuple[type[BaseException], ...] = Exception
) -> Iterator[None]:
    """Turn errors of other libraries, of these `kinds`, into a [`UserError`] of `field`: a `claim` and the reason."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        reason = f"no {error}" if isinstance(error, KeyError) else shorten(str(error) or type(error).__name__)
        raise UserError(f"{claim} ({reason}).", field=field) from error


def shorten(text: str) -> str:
    """Return the first paragraph of a message, on one line and without its full stop."""
    first = " ".join(text.strip().split("\n\n")[0].split())
    if len(first) > LONGEST:
        sentences = first[:LONGEST].rpartition(". ")[0]
        first = sentences or f"{first[:LONGEST].rpartition(' ')[0]} ..."
    return first.removesuffix(".") or "no reason is given"
