"""
The families of models, one manifest each: a file MODEL_TYPE.yaml in this folder has all that the package knows of a
family besides the equations: its classes, its paper with its tables, what can be inspected, and a small model for
tests. Registration, cards, commands and tests read it from [`FAMILIES`].
"""

from importlib import resources

from .family import Family, PaperRow, PaperTable, PaperTask, Subject


__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "PaperRow", "PaperTable", "PaperTask", "Subject"]

_names = sorted(file.name for file in resources.files(__name__).iterdir() if file.name.endswith(".yaml"))
_manifests = map(resources.files(__name__).joinpath, _names)
FAMILIES = {family.model_type: family for family in map(Family.load, _manifests)}
MODEL_TYPES = tuple(FAMILIES)
