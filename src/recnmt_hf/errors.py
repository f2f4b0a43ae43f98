"""Errors that the user can correct."""

from collections.abc import Iterator
from contextlib import contextmanager

from .models.user_errors import UserError, short_repr


__all__ = ["ExistingFileError", "MissingFileError", "UserError", "packages_of_extra", "short_repr"]


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
