"""The length penalty that suits a validation set, from n-best lists."""

from types import SimpleNamespace

import pytest

from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.inference.results import Hypothesis, Translation
from recnmt_hf.training.metrics import TextScorer
from recnmt_hf.training.testing import GRID, N_BEST, tune_length_penalty


SHORT, LONG = "the dog sleeps here", "the dog sleeps here in the house today"


@pytest.mark.parametrize(("reference", "is_long"), [(LONG, True), (SHORT, False)])
def test_long_references_need_a_larger_exponent(reference, is_long):
    """-4 / ((5 + 4) / 6)^a against -5 / ((5 + 8) / 6)^a: the longer one is better from a = 0.61 on."""
    seen = []

    def translate(sources, options):
        seen.append(options)
        hypotheses = [Hypothesis(SHORT, 0.0, -4.0, [1] * 4), Hypothesis(LONG, 0.0, -5.0, [1] * 8)]
        return [Translation(source, hypotheses) for source in sources]

    translator = SimpleNamespace(translate=translate)
    scores = tune_length_penalty(translator, ["x"] * 3, [[reference] * 3], DecodingOptions(beams=4), TextScorer())
    assert {alpha for alpha in GRID if scores[alpha] == pytest.approx(100)} == {
        a for a in GRID if (a > 0.61) == is_long
    }
    assert next(iter(scores.values())) == max(scores.values())
    assert (seen[0].beams, seen[0].num_hypotheses, seen[0].split_sentences) == (N_BEST, N_BEST, "never")
