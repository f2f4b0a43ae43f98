"""Paired tests: what each method reports, what is not said, and the seed's bounds."""

import os

import pytest
from user_errors import rejects

from recnmt_hf.metrics.bleu import sacrebleu_score
from recnmt_hf.metrics.significance import compare_systems


REFERENCES = [f"The farmer number {i} invites the girl that the dog follows" for i in range(12)]
BASELINE = [each.replace("invites", "invited") if i % 3 else each for i, each in enumerate(REFERENCES)]
SYSTEM = [each.replace("follows", "followed") if i % 4 == 0 else each for i, each in enumerate(REFERENCES)]
SYSTEMS = {"baseline": BASELINE, "system": SYSTEM}


def test_bootstrap_reports_an_interval_and_randomization_none():
    baseline, system = compare_systems(SYSTEMS, REFERENCES, "bootstrap", samples=200)
    for found, hypotheses in ((baseline, BASELINE), (system, SYSTEM)):
        assert found.score == sacrebleu_score(hypotheses, REFERENCES).score
        mean, half_width = found.interval
        assert abs(mean - found.score) < half_width < 20
        assert "bs:200" in found.signature and "ar:" not in found.signature
    assert system.difference == system.score - baseline.score > 0
    for found in compare_systems(SYSTEMS, REFERENCES, "randomization", samples=200):
        assert found.interval is None
        assert "ar:200" in found.signature and "bs:" not in found.signature


def test_what_is_not_said():
    plain = compare_systems(SYSTEMS, REFERENCES)
    assert "bs:1000|seed:12345|case:mixed" in plain[1].signature and "tok:13a" in plain[1].signature
    assert plain == compare_systems(
        SYSTEMS, REFERENCES, method="bootstrap", samples=1000, seed=12345, lowercase=False, tokenize=None
    )


def test_case_is_ignored_where_it_is_asked_for():
    shouted = {"baseline": [each.upper() for each in REFERENCES], "system": REFERENCES}
    assert compare_systems(shouted, REFERENCES, samples=5)[0].score < 20
    found = compare_systems(shouted, REFERENCES, samples=5, lowercase=True)[0]
    assert found.score == pytest.approx(100) and "case:lc" in found.signature


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seeds_within_bounds(seed, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    assert f"seed:{seed}|" in compare_systems(SYSTEMS, REFERENCES, samples=2, seed=seed)[0].signature
    assert os.environ["SACREBLEU_SEED"] == "7"
    monkeypatch.delenv("SACREBLEU_SEED")
    compare_systems(SYSTEMS, REFERENCES, samples=2, seed=seed)
    assert "SACREBLEU_SEED" not in os.environ


def test_a_seed_beyond_the_bounds_is_refused():
    with rejects("option.value", "seed"):
        compare_systems(SYSTEMS, REFERENCES, seed=2**32)


def test_only_names_that_come_twice_are_named():
    with rejects("metric.repeated_systems"):
        compare_systems([(name, BASELINE) for name in "abcac"], REFERENCES)
