"""
YAML as recipes have it: the core schema of YAML 1.2, and nothing that is larger than a recipe.

Of plain words only true and false are booleans and null is nothing, so that `no` is Norwegian; 1:30 and 2024-01-01 are
text, 010 is ten, 5e-4 a number. Names may not stand twice in a mapping. What a message says of a file is its name and
the line, not its content: `extends` may name any file.
"""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..models.user_errors import MissingFileError, UserError


MAX_BYTES = 2**20
MAX_NODES = 20000  # after aliases are written out
MAX_DEPTH = 32
MAX_DIGITS = 40
# How long a pipe may stay without anyone who writes into it.
SECONDS_FOR_WRITER = 5.0

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
    """A loader that knows the core schema alone and looks at a document's size before it makes anything of it."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    yaml_constructors: dict[str | None, Any] = {
        f"{_PREFIX}{name}": yaml.SafeLoader.yaml_constructors[f"{_PREFIX}{name}"]
        for name in ("null", "bool", "str", "seq", "map")
    } | {None: yaml.SafeLoader.yaml_constructors[None]}

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"nested more than {MAX_DEPTH} deep", self.peek_event().start_mark
            )
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def compose_document(self) -> yaml.Node:
        node = super().compose_document()
        check_tree(node, {})
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
    """Quotes what any reader could take for something else, of YAML 1.1 or 1.2."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _CORE_SCHEMA:
    _Dumper.add_implicit_resolver(f"{_PREFIX}{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def check_tree(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """
    The number of nodes and the depth of a tree whose aliases are written out.

    Raises:
        yaml.MarkedYAMLError: It is too large or too deep, holds itself, or a mapping has a name twice.
    """

    def refuse(problem: str, at: yaml.Node) -> NoReturn:
        raise yaml.composer.ComposerError(None, None, problem, at.start_mark)

    if id(node) in known:
        found = known[id(node)]
        if found is None:
            refuse("an alias within what it stands for", node)
        return found
    known[id(node)] = None
    children = []
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                refuse("a list or mapping where a name is expected", key)
            if key.value in names and key.tag != f"{_PREFIX}merge":
                refuse("a name that stands twice in one mapping", key)
            names.add(key.value)
            children += [key, value]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size, depth = 1, 1
    for child in children:
        below = check_tree(child, known)
        size, depth = size + below[0], max(depth, below[1] + 1)
        if size > MAX_NODES:
            refuse(f"more than {MAX_NODES:,} values, aliases written out", node)
        if depth > MAX_DEPTH:
            refuse(f"nested more than {MAX_DEPTH} deep", node)
    known[id(node)] = (size, depth)
    return size, depth


def load_yaml(text: str, name: str) -> Any:
    """
    A YAML document or value.

    Args:
        text (`str`): The document.
        name (`str`): What messages call it.

    Raises:
        UserError: It is no YAML, or too large; the message names line and column, and quotes nothing of it.
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
    """What [`load_yaml`] reads back as it was."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_text(path: Path) -> str:
    """
    A recipe's file, whole.

    Raises:
        UserError: It is not there, is no file, cannot be read, is too large, or is not UTF-8 text.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(
            f"There is no recipe {path}; {path.parent} holds {yaml_files(path.parent)}. Remedy: correct the path."
        ) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder; it holds {yaml_files(path)}. Remedy: name a recipe in it.")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise UserError(f"{path} is no file. Remedy: name a recipe.")
    try:
        content = read_pipe(path) if stat.S_ISFIFO(mode) else read_start(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES:,} bytes, too many for a recipe. Remedy: correct the path.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 text. Remedy: correct the path, or save the recipe as UTF-8."
        ) from None


def unreadable(path: Path, error: Exception) -> UserError:
    shown = f"{str(path)[:60]}..." if len(str(path)) > 200 else path
    why = getattr(error, "strerror", None) or "no name of a file"
    return UserError(f"The recipe {shown!s} cannot be read ({why}). Remedy: correct the path or its permissions.")


def read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def read_pipe(path: Path) -> bytes:
    """What is written into a pipe, without waiting for ever for someone who does."""
    import select

    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    content, end = b"", time.monotonic() + SECONDS_FOR_WRITER
    try:
        while len(content) <= MAX_BYTES:
            try:
                part = os.read(handle, 65536)
            except BlockingIOError:  # a writer is there and has not written yet
                select.select([handle], [], [], 1.0)
                continue
            content += part
            if not part and content:
                break
            if not part and time.monotonic() > end:
                raise UserError(f"{path} is a pipe that nobody writes into. Remedy: name a file.")
            if not part:
                time.sleep(0.02)
        return content
    finally:
        os.close(handle)


def yaml_files(folder: Path, most: int = 12) -> str:
    names = sorted(path.name for path in folder.glob("*.yaml"))
    return ", ".join(names[:most]) + " ..." * (len(names) > most) or "no YAML file"
