"""The length penalty of a model, chosen on a validation set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._plain_text import on_one_line
from ..inference.options import DecodingOptions
from ..inference.results import Hypothesis
from ..inference.translator import Translator
from .metrics import TextScorer


# Exponents alpha of the length penalty that are compared.
GRID = tuple(round(0.1 * step, 1) for step in range(21))
# Hypotheses of each sentence that are rescored.
N_BEST = 16


def best_hypothesis(hypotheses: Sequence[Hypothesis], alpha: float, penalty_type: str = "vaswani") -> Hypothesis:
    """Return the hypothesis with the highest log-probability / penalty: ((5 + length) / 6)^alpha, or length^alpha."""

    def score(one: Hypothesis) -> float:
        length = max(len(one.tokens), 1)
        return one.log_prob / ((5 + length) / 6 if penalty_type == "vaswani" else length) ** alpha

    return max(hypotheses, key=score)


def tune_length_penalty(
    translator: Translator,
    sources: Sequence[Any],
    references: Sequence[Sequence[str]],
    options: DecodingOptions,
    scorer: TextScorer,
) -> dict[float, float]:
    """
    Return the score on a validation set by exponent of [`GRID`], the best one first. Each sentence is translated once,
    and its [`N_BEST`] hypotheses are rescored; a search with the chosen exponent may find others.

    Args:
        translator (`Translator`): The model.
        sources (sequence of `str`): Sentences of the validation set.
        references (sequence of sequences of `str`): Its sets of references.
        options (`DecodingOptions`): Options of the search; its beam is widened to [`N_BEST`].
        scorer (`TextScorer`): BLEU or ROUGE.
    """
    wide = max(N_BEST, options.beams)
    options = replace(options, beams=wide, num_hypotheses=wide, split_sentences="never")
    lists = [translation.hypotheses for translation in translator.translate(sources, options)]
    scores = {}
    for alpha in GRID:
        best = [best_hypothesis(one, alpha, options.length_penalty_type).text for one in lists]
        *_, score = scorer.scores([on_one_line(text) for text in best], references).values()
        scores[alpha] = score.score
    return dict(sorted(scores.items(), key=lambda entry: -entry[1]))
