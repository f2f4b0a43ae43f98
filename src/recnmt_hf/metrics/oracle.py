"""The best of several hypotheses of each sentence, chosen with the references: a bound for reranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import sacrebleu

from .._values import check_value
from ..errors import UserError
from .bleu import MetricScore, bleu_metric, chrf_score, reference_sets, sacrebleu_score


# Scores of single sentences that choose a hypothesis.
CHOICES = ("bleu", "chrf")


def choose_best(
    hypotheses: Sequence[Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    by: str = "bleu",
    tokenize: str | None = None,
) -> list[str]:
    """
    Return the best hypothesis of each sentence, the first one among equals.

    Args:
        hypotheses (sequence of sequences of `str`): At least one for each sentence.
        references (sequence of `str`, or of such sequences): One set of references, or several.
        by (`str`, *optional*, defaults to `"bleu"`): `"bleu"`: BLEU of the sentence without orders that it is too short
            for. `"chrf"`: chrF2.
        tokenize (`str`, *optional*): sacrebleu's tokenizer for BLEU.

    Raises:
        UserError: The numbers of sentences differ, or a value is not allowed.
    """
    check_value("by", by, Literal[CHOICES])
    for number, own in enumerate(hypotheses, start=1):
        if not own:
            raise UserError("metric.nothing_to_score", field=f"sentence {number}")
        reference_sets(own, [own])  # checks that they are a list of text
    sets = reference_sets([own[0] for own in hypotheses], references)
    metric: sacrebleu.BLEU | sacrebleu.CHRF = sacrebleu.CHRF()
    if by == "bleu":
        metric = bleu_metric(tokenize=tokenize)
        metric.effective_order = True
    chosen = []
    for own, *of_sentence in zip(hypotheses, *sets, strict=True):
        scores = {text: metric.sentence_score(text, of_sentence).score for text in dict.fromkeys(own)}
        chosen.append(max(scores, key=scores.__getitem__))
    return chosen


def oracle_scores(
    hypotheses: Sequence[Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    tokenize: str | None = None,
) -> list[MetricScore]:
    """
    Return corpus BLEU of the hypotheses chosen by BLEU, and chrF of those chosen by chrF; `hypotheses`, `references`
    and `tokenize` as for [`choose_best`].
    """
    bleu = sacrebleu_score(choose_best(hypotheses, references, "bleu", tokenize), references, tokenize=tokenize)
    return [bleu, chrf_score(choose_best(hypotheses, references, "chrf"), references)]
