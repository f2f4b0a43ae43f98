"""
Read and write recipes: YAML in the core schema of YAML 1.2, `extends`, and overrides of the command line.

Only plain `true` and `false` are booleans, so that `no` is Norwegian; 1:30 and 2024-01-01 are text, 010 is ten, 5e-4 a
number. Names in a mapping are unique. Messages give file and line, never the content, because `extends` may name any
file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .._values import DEFAULT, kind_of
from ..errors import MissingFileError, UserError


MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_ALIASES = 20
MAX_DIGITS = 40
MAX_EXTENDED = 32
# Depth at which `null` resets a value: section.field.
FIELD_DEPTH = 2

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
    """A loader of the core schema alone, with limits on nesting and aliases."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    yaml_constructors: dict[str | None, Any] = {
        f"{_PREFIX}{name}": yaml.SafeLoader.yaml_constructors[f"{_PREFIX}{name}"]
        for name in ("null", "bool", "str", "seq", "map")
    } | {None: yaml.SafeLoader.yaml_constructors[None]}

    def __init__(self, text: str):
        super().__init__(text)
        self.open_anchors: list[str | None] = []
        self.aliases = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        self.aliases += is_alias
        problem = None
        if len(self.open_anchors) >= MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
        elif is_alias and event.anchor in self.open_anchors:
            problem = "an alias within its own anchor"
        elif self.aliases > MAX_ALIASES:
            problem = f"more than {MAX_ALIASES} aliases"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.open_anchors.append(None if is_alias else event.anchor)
        node = super().compose_node(parent, index)
        self.open_anchors.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.Node:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            is_name = isinstance(key, yaml.ScalarNode)
            if not is_name or (key.value in names and key.tag != f"{_PREFIX}merge"):
                problem = "a name that occurs twice in a mapping" if is_name else "a list or mapping instead of a name"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            names.add(key.value)
        return node

    def number(self, node: yaml.Node) -> int | float:
        text = self.construct_scalar(node)
        if len(text) > MAX_DIGITS:
            raise yaml.constructor.ConstructorError(None, None, f"a number of {len(text)} digits", node.start_mark)
        try:
            if node.tag.endswith("int"):
                base = {"0o": 8, "0x": 16}.get(text[:2], 10)
                return int(text, base)
            return float(text.replace(".inf", "inf").replace(".nan", "nan") if "n" in text.lower() else text)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, "a tag that does not fit", node.start_mark) from error


for _name, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(f"{_PREFIX}{_name}", re.compile(f"^(?:{_pattern})$"), _first)
for _name in ("int", "float"):
    _Loader.add_constructor(f"{_PREFIX}{_name}", _Loader.number)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text that a reader of YAML 1.1 or 1.2 could take for another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _CORE_SCHEMA:
    _Dumper.add_implicit_resolver(f"{_PREFIX}{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def load_yaml(text: str, name: str) -> Any:
    """
    Parse a YAML document or value, which messages call `name` (a file or an override). `UserError` if it is not valid
    YAML or exceeds a limit; the message quotes nothing.
    """
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.reader.ReaderError as error:
        position = f", line {text.count(chr(10), 0, error.position) + 1}"
        raise UserError("yaml.invalid", field=name, position=position, reason="a control character") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        # Quoted words would be content of the file.
        reason = re.sub(r"'(?!<)[^']{2,}'|\"[^\"]*\"", "...", error.problem or "it ends early")
        raise UserError("yaml.invalid", field=name, position=position, reason=reason) from None
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(content: Any) -> str:
    """Return YAML from which [`load_yaml`] reads the same content."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_text(path: Path) -> str:
    """Read a recipe's file; `UserError` if it is not a regular file, unreadable, too large, or not UTF-8 text."""
    name = f"{str(path)[:60]}..." if len(str(path)) > 200 else str(path)
    try:
        if path.exists() and not path.is_file():
            folder = path if path.is_dir() else path.parent
            raise UserError("recipe.not_a_file", field=name, folder=folder, names=yaml_files(folder))
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        names = yaml_files(path.parent)
        raise MissingFileError("recipe.missing", field=name, folder=path.parent, names=names) from None
    except UserError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file name"
        raise UserError("recipe.unreadable", field=name, reason=reason) from None
    if len(content) > MAX_BYTES:
        raise UserError("recipe.too_large", field=name, most=MAX_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("recipe.not_utf8", field=name, line=content.count(b"\n", 0, error.start) + 1) from None


def yaml_files(folder: Path, most: int = 12) -> str:
    """List the YAML files in a folder."""
    names = sorted(path.name for path in folder.glob("*.yaml"))
    return ", ".join(names[:most]) + " ..." * (len(names) > most) or "no YAML file"


# -- recipes that extend others, and overrides -------------------------------------------------------------------------


def content_of(path: Path, overrides: Sequence[str], sections: set[str]) -> dict[str, Any]:
    """
    Read a recipe's file and apply overrides; see [`~recnmt_hf.training.recipe.Recipe.from_file`]. `sections` are the
    names of the sections that a recipe of this kind has.
    """
    content = read_recipe(path, sections)
    applied: list[list[str]] = []
    for override in overrides:
        name, equals, value = override.partition("=")
        parts = name.split(".")
        if not equals or not all(parts) or name != name.strip():
            raise UserError("override.syntax", value=override)
        if not value.strip():
            raise UserError("override.no_value", field=name)
        for earlier in applied:
            if parts == earlier[: len(parts)]:
                raise UserError("override.repeated", field=name, earlier=".".join(earlier))
        applied.append(parts)
        target = content
        for depth, parent in enumerate(parts[:-1], start=1):
            if target.get(parent) in (None, DEFAULT):
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                raise UserError(
                    "override.not_a_mapping", field=name, parent=".".join(parts[:depth]), kind=kind_of(target)
                )
        parsed = load_yaml(value, name)
        target[parts[-1]] = DEFAULT if parsed is None and len(parts) <= FIELD_DEPTH else parsed
    return content


def read_recipe(path: Path, sections: set[str], extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe's file, merged into the one it extends."""
    text, name = read_text(path), str(path)
    if path.resolve() in extended_by:
        raise UserError("recipe.extends_itself", field=name)
    if len(extended_by) >= MAX_EXTENDED:
        raise UserError("recipe.too_many_extended", field=name, most=MAX_EXTENDED)
    content = load_yaml(text, name)
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise UserError("recipe.not_a_mapping", field=name, kind=kind_of(content))
    extended = content.pop("extends", None)
    if extended_by and not content.keys() <= sections:  # a message must not quote a foreign file
        names = ", ".join(sorted(sections))
        raise UserError("recipe.foreign_sections", field=name, sections=names, extended_by=extended_by[-1])
    if extended is None:
        return content
    if not isinstance(extended, str) or not extended:
        raise UserError("recipe.extends", field=name, kind=kind_of(extended))
    return merged(read_recipe(path.parent / extended, sections, (*extended_by, path.resolve())), content)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any], depth: int = FIELD_DEPTH) -> dict[str, Any]:
    """
    Merge changes into a base: mappings are merged, other values replaced. Down to `depth`, `None` becomes `DEFAULT`;
    deeper, as in `model.fields`, it is a value.
    """
    result = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping):
            inner = result.get(name)
            result[name] = merged(inner if isinstance(inner, Mapping) else {}, value, max(depth - 1, 0))
        else:
            result[name] = DEFAULT if value is None and depth else value
    return result
