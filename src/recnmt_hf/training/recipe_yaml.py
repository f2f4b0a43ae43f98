"""
Reading and writing recipes: YAML in the core schema of YAML 1.2, `extends`, and overrides of the command line.

Plain `true` and `false` are the only booleans, so that `no` is Norwegian; 1:30 and 2024-01-01 are text, 010 is ten,
5e-4 a number. A name may occur once in a mapping. Messages give the name of a file and the line, never its content,
because `extends` may name any file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .._values import DEFAULT, kind_of, shown
from ..models.user_errors import MissingFileError, UserError


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
        if len(self.open_anchors) >= MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", event.start_mark)
        if is_alias and event.anchor in self.open_anchors:
            raise yaml.composer.ComposerError(None, None, "an alias within its own anchor", event.start_mark)
        if self.aliases > MAX_ALIASES:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_ALIASES} aliases", event.start_mark)
        self.open_anchors.append(None if is_alias else event.anchor)
        node = super().compose_node(parent, index)
        self.open_anchors.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.Node:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(
                    None, None, "a list or mapping where a name is expected", key.start_mark
                )
            if key.value in names and key.tag != f"{_PREFIX}merge":
                raise yaml.composer.ComposerError(None, None, "a name that occurs twice in a mapping", key.start_mark)
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
    Parse a YAML document or value.

    Args:
        text (`str`): The document.
        name (`str`): Its name in messages.

    Raises:
        UserError: The document is not valid YAML, or exceeds a limit; the message gives line and column, and quotes
            nothing.
    """
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{name}, line {line}: no valid YAML (a control character). Remedy: remove it.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        # Quoted words would be the file's.
        problem = re.sub(r"'(?!<)[^']{2,}'|\"[^\"]*\"", "...", error.problem or "it ends early")
        raise UserError(f"{name}{place}: no valid YAML ({problem}). Remedy: correct it.") from None
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(content: Any) -> str:
    """Return YAML from which [`load_yaml`] reads the same content."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_text(path: Path) -> str:
    """
    Read a recipe's file.

    Raises:
        UserError: The file does not exist, is not a regular file, cannot be read, is too large, or is not UTF-8 text.
    """
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; it holds {yaml_files(path)}. Remedy: name a recipe in it.")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file. Remedy: name a recipe.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(
            f"There is no recipe {path}; {path.parent} holds {yaml_files(path.parent)}. Remedy: correct the path."
        ) from None
    except UserError:
        raise
    except (OSError, ValueError) as error:
        place = f"{str(path)[:60]}..." if len(str(path)) > 200 else path
        why = getattr(error, "strerror", None) or "not a file name"
        raise UserError(
            f"The recipe {place} cannot be read ({why}). Remedy: correct the path or its permissions."
        ) from None
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES:,} bytes, too many for a recipe. Remedy: correct the path.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 text. Remedy: correct the path, or save the recipe as UTF-8."
        ) from None


def yaml_files(folder: Path, most: int = 12) -> str:
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
            raise UserError(f"{shown(override)} is no override. Remedy: write section.field=value.")
        if not value.strip():
            raise UserError(
                f"{name}= has no value. Remedy: write {name}=null for its default, {name}='\"\"' for no text."
            )
        for earlier in applied:
            if parts == earlier[: len(parts)]:
                raise UserError(f"{name} replaces {'.'.join(earlier)} given before it. Remedy: give one of them.")
        applied.append(parts)
        place = content
        for depth, parent in enumerate(parts[:-1], start=1):
            if place.get(parent) in (None, DEFAULT):
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                scalar = ".".join(parts[:depth])
                raise UserError(
                    f"{name} cannot be set: {scalar} is {kind_of(place)}, not a mapping. Remedy: give {scalar} as "
                    "a whole."
                )
        parsed = load_yaml(value, f"the value of {name}")
        place[parts[-1]] = DEFAULT if parsed is None and len(parts) <= FIELD_DEPTH else parsed
    return content


def read_recipe(path: Path, sections: set[str], extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe's file, merged into the one it extends."""
    text = read_text(path)
    if path.resolve() in extended_by:
        raise UserError(f"{path} extends itself. Remedy: correct its line `extends`.")
    if len(extended_by) >= MAX_EXTENDED:
        raise UserError(
            f"{path} is the last of more than {MAX_EXTENDED} recipes that extend each other. Remedy: join some."
        )
    content = load_yaml(text, str(path))
    if content is not None and not isinstance(content, dict):
        raise UserError(
            f"{path} is no recipe: it must be a mapping of sections, not {kind_of(content)}. Remedy: correct the path, "
            "or write sections such as training: {max_steps: 1000}."
        )
    content = content or {}
    extended = content.pop("extends", None)
    if extended_by and any(name not in sections for name in content):  # a message must not quote a foreign file
        raise UserError(
            f"{path} is no recipe: it has other sections than {', '.join(sorted(sections))}. Remedy: correct the line "
            f"`extends` of {extended_by[-1]}, or this file."
        )
    if extended is None:
        return content
    if not isinstance(extended, str) or not extended:
        raise UserError(
            f"{path}: extends must be the name of one file, not {kind_of(extended)}. Remedy: write extends: base.yaml."
        )
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
