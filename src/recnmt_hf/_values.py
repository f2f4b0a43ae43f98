"""Single values against the type and the range they must have, with one sentence for each mistake."""

from __future__ import annotations

import difflib
import math
import reprlib
import types
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .models.user_errors import UserError


# What no machine number of 64 bits holds is no size of anything.
LARGEST = 2**63
# Beyond these translating takes all memory, or no float holds the divisor of a score.
MOST_BEAMS = 1000
MOST_LENGTH_PENALTY = 100


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


def describe(kind: Any, allowed: Range | None) -> str:
    if kind is None or kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
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
    elif near := difflib.get_close_matches(str(value), [one.value for k in kinds if is_enum(k) for one in k], n=1):
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
