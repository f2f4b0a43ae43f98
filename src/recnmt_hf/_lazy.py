"""Packages that import their names on first use."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def names_for_type_checkers(package: str) -> dict[str, str]:
    """Return the names that a package imports under `if TYPE_CHECKING:`, with their modules relative to it."""
    source = inspect.getsource(sys.modules[package])
    blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    pairs = [(alias, f"{'.' * node.level}{node.module}") for node in imports for alias in node.names]
    return {alias.asname or alias.name: module for alias, module in pairs if alias.name != "*"}


def lazy_names(package: str, **further: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package: names for type checkers and `further` ones."""
    modules, own = names_for_type_checkers(package) | further, sys.modules[package].__dict__

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        own[name] = getattr(importlib.import_module(modules[name], package), name)
        return own[name]

    def names() -> list[str]:
        return sorted({*own, *modules})

    return get, names, sorted(modules)
