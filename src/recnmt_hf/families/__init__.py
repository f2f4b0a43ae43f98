"""
The families of models, one module each.

A module of this folder holds `FAMILY`, all that the package knows of a family besides the equations: its classes, its
paper, the paper's figures, what can be inspected, and a small model for tests. Registration, cards, commands and tests
read it from [`FAMILIES`].
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from .family import Family, PaperRow, PaperTable, PaperTask, Subject


__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "PaperRow", "PaperTable", "PaperTask", "Subject", "paper_table_of"]

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(__path__):
    _family = getattr(importlib.import_module(f".{_module.name}", __name__), "FAMILY", None)
    if _family is not None:
        FAMILIES[_family.model_type] = _family
MODEL_TYPES = tuple(FAMILIES)


def paper_table_of(systems: Sequence[str], size: str | None = None) -> PaperTable | None:
    """
    Return the paper's table of a comparison of these systems, or `None`. Its first row is the first system. It has at
    least two of them, and the given size (a preset) or more than a third of them. Of several tables, the one with most
    of them is returned.
    """
    counts = [
        (sum(table.row(name) is not None for name in systems), table)
        for family in FAMILIES.values()
        for table in family.tables
        if [table.baseline.system] == list(systems[:1]) and size in (None, table.size)
    ]
    count, table = max(counts, key=lambda entry: entry[0], default=(0, None))
    return table if count >= 2 and (size is not None or 3 * count > len(systems)) else None
