"""Translating, scoring, metrics and significance."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names, names_for_type_checkers


if TYPE_CHECKING:
    from ..data.tokenizer_checks import stamp_tokenizers
    from .alignment import (
        AlignmentErrorRate,
        AlignmentScore,
        GoldAlignment,
        WordAlignment,
        align_pairs,
        alignment_error_rate,
        format_links,
        parse_links,
    )
    from .decoding import MaxLengthPerSentence, PrefixPerSentence, VaswaniLengthPenalty, length_penalty
    from .metrics import (
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
    from .options import DecodingOptions
    from .results import Hypothesis, SentenceScore, Translation
    from .rouge import Rouge, rouge_scores
    from .significance import Comparison, compare_systems
    from .translator import Translator

__all__ = [
    "AlignmentErrorRate",
    "AlignmentScore",
    "Bleu",
    "ChrF",
    "Comparison",
    "DecodingOptions",
    "GoldAlignment",
    "Hypothesis",
    "MaxLengthPerSentence",
    "MetricScore",
    "PrefixPerSentence",
    "Rouge",
    "SentenceScore",
    "Ter",
    "TokenizedBleu",
    "Translation",
    "Translator",
    "VaswaniLengthPenalty",
    "WordAlignment",
    "align_pairs",
    "alignment_error_rate",
    "chrf_score",
    "compare_systems",
    "format_links",
    "length_penalty",
    "parse_links",
    "rouge_scores",
    "sacrebleu_score",
    "scores_by_length",
    "stamp_tokenizers",
    "ter_score",
    "tokenized_bleu_score",
]

__getattr__, __dir__ = lazy_names(__name__, names_for_type_checkers(__name__))
