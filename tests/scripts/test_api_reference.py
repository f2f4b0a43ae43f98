"""The checks of the API reference."""

import sys
from dataclasses import dataclass

import pytest


pdoc = pytest.importorskip("pdoc")


@pytest.fixture(scope="module")
def api_reference(repository):
    sys.path.insert(0, str(repository / "scripts"))
    try:
        import api_reference
    finally:
        sys.path.pop(0)
    return api_reference


@dataclass
class Commented:
    """Fields."""

    width: int = 1  # number of channels
    depth: int = 2


class Constructed:
    """Mentions `first` alone."""

    def __init__(self, first, second, *args, config=None):
        pass


def described(one, another_one=None, **kwargs):
    """
    Args:
        one: Told here.
        another_one_more: Something else.
    """


def test_undescribed_arguments_are_found(api_reference):
    assert api_reference.undescribed_arguments(described) == ["another_one"]
    assert api_reference.undescribed_arguments(Constructed) == ["second"]
    assert api_reference.undescribed_arguments(Commented) == []


def test_comments_of_fields_are_shown(api_reference):
    api_reference.comments_to_docstrings(Commented)
    members = pdoc.doc.Class("tests", "Commented", Commented, ("tests", "Commented")).members
    assert (members["width"].docstring, members["depth"].docstring) == ("Number of channels.", "")
