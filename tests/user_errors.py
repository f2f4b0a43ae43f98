"""Assertions about errors: their class, field, and words of the message."""

from contextlib import contextmanager

import pytest

from recnmt_hf.errors import UserError


@contextmanager
def rejects(*words, field=None, kind=UserError):
    """As `pytest.raises`, for an error of this kind with these words in its message and, if given, about this field."""
    with pytest.raises(kind) as caught:
        yield caught
    assert not [word for word in words if str(word) not in str(caught.value)], str(caught.value)
    assert field in (None, caught.value.field), caught.value.field
