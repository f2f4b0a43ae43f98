"""The length penalty of a model, chosen on a validation set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._plain_text import on_one_line
from ..inference.options import DecodingOptions
from ..inference.translator import Translator
from .metrics import TextScorer


# Exponents alpha of the length penalty that are compared.
GRID = tuple(round(0.1 * step, 1) for step in range(21))
# Hypotheses of each sentence that are rescored.
N_BEST = 16


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
        penalty = replace(options, length_penalty=alpha).penalty()
        best = [max(rows, key=lambda row: row.log_prob / max(len(row.tokens), 1) ** penalty) for rows in lists]
        *_, score = scorer.scores([on_one_line(row.text) for row in best], references).values()
        scores[alpha] = score.score
    return dict(sorted(scores.items(), key=lambda entry: -entry[1]))
