"""Turn cross-attention into links: choose layer and heads, map tokens to words, drop links to the end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from ..models.user_errors import UserError


def word_matrix(
    weights: np.ndarray,
    source: Sequence[int | None],
    target: Sequence[int | None],
    source_words: int | None = None,
    target_words: int | None = None,
) -> np.ndarray:
    """
    Compute attention between words from attention between tokens. The attention of a target word is the mean over its
    tokens, that to a source word the sum over its tokens.

    Args:
        weights (`numpy.ndarray` of shape `(target tokens, source tokens)`).
        source, target (sequence of `int`, *optional*): The word of each token; `None` for special tokens.
        source_words, target_words (`int`, *optional*): Words of either side; `None`: up to the last one with a token.

    Returns:
        `numpy.ndarray` of shape `(target_words, source_words + 1)`; special source tokens share the last column. Rows
        of words without a token (a tokenizer may drop characters) are zero.
    """
    count = 1 + max((word for word in source if word is not None), default=-1)
    count = count if source_words is None else source_words
    columns = np.zeros((weights.shape[0], count + 1))
    for place, word in enumerate(source):
        columns[:, count if word is None else word] += weights[:, place]
    length = 1 + max((word for word in target if word is not None), default=-1)
    rows = np.zeros((length if target_words is None else target_words, count + 1))
    tokens = np.zeros(len(rows))
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
        chosen = torch.stack(list(attentions)).mean(dim=0)
    else:
        place = max(len(attentions) - 2, 0) if layer is None else layer
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(attentions):
            raise UserError(
                f"There is no decoder layer {layer!r}; the model has layers 0 to {len(attentions) - 1}. Remedy: choose "
                'one, or "mean".'
            )
        chosen = attentions[place]
    if head is None:
        return chosen.mean(dim=1)
    if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head < chosen.shape[1]:
        raise UserError(
            f"There is no head {head!r}; the layer has heads 0 to {chosen.shape[1] - 1}. Remedy: choose one."
        )
    return chosen[:, head]


def links_of_matrix(matrix: np.ndarray) -> list[tuple[int, int]]:
    """
    Return for each row a link to the column of largest attention. There is none if that is the last column, the
    source's end token, or if the row is zero.

    Args:
        matrix (`numpy.ndarray` of shape `(targets, sources + 1)`): As from [`word_matrix`].

    Returns:
        (source, target) positions from 0.
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
    Return links between the tokens of a batch, each token as a word.

    Args:
        attentions (sequence of `torch.Tensor` of shape `(batch_size, num_heads, target_length, source_length)`).
        sources, targets (sequence of sequences of `int`): Token ids without padding.
        controls (pair of collections of `int`): Ids of source and target that get no link, as end tokens.
        layer (`int` or `"mean"`, *optional*): As in [`choose_attention`].

    Returns:
        For each sentence (source, target) positions from 0.
    """
    links = []
    chosen = choose_attention(attentions, layer).float().cpu().numpy()
    for row, source, target in zip(chosen, sources, targets, strict=True):
        source_words = [None if id in controls[0] else place for place, id in enumerate(source)]
        target_words = [None if id in controls[1] else place for place, id in enumerate(target)]
        own = row[: len(target), : len(source)]
        links.append(links_of_matrix(word_matrix(own, source_words, target_words)))
    return links
