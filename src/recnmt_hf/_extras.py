"""Errors for packages of an extra that are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UserError


@contextmanager
def packages_of_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import into a [`UserError`] with the command that installs the extra; `purpose` needs it."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f'{purpose} requires the package {error.name}. Run pip install "recnmt-hf[{extra}]".'
        ) from error
