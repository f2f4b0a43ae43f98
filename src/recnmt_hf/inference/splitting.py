"""Split texts into sentences and long sentences into parts, and join their translations."""

import re
import unicodedata
from collections.abc import Callable, Sequence

import sentencex

from .._plain_text import IS_UNSPACED
from ..data.languages import main_language
from .results import Hypothesis


# Wide punctuation contains its own space.
IS_WIDE_MARK = re.compile(
    "[\u3000-\u3003\u3008-\u3011\u3014-\u301f\ufe30-\ufe4f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]"
)
# Where to cut, best first: after punctuation (a mark within a number, a time or an address is not followed by a space
# and no place to cut), between words, between characters.
CUTS = (r"[.!?;:,]\s+|[。！？；：，、]\s*", r"\s+", r".")


def split_text(text: str, limit: int, length: Callable[[str], int], separator: str = "") -> list[tuple[str, str]]:
    """Split a text near its middle until all parts are within `limit`; each follows the text that joins it."""
    if length(text) <= limit or len(text) < 2:
        return [(separator, text)]
    for pattern in CUTS:
        cuts = [match.end() for match in re.finditer(pattern, text) if match.end() < len(text)]
        if cuts:
            cut = min(cuts, key=lambda place: abs(place - len(text) / 2))
            left = split_text(text[:cut].strip(), limit, length, separator)
            return left + split_text(text[cut:].strip(), limit, length, separator_at(text, cut))
    return [(separator, text)]


def split_sentences(text: str, language: str | None = None) -> list[tuple[str, str]]:
    """Split a text into sentences by the rules of a language; each follows the text that joins it to the last."""
    code = main_language(language or "")
    # The splitter fails on white space of several bytes.
    plain = re.sub(r"\s", " ", text)
    sentences: list[tuple[str, str]] = []
    separator, start = "", 0
    for line in text.split("\n"):
        for part in sentencex.segment(code, plain[start : start + len(line)]):
            original, start = text[start : start + len(part)], start + len(part)
            if sentence := original.strip():
                space = separator + original.partition(sentence)[0]
                space = space if "\n" in separator else space.replace("\u3000", " ")
                sentences.append((space or separator_at(text, start - len(original)), sentence))
                separator = ""
            separator += original[len(original.rstrip()) :] if sentence else original
        separator, start = f"{separator}\n", start + 1
    return [("", sentences[0][1]), *sentences[1:]] if sentences else []


def separator_at(text: str, cut: int) -> str:
    """Return the text that joins the translations of both sides of a cut: nothing within a word, else a space."""
    around = text[cut - 1 : cut + 1]
    return " " if any(map(str.isspace, around)) or IS_UNSPACED.search(around) else ""


def join_texts(parts: Sequence[str], separators: Sequence[str]) -> str:
    """Join the translations of parts by the white space before each; scripts without spaces get none."""
    joined = space = ""
    for part, separator in zip(parts, separators, strict=True):
        space = max(space, separator, key=lambda text: (text.count("\n"), len(text)))
        if not part:
            continue
        if joined:
            sides = (reversed(joined), part)
            letters = (next((c for c in side if unicodedata.category(c)[0] in "LM"), "") for side in sides)
            near = [letter for letter in letters if letter]
            is_unspaced = near and all(map(IS_UNSPACED.match, near))
            has_wide_mark = IS_WIDE_MARK.match(joined[-1]) or IS_WIDE_MARK.match(part[0])
            joined += space if "\n" in space or not (is_unspaced or has_wide_mark) else ""
        joined, space = joined + part, ""
    return joined


def join_pieces(
    pieces: Sequence[Sequence[Hypothesis]], penalty: float, separators: Sequence[str], lengths: Sequence[int] = ()
) -> list[Hypothesis]:
    """Join hypotheses of parts rank by rank; `lengths` of their sources, without control tokens, shift alignments."""
    joined = []
    for parts in zip(*pieces, strict=True):
        log_prob, finished = sum(part.log_prob for part in parts), all(part.finished for part in parts)
        tokens: list[int] = []
        links: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            sources, targets = sum(lengths[:number]), len(tokens)
            links += [(source + sources, target + targets) for source, target in part.alignment or []]
            tokens += part.tokens
        text, score = join_texts([part.text for part in parts], separators), log_prob / max(len(tokens), 1) ** penalty
        alignment = None if parts[0].alignment is None else links
        joined.append(Hypothesis(text, score, log_prob, tokens, finished, alignment, len(parts)))
    return joined
