"""Where long sentences are cut, and how the translations of their parts are joined."""

import pytest

from recnmt_hf.evaluation import Hypothesis
from recnmt_hf.evaluation.splitting import join_pieces, split_text


@pytest.mark.parametrize(
    ("text", "limit", "parts"),
    [
        ("ab cd", 5, [("", "ab cd")]),
        ("a, b c d e.f", 9, [("", "a,"), (" ", "b c d e.f")]),
        ("aa bb. cc. dd ee", 9, [("", "aa bb."), (" ", "cc. dd ee")]),
        ("aa bb cc dd", 5, [("", "aa bb"), (" ", "cc dd")]),
        ("abcdef", 3, [("", "abc"), ("", "def")]),
        ("abcdef", 0, [("", letter) for letter in "abcdef"]),
        ("今天好明天好。", 4, [("", "今天好"), (" ", "明天好。")]),
        ("今天好。明天好", 4, [("", "今天好。"), (" ", "明天好")]),
    ],
)
def test_sentences_are_cut_near_the_middle(text, limit, parts):
    """After punctuation before between words before between characters."""
    assert split_text(text, limit, len) == parts
    assert split_text(text, limit, len, "-")[0] == ("-", parts[0][1])


def test_hypotheses_of_parts_are_joined_rank_by_rank():
    parts = [
        [Hypothesis("a b", -1.0, -2.0, [5, 6, 2]), Hypothesis("a", -3.0, -4.0, [5])],
        [Hypothesis("c", -1.0, -0.5, [7], finished=False), Hypothesis("", 0.0, 0.0, [])],
    ]
    first, second = join_pieces(parts, 0.5, ["", " "])
    assert first == Hypothesis("a b c", -2.5 / 2.0, -2.5, [5, 6, 2, 7], False)
    assert second == Hypothesis("a", -4.0, -4.0, [5], True)
    assert join_pieces([[Hypothesis("", 0.0, -1.0)]], 0.5, [""])[0].score == -1.0
