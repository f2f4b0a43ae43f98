"""Errors that the user can correct."""

import copy
import pickle

import pytest

from recnmt_hf.errors import ExistingFileError, MissingFileError, UserError


@pytest.mark.parametrize("kind", [UserError, MissingFileError, ExistingFileError])
def test_an_error_has_message_and_field_in_every_process(kind):
    error = kind("2000 is not allowed.", field="beams")
    assert str(error) == "beams: 2000 is not allowed."
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), other.field) == (kind, str(error), "beams")


def test_a_field_inside_a_section_and_a_message_without_field():
    error = UserError("beams=2000 is not allowed.", field="beams").inside("decoding")
    assert (error.field, str(error)) == ("decoding.beams", "decoding.beams=2000 is not allowed.")
    assert str(UserError("The files have different lengths.").inside("data")) == (
        "data: The files have different lengths."
    )
