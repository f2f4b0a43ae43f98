"""Split texts into sentences and long sentences into parts, and join their translations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import sentencex

from .joining import glue_at, join_texts
from .results import Hypothesis


# Where to cut, best first: after punctuation (a mark within a number, a time or an address is not followed by a space
# and no place to cut), between words, between characters.
CUTS = (r"[.!?;:,]\s+|[。！？；：，、]\s*", r"\s+", r".")


def split_text(text: str, limit: int, length: Callable[[str], int], glue: str = "") -> list[tuple[str, str]]:
    """
    Split a text after punctuation if possible, else between words, else between characters, each time as near to the
    middle as possible. Only a single character may exceed `limit`, as measured by `length`. Return for each part the
    text that joins its translation to the one before (`glue` for the first), and the part.
    """
    if length(text) <= limit or len(text) < 2:
        return [(glue, text)]
    for pattern in CUTS:
        cuts = [match.end() for match in re.finditer(pattern, text) if match.end() < len(text)]
        if cuts:
            cut = min(cuts, key=lambda place: abs(place - len(text) / 2))
            left = split_text(text[:cut].strip(), limit, length, glue)
            return left + split_text(text[cut:].strip(), limit, length, glue_at(text, cut))
    return [(glue, text)]


def split_sentences(text: str, language: str | None = None) -> list[tuple[str, str]]:
    """
    Split a text into its sentences by the rules of a language code; without one, and for an unknown one, by rules that
    suit most languages. Line breaks always separate sentences. Return for each sentence the text that joins it to the
    one before, and the sentence.
    """
    code = re.split("[-_]", language or "")[0].lower()
    # The splitter fails on white space of several bytes.
    plain = re.sub(r"\s", " ", text)
    sentences: list[tuple[str, str]] = []
    glue, start = "", 0
    for line in text.split("\n"):
        for part in sentencex.segment(code, plain[start : start + len(line)]):
            original, start = text[start : start + len(part)], start + len(part)
            if sentence := original.strip():
                space = glue + original.partition(sentence)[0]
                space = space if "\n" in glue else space.replace("\u3000", " ")
                sentences.append((space or glue_at(text, start - len(original)), sentence))
                glue = ""
            glue += original[len(original.rstrip()) :] if sentence else original
        glue, start = f"{glue}\n", start + 1
    return [("", sentences[0][1]), *sentences[1:]] if sentences else []


def join_pieces(
    pieces: Sequence[Sequence[Hypothesis]], penalty: float, glues: Sequence[str], lengths: Sequence[int] = ()
) -> list[Hypothesis]:
    """
    Join the hypotheses of the parts of a text rank by rank: the best of each part, the second best of each, and so on.
    Log-probabilities add up.

    Args:
        pieces (sequence of sequences of [`Hypothesis`]): Hypotheses of each part.
        penalty (`float`): The length penalty of the joined hypotheses.
        glues (sequence of `str`): Text that joins each part to the one before.
        lengths (sequence of `int`, *optional*): Source tokens of each part without control tokens, which the
            alignments of the parts behind it are moved by. Required for alignments.
    """
    joined = []
    for parts in zip(*pieces, strict=True):
        log_prob = sum(part.log_prob for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        alignment = None if parts[0].alignment is None else join_alignments(parts, lengths)
        joined.append(
            Hypothesis(
                join_texts([part.text for part in parts], glues),
                log_prob / max(len(tokens), 1) ** penalty,
                log_prob,
                tokens,
                all(part.finished for part in parts),
                alignment,
            )
        )
    return sorted(joined, key=lambda one: -one.score)


def join_alignments(parts: Sequence[Hypothesis], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the links of all parts, with positions in the whole source and in the joined tokens."""
    links: list[tuple[int, int]] = []
    sources = targets = 0
    for part, length in zip(parts, lengths, strict=True):
        links += [(source + sources, target + targets) for source, target in part.alignment or []]
        sources, targets = sources + length, targets + len(part.tokens)
    return links
