"""From attention to links: words of tokens, layers and heads."""

import numpy as np
import torch
from user_errors import rejects

from recnmt_hf.inference.results import choose_attention, links_of_matrix, word_matrix


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
