"""Turn cross-attention into links: choose layer and heads, map tokens to words, drop links to the end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from ..errors import UserError


def word_matrix(
    weights: np.ndarray,
    source: Sequence[int | None],
    target: Sequence[int | None],
    source_words: int,
    target_words: int,
) -> np.ndarray:
    """
    Compute attention between words from attention between tokens. The attention of a target word is the mean over its
    tokens, that to a source word the sum over its tokens.

    Args:
        weights (`numpy.ndarray` of shape `(target tokens, source tokens)`).
        source, target (sequence of `int`, *optional*): The word of each token; `None` for special tokens.
        source_words, target_words (`int`): Number of words of either side.

    Returns:
        `numpy.ndarray` of shape `(target_words, source_words + 1)`; special source tokens share the last column. Rows
        of words without a token (a tokenizer may drop characters) are zero.
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
    Return the cross-attention to align by, `(batch_size, target_length, source_length)`.

    Args:
        attentions (sequence of `torch.Tensor` of shape `(batch_size, num_heads, target_length, source_length)`).
        layer (`int` or `"mean"`, *optional*): A decoder layer from 0, or the mean of all. `None`: the one below the
            top, which Garg et al. (2019) found best; the only one of a recurrent decoder.
        head (`int`, *optional*): A head from 0; `None`: the mean of all.

    Raises:
        ValueError: There is no such layer or head.
    """
    if layer == "mean":
        weights = torch.stack(list(attentions)).mean(dim=0)
    else:
        weights = attentions[check_index("layer", max(len(attentions) - 2, 0) if layer is None else layer, attentions)]
    return weights.mean(dim=1) if head is None else weights[:, check_index("head", head, weights[0])]


def check_index(name: str, index: int | str, values: Sequence[torch.Tensor] | torch.Tensor) -> int:
    """Return an index if it is in range."""
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(values):
        raise UserError("alignment.out_of_range", field=name, value=index, most=len(values) - 1)
    return index


def links_of_matrix(matrix: np.ndarray) -> list[tuple[int, int]]:
    """
    Return for each row of a [`word_matrix`] a link to the column of largest attention, as (source, target) positions
    from 0. There is none to the last column, the source's end token, and none for a row of zeros.
    """
    end = matrix.shape[1] - 1
    return [(int(best), j) for j, best in enumerate(matrix.argmax(axis=1)) if best < end and matrix[j].any()]


def token_links(
    attentions: Sequence[torch.Tensor],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    controls: tuple[Collection[int], Collection[int]],
    layer: int | str | None = None,
) -> list[list[tuple[int, int]]]:
    """
    Return for each sentence of a batch the links between its tokens, as [`links_of_matrix`]. `attentions` and `layer`
    are those of [`choose_attention`], `controls` the ids of source and target that get no link, as end tokens.
    """
    links = []
    weights = choose_attention(attentions, layer).float().cpu().numpy()
    for row, source, target in zip(weights, sources, targets, strict=True):
        source_words = [None if id in controls[0] else place for place, id in enumerate(source)]
        target_words = [None if id in controls[1] else place for place, id in enumerate(target)]
        row = row[: len(target), : len(source)]
        links.append(links_of_matrix(word_matrix(row, source_words, target_words, len(source), len(target))))
    return links
