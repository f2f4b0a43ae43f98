"""Significance tests of the difference between the scores of two systems."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast
from unittest.mock import patch

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

from ..errors import UserError
from ..options import MOST_SEED, Range, check_value
from .bleu import References, bleu_metric, reference_sets
from .rouge import ROUGE_TYPES, RougeF1


METHODS = BOOTSTRAP, RANDOMIZATION, SIGN = "bootstrap", "randomization", "sign"
ROUNDING = 1e-9  # differences of scores that rounding alone makes


@dataclass
class Comparison:
    """A system against the baseline."""

    system: str
    score: float  # BLEU or ROUGE
    difference: float  # score minus that of the baseline; 0 for the baseline itself
    # Chance of a difference at least as large if both systems were equally good (about half of it for the bootstrap);
    # `None` for the baseline.
    p_value: float | None
    interval: tuple[float, float] | None  # mean and half-width of the score's 95% confidence interval; bootstrap only
    signature: str  # sacrebleu's, with the test's settings
    better: int | None = None  # sentences that the system translates better than the baseline; sign test only
    worse: int | None = None


def compare_systems(
    systems: Mapping[str, Sequence[str]] | Iterable[tuple[str, Sequence[str]]],
    references: References,
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

    `"bootstrap"` is paired bootstrap resampling (Koehn, 2004) by sacrebleu, whose p-value is one-sided, about half of a
    two-sided one. `"randomization"` is approximate randomization (Riezler and Maxwell, 2005) with sacrebleu's random
    exchanges. Unlike sacrebleu's, it counts random differences that equal the observed one, which matters for systems
    that differ in few sentences. `"sign"` is the sign test of Collins et al. (2005, "Clause Restructuring for
    Statistical Machine Translation", section 4): a sentence is better (worse) if the corpus score of the baseline rises
    (falls) when its translation is replaced with the system's. Its p-value is that of a two-sided binomial test with
    probability 1/2 over the better and the worse sentences; the others are ignored.

    Args:
        systems (mapping of name to translations, or pairs of them): The first is the baseline.
        references (sequence of `str`, or of such sequences): One reference set or several.
        method (`str`, *optional*, defaults to `"bootstrap"`): `"bootstrap"`, `"randomization"` or `"sign"`.
        samples (`int`, *optional*, defaults to 1000): Resamplings, or random swaps; the sign test has none.
        seed (`int`, *optional*, defaults to 12345): Seed of the resampling, at least 1 (sacrebleu ignores 0).
        lowercase (`bool`, *optional*, defaults to `False`): Case-insensitive BLEU.
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.
        metric (`str`, *optional*, defaults to `"bleu"`): `"bleu"`, `"rouge1"`, `"rouge2"` or `"rougeL"`.
        units (`str`, *optional*, defaults to `"words"`): Units of ROUGE's n-grams, as for [`units_of`].

    Returns:
        `list[Comparison]`: One for each system, the baseline first.

    Raises:
        UserError: There are fewer than two systems, no such method, metric, units or tokenizer, a number is not
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
    measure: Metric = RougeF1(metric, units, streams) if metric != "bleu" else bleu_metric(lowercase, tokenize, streams)
    if method == BOOTSTRAP:
        return bootstrap(systems, measure, samples, seed)
    statistics = [statistics_of(measure, hypotheses) for hypotheses in systems.values()]
    baseline, total, signature = statistics[0], statistics[0].sum(axis=0), measure.get_signature()
    if method == RANDOMIZATION:
        signature.info.update(seed=str(seed), ar=samples)
    text = f"{signature}|test:{SIGN}" if method == SIGN else str(signature)
    scores = [score_of(measure, rows.sum(axis=0)) for rows in statistics]
    pairs = zip(map(str, systems), scores, strict=True)
    found = [Comparison(name, score, score - scores[0], None, None, text) for name, score in pairs]
    for comparison, rows in zip(found[1:], statistics[1:], strict=True):
        if method == SIGN:
            changes = [score_of(measure, total + difference) - scores[0] for difference in rows - baseline]
            comparison.better, comparison.worse = (sum(sign * x > ROUNDING for x in changes) for sign in (1, -1))
            comparison.p_value = sign_p_value(comparison.better, comparison.worse)
        else:  # exchanges of each sentence, shape (samples, sentences)
            exchanges = np.random.default_rng(seed).integers(2, size=(samples, len(baseline)), dtype=bool)
            comparison.p_value = chance(rows[None], baseline[None], measure, exchanges)
    return found


def bootstrap(systems: Mapping[str, Sequence[str]], measure: Metric, samples: int, seed: int) -> list[Comparison]:
    """Run sacrebleu's paired bootstrap resampling against the first system."""
    named: list[tuple[str, Sequence[str]]] = [(name, list(hypotheses)) for name, hypotheses in systems.items()]
    with patch.dict(os.environ, SACREBLEU_SEED=str(seed)):
        signatures, scores = PairedTest(named, {"metric": measure}, None, test_type="bs", n_samples=samples)()
    ((name, signature),) = signatures.items()  # sacrebleu's own name of the metric
    results = cast("list[Result]", scores[name])  # only the column of names holds text
    found = []
    for system, result in zip(scores["System"], results, strict=True):
        difference = result.score - results[0].score
        # Any difference is at least as large as 0; sacrebleu counts only larger ones.
        p_value = 1.0 if result.p_value is not None and difference == 0 else result.p_value
        interval = None if result.mean is None or result.ci is None else (result.mean, result.ci)
        found.append(Comparison(str(system), result.score, difference, p_value, interval, str(signature)))
    return found


def statistics_of(measure: Metric, hypotheses: Sequence[str]) -> np.ndarray:
    """Return the counts from which a corpus score is computed, of shape `(sentences, counts)`."""
    return np.array(measure._extract_corpus_statistics(list(hypotheses), None))


def score_of(measure: Metric, sums: np.ndarray) -> float:
    """Return a corpus score from its summed counts."""
    return float(measure._compute_score_from_stats(sums.tolist()).score)


def chance(own: np.ndarray, other: np.ndarray, measure: Metric, exchanges: Iterable[np.ndarray]) -> float:
    """Return the p-value, the share of exchanges whose means differ as much, of `(runs, sentences, counts)`."""

    def mean_score(runs: np.ndarray) -> float:
        return float(np.mean([score_of(measure, sums) for sums in runs]))

    sums, base, gap = own.sum(axis=1), other.sum(axis=1), own - other
    least = abs(mean_score(sums) - mean_score(base)) - ROUNDING
    moved = (gap[:, exchanged].sum(axis=1) for exchanged in exchanges)
    extreme = [abs(mean_score(sums - one) - mean_score(base + one)) >= least for one in moved]
    return (sum(extreme) + 1) / (len(extreme) + 1)


def sign_p_value(better: int, worse: int) -> float:
    """Return the p-value of a two-sided binomial test with probability 1/2, computed exactly."""
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**count)


def compare_runs(
    baseline: Sequence[Sequence[str]],
    system: Sequence[Sequence[str]],
    references: References,
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
        references, samples, seed, tokenize: As in [`compare_systems`]; the p-value is at least 1 / (samples + 1).

    Raises:
        UserError: The systems have no runs or different numbers of runs, or lengths differ.
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
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected
