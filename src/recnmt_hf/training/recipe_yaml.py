"""
Read and write recipes: YAML in the core schema of YAML 1.2, `extends`, and overrides of the command line.

Only plain `true` and `false` are booleans, so that `no` is Norwegian; 1:30 and 2024-01-01 are text, 010 is ten, 5e-4 a
number. Names in a mapping are unique.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ..data.text import read_lines
from ..errors import UserError, short_repr
from ..models.user_errors import masked
from ..options import DEFAULT, kind_of


# Depth at which `null` resets a value: section.field.
FIELD_DEPTH = 2
# Values of a document, those of its aliases included; a recipe has some hundreds.
MOST_NODES = 100_000

_PREFIX = "tag:yaml.org,2002:"
_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    """A loader of the core schema and `<<` alone, in which the names of a mapping are unique, and aliases bounded."""

    def __init__(self, text: str):
        super().__init__(text)
        self.sizes: dict[yaml.Node, int] = {}  # numbers of nodes, with those of aliases

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    yaml_constructors: dict[str | None, Any] = {
        f"{_PREFIX}{name}": yaml.SafeLoader.yaml_constructors[f"{_PREFIX}{name}"]
        for name in ("null", "bool", "str", "seq", "map")
    } | {None: yaml.SafeLoader.yaml_constructors[None]}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        target = self.anchors.get(event.anchor) if isinstance(event, yaml.AliasEvent) else None
        if target is not None and target.end_mark is None:  # not composed yet
            raise yaml.composer.ComposerError(None, None, "an alias within its own anchor", event.start_mark)
        node = super().compose_node(parent, index)
        children = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        is_collection = isinstance(node, yaml.CollectionNode)
        self.sizes[node] = 1 + (sum(self.sizes[child] for child in children) if is_collection else 0)
        if self.sizes[node] > MOST_NODES:
            problem = f"aliases that repeat more than {MOST_NODES:,} values"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.Node:
        node = super().compose_mapping_node(anchor)
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "a list or mapping instead of a name"
            elif key.tag == f"{_PREFIX}merge":  # merged here: what is merged again has each name once
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in sources:
                    if not isinstance(source, yaml.MappingNode):
                        raise yaml.composer.ComposerError(None, None, "<< without a mapping", key.start_mark)
                    merged = {name.value: (name, entry) for name, entry in source.value} | merged
                continue
            elif key.value in own:
                problem = "a name that occurs twice in a mapping"
            else:
                own[key.value] = (key, value)
                continue
            raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
        node.value = list((merged | own).values())
        return node

    def number(self, node: yaml.Node) -> int | float:
        text = self.construct_scalar(node)
        try:
            if node.tag.endswith("int"):
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            return float(text.replace(".inf", "inf").replace(".nan", "nan") if "n" in text.lower() else text)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, "not a valid number", node.start_mark) from error


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text that a reader of YAML 1.1 or 1.2 could take for another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _CORE_SCHEMA:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"{_PREFIX}{_name}", re.compile(f"^(?:{_pattern})$"), _first)
for _name in ("int", "float"):
    _Loader.add_constructor(f"{_PREFIX}{_name}", _Loader.number)


def load_yaml(text: str, name: str) -> Any:
    """Parse a YAML document or value, which messages call `name` (a file or an override), or raise `UserError`."""
    position = ""
    try:
        return _Loader(text).get_single_data()
    except RecursionError:
        reason = "nested too deeply"
    except yaml.reader.ReaderError as error:
        position, reason = f", line {text.count(chr(10), 0, error.position) + 1}", "a control character"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = error.problem or "it ends early"
    raise UserError(f"{name}{position}: invalid YAML ({reason}).", field=name)


def read_yaml(path: Path) -> Any:
    """Parse a YAML file; `UserError` if it cannot be read."""
    return load_yaml("\n".join(read_lines(path, strip="\n")), str(path))


def dump_yaml(content: Any) -> str:
    """Return YAML from which [`load_yaml`] reads the same content, with its secrets masked."""
    return yaml.dump(masked(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


# -- recipes that extend others, and overrides -------------------------------------------------------------------------


# The length of a run is that of the last override: in steps or in epochs.
LENGTHS = {"training.max_steps": "num_train_epochs", "training.num_train_epochs": "max_steps"}


def content_of(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read a recipe's file and apply overrides; see [`~recnmt_hf.training.recipe.Recipe.from_file`]."""
    return apply_overrides(read_recipe(path), overrides)


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set the fields `section.field=value` of a recipe's content, which is changed and returned."""
    for override in overrides:
        name, equals, value = override.partition("=")
        parts = name.split(".")
        if not equals or not all(parts) or name != name.strip():
            raise UserError(f"{short_repr(override)} is not an override. Write section.field=value.")
        if not value.strip():
            raise UserError(
                f"{name}= has no value. Write {name}=null for its default, or {name}='\"\"' for empty text.", field=name
            )
        target = content
        for depth, parent in enumerate(parts[:-1], start=1):
            if target.get(parent) in (None, DEFAULT):
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                place = ".".join(parts[:depth])
                raise UserError(
                    f"{name} cannot be set, because {place} is {kind_of(target)}, not a mapping. Set {place} instead.",
                    field=name,
                )
        parsed = load_yaml(value, name)
        target[parts[-1]] = DEFAULT if parsed is None and len(parts) <= FIELD_DEPTH else parsed
        if name in LENGTHS and parsed not in (None, -1):
            target.pop(LENGTHS[name], None)
    return content


def read_recipe(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe's file, merged into the one it extends."""
    content, name = read_yaml(path), str(path)
    if path.resolve() in extended_by:
        raise UserError(f"{name} extends itself. Correct its line `extends`.", field=name)
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise UserError(
            f"{name} must be a mapping of sections, not {kind_of(content)}. Correct the path, or write sections such "
            "as training: {max_steps: 1000}.",
            field=name,
        )
    extended = content.pop("extends", None)
    if extended is None:
        return content
    if not isinstance(extended, str) or not extended:
        raise UserError(
            f"extends must be the name of one file, not {kind_of(extended)}. Write extends: base.yaml.", field=name
        )
    return merge(read_recipe(path.parent / extended, (*extended_by, path.resolve())), content)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any], depth: int = FIELD_DEPTH) -> dict[str, Any]:
    """
    Merge changes into a base: mappings are merged, other values replaced. Down to `depth`, `None` becomes `DEFAULT`;
    deeper, as in `model.fields`, it is a value.
    """
    result = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping):
            inner = result.get(name)
            result[name] = merge(inner if isinstance(inner, Mapping) else {}, value, max(depth - 1, 0))
        else:
            result[name] = DEFAULT if value is None and depth else value
    return result
