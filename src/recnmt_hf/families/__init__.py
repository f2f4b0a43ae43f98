"""
The families of models, one module each.

A module of this folder holds `FAMILY`, all that the package knows of a family besides the equations: its classes, its
paper, the paper's figures, what can be inspected, and a small model for tests. Registration, cards, commands and tests
read it from [`FAMILIES`].
"""

import importlib
import pkgutil

from .family import Family, PaperRow, PaperTable, PaperTask, Subject


__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "PaperRow", "PaperTable", "PaperTask", "Subject"]

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(__path__):
    _family = getattr(importlib.import_module(f".{_module.name}", __name__), "FAMILY", None)
    if _family is not None:
        FAMILIES[_family.model_type] = _family
MODEL_TYPES = tuple(FAMILIES)
