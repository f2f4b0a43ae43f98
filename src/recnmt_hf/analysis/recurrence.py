"""Attention weights of each step of an attentive recurrent network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..data.text import tsv
from ..errors import UserError, short_repr
from ..inference.translator import Translator
from .sentences import DIRECTIONS, check_index, run_encoder


@dataclass
class RecurrenceAttention:
    """The attention of each step of an attentive recurrent network (Hao et al., 2019, Eq. 12) in one of its layers."""

    tokens: list[str]  # attended positions; in higher layers the steps of the layer below
    # (directions, num_heads, steps, len(tokens)): rows sum to 1; the backward direction computes its last row first
    weights: np.ndarray

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions of the network."""
        return DIRECTIONS[: len(self.weights)]

    def of_head(self, head: int | None = None) -> np.ndarray:
        """
        Return the weights of one head, or the mean of all heads, `(directions, T, len(tokens))`.

        Raises:
            ValueError: The head does not exist.
        """
        if head is None:
            return self.weights.mean(axis=1)
        return self.weights[:, check_index("head", head, self.weights.shape[1])]

    def to_tsv(self, head: int | None = None) -> str:
        """Return a table: direction, step and one column per token."""
        rows = [["direction", "step", *self.tokens]]
        for direction, matrix in zip(self.directions, self.of_head(head), strict=True):
            for step, row in enumerate(matrix, start=1):
                rows.append([direction, str(step), *(f"{weight:.6f}" for weight in row)])
        return tsv(rows)


def recurrence_attention(translator: Translator, sentence: str, layer: int = 0) -> RecurrenceAttention:
    """
    Encode a sentence with a BiARN model and return the attention of the steps in a layer of the recurrence encoder.

    Raises:
        ValueError: The model has no attentive recurrence encoder or no such layer, or the sentence is empty.
    """
    encoded, tokens = run_encoder(translator, sentence)
    attentions = getattr(encoded, "recurrence_attentions", None)
    if attentions is None:
        config = translator.inspected_model().config
        kind = getattr(config, "recurrence_encoder_type", None)
        raise UserError(
            f"The {short_repr(config.model_type)} model (recurrence_encoder_type={kind}) has no attentive recurrence. "
            'Use a biarn_transformer with recurrence_encoder_type "biarn" or "arn".'
        )
    check_index("layer", layer, len(attentions))
    weights = attentions[layer][0].float().cpu().numpy()
    if layer:
        tokens = [f"step {t}" for t in range(1, weights.shape[-1] + 1)]
    return RecurrenceAttention(tokens, weights)


def inspect_attention(
    translator: Translator, sentence: str, output: str | None = None, layer: int = 0, head: int | None = None
) -> str:
    """Return the attention of a head (or the mean of all) as a table, or plot it and return a summary."""
    from .plots import heat_maps

    attention = recurrence_attention(translator, sentence, layer)
    if output is None:
        return attention.to_tsv(head)
    steps, count = attention.weights.shape[2:]
    name = "mean of heads" if head is None else f"head {head}"
    matrices = zip(attention.directions, attention.of_head(head), strict=True)
    panels = [(f"{direction}, {name}", matrix) for direction, matrix in matrices]
    title = f"Attention of the recurrence encoder's steps, layer {layer}"
    names, columns = [str(step) for step in range(1, steps + 1)], "step of the layer below" if layer else "source token"
    heat_maps(panels, attention.tokens, names, "step", output, title=title, column_name=columns)
    return f"{output}: {' and '.join(attention.directions)}, {steps} steps over {count} tokens\n"
