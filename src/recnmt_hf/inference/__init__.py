"""Translation, scoring and alignment with a trained model."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names, names_for_type_checkers


if TYPE_CHECKING:
    from ..data.tokenizer_checks import stamp_tokenizers
    from .decoding import MaxLengthPerSentence, PrefixPerSentence, VaswaniLengthPenalty
    from .options import DecodingOptions, length_penalty
    from .results import Hypothesis, SentenceScore, Translation
    from .translator import Translator
    from .word_alignment import WordAlignment, align_pairs

__all__ = [
    "DecodingOptions",
    "Hypothesis",
    "MaxLengthPerSentence",
    "PrefixPerSentence",
    "SentenceScore",
    "Translation",
    "Translator",
    "VaswaniLengthPenalty",
    "WordAlignment",
    "align_pairs",
    "length_penalty",
    "stamp_tokenizers",
]

__getattr__, __dir__ = lazy_names(__name__, names_for_type_checkers(__name__))
