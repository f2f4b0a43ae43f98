"""Paired tests: what each method reports, what is not said, and the seed's bounds."""

import math
import os
import random
from itertools import product

import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest
from user_errors import rejects

from recnmt_hf.metrics.bleu import sacrebleu_score
from recnmt_hf.metrics.rouge import rouge_scores
from recnmt_hf.metrics.significance import compare_runs, compare_systems, holm, sign_p_value


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
    _, same = compare_systems({"a": SYSTEM, "b": SYSTEM}, REFERENCES, metric="rouge2", samples=50)
    assert (same.difference, same.p_value) == (0, 1)


@pytest.mark.parametrize("method", ["bootstrap", "randomization", "sign"])
def test_a_better_system_is_significant_and_an_almost_equal_one_is_not(method):
    """The same seed gives the same p."""
    systems = {"baseline": BASELINE, "better": REFERENCES, "same": [*REFERENCES[:2], *BASELINE[2:]]}
    found = compare_systems(systems, REFERENCES, method, samples=300)
    assert found[0].p_value is None and found[1].p_value < 0.02 < 0.05 < found[2].p_value
    assert compare_systems(systems, REFERENCES, method, samples=300) == found


def test_the_largest_seed(monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    assert "seed:4294967295|" in compare_systems(SYSTEMS, REFERENCES, samples=2, seed=2**32 - 1)[0].signature
    assert os.environ["SACREBLEU_SEED"] == "7"


def random_systems(sentences):
    """Two systems with errors in different sentences, some of them equal."""
    draw = random.Random(1)
    words = ["the", "a", "farmer", "girl", "dog", "sees", "follows", "invites", "old", "young", "house"]
    references = [[draw.choice(words) for _ in range(draw.randint(4, 12))] for _ in range(sentences)]

    def disturbed(rate):
        return [" ".join(draw.choice(words) if draw.random() < rate else w for w in line) for line in references]

    first, second = disturbed(0.35), disturbed(0.25)
    second[::5] = first[::5]
    return [" ".join(line) for line in references], {"baseline": first, "system": second}


@pytest.mark.parametrize("kind", ["bleu", "lowercased, two references", "rougeL"])
def test_sign_test_against_whole_scores(kind):
    """Better and worse sentences are those whose swap raises and lowers the score, computed from the texts."""
    references, systems = random_systems(40)
    first, second = systems.values()
    options = {"metric": "rougeL"} if kind == "rougeL" else {"lowercase": kind != "bleu"}
    if kind == "lowercased, two references":
        systems["system"] = second = [line.upper() for line in second]
        references = [references, [*first[1:], "a dog"]]

    def score(texts):
        if kind == "rougeL":
            return rouge_scores(texts, references)[-1].score
        return sacrebleu_score(texts, references, **options).score

    changes = [score([*first[:i], second[i], *first[i + 1 :]]) - score(first) for i in range(len(first))]
    better, worse = (sum(sign * change > 1e-9 for change in changes) for sign in (1, -1))
    assert better > 5 and worse > 1 and better + worse < 40
    baseline, system = compare_systems(systems, references, "sign", **options)
    assert (baseline.better, baseline.worse, baseline.p_value, baseline.difference) == (None, None, None, 0)
    assert (system.better, system.worse) == (better, worse) and system.interval is None
    assert system.score == pytest.approx(score(second)) and "test:sign" in system.signature
    assert system.p_value == sign_p_value(better, worse)


def test_rounding_is_neither_better_nor_worse():
    """F1 is 1/3 with one word of one, and with two of seven; the computed values differ in their last bit."""
    systems = {"baseline": ["a"], "system": ["a b x x x x x"]}
    (_, found) = compare_systems(systems, ["a b c d e"], "sign", metric="rouge1")
    assert (found.better, found.worse, found.p_value) == (0, 0, 1.0)


def test_sign_p_values_against_all_outcomes():
    """The share of all outcomes of fair coins that are at most as likely as the one seen."""
    for count in range(9):
        sizes = [sum(outcome) for outcome in product((0, 1), repeat=count)]
        for better in range(count + 1):
            share = sum(abs(size - count / 2) >= abs(better - count / 2) for size in sizes) / len(sizes)
            assert sign_p_value(better, count - better) == pytest.approx(share, abs=1e-15)
    # 2,000 and 1,800 of 3,800: normal approximation with continuity correction
    assert sign_p_value(2000, 1800) == pytest.approx(math.erfc(199 / math.sqrt(2 * 3800)), rel=1e-2)
    assert 0 < sign_p_value(3000, 2000) < 1e-40


def test_runs_against_all_exchanges():
    """Translations of a sentence are exchanged by all runs together: 2^8 cases, with scores of whole corpora."""
    references = [text.replace("number", f"number {i % 3}") for i, text in enumerate(REFERENCES[:8])]

    def texts(word, places):
        return [text.replace(word, "or") if i in places else text for i, text in enumerate(references)]

    baseline = [texts("invites", {0, 2, 3, 4, 6}), texts("dog", {1, 2, 4, 5})]
    system = [texts("girl", {3, 7}), texts("farmer", {2, 3, 5})]

    def difference(mask):
        pairs = [
            [[two[i], one[i]] if mask[i] else [one[i], two[i]] for i in range(8)]
            for one, two in zip(baseline, system, strict=True)
        ]
        scores = [[sacrebleu_score([pair[side] for pair in run], references).score for side in (0, 1)] for run in pairs]
        return abs(sum(two - one for one, two in scores) / len(scores))

    observed, exchanges = difference([0] * 8), list(product((0, 1), repeat=8))
    exact = sum(difference(mask) >= observed - 1e-9 for mask in exchanges) / len(exchanges)
    assert 0.05 < exact < 0.95
    assert compare_runs(baseline, system, references, samples=4000) == pytest.approx(exact, abs=0.03)
    assert compare_runs(baseline, baseline, references, samples=10) == 1.0
    for runs in ([], system[:1]):
        with rejects(field="system"):
            compare_runs(baseline, runs, references)
    with rejects("entries, but"):
        compare_runs(baseline, [system[0], system[1][1:]], references)


@pytest.mark.parametrize("metric", ["bleu", "rougeL"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_different_sentences_are_not_significant(count, metric):
    """Only an exchange of all of them, or of none, makes as large a difference: p is 2 ** (1 - count)."""
    references = [f"The farmer number {i} invites the girl that the dog follows" for i in range(60)]
    baseline = [each.replace("the girl", "a girl") for each in references]
    system = [each if i < count else baseline[i] for i, each in enumerate(references)]
    systems = {"baseline": baseline, "system": system}
    (_, found) = compare_systems(systems, references, "randomization", samples=2000, metric=metric)
    assert found.p_value == pytest.approx(2.0 ** (1 - count), abs=0.03)


def test_randomization_equals_sacrebleus_where_no_differences_are_equal():
    baseline = [" ".join(each.split()[: 4 + i % 7]) for i, each in enumerate(REFERENCES)]
    system = [" ".join(each.split()[: 11 - i * i % 5]) for i, each in enumerate(REFERENCES)]
    test = PairedTest([("a", baseline), ("b", system)], {"bleu": BLEU(references=[REFERENCES])}, None, "ar", 500)
    signatures, scores = test()
    (_, found) = compare_systems({"a": baseline, "b": system}, REFERENCES, "randomization", samples=500)
    assert found.p_value == scores["BLEU"][1].p_value and found.signature == str(signatures["BLEU"])


def test_holm_against_its_steps():
    """Holm (1979): the k-th smallest of n times n - k + 1, and never less than a smaller one."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0] and holm([]) == []
