"""Translating, scoring, metrics and significance."""

from .decoding import MaxLengthPerSentence, VaswaniLengthPenalty, length_penalty
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
from .significance import Comparison, compare_systems
from .translator import DecodingOptions, Hypothesis, SentenceScore, Translation, Translator


__all__ = [
    "Bleu",
    "ChrF",
    "Comparison",
    "DecodingOptions",
    "Hypothesis",
    "MaxLengthPerSentence",
    "MetricScore",
    "SentenceScore",
    "Ter",
    "TokenizedBleu",
    "Translation",
    "Translator",
    "VaswaniLengthPenalty",
    "chrf_score",
    "compare_systems",
    "length_penalty",
    "sacrebleu_score",
    "scores_by_length",
    "ter_score",
    "tokenized_bleu_score",
]
