"""BLEU, chrF, TER, ROUGE and alignment error rate as metrics of `evaluate`, and significance tests."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names, names_for_type_checkers


if TYPE_CHECKING:
    from .alignment import (
        AlignmentErrorRate,
        AlignmentScore,
        GoldAlignment,
        alignment_error_rate,
        format_links,
        parse_links,
    )
    from .bleu import (
        Bleu,
        ChrF,
        MetricScore,
        Ter,
        TokenizedBleu,
        chrf_score,
        sacrebleu_score,
        scores_by_length,
        ter_score,
        tokenized_bleu_score,
    )
    from .oracle import choose_best, oracle_scores
    from .rouge import Rouge, rouge_scores
    from .significance import Comparison, compare_runs, compare_systems, holm

__all__ = [
    "AlignmentErrorRate",
    "AlignmentScore",
    "Bleu",
    "ChrF",
    "Comparison",
    "GoldAlignment",
    "MetricScore",
    "Rouge",
    "Ter",
    "TokenizedBleu",
    "alignment_error_rate",
    "choose_best",
    "chrf_score",
    "compare_runs",
    "compare_systems",
    "format_links",
    "holm",
    "oracle_scores",
    "parse_links",
    "rouge_scores",
    "sacrebleu_score",
    "scores_by_length",
    "ter_score",
    "tokenized_bleu_score",
]

__getattr__, __dir__ = lazy_names(__name__, names_for_type_checkers(__name__))
