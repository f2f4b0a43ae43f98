"""Attention weights of each step of an attentive recurrent network."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.text import tsv
from ..inference.translator import Translator
from . import plots
from .sentences import DIRECTIONS, cells, check_index, require, run_encoder


@dataclass
class RecurrenceAttention:
    """The attention of each step of an attentive recurrent network (Hao et al., 2019, Eq. 12) in one of its layers."""

    tokens: list[str]  # attended positions; in higher layers the steps of the layer below
    # (directions, num_heads, steps, len(tokens)): rows sum to 1; the backward direction computes its last row first
    weights: np.ndarray


def recurrence_attention(translator: Translator, sentence: str, layer: int = 0) -> RecurrenceAttention:
    """Return the attention of the steps in a layer of a BiARN's recurrence encoder; `UserError` if there is none."""
    encoded, tokens = run_encoder(translator, sentence)
    attentions: Any = getattr(encoded, "recurrence_attentions", None)
    remedy = 'Use a biarn_transformer with recurrence_encoder_type "biarn" or "arn".'
    require(attentions is not None, translator, "attentive recurrence", remedy)
    check_index("layer", layer, len(attentions))
    weights = attentions[layer][0].float().cpu().numpy()
    if layer:
        tokens = [f"step {t}" for t in range(1, weights.shape[-1] + 1)]
    return RecurrenceAttention(tokens, weights)


def inspect_attention(
    translator: Translator, sentence: str, output: str | None = None, layer: int = 0, head: int | None = None
) -> str:
    """Return the attention of a head (or the mean of all) as a table, or plot it and return a summary."""
    attention = recurrence_attention(translator, sentence, layer)
    weights, directions = attention.weights, DIRECTIONS[: len(attention.weights)]
    _, heads, steps, count = weights.shape
    of_head = weights.mean(axis=1) if head is None else weights[:, check_index("head", head, heads)]
    matrices = list(zip(directions, of_head, strict=True))
    names = [str(step) for step in range(1, steps + 1)]
    if output is None:
        rows = [["direction", "step", *attention.tokens]]
        for direction, matrix in matrices:
            rows += [[direction, step, *cells(row)] for step, row in zip(names, matrix, strict=True)]
        return tsv(rows)
    shown = "mean of heads" if head is None else f"head {head}"
    panels = [(f"{direction}, {shown}", matrix) for direction, matrix in matrices]
    labels: dict[str, Any] = {"title": f"Attention of the recurrence encoder's steps, layer {layer}"}
    labels["column_name"] = "step of the layer below" if layer else "source token"
    plots.heat_maps(panels, attention.tokens, names, "step", output, **labels)
    return f"{output}: {' and '.join(directions)}, {steps} steps over {count} tokens\n"
