"""
Options: a field of a dataclass declares the type, range, default and meaning of a value once. Its checks, YAML, the
command line and the documentation use this declaration.
"""

import difflib
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import UserError, short_repr


T = TypeVar("T")

LARGEST = 2**63  # bound of 64-bit integers: larger values cannot be sizes
MOST_TOKENS = 2**31 - 1  # more would be a slip of the keyboard, and some libraries count in 32 bits
MOST_SEED = 2**32 - 1
# Beyond these translating takes all memory, or no float holds the divisor of a score.
MOST_BEAMS = 1000
LEAST_LENGTH_PENALTY, MOST_LENGTH_PENALTY = -5, 100
LANGUAGE = re.compile(r"[^\W_][\w-]{0,30}")  # a language code
DEFAULT = object()  # value of a field that a recipe resets to its default


@dataclass(frozen=True)
class Range:
    """A range of numbers: inclusive bounds `least` and `most`, exclusive ones `above` and `below`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    share: bool = False  # numbers below 1 are a share of all steps, others integers

    def allows(self, number: float) -> bool:
        """Return whether a number is in the range; NaN and infinite numbers are not."""
        return (
            -LARGEST < number < LARGEST
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (not self.share or number < 1 or number == int(number))
        )

    def words(self) -> str:
        """Return the bounds as they follow "a number" in a message."""
        last = [f"at most {self.most:,}"] if self.most is not None else []
        last += [f"below {self.below:,}"] if self.below is not None else []
        if self.least is not None and last:
            return f"from {self.least:,} to {last[0].removeprefix('at most ')}"
        first = [f"above {self.above:,}"] if self.above is not None else []
        first += [f"of at least {self.least:,}"] if self.least is not None else []
        return " and ".join(first + last)


def check_value(name: str, value: Any, hint: Any, allowed: Range | None = None) -> Any:
    """
    Return a value if it has the type of an annotation, or raise `UserError`. Integers may be written as 1e5 (and are
    returned as `int`), numbers as integers; an Enum allows its values. `allowed` holds for numbers, also in a list.
    """
    kinds = members(hint)
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        value = int(value)
    if not any(is_allowed(value, kind, allowed) for kind in kinds):
        raise UserError(
            f"{name}={short_repr(value, name)} is not allowed; it must be {describe(hint, allowed)}.", field=name
        )
    return value


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, without `str` beside an Enum, whose values are text."""
    if get_origin(hint) not in (Union, types.UnionType):
        return (hint,)
    kinds = get_args(hint)
    has_enum = any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds)
    return tuple(kind for kind in kinds if not (has_enum and kind is str))


def choices_of(kind: Any) -> list[Any]:
    """Return the values that a Literal or an Enum lists; other types have none."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [member.value for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def is_allowed(value: Any, kind: Any, allowed: Range | None) -> bool:
    """Return whether a value has a type, and its numbers are in range. Text can be written to a file and name one."""
    origin = get_origin(kind) or kind
    if kind is Any or kind is None:
        return kind is Any or value is None
    if choices := choices_of(kind):
        is_member = isinstance(kind, type) and isinstance(value, kind)
        return is_member or any(value == choice and type(value) is type(choice) for choice in choices)
    if kind is int or kind is float:
        is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        return is_number and (allowed or Range()).allows(value)
    if kind is str:
        return isinstance(value, str) and "\0" not in value and value == value.encode("utf-8", "replace").decode()
    if origin in (list, dict) and get_args(kind):
        inner = members(get_args(kind)[-1])
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(
            any(is_allowed(item, one, allowed) for one in inner) for item in values
        )
    return not isinstance(origin, type) or isinstance(value, origin)


def describe(hint: Any, allowed: Range | None) -> str:
    """Describe the values of a type, for messages and tables."""
    kinds = members(hint)
    if len(kinds) > 1:
        return " or ".join(dict.fromkeys(describe(kind, allowed) for kind in kinds))
    (kind,) = kinds
    if kind is None or kind is type(None):
        return "null"
    if choices := ["null" if choice is None else str(choice) for choice in choices_of(kind)]:
        most = len(choices) if get_origin(kind) is Literal else 12
        words = f"{', '.join(choices[:most])}{' ...' * (len(choices) > most)}"
        return words if len(choices) == 1 else f"one of {words}"
    if kind is int or kind is float:
        if allowed is not None and allowed.share:
            least, zero = (0, "") if allowed.least is not None else (1, " above 0")
            return f"an integer of at least {least}, or a share of all steps{zero} and below 1"
        return f"{'an integer' if kind is int else 'a number'} {allowed.words() if allowed else ''}".rstrip()
    if get_origin(kind) is list and allowed is not None:
        return f"a list of numbers {allowed.words()}"
    named = {bool: "true or false", str: "text", list: "a list", dict: "a mapping of names to values"}
    return named.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))


def check_content(value: Any, place: str) -> None:
    """Check that all text in a value can be written to a file, and that all numbers are finite."""
    if isinstance(value, (str, int, float)):
        check_value(place, value, str | float | bool)
    for name, item in value.items() if isinstance(value, Mapping) else ():
        check_content(item, f"{place}.{name}")
    for number, item in enumerate(value) if isinstance(value, list) else ():
        check_content(item, f"{place}[{number}]")


@dataclass(frozen=True)
class Option:
    """Declaration of a dataclass' field."""

    name: str
    hint: Any  # the type, as in an annotation
    allowed: Range | None  # range of its numbers
    choices: tuple[Any, ...] | None  # the allowed values, if the type does not list them
    default: Any  # `MISSING` if there is none or a factory makes it
    help: str

    def value_type(self) -> Any:
        """Return the type of its values; that of choices is a Literal."""
        return self.hint if self.choices is None else Literal[self.choices]

    def check(self, value: Any, name: str | None = None) -> Any:
        """Return a value as [`check_value`] does; `name` is that of the option in messages."""
        return check_value(name or self.name, value, self.value_type(), self.allowed)

    def kind(self) -> str:
        """Describe the allowed values."""
        allowed = self.allowed
        if allowed is not None and allowed.most is not None and allowed.most >= MOST_TOKENS:
            allowed = replace(allowed, most=None)
        return describe(self.value_type(), allowed)


def option(default: Any, help: str, *, choices: Sequence[Any] | None = None) -> Any:
    """
    Declare a field of a dataclass, as in `beams: Annotated[int, Range(least=1)] = option(4, "beam size")`. With a
    `default_factory`, write `field(default_factory=list, metadata={"help": ...})`. The metadata have the names of
    argparse, because transformers' `HfArgumentParser` passes all of them on.
    """
    metadata = {"help": help} | ({"choices": tuple(choices)} if choices is not None else {})
    return field(default=default, metadata=metadata)


@cache
def options_of(kind: type) -> dict[str, Option]:
    """Return the declarations of a dataclass' fields by name."""
    options = {}
    plain_hints, hints = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for entry in fields(kind):
        if not entry.init:
            continue
        extras = get_args(hints[entry.name])[1:] if get_origin(hints[entry.name]) is Annotated else ()
        options[entry.name] = Option(
            entry.name,
            plain_hints[entry.name],
            next((extra for extra in extras if isinstance(extra, Range)), None),
            entry.metadata.get("choices"),
            entry.default if entry.default_factory is MISSING else MISSING,
            entry.metadata.get("help", ""),
        )
    return options


def check_options(values: Any, place: str = "") -> None:
    """Check the fields of a dataclass' object and replace integers written as 1e5; names begin with `place`."""
    kind: type = type(values)
    for name, entry in options_of(kind).items():
        object.__setattr__(values, name, entry.check(getattr(values, name), f"{place}{name}"))


def documented(kind: type[T]) -> type[T]:
    """Add a dataclass' options to its docstring, in the form of transformers' docstrings."""
    lines = ["", "    Args:"]
    wrap = textwrap.TextWrapper(120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    dataclass_kind: type = kind
    for entry in options_of(dataclass_kind).values():
        default = f", defaults to `{default_text(entry)}`" if entry.default not in (MISSING, None) else ""
        text = f"{entry.help[:1].upper()}{entry.help[1:]}."
        lines += wrap.wrap(f"{entry.name} ({entry.kind()}, *optional*{default}): {text}")
    kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n" + "\n".join(lines) + "\n    "
    return kind


def default_text(entry: Option) -> str:
    """Return a default as YAML and the command line write it."""
    if entry.default is None or isinstance(entry.default, bool):
        return {None: "null", True: "true", False: "false"}[entry.default]
    return str(entry.default.value if isinstance(entry.default, Enum) else entry.default)


def parse(kind: type[T], content: Any, place: str) -> T:
    """Build a dataclass from the mapping at `place`, the prefix of fields in messages; [`stated`] reverses this."""
    dataclass_kind: type = kind
    given = given_fields(content, options_of(dataclass_kind), place)
    try:
        for name, value in given.items():
            if value == "":
                raise UserError(f"{name} is empty.", field=name)
        parsed = kind(**given)
        object.__setattr__(parsed, "_given_fields", tuple(given))
        return parsed
    except UserError as error:
        raise error.inside(place) from error


def stated(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass' object that were given to [`parse`], then those that are not the default."""
    names = dict.fromkeys(getattr(values, "_given_fields", ()))
    for entry in fields(values):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if getattr(values, entry.name) != default:
            names[entry.name] = None
    return {name: getattr(values, name) for name in names}


def given_fields(content: Any, known: Iterable[str], place: str = "") -> dict[str, Any]:
    """Return the fields of the mapping at `place`, without those reset to their default; no unknown ones."""
    content, known = mapping(content, place), sorted(known)
    for name in content:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1) or known[:12] + ["..."] * (len(known) > 12)
            field = f"{place}.{name}".lstrip(".")
            raise UserError(f"There is no field {field}. Use {', '.join(near)}.", field=field)
    return {name: value for name, value in content.items() if value is not DEFAULT}


def mapping(content: Any, place: str) -> dict[str, Any]:
    """Return the content of the mapping at `place`; `None` is empty."""
    if content is None or content is DEFAULT:
        return {}
    if not isinstance(content, Mapping):
        raise UserError(f"{place} must be a mapping of names to values, not {type(content).__name__}.", field=place)
    return dict(content)
