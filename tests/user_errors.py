"""Assertions about errors by code and field; test_user_errors.py checks the messages."""

from contextlib import contextmanager

import pytest

from recnmt_hf.errors import UserError


@contextmanager
def rejects(code, field=None, kind=UserError, **details):
    """As `pytest.raises`, for an error with this code and, if given, this field and these details."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    if field is not None:
        assert caught.value.field == field
    assert {name: caught.value.details.get(name) for name in details} == details
