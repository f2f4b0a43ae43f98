"""Join the translations of the parts of a text: with a space where the target language writes one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence


# Scripts that put no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, CJK signs and punctuation, Kana,
# Bopomofo, full-width forms. Hangul has spaces.
UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3000-\u30ff\u3100-\u312f\u31a0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff9f\U00020000-\U0003ffff"
)
IS_UNSPACED = re.compile(f"[{UNSPACED}]")
# Wide punctuation contains its own space.
IS_WIDE_MARK = re.compile(
    "[\u3000-\u3003\u3008-\u3011\u3014-\u301f\ufe30-\ufe4f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]"
)


def glue_at(text: str, cut: int) -> str:
    """
    Return the text that joins the translations of `text[:cut]` and `text[cut:]` in a language with spaces: nothing
    within a word, else a space. In a source language without spaces, every cut is between words.
    """
    around = text[cut - 1 : cut + 1]
    return " " if any(map(str.isspace, around)) or IS_UNSPACED.search(around) else ""


def join_texts(parts: Sequence[str], glues: Sequence[str]) -> str:
    """
    Join the translations of the parts of a text, some perhaps empty, with the white space before each part in a
    language with spaces. Spaces are left out between characters of a script without, and beside wide punctuation; line
    breaks stay.
    """
    joined = space = ""
    for part, glue in zip(parts, glues, strict=True):
        space = max(space, glue, key=lambda text: (text.count("\n"), len(text)))
        if not part:
            continue
        if joined and ("\n" in space or not is_unspaced_between(joined, part)):
            joined += space
        joined, space = joined + part, ""
    return joined


def is_unspaced_between(left: str, right: str) -> bool:
    """Return whether no space belongs between two texts, by their nearest letters and the marks that meet."""
    if IS_WIDE_MARK.match(left[-1]) or IS_WIDE_MARK.match(right[0]):
        return True
    near = [next(filter(is_letter, side), None) for side in (reversed(left), right)]
    letters = [letter for letter in near if letter is not None]
    return bool(letters) and all(map(IS_UNSPACED.match, letters))


def is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LM"
