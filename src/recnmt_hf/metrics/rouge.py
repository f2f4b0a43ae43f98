"""ROUGE of summaries (Lin, 2004), computed by the `rouge-score` package, as functions and as an `evaluate.Metric`."""

import unicodedata
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Literal

import regex  # type: ignore[import-untyped]
from sacrebleu.metrics.base import Metric as SacreMetric
from sacrebleu.metrics.base import Score, Signature

from ..errors import packages_of_extra
from ..options import check_value
from .bleu import MetricScore, References, TextMetric, score_with, sets_of


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
ROUGE_UNITS = ("words", "characters", "english")


def units_of(kind: str) -> Callable[[str], list[str]]:
    """
    Return the function that splits a text into units. `"characters"`: all but spaces, as is usual for Chinese (Hu et
    al., 2015). `"words"`: runs of letters with their marks and digits of any script, in lower case. `"english"`: those
    of the original script, letters a to z with Porter's stemmer; for figures of CNN/DailyMail or XSum.
    """
    check_value("units", kind, Literal[ROUGE_UNITS])
    if kind != "english":
        return words_of if kind == "words" else lambda text: list("".join(text.split()))
    with packages_of_extra("metrics", "ROUGE"):
        from rouge_score.tokenizers import DefaultTokenizer

    return DefaultTokenizer(use_stemmer=True).tokenize


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, in which vowel signs and accents belong to their letters."""
    visible = regex.sub(r"\p{Cf}", "", unicodedata.normalize("NFC", text.lower()))
    return regex.findall(r"\p{M}*[\p{L}\p{N}_][\p{L}\p{N}_\p{M}]*", visible)


class RougeF1(SacreMetric):
    """
    Mean F1 of one kind of ROUGE over a corpus, in percent, as a metric of sacrebleu, so that its significance tests
    apply. The reference with the largest F1 counts, as in `rouge-score`.
    """

    def __init__(self, kind: str, units: str = "words", references: Sequence[Sequence[str]] | None = None):
        with packages_of_extra("metrics", "ROUGE"):
            from rouge_score.rouge_scorer import RougeScorer

        super().__init__()
        self.kind, self.units, self.label = kind, units, f"ROUGE-{kind.removeprefix('rouge')} F1"
        self.scorer = RougeScorer([kind], tokenizer=SimpleNamespace(tokenize=units_of(units)))
        if references is not None:
            self._ref_cache = self._cache_references(references)

    def get_signature(self) -> Signature:
        signature = super().get_signature()
        signature.info.update(units=self.units, tool="rouge-score", version=version("rouge-score"))
        return signature

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": list(refs)}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[float]:
        score = self.scorer.score_multi(ref_kwargs["references"], hypothesis)[self.kind]
        return [float(score.fmeasure), 1.0]

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        return Score(self.label, 100.0 * float(stats[0]) / float(stats[1]))

    def _aggregate_and_compute(self, stats: Sequence[Sequence[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])


def rouge_scores(hypotheses: Sequence[str], references: References, units: str = "words") -> list[MetricScore]:
    """
    Compute the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004), in percent.

    Args:
        hypotheses (sequence of `str`): Summaries.
        references (sequence of `str`, or of such sequences): One reference set, or several.
        units (`str`, *optional*, defaults to `"words"`): Units of the n-grams, as for [`units_of`].

    Raises:
        ValueError: The units are unknown, or the lists have different lengths.
    """
    metrics = [RougeF1(kind, units) for kind in ROUGE_TYPES]
    return [score_with(metric, metric.label, hypotheses, references) for metric in metrics]


class Rouge(TextMetric):
    """
    Mean F1 of ROUGE; `Rouge().compute(predictions=[...], references=[...], units="words")` returns `rouge1`, `rouge2`,
    `rougeL` in percent, and the `signature`. `units` are those of [`rouge_scores`].
    """

    citation = "Lin, 2004"

    def _compute(self, predictions: list[str], references: list[Any], **options: Any) -> dict[str, object]:
        scores = rouge_scores(predictions, sets_of(references), **options)
        by_kind = {kind: score.score for kind, score in zip(ROUGE_TYPES, scores, strict=True)}
        return {**by_kind, "signature": scores[0].signature}
