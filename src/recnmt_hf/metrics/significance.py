"""Significance tests of the difference between the scores of two systems."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast
from unittest.mock import patch

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

from ..errors import UserError
from ..options import MOST_SEED, Range, check_value
from .bleu import bleu_metric, reference_sets
from .rouge import ROUGE_TYPES, RougeF1


METHODS = BOOTSTRAP, RANDOMIZATION, SIGN = "bootstrap", "randomization", "sign"
# Differences of scores that rounding alone makes.
ROUNDING = 1e-9


@dataclass
class Comparison:
    """
    A system against the baseline.

    Attributes:
        system (`str`): Its name.
        score (`float`): BLEU or ROUGE.
        difference (`float`): Score minus that of the baseline; 0 for the baseline itself.
        p_value (`float`, *optional*): Chance of a difference at least as large if both systems were equally good
            (about half of it for the bootstrap); `None` for the baseline.
        interval (`tuple[float, float]`, *optional*): Mean and half-width of the 95% confidence interval of the score
            (bootstrap only).
        signature (`str`): sacrebleu's, with the test's settings.
        better, worse (`int`, *optional*): Numbers of sentences that the system translates better, and worse, than the
            baseline (sign test only; `None` for the baseline).
    """

    system: str
    score: float
    difference: float
    p_value: float | None
    interval: tuple[float, float] | None
    signature: str
    better: int | None = None
    worse: int | None = None


def compare_systems(
    systems: Mapping[str, Sequence[str]] | Iterable[tuple[str, Sequence[str]]],
    references: Sequence[str] | Sequence[Sequence[str]],
    method: str = "bootstrap",
    samples: int = 1000,
    seed: int = 12345,
    lowercase: bool = False,
    tokenize: str | None = None,
    metric: str = "bleu",
    units: str = "words",
) -> list[Comparison]:
    """
    Run paired tests of BLEU or ROUGE.

    Args:
        systems (mapping of name to translations, or pairs of them): The first is the baseline.
        references (sequence of `str`, or of such sequences): One reference set or several.
        method (`str`, *optional*, defaults to `"bootstrap"`): `"bootstrap"`: paired bootstrap resampling (Koehn,
            2004) by sacrebleu, whose p-value is one-sided, about half of a two-sided one. `"randomization"`:
            approximate randomization (Riezler and Maxwell, 2005). `"sign"`: sign test on sentences (Collins et al.,
            2005); see [`sign_test`].
        samples (`int`, *optional*, defaults to 1000): Resamplings, or random swaps; the sign test has none.
        seed (`int`, *optional*, defaults to 12345): Seed of the resampling, at least 1 (sacrebleu ignores 0).
        lowercase (`bool`, *optional*, defaults to `False`): Case-insensitive BLEU.
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.
        metric (`str`, *optional*, defaults to `"bleu"`): `"bleu"`, `"rouge1"`, `"rouge2"` or `"rougeL"`.
        units (`str`, *optional*, defaults to `"words"`): Units of ROUGE's n-grams, as for [`units_of`].

    Returns:
        `list[Comparison]`: One for each system, the baseline first.

    Raises:
        ValueError: There are fewer than two systems, no such method, metric, units or tokenizer, a number is not
            allowed, or lengths differ.
    """
    samples = check_value("samples", samples, int, Range(least=1))
    seed = check_value("seed", seed, int, Range(least=1, most=MOST_SEED))
    check_value("method", method, Literal[(*METHODS,)])
    check_value("metric", metric, Literal["bleu", *ROUGE_TYPES])
    named = list(systems.items() if isinstance(systems, Mapping) else systems)
    systems = dict(named)
    if not 2 <= len(systems) == len(named):
        raise UserError("A comparison needs a baseline and at least one other system, with different names.")
    for hypotheses in systems.values():
        streams = reference_sets(hypotheses, references)
    is_bleu = metric == "bleu"
    measure = bleu_metric(lowercase, tokenize, streams) if is_bleu else RougeF1(metric, units, streams)
    if method == SIGN:
        return sign_test(systems, measure)
    if method == RANDOMIZATION:
        return randomization_test(systems, measure, samples, seed)
    with patch.dict(os.environ, SACREBLEU_SEED=str(seed)):
        test = PairedTest(
            [(name, list(hypotheses)) for name, hypotheses in systems.items()],
            {metric: measure},
            references=None,
            test_type="bs",
            n_samples=samples,
        )
        signatures, scores = test()
    (name,) = signatures  # sacrebleu's own for the metric
    results = cast("list[Result]", scores[name])  # only the column of names holds text
    base = results[0].score
    return [
        Comparison(
            system=str(system),
            score=result.score,
            difference=result.score - base,
            # Any difference is at least as large as 0; sacrebleu counts only larger ones.
            p_value=1.0 if result.p_value is not None and result.score == base else result.p_value,
            interval=None if result.mean is None or result.ci is None else (result.mean, result.ci),
            signature=str(signatures[name]),
        )
        for system, result in zip(scores["System"], results, strict=True)
    ]


def randomization_test(
    systems: Mapping[str, Sequence[str]], measure: Metric, samples: int, seed: int
) -> list[Comparison]:
    """
    Run approximate randomization (Riezler and Maxwell, 2005) against the first system. Unlike sacrebleu's, the test
    counts random differences that equal the observed one, which matters for systems that differ in few sentences. Its
    random exchanges are sacrebleu's.
    """
    statistics = [statistics_of(measure, hypotheses) for hypotheses in systems.values()]
    baseline = statistics[0]
    # Exchanges of each sentence, shape (samples, sentences).
    exchanges = np.random.default_rng(seed).integers(2, size=(samples, len(baseline)), dtype=bool)
    base, signature = score_of(measure, baseline.sum(axis=0)), measure.get_signature()
    signature.update("seed", str(seed))
    signature.update("ar", samples)
    comparisons: list[Comparison] = []
    for name, rows in zip(systems, statistics, strict=True):
        own = score_of(measure, rows.sum(axis=0))
        p_value = chance(rows[None], baseline[None], measure, exchanges) if comparisons else None
        comparisons.append(Comparison(str(name), own, own - base, p_value, None, str(signature)))
    return comparisons


def statistics_of(measure: Metric, hypotheses: Sequence[str]) -> np.ndarray:
    """Return the counts from which a corpus score is computed, of shape `(sentences, counts)`."""
    return np.array(measure._extract_corpus_statistics(list(hypotheses), None))


def score_of(measure: Metric, sums: np.ndarray) -> float:
    """Return a corpus score from its summed counts."""
    return float(measure._compute_score_from_stats(sums.tolist()).score)


def chance(own: np.ndarray, other: np.ndarray, measure: Metric, exchanges: Iterable[np.ndarray]) -> float:
    """
    Return the p-value: the share of random exchanges of sentences after which the difference between two systems' mean
    scores is at least as large as the observed one. `own` and `other` are counts of shape `(runs, sentences, counts)`.
    """

    def mean_score(runs: np.ndarray) -> float:
        return float(np.mean([score_of(measure, sums) for sums in runs]))

    sums, base, gap = own.sum(axis=1), other.sum(axis=1), own - other
    least = abs(mean_score(sums) - mean_score(base)) - ROUNDING
    count = extreme = 0
    for exchanged in exchanges:
        moved = gap[:, exchanged].sum(axis=1)
        extreme += abs(mean_score(sums - moved) - mean_score(base + moved)) >= least
        count += 1
    return (extreme + 1) / (count + 1)


def sign_test(systems: Mapping[str, Sequence[str]], measure: Metric) -> list[Comparison]:
    """
    Run the sign test of Collins et al. (2005, "Clause Restructuring for Statistical Machine Translation", section 4)
    against the first system. A sentence is better (worse) if the corpus score of the baseline rises (falls) when its
    translation is replaced with the system's. The p-value is that of a two-sided binomial test with probability 1/2
    over the better and the worse sentences; the others are ignored.

    Args:
        systems (mapping of name to translations): The first is the baseline.
        measure (`sacrebleu.metrics.base.Metric`): Has the references in its cache.
    """
    statistics = {name: statistics_of(measure, hypotheses) for name, hypotheses in systems.items()}
    baseline = next(iter(statistics.values()))
    total = baseline.sum(axis=0)
    score = partial(score_of, measure)
    base = score(total)
    signature = f"{measure.get_signature()}|test:{SIGN}"
    comparisons: list[Comparison] = []
    for name, rows in statistics.items():
        own = score(rows.sum(axis=0))
        comparison = Comparison(str(name), own, own - base, None, None, signature)
        if comparisons:
            changes = [score(total + difference) - base for difference in rows - baseline]
            comparison.better, comparison.worse = (sum(sign * x > ROUNDING for x in changes) for sign in (1, -1))
            comparison.p_value = sign_p_value(comparison.better, comparison.worse)
        comparisons.append(comparison)
    return comparisons


def sign_p_value(better: int, worse: int) -> float:
    """Return the p-value of a two-sided binomial test with probability 1/2, computed exactly."""
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**count)


def compare_runs(
    baseline: Sequence[Sequence[str]],
    system: Sequence[Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    samples: int = 1000,
    seed: int = 12345,
    tokenize: str | None = None,
) -> float:
    """
    Return the p-value of the difference between the mean BLEU of two systems over several training runs (seeds):
    approximate randomization (Riezler and Maxwell, 2005), in which the translations of a sentence by all runs of the
    two systems are exchanged together. The runs are therefore not treated as independent test sets; the test covers
    the choice of sentences, not that of seeds.

    Args:
        baseline, system (sequence of sequences of `str`): For each run its translations; both have the same seeds.
        references (sequence of `str`, or of such sequences): One reference set or several.
        samples (`int`, *optional*, defaults to 1000): Random exchanges; the p-value is at least 1 / (samples + 1).
        seed (`int`, *optional*, defaults to 12345): Seed of the exchanges.
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.

    Raises:
        ValueError: The systems have no runs or different numbers of runs, or lengths differ.
    """
    samples = check_value("samples", samples, int, Range(least=1))
    if not baseline or len(baseline) != len(system):
        message = f"system has {len(system)} runs, but the baseline has {len(baseline)}; pass runs with the same seeds."
        raise UserError(message, field="system")
    for hypotheses in (*baseline, *system):
        streams = reference_sets(hypotheses, references)
    measure = bleu_metric(tokenize=tokenize, references=streams)
    own, other = (np.array([statistics_of(measure, texts) for texts in runs]) for runs in (system, baseline))
    generator = np.random.default_rng(seed)
    exchanges = (generator.integers(2, size=own.shape[1]).astype(bool) for _ in range(samples))
    return chance(own, other, measure, exchanges)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return `p_values` corrected for the number of comparisons (Holm, 1979), in their order."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected
