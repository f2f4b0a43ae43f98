"""BLEU, chrF, TER, ROUGE and alignment error rate as metrics of `evaluate`, and significance tests."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


if TYPE_CHECKING:
    from .alignment import AlignmentErrorRate as AlignmentErrorRate
    from .alignment import AlignmentScore as AlignmentScore
    from .alignment import GoldAlignment as GoldAlignment
    from .alignment import alignment_error_rate as alignment_error_rate
    from .alignment import format_links as format_links
    from .alignment import parse_links as parse_links
    from .bleu import Bleu as Bleu
    from .bleu import ChrF as ChrF
    from .bleu import MetricScore as MetricScore
    from .bleu import Ter as Ter
    from .bleu import TokenizedBleu as TokenizedBleu
    from .bleu import bleu_tokenizer as bleu_tokenizer
    from .bleu import chrf_score as chrf_score
    from .bleu import sacrebleu_score as sacrebleu_score
    from .bleu import scores_by_length as scores_by_length
    from .bleu import ter_score as ter_score
    from .bleu import tokenized_bleu_score as tokenized_bleu_score
    from .rouge import Rouge as Rouge
    from .rouge import rouge_scores as rouge_scores
    from .significance import Comparison as Comparison
    from .significance import compare_runs as compare_runs
    from .significance import compare_systems as compare_systems
    from .significance import holm as holm

__getattr__, __dir__, __all__ = lazy_names(__name__)
