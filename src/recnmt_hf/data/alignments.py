"""Word alignments as data: links in Pharaoh format, mapped onto the tokens of a sentence pair."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .._plain_text import control_ids, encode_plain
from ..errors import UserError, short_repr
from ..models.user_errors import masked
from .records import Links, Sentence
from .text import read_lines, side_by_side


# Units that the positions of links count: words separated by spaces, or tokens without control tokens.
ALIGNMENT_UNITS = ("words", "tokens")
# A sure link (`1-3`) or a possible one (`1p3`, `1?3`).
LINK = re.compile(r"(\d{1,9})([-p?])(\d{1,9})")


def marked_links(line: str, place: str, one_based: bool = False) -> Iterator[tuple[tuple[int, int], bool]]:
    """Yield the links of a line, as positions from 0, and whether they are sure; `place` names it in messages."""
    for word in line.split():
        match = LINK.fullmatch(word)
        link = (int(match[1]) - one_based, int(match[3]) - one_based) if match else (-1, -1)
        if match is None or min(link) < 0:
            example = "Write 1-2 (source-target) or 1p2 (possible)"
            raise UserError(f"{short_repr(word)} is not a link counted from {int(one_based)}. {example}.", field=place)
        yield link, match[2] == "-"


def words_of_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, is_target: bool = False, add_special_tokens: bool = True
) -> tuple[list[int], list[int | None]]:
    """Return token ids, and the number of the word (between spaces, from 0) of each; `None` for special tokens."""
    if not tokenizer.is_fast:
        return words_of_pieces(tokenizer, text, is_target, add_special_tokens)
    settings = {"return_offsets_mapping": True, "add_special_tokens": add_special_tokens}
    encoded, controls = encode_plain(tokenizer, text, is_target, **settings), control_ids(tokenizer)
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    # A space belongs to the word after it, or to the last one.
    return encoded["input_ids"], [
        None if id in controls else max(min(bisect_right(ends, start), len(ends) - 1), 0)
        for id, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]


def words_of_pieces(
    tokenizer: PreTrainedTokenizerBase, text: str, is_target: bool, add_special_tokens: bool = True
) -> tuple[list[int], list[int | None]]:
    """Return what [`words_of_tokens`] does for SentencePiece, whose pieces are those of each word alone, joined."""
    own = getattr(tokenizer, "spm_target" if is_target else "spm_source", None)
    model: Any = own or getattr(tokenizer, "sp_model", None)
    pieces: list[str] = [] if model is None else model.encode(text, out_type=str)
    ends = np.cumsum([len("".join(model.encode(word, out_type=str))) for word in text.split()] if pieces else [0])
    ids = encode_plain(tokenizer, text, is_target, add_special_tokens=add_special_tokens)["input_ids"]
    ends_with_control = int(add_special_tokens)
    if model is None or len(ids) != len(pieces) + ends_with_control or ends[-1] != len("".join(pieces)):
        name = type(tokenizer).__name__
        raise UserError(f"{name} returns no token positions. Load its fast version (tokenizer.json).", field=name)
    words: list[int | None] = []
    start = 0
    for piece in pieces:
        first = start + len(piece) - len(piece.lstrip("\u2581"))  # a space belongs to the word after it
        words.append(min(int(np.searchsorted(ends, first, side="right")), len(ends) - 1))
        start += len(piece)
    return ids, [*words, *[None] * ends_with_control]


def attach_links(lines: Iterable[str], text: str | Path, alignments: str | Path, units: str) -> Iterator[Sentence]:
    """Yield lines of translations of the file `text` as sentences with their links, lines of the file `alignments`."""
    name = masked(str(alignments))
    for number, (line, links) in side_by_side([text, name], [iter(lines), read_lines(alignments)]):
        yield Sentence(line, links=Links(links, f"{name}, line {number}", units))


def tokens_of_units(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], units: str, is_target: bool = False
) -> tuple[int, dict[int, list[int]]]:
    """Return the number of units of a text, and the positions of each in `ids`, which may be truncated."""
    if units == "words":
        whole, numbers = words_of_tokens(tokenizer, text, is_target)
        count = len(text.split())
    else:
        whole, controls = encode_plain(tokenizer, text, is_target)["input_ids"], control_ids(tokenizer)
        own = [id not in controls for id in whole]
        numbers = [number if is_own else None for number, is_own in zip(np.cumsum(own) - 1, own, strict=True)]
        count = sum(own)
    tokens: dict[int, list[int]] = {}
    # Up to the first control token that truncation moved to the end.
    kept = next((i for i, (own, other) in enumerate(zip(ids, whole, strict=False)) if own != other), len(ids))
    for position, number in enumerate(numbers[:kept]):
        if number is not None:
            tokens.setdefault(int(number), []).append(position)
    return count, tokens


def links_of_pairs(
    pairs: Iterable[Sequence[Sentence]],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    ids: Sequence[Sequence[Sequence[int]]],
) -> list[list[int]]:
    """
    Return the links between the tokens of each pair as `[source, target, source, target, ...]`: from every token of a
    target unit to every token of its source unit, if truncation left both.
    """
    rows: list[list[int]] = []
    for (source, target), source_ids, target_ids in zip(pairs, *ids, strict=True):
        found: set[tuple[int, int]] = set()
        if (links := target.links) is not None and links.line:
            sources, own = tokens_of_units(tokenizers[0], source.text, source_ids, links.units)
            targets, others = tokens_of_units(tokenizers[1], target.text, target_ids, links.units, is_target=True)
            for (i, j), _ in marked_links(links.line, links.place):
                if i >= sources or j >= targets:
                    counts = f"{sources} source and {targets} target {links.units}"
                    raise UserError(f"the link {i}-{j} is beyond {counts}.", field=links.place)
                found |= {(one, other) for one in own.get(i, ()) for other in others.get(j, ())}
        rows.append([position for link in sorted(found, key=lambda link: link[::-1]) for position in link])
    return rows


def collate_links(rows: Sequence[Sequence[int]], batch: Mapping[str, Any]) -> torch.Tensor:
    """Return p(source token i | target token j) `(batch_size, target_length, source_length)` by [`links_of_pairs`]."""
    count, target_length = batch["labels"].shape
    links = np.zeros((count, target_length, batch["input_ids"].shape[1]), dtype=np.float32)
    sentences = np.repeat(np.arange(count), [len(row) // 2 for row in rows])
    pairs = np.fromiter((position for row in rows for position in row), dtype=np.int64).reshape(-1, 2)
    links[sentences, pairs[:, 1], pairs[:, 0]] = 1.0
    return torch.from_numpy(links / np.maximum(links.sum(axis=-1, keepdims=True), 1.0))
