"""Unit tests of length penalties and of limits and prefixes for each sentence."""

import pytest
import torch

from recnmt_hf.inference import MaxLengthPerSentence, PrefixPerSentence, VaswaniLengthPenalty


def test_vaswani_penalty_is_a_number_for_generate():
    penalty = VaswaniLengthPenalty(0.6)
    assert 10**penalty == pytest.approx((15 / 6) ** 0.6)
    assert 10.0**penalty == pytest.approx((15 / 6) ** 0.6)
    assert penalty == 0.6 and 7 ** VaswaniLengthPenalty(0.0) == 1.0


def test_limits_apply_to_the_rows_of_their_sentence():
    """Two rows for each of two sentences; new tokens count, the prompt does not."""
    ids = torch.zeros(4, 5, dtype=torch.long)
    assert MaxLengthPerSentence(torch.tensor([4, 5]))(ids, None).tolist() == [True, True, False, False]
    assert MaxLengthPerSentence(torch.tensor([2, 3]), 3)(ids, None).tolist() == [True, True, False, False]
    assert MaxLengthPerSentence(torch.tensor([5, 6]), 0)(ids[:2], None).tolist() == [True, False]


def test_prefixes_leave_one_token_to_choose():
    """It has its own score, or a finite one if another processor forbids it; other steps are unconstrained."""
    prefixes = PrefixPerSentence([[2, 0], [], [1]], prompt_length=2)
    scores = torch.tensor([[0.1, 0.2, 0.3]]).repeat(6, 1)
    scores[1, 2] = -torch.inf
    hidden = -torch.inf
    own = torch.tensor([0.1, 0.2, 0.3])
    first = torch.tensor(
        [[hidden, hidden, 0.3], [hidden, hidden, -1e4], *[own.tolist()] * 2, *[[hidden, 0.2, hidden]] * 2]
    )
    second = torch.cat([torch.tensor([[0.1, hidden, hidden]] * 2), scores[2:]])
    for length, expected in ((2, first), (3, second), (4, scores), (9, scores)):
        assert torch.equal(prefixes(torch.zeros(6, length, dtype=torch.long), scores), expected)
    alone = PrefixPerSentence([[1, 0]])(torch.zeros(1, 1, dtype=torch.long), scores[:1])
    assert alone.tolist() == [[hidden, own[1].item(), hidden]]


def test_prefixes_of_another_batch_join_sentences_without_any():
    prefixes = PrefixPerSentence([[], []])
    prefixes.add_sentences(PrefixPerSentence([[1, 0]]))
    scores = torch.zeros(3, 4)
    forced = prefixes(torch.zeros(3, 2, dtype=torch.long), scores)
    assert torch.equal(forced[:2], scores[:2]) and forced[2].tolist() == [0, *[-torch.inf] * 3]
