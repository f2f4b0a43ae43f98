"""From attention to links: words of tokens, layers and heads, and tokens without a link."""

import numpy as np
import torch
from user_errors import rejects

from recnmt_hf.inference.results import choose_attention, links_of_matrix, links_of_tokens, word_matrix


def test_matrix_of_words():
    weights = np.array([[0.1, 0.2, 0.3, 0.4], [0.3, 0.2, 0.1, 0.4], [0.0, 0.0, 0.9, 0.1], [1.0, 0.0, 0.0, 0.0]])
    matrix = word_matrix(weights, [0, 0, 1, None], [0, 0, 1, None], (2, 2))
    np.testing.assert_allclose(matrix, [[0.4, 0.2, 0.4], [0.0, 0.9, 0.1]])
    wider = word_matrix(weights, [0, 0, 1, None], [0, 0, 2, None], (3, 4))
    np.testing.assert_allclose(wider, [[0.4, 0.2, 0.0, 0.4], [0] * 4, [0.0, 0.9, 0.0, 0.1], [0] * 4])


def test_choosing_layer_and_head():
    attentions = [torch.rand(2, 4, 3, 5) for _ in range(3)]
    torch.testing.assert_close(choose_attention(attentions), attentions[1].mean(1))
    torch.testing.assert_close(choose_attention(attentions, 2, 3), attentions[2][:, 3])
    torch.testing.assert_close(choose_attention(attentions, 0, 0), attentions[0][:, 0])
    torch.testing.assert_close(choose_attention(attentions, "mean"), torch.stack(attentions).mean((0, 2)))
    torch.testing.assert_close(choose_attention(attentions[:1]), attentions[0].mean(1))
    with rejects(field="layer"):
        choose_attention(attentions, 3)
    with rejects(field="head"):
        choose_attention(attentions, 0, 4)


def test_links_of_rows():
    """There is no link to the last column and none of an empty row; of equal columns the first is linked."""
    matrix = np.array([[0.1, 0.5, 0.4], [0.4, 0.1, 0.5], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    assert links_of_matrix(matrix) == [(1, 0), (0, 3)]
    nothing = word_matrix(np.ones((1, 2)), [None, None], [None], (0, 0))
    assert nothing.shape == (0, 1) and links_of_matrix(nothing) == []
    np.testing.assert_allclose(word_matrix(np.ones((3, 2)), [None, None], [0, 0, None], (0, 1)), [[2.0]])


def test_links_between_tokens():
    """Control tokens have no links, nor has padding."""
    attention = torch.zeros(2, 1, 3, 4)
    for sentence, row, column in ((0, 0, 1), (0, 1, 0), (0, 2, 2), (1, 0, 3), (1, 1, 1), (1, 2, 0)):
        attention[sentence, 0, row, column] = 1.0
    attention[1, 0, 0, 0] = 0.5
    sources, targets = [[5, 6, 2], [7, 2]], [[8, 9, 10], [8, 3]]
    rows = [attention[0, 0, :, :3].numpy(), attention[1, 0, :2, :2].numpy()]

    def links(controls):
        return [links_of_tokens(*pair, controls) for pair in zip(rows, sources, targets, strict=True)]

    assert links(({2}, {3})) == [[(1, 0), (0, 1)], [(0, 0)]]
    assert links(({6}, {8})) == [[(0, 1), (2, 2)], [(1, 1)]]
    assert links_of_tokens(np.array([[0.1, 0.2, 0.7]]), [5, 6, 7], [8], ({2}, {3})) == [(2, 0)]
