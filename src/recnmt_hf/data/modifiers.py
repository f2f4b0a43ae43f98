"""Modifiers: small changes to a share of the training pairs, so that a model learns to handle them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .._values import Range, check_value
from ..errors import UserError
from .text import SentencePair


def upper_case(source: str, target: str, rng: random.Random) -> tuple[str, str]:
    """Write both sides in upper case."""
    return source.upper(), target.upper()


def title_case(source: str, target: str, rng: random.Random) -> tuple[str, str]:
    """Begin each word of both sides with a capital."""
    return capitalized(source), capitalized(target)


def capitalized(text: str) -> str:
    """Return a text whose words begin with a capital; `str.title` also changes the letters after an apostrophe."""
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


def placeholder(source: str, target: str, rng: random.Random) -> tuple[str, str]:
    """Put the same code, such as `XK-4081`, at the beginning or the end of both sides, to be copied."""
    code = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=2)) + f"-{rng.randrange(10_000):04d}"
    if rng.random() < 0.5:
        return f"{code} {source}", f"{code} {target}"
    return f"{source} {code}", f"{target} {code}"


MODIFIERS: dict[str, Callable[[str, str, random.Random], tuple[str, str]]] = {
    function.__name__: function for function in (upper_case, title_case, placeholder)
}


def check_modifiers(modifiers: Mapping[str, Any], field: str) -> None:
    """Raise `UserError` for a modifier that does not exist, or a share that is not one."""
    for name, share in modifiers.items():
        if name not in MODIFIERS:
            raise UserError("modifier.unknown", field=f"{field}.{name}", known=", ".join(MODIFIERS))
        check_value(f"{field}.{name}", share, float, Range(least=0, most=1))


def modified(pairs: Iterable[SentencePair], modifiers: Mapping[str, float], seed: str) -> Iterator[SentencePair]:
    """Apply modifiers to sentence pairs, each to its share of them; the seed decides to which."""
    rng = random.Random(seed)
    for pair in pairs:
        for name, share in modifiers.items():
            if rng.random() < share:
                pair = SentencePair(*MODIFIERS[name](*pair, rng))
        yield pair
