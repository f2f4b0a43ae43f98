"""Names and directions of validation metrics, and what measures generated text."""

from __future__ import annotations

from collections.abc import Sequence

from ..metrics.bleu import MetricScore, sacrebleu_score
from ..metrics.rouge import ROUGE_TYPES, rouge_scores
from ..models.user_errors import UserError


# What measures generated text, and the names under which it does.
TEXT_METRICS = {"bleu": ("bleu",), "rouge": ROUGE_TYPES}
# What an evaluation during training gives.
VALIDATION_METRICS = ("loss", "perplexity", *(name for names in TEXT_METRICS.values() for name in names))
LOWER = frozenset({"loss", "perplexity", "ppl", "nll", "ter", "wer", "cer", "aer"})
HIGHER = frozenset({"bleu", "chrf", "comet", "accuracy", "rouge1", "rouge2", "rougel", "rougelsum", "meteor", "f1"})


def text_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    metric: str = "bleu",
    rouge_units: str = "words",
    lowercase: bool = False,
) -> dict[str, MetricScore]:
    """
    The scores of generated text by their names.

    Args:
        hypotheses, references (sequences of `str`): One each for a sentence.
        metric (`str`, *optional*, defaults to `"bleu"`): `"bleu"`, or `"rouge"`: F1 of ROUGE-1, ROUGE-2 and ROUGE-L.
        rouge_units (`str`, *optional*, defaults to `"words"`): What ROUGE counts.
        lowercase (`bool`, *optional*, defaults to `False`): Case-insensitive BLEU.
    """
    if metric == "rouge":
        return dict(zip(ROUGE_TYPES, rouge_scores(hypotheses, references, rouge_units), strict=True))
    return {"bleu": sacrebleu_score(hypotheses, references, lowercase=lowercase)}


def without_prefix(metric: str) -> str:
    """A metric's name as recipes have it, without the Trainer's `eval_`."""
    return metric.removeprefix("eval_")


def known_direction(metric: str) -> bool | None:
    """Whether more of a metric is better; `None` where the metric is not known."""
    last = metric.lower().rsplit("_", 1)[-1]
    return False if last in LOWER else True if last in HIGHER else None


def higher_is_better(metric: str, stated: bool | None = None, place: str = "") -> bool:
    """
    The direction of a metric.

    Args:
        metric (`str`): With or without `eval_` or a data set's name before it.
        stated (`bool`, *optional*): The direction that the user gives; needed for a metric that is not known and of
            which less is better.
        place (`str`, *optional*): What stands before `greater_is_better` in the message.

    Raises:
        UserError: What is stated contradicts what is known of the metric.
    """
    known = known_direction(metric)
    if stated is not None and known is not None and stated is not known:
        less = "less" if known is False else "more"
        raise UserError(
            f"{place}greater_is_better={stated} contradicts {place}metric_for_best_model={metric}, of which {less} is "
            "better. Remedy: leave greater_is_better out."
        )
    return stated if stated is not None else known is not False
