"""The checks of the API reference."""

from dataclasses import dataclass

import pytest


pdoc = pytest.importorskip("pdoc")

from api_reference import comments_to_docstrings, undescribed_arguments  # noqa: E402


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


def test_undescribed_arguments_are_found():
    assert undescribed_arguments(described) == ["another_one"]
    assert undescribed_arguments(Constructed) == ["second"]
    assert undescribed_arguments(Commented) == []


def test_comments_of_fields_are_shown():
    comments_to_docstrings(Commented)
    members = pdoc.doc.Class("tests", "Commented", Commented, ("tests", "Commented")).members
    assert (members["width"].docstring, members["depth"].docstring) == ("Number of channels.", "")
