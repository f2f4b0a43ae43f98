"""Compare pictures with committed ones."""

import re
from importlib.metadata import version
from pathlib import Path


PINS = Path(__file__).resolve().parents[1] / "scripts/constraints.txt"


def check_pictures(drawn, committed):
    """
    Assert that two folders have the same pictures: the same files with the pinned version of matplotlib, otherwise the
    same texts, because the positions of texts depend on the version.
    """
    names = sorted(path.name for path in drawn.glob("*.svg"))
    assert names and names == sorted(path.name for path in committed.glob("*.svg"))
    for name in names:
        own, other = ((folder / name).read_text() for folder in (drawn, committed))
        assert re.findall(r"<text[^>]*>(.*?)</text>", own) == re.findall(r"<text[^>]*>(.*?)</text>", other), name
        if f"matplotlib=={version('matplotlib')}" in PINS.read_text().split():
            assert own == other, name
