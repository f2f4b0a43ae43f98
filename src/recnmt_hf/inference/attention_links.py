"""Links between words by cross-attention: choose layer and heads, map tokens to words, drop links to the end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..metrics.alignment import format_links


@dataclass
class WordAlignment:
    """
    Links and attention between the words of a sentence pair.

    Attributes:
        source, target (`list[str]`): Words, separated by spaces in the text.
        links (`list[tuple[int, int]]`): At most one for each target word: its source word of largest attention, none
            where that is the source's end token, or where the tokenizer leaves nothing of the word.
        weights (`numpy.ndarray` of shape `(len(target), len(source) + 1)`): Attention of target words to source words
            and, in the last column, to the source's end token.
    """

    source: list[str]
    target: list[str]
    links: list[tuple[int, int]]
    weights: np.ndarray

    def to_pharaoh(self) -> str:
        """Return the links in Pharaoh format, source first."""
        return format_links(self.links)


def word_matrix(
    weights: np.ndarray,
    source: Sequence[int | None],
    target: Sequence[int | None],
    source_words: int,
    target_words: int,
) -> np.ndarray:
    """
    Compute attention between words `(target_words, source_words + 1)` from attention between tokens `(target tokens,
    source tokens)`. `source` and `target` are the word of each token, `None` for special tokens; special source tokens
    share the last column. The attention of a target word is the mean over its tokens, that to a source word the sum
    over its tokens. Rows of words without a token (a tokenizer may drop characters) are zero.
    """
    columns = np.zeros((weights.shape[0], source_words + 1))
    for place, word in enumerate(source):
        columns[:, source_words if word is None else word] += weights[:, place]
    rows, tokens = np.zeros((target_words, source_words + 1)), np.zeros(target_words)
    for place, word in enumerate(target):
        if word is not None:
            rows[word] += columns[place]
            tokens[word] += 1
    return rows / np.maximum(tokens, 1)[:, None]


def choose_attention(
    attentions: Sequence[torch.Tensor], layer: int | str | None = None, head: int | None = None
) -> torch.Tensor:
    """
    Return the cross-attention to align by, `(batch_size, target_length, source_length)`, from that of all layers, each
    `(batch_size, heads, target_length, source_length)`. `layer` is a decoder layer from 0 or `"mean"`, by default the
    one below the top, which Garg et al. (2019) found best; `head` is one from 0, by default the mean of all.
    """
    heads, layers = attentions[0].shape[1], len(attentions)
    if layer is None:
        layer = max(layers - 2, 0)
    for name, index, size in (("layer", layer, layers), ("head", head, heads)):
        if index not in (None, "mean", *range(size)):
            raise UserError(f"{name}={index!r} does not exist; the model has 0 to {size - 1}.", field=name)
    weights: Any = torch.stack(list(attentions)).mean(dim=0) if layer == "mean" else attentions[int(layer)]
    return weights.mean(dim=1) if head is None else weights[:, head]


def links_of_matrix(matrix: np.ndarray) -> list[tuple[int, int]]:
    """
    Return for each row of a [`word_matrix`] a link to the column of largest attention, as (source, target) positions
    from 0. There is none to the last column, the source's end token, and none for a row of zeros.
    """
    end = matrix.shape[1] - 1
    return [(int(best), j) for j, best in enumerate(matrix.argmax(axis=1)) if best < end and matrix[j].any()]


def links_of_tokens(
    weights: np.ndarray, source: Sequence[int], target: Sequence[int], controls: tuple[Collection[int], Collection[int]]
) -> list[tuple[int, int]]:
    """Return the links between tokens, as [`links_of_matrix`]. `controls` are ids of source and target without link."""
    source_words = [None if id in controls[0] else place for place, id in enumerate(source)]
    target_words = [None if id in controls[1] else place for place, id in enumerate(target)]
    return links_of_matrix(word_matrix(weights, source_words, target_words, len(source), len(target)))
