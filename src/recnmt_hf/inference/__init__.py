"""Translation, scoring and alignment with a trained model."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


if TYPE_CHECKING:
    from ..data.tokenizer_pair import stamp_tokenizers as stamp_tokenizers
    from .decoding import MaxLengthPerSentence as MaxLengthPerSentence
    from .decoding import PrefixPerSentence as PrefixPerSentence
    from .decoding import VaswaniLengthPenalty as VaswaniLengthPenalty
    from .devices import pack_weights as pack_weights
    from .options import DecodingOptions as DecodingOptions
    from .options import length_penalty as length_penalty
    from .results import Hypothesis as Hypothesis
    from .results import SentenceScore as SentenceScore
    from .results import Translation as Translation
    from .results import WordAlignment as WordAlignment
    from .translator import Translator as Translator
    from .translator import align_pairs as align_pairs

__getattr__, __dir__, __all__ = lazy_names(__name__)
