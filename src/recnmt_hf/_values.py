"""
Options: the type, range, default and meaning of a value are stated once, as a field of a dataclass, and feed its checks
(one sentence for each mistake), YAML, the command line and the documentation.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import textwrap
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .models.user_errors import UserError


T = TypeVar("T")

# What no machine number of 64 bits holds is no size of anything.
LARGEST = 2**63
# More tokens would be a slip of the keyboard, and some libraries count in 32 bits.
MOST_TOKENS = 2**31 - 1
MOST_SEED = 2**32 - 1
# Beyond these translating takes all memory, or no float holds the divisor of a score.
MOST_BEAMS = 1000
MOST_LENGTH_PENALTY = 100
# A language code.
LANGUAGE = re.compile(r"[^\W_][\w-]{0,30}")


@dataclass(frozen=True)
class Range:
    """
    Which numbers are allowed.

    Args:
        least, most (`float`, *optional*): Bounds that are allowed themselves.
        above, below (`float`, *optional*): Bounds that are not.
        share (`bool`, *optional*, defaults to `False`): Numbers below 1 are a share of all steps, others whole.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    share: bool = False

    def allows(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (not self.share or number < 1 or number == int(number))
        )

    def words(self) -> str:
        parts = [f"of at least {self.least:,}"] if self.least is not None else []
        parts += [f"above {self.above:,}"] if self.above is not None else []
        parts += [f"at most {self.most:,}"] if self.most is not None else []
        parts += [f"below {self.below:,}"] if self.below is not None else []
        return " and ".join(parts)


# -- options -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """
    What is stated of a field of a dataclass.

    Attributes:
        name (`str`): The field's.
        hint: Its type, as annotations write it.
        allowed ([`Range`], *optional*): For numbers.
        choices (sequence, *optional*): The only values, where the type does not name them.
        default: `MISSING` where there is none, or where each object has its own.
        help (`str`): What it means, for the command line and the documentation.
        is_required (`bool`): Whether it has to be given.
    """

    name: str
    hint: Any
    allowed: Range | None
    choices: tuple[Any, ...] | None
    default: Any
    help: str
    is_required: bool = False

    def check(self, value: Any, name: str | None = None) -> Any:
        """
        The value, if it is allowed; whole numbers are `int`.

        Args:
            value: The value.
            name (`str`, *optional*): What the message calls the option; `None`: its name.

        Raises:
            UserError: It is not; the message names the option, the value, what is allowed and the remedy.
        """
        hint = self.hint if self.choices is None else Literal[self.choices]
        return check_value(name or self.name, value, hint, self.allowed, self.default)

    def kind(self) -> str:
        """Which values are allowed, in words."""
        hint = self.hint if self.choices is None else Literal[self.choices]
        allowed = self.allowed
        if allowed is not None and allowed.most is not None and allowed.most >= MOST_TOKENS:
            allowed = replace(allowed, most=None)  # nobody reaches it
        return " or ".join(dict.fromkeys(describe(one, allowed) for one in members(hint)))


def option(default: Any, help: str, *, choices: Sequence[Any] | None = None) -> Any:
    """
    A field of a dataclass that is an option. Its range stands in its annotation:
    `beams: Annotated[int, Range(least=1)] = option(4, "beam size")`; its choices too (`Literal`), unless they are
    `choices`. A field with a `default_factory` may say as much: `field(default_factory=list, metadata={"help": ...})`.

    The metadata hold what argparse takes, `help` and `choices`, since transformers' `HfArgumentParser` passes on all of
    them.
    """
    metadata = {"help": help} | ({"choices": tuple(choices)} if choices is not None else {})
    return field(default=default, metadata=metadata)


@cache
def options_of(kind: type) -> dict[str, Option]:
    """What is stated of each field of a dataclass."""
    found = {}
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        extras = get_args(hints[one.name])[1:] if get_origin(hints[one.name]) is Annotated else ()
        allowed = next((extra for extra in extras if isinstance(extra, Range)), None)
        default = one.default if one.default_factory is MISSING else MISSING
        about = one.metadata
        found[one.name] = Option(
            one.name,
            hints_of(kind)[one.name],
            allowed,
            about.get("choices"),
            default,
            about.get("help", ""),
            one.default is MISSING and one.default_factory is MISSING,
        )
    return found


def check_options(values: Any, place: str = "") -> None:
    """
    Checks the fields of a dataclass' object, and puts whole numbers that were written as 1e5 into place.

    Args:
        values: The object.
        place (`str`, *optional*): What stands before the fields' names in messages, e.g. `"data."`.

    Raises:
        UserError: A value is not allowed.
    """
    kind: type = type(values)
    for name, each in options_of(kind).items():
        setattr(values, name, each.check(getattr(values, name), f"{place}{name}"))


def documented(kind: type[T]) -> type[T]:
    """Adds a dataclass' options to its docstring, in the form of transformers' docstrings."""
    lines = ["", "    Args:"]
    wrap = textwrap.TextWrapper(120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    fields_of: type = kind
    for each in options_of(fields_of).values():
        stated = "" if each.is_required else ", *optional*"
        stated += f", defaults to `{shown_default(each)}`" if each.default not in (MISSING, None) else ""
        lines += wrap.wrap(f"{each.name} ({each.kind()}{stated}): {each.help[:1].upper()}{each.help[1:]}.")
    kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n" + "\n".join(lines) + "\n    "
    return kind


def option_table(kind: type, names: Sequence[str] | None = None) -> str:
    """
    A dataclass' options as a table in Markdown.

    Args:
        kind (`type`): The dataclass.
        names (sequence of `str`, *optional*): Which fields; `None`: all.
    """
    rows = ["| option | default | values | meaning |", "|---|---|---|---|"]
    for name, each in options_of(kind).items():
        if names is None or name in names:
            default = "" if each.default is MISSING else f"`{shown_default(each)}`"
            rows.append(f"| `{name}` | {default} | {each.kind()} | {each.help} |")
    return "\n".join(row.replace("|  |", "| |") for row in rows)


def shown_default(each: Option) -> str:
    """A default as YAML and the command line write it."""
    if each.default is None or isinstance(each.default, bool):
        return {None: "null", True: "true", False: "false"}[each.default]
    return str(each.default.value if isinstance(each.default, Enum) else each.default)


# -- values ------------------------------------------------------------------------------------------------------------


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass' fields, as `check_value` takes them."""
    return get_type_hints(kind)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlevel, _short.maxlist, _short.maxdict = 2, 4, 4


def shown(value: Any) -> str:
    """A value as a message quotes it: never longer than a line."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    return str(value.value) if isinstance(value, Enum) else _short.repr(value)


def check_value(name: str, value: Any, hint: Any, allowed: Range | None = None, default: Any = MISSING) -> Any:
    """
    A value, if it has its type and range.

    Args:
        name (`str`): What the message calls it.
        hint: The type, as annotations write it. Whole numbers may be written as 1e5, numbers as whole ones; an Enum
            stands for its values.
        allowed ([`Range`], *optional*): For numbers.
        default (*optional*): Named in the remedy.

    Returns:
        The value; whole numbers are `int`.

    Raises:
        UserError: It has not; the message names `name`, the value, what is allowed and the remedy.
    """
    kinds = members(hint)
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        value = int(value)
    if not any(fits(value, kind, allowed) for kind in kinds):
        words = " or ".join(dict.fromkeys(describe(kind, allowed) for kind in kinds))
        if isinstance(value, (int, float)) and LARGEST <= abs(value) < math.inf and {int, float} & set(kinds):
            words += ", of a size below 2^63"
        act = remedy(value, kinds, default)
        raise UserError(f"{name}={shown(value)} is not allowed; it must be {words}. Remedy: {act}.")
    return value


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; texts that name the members of an Enum count as that Enum."""
    if get_origin(hint) not in (Union, types.UnionType):
        return (hint,)
    kinds = get_args(hint)
    closed = any(is_enum(kind) for kind in kinds)
    return tuple(kind for kind in kinds if not (closed and kind is str))


def is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def fits(value: Any, kind: Any, allowed: Range | None) -> bool:
    origin = get_origin(kind) or kind
    if kind is Any:
        return True
    if kind is None or kind is type(None):
        return value is None
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(kind))
    if is_enum(kind):
        return isinstance(value, kind) or value in [one.value for one in kind]
    if kind is int or kind is float:
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            return False
        # NaN compares as false.
        return -LARGEST < value < LARGEST and (allowed is None or allowed.allows(value))
    if kind is str:
        return isinstance(value, str) and is_plain(value)
    if origin in (list, dict) and get_args(kind):
        inner = get_args(kind)[-1]
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(any(fits(v, k, None) for k in members(inner)) for v in values)
    return not isinstance(origin, type) or isinstance(value, origin)


def is_plain(text: str) -> bool:
    """Whether a text can be written to a file, and be a file's name."""
    try:
        return "\0" not in text and bool(text.encode("utf-8") or True)
    except UnicodeEncodeError:
        return False


def named_values(kind: Any) -> list[Any]:
    """The values of a type that names them."""
    if get_origin(kind) is Literal:
        return [one for one in get_args(kind) if one is not None]
    return [one.value for one in kind] if is_enum(kind) else []


def describe(kind: Any, allowed: Range | None) -> str:
    if kind is None or kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        values = ["null" if one is None else str(one) for one in get_args(kind)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if is_enum(kind):
        values = [str(one.value) for one in kind]
        return f"one of {', '.join(values[:12])}{' ...' * (len(values) > 12)}"
    if kind is int or kind is float:
        number = "whole number" if kind is int else "number"
        if allowed is not None and allowed.share:
            least, zero = (0, "") if allowed.least is not None else (1, " above 0")
            return f"a whole number of at least {least}, or a share of all steps{zero} and below 1"
        return f"a {number} {allowed.words() if allowed else ''}".rstrip()
    named = {bool: "true or false", str: "text", list: "a list", dict: "a mapping of names to values"}
    return named.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))


def remedy(value: Any, kinds: tuple[Any, ...], default: Any) -> str:
    if isinstance(value, str) and str not in kinds and reads_as(value, kinds):
        act = "write it without quotes"
    elif near := difflib.get_close_matches(str(value), [str(one) for kind in kinds for one in named_values(kind)], n=1):
        act = f"write {near[0]}"
    elif isinstance(value, (bool, int, float)) and kinds[0] is str:
        act = "put it in quotes if it is meant as text"
    else:
        act = "correct it"
    if default is MISSING or callable(default):
        return act
    return f"{act}, or leave it out (the default is {'null' if default is None else shown(default)})"


def reads_as(text: str, kinds: tuple[Any, ...]) -> bool:
    if bool in kinds and text.lower() in ("true", "false"):
        return True
    try:
        return math.isfinite(float(text)) and (int in kinds or float in kinds)
    except ValueError:
        return False
