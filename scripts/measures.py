"""
Scores of translations and gains of one model over another, for `scripts/results.py`.

A gain in BLEU that comes from longer output alone is none in quality, so both are computed with and without the brevity
penalty, and chrF and TER stand beside them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from recnmt_hf.metrics.bleu import bleu_metric, chrf_score, sacrebleu_score, ter_score
from recnmt_hf.metrics.significance import compare_runs, statistics_of


# Words of the marks of a difference in BLEU.
LENGTH, DISAGREE = "length effect", "metrics disagree"
ORDER = 4  # of BLEU's n-grams
SEED = 12345


def scores_of(texts: Sequence[str], references: Sequence[Sequence[str]], tokenize: str | None) -> dict[str, Any]:
    """Return BLEU, chrF and TER of translations with their signatures, and BLEU's length ratio and brevity penalty."""
    bleu = sacrebleu_score(texts, references, tokenize=tokenize)
    (ratio,), (penalty,), _ = bleu_parts(counts_of([texts], references, tokenize).sum(axis=1))
    chrf, ter = chrf_score(texts, references), ter_score(texts, references, tokenize)
    return {
        "bleu": bleu.score,
        "length_ratio": float(ratio),
        "brevity_penalty": float(penalty),
        "chrf": chrf.score,
        "ter": ter.score,
        "signatures": {"BLEU": bleu.signature, "chrF": chrf.signature, "TER": ter.signature},
    }


def counts_of(runs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], tokenize: str | None) -> np.ndarray:
    """Return BLEU's counts `(runs, sentences, 2 + 2 * ORDER)`: lengths of both sides, matching and all n-grams."""
    measure = bleu_metric(tokenize=tokenize, references=[list(side) for side in references])
    return np.array([statistics_of(measure, texts) for texts in runs], dtype=np.float64)


def bleu_parts(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return length ratios, brevity penalties and BLEU without penalty of summed counts `(.., 2 + 2 * ORDER)`."""
    own, reference = sums[..., 0], sums[..., 1]
    matching, total = sums[..., 2 : 2 + ORDER], sums[..., 2 + ORDER :]
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = 100 * np.exp(np.log(matching / total).mean(axis=-1))
        penalty = np.where(own < reference, np.exp(1 - reference / own), 1.0)
    return own / reference, penalty, np.nan_to_num(precision)


def gain_of(
    baseline: Sequence[Sequence[str]],
    system: Sequence[Sequence[str]],
    references: Sequence[Sequence[str]],
    samples: int,
    tokenize: str | None,
) -> dict[str, Any]:
    """
    Return the gain in mean BLEU over runs with the same seeds: the difference with its 95% interval and p-value, and
    the difference without brevity penalty with its interval. Intervals come from a paired bootstrap over the sentences
    (Koehn, 2004), which all runs share.
    """
    counts = [counts_of(runs, references, tokenize) for runs in (baseline, system)]
    sentences = counts[0].shape[1]
    drawn = np.random.default_rng(SEED).multinomial(sentences, np.full(sentences, 1 / sentences), size=samples)
    weights = np.vstack([np.ones(sentences), drawn])  # the first row is the test set itself
    with_penalty, without = [], []
    for one in counts:
        _, penalty, precision = bleu_parts(np.einsum("bs,rsc->brc", weights, one))
        with_penalty.append((penalty * precision).mean(axis=1))
        without.append(precision.mean(axis=1))
    gains = {"": with_penalty[1] - with_penalty[0], "_without_penalty": without[1] - without[0]}
    entry: dict[str, Any] = {"samples": samples}
    for name, values in gains.items():
        entry[f"difference{name}"] = float(values[0])
        entry[f"interval{name}"] = [float(x) for x in np.percentile(values[1:], [2.5, 97.5])]
    entry["p_value"] = compare_runs(baseline, system, references, samples, tokenize=tokenize)
    return entry


def marks_of(entry: dict[str, Any], chrf: float, ter: float) -> list[str]:
    """Return the marks of a gain, given the differences of chrF and TER (lower is better)."""
    marks, gain = [], entry["difference"]
    if gain * entry["difference_without_penalty"] < 0:
        marks.append(LENGTH)
    if gain * chrf < 0 or gain * ter > 0:
        marks.append(DISAGREE)
    return marks
