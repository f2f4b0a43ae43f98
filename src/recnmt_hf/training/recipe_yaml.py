"""
Read and write recipes: YAML 1.2, `extends`, and overrides of the command line.

Only plain `true` and `false` are booleans, so that `no` is Norwegian; 1:30 and 2024-01-01 are text, 010 is ten, 5e-4 a
number. Names in a mapping are unique.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.constructor import SafeConstructor

from ..data.text import read_lines
from ..errors import UserError, short_repr
from ..models.user_errors import masked
from ..options import DEFAULT, check_value, mapping


# Depth at which `null` resets a value: section.field.
FIELD_DEPTH = 2
# Values of a document, those of its aliases included; a recipe has some hundreds.
MOST_NODES = 100_000
# Numbers of YAML 1.2. PyYAML, which writes YAML 1.1, would leave some of them without quotes.
NUMBERS = re.compile(
    r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|0o[0-7_]+|0x[0-9a-fA-F_]+|[-+]?\.(inf|nan)", re.I
)


class _Constructor(SafeConstructor):
    """A constructor that reads dates as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text that a reader of YAML 1.1 or 1.2 could take for another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^(?:{NUMBERS.pattern})$", re.I), None)


def load_yaml(text: str, name: str) -> Any:
    """Parse a YAML document or value, which messages call `name` (a file or an override), or raise `UserError`."""
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    place = ""
    try:
        waiting, count = [parser.compose(text)], 0
        while waiting and count <= MOST_NODES:  # a small file may repeat an alias of aliases of aliases ...
            node, count = waiting.pop(), count + 1
            for child in node.value if isinstance(getattr(node, "value", None), list) else ():
                waiting += child if isinstance(child, tuple) else [child]
        if not waiting:
            return parser.load(text)
        reason = f"aliases that repeat more than {MOST_NODES:,} values"
    except RecursionError:
        reason = "nested too deeply"
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
    raise UserError(f"{name}{place}: invalid YAML ({reason}).", field=name)


def read_yaml(path: Path) -> Any:
    """Parse a YAML file; `UserError` if it cannot be read."""
    return load_yaml("\n".join(read_lines(path, strip="\n")), str(path))


def dump_yaml(content: Any) -> str:
    """Return YAML from which [`load_yaml`] reads the same content, with its secrets masked."""
    return yaml.dump(masked(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


# The length of a run is that of the last override: in steps or in epochs.
LENGTHS = {"training.max_steps": "num_train_epochs", "training.num_train_epochs": "max_steps"}


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set the fields `section.field=value` of a recipe's content, which is changed and returned."""
    for override in overrides:
        name, equals, value = override.partition("=")
        *parents, last = name.split(".")
        if not equals or not all((*parents, last, value.strip())):
            raise UserError(f"{short_repr(override)} is not an override. Write section.field=value, or =null to reset.")
        target = content
        for parent in parents:
            target[parent] = mapping(target.get(parent), parent)
            target = target[parent]
        parsed = load_yaml(value, name)
        target[last] = DEFAULT if parsed is None and len(parents) < FIELD_DEPTH else parsed
        if name in LENGTHS and parsed not in (None, -1):
            target.pop(LENGTHS[name], None)
    return content


def read_recipe(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe's file, merged into the one it extends."""
    if path.resolve() in extended_by:
        raise UserError(f"{path} extends itself.", field=path)
    content = read_yaml(path)
    if content is None:
        raise UserError(f"{path} is empty.", field=path)
    content = mapping(content, str(path))
    if (extended := content.pop("extends", None)) is None:
        return content
    base = path.parent / check_value("extends", extended, str)
    return merge(read_recipe(base, (*extended_by, path.resolve())), content)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any], depth: int = FIELD_DEPTH) -> dict[str, Any]:
    """Merge changes into a base. Down to `depth`, `None` becomes `DEFAULT`; deeper, as in `model.fields`, it stays."""
    result = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping):
            inner = result[name] if isinstance(result.get(name), Mapping) else {}
            result[name] = merge(inner, value, max(depth - 1, 0))
        else:
            result[name] = DEFAULT if value is None and depth else value
    return result
