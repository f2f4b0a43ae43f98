"""Errors that the user can correct."""

from .models.user_errors import UserError, short_repr


__all__ = ["ExistingFileError", "MissingFileError", "UserError", "short_repr"]


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that does not exist."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder that exists and must not be overwritten."""
