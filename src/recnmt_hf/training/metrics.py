"""Names and directions of validation metrics, and the scorer of generated text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..metrics.bleu import MetricScore, References, sacrebleu_score
from ..metrics.rouge import ROUGE_TYPES, rouge_scores
from ..metrics.significance import RANDOMIZATION, Comparison, compare_systems


# Metrics of generated text with the names of their scores.
TEXT_METRICS = {"bleu": ("bleu",), "rouge": ROUGE_TYPES}
# Tokenizers of sacrebleu that recipes can set.
BLEU_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "flores200", "none")
# Metrics of an evaluation during training.
VALIDATION_METRICS = ("loss", "perplexity", *(name for names in TEXT_METRICS.values() for name in names))
# Schedules of the learning rate that follow the metric of the evaluations.
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
LOWER = frozenset({"loss", "perplexity", "ppl", "nll", "ter", "wer", "cer", "aer"})
HIGHER = frozenset({"bleu", "chrf", "comet", "accuracy", "rouge1", "rouge2", "rougel", "rougelsum", "meteor", "f1"})


@dataclass(frozen=True)
class TextScorer:
    """A scorer of generated text."""

    metric: str = "bleu"  # or "rouge": F1 of ROUGE-1, ROUGE-2 and ROUGE-L
    rouge_units: str = "words"
    lowercase: bool = False  # case-insensitive BLEU
    tokenize: str | None = None  # sacrebleu's tokenizer

    def scores(self, hypotheses: Sequence[str], references: References) -> dict[str, MetricScore]:
        """Return the scores of generated text by name."""
        if self.metric == "rouge":
            return dict(zip(ROUGE_TYPES, rouge_scores(hypotheses, references, self.rouge_units), strict=True))
        return {"bleu": sacrebleu_score(hypotheses, references, self.lowercase, self.tokenize)}

    def compare(
        self, baseline: Sequence[str], hypotheses: Sequence[str], references: References, samples: int = 1000
    ) -> Comparison:
        """Test by approximate randomization whether generated text differs from a baseline's."""
        options: dict[str, Any] = {"lowercase": self.lowercase, "tokenize": self.tokenize}
        if self.metric == "rouge":
            options = {"metric": ROUGE_TYPES[-1], "units": self.rouge_units}
        systems = {"baseline": baseline, "model": hypotheses}
        return compare_systems(systems, references, RANDOMIZATION, samples, **options)[-1]


def higher_is_better(metric: str, given: bool | None = None) -> bool:
    """Return whether higher values of a metric are better; `given` is the answer for a metric that is not known."""
    last = metric.lower().rsplit("_", 1)[-1]
    known = False if last in LOWER else True if last in HIGHER else None
    if given is not None and known is not None and given is not known:
        raise UserError(f"{'Higher' if known else 'Lower'} values of {metric} are better.", field="greater_is_better")
    return given if given is not None else known is not False
