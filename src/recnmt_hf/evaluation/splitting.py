"""Sentences that are too long for a model: cut into parts, and their translations joined again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .joining import glue_at, join_texts
from .results import Hypothesis


# Where to cut, best first: after punctuation (a mark within a number, a time or an address is not followed by a space
# and no place to cut), between words, between characters.
CUTS = (r"[.!?;:,]\s+|[。！？；：，、]\s*", r"\s+", r".")


def split_text(text: str, limit: int, length: Callable[[str], int], glue: str = "") -> list[tuple[str, str]]:
    """
    The parts of a text, cut after punctuation where possible, else between words, else between characters, each time as
    near to the middle as possible.

    Args:
        text (`str`): The text.
        limit (`int`): The most that `length` may say of a part; a single character may have more.
        length (callable): Of a text, e.g. in tokens.
        glue (`str`, *optional*): What joins the first part to what is before.

    Returns:
        For each part what joins its translation to the one before, and the part.
    """
    if length(text) <= limit or len(text) < 2:
        return [(glue, text)]
    for pattern in CUTS:
        cuts = [found.end() for found in re.finditer(pattern, text) if found.end() < len(text)]
        if cuts:
            cut = min(cuts, key=lambda place: abs(place - len(text) / 2))
            left = split_text(text[:cut].strip(), limit, length, glue)
            return left + split_text(text[cut:].strip(), limit, length, glue_at(text, cut))
    return [(glue, text)]


def join_pieces(found: Sequence[Sequence[Hypothesis]], penalty: float, glues: Sequence[str]) -> list[Hypothesis]:
    """The hypotheses of a split sentence from those of its parts, rank by rank."""
    joined = []
    for parts in zip(*found, strict=True):
        log_prob = sum(part.log_prob for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        joined.append(
            Hypothesis(
                join_texts([part.text for part in parts], glues),
                log_prob / max(len(tokens), 1) ** penalty,
                log_prob,
                tokens,
                all(part.finished for part in parts),
            )
        )
    return joined
