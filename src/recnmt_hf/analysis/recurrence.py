"""Attention of a recurrence encoder: the words that each step of an attentive recurrent network reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._plain_text import encode_plain, is_blank
from .._values import check_value
from ..inference.eval_mode import eval_mode
from ..inference.translator import Translator
from ..models.user_errors import UserError
from .token_names import token_names


DIRECTIONS = ("forward", "backward")


@dataclass
class RecurrenceAttention:
    """
    The attention of each step of an attentive recurrent network (Hao et al., 2019, Eq. 12) in one of its layers.

    Attributes:
        tokens (`list[str]`): Attended positions: tokens, or in higher layers the steps of the layer below.
        weights (`numpy.ndarray` of shape `(directions, num_heads, T, len(tokens))`): Rows sum to 1. The backward
            direction computes its last row first.
    """

    tokens: list[str]
    weights: np.ndarray

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS[: len(self.weights)]

    def of_head(self, head: int | None = None) -> np.ndarray:
        """
        Return the weights of one head, or the mean of all heads, `(directions, T, len(tokens))`.

        Raises:
            ValueError: There is no such head.
        """
        if head is None:
            return self.weights.mean(axis=1)
        heads = self.weights.shape[1]
        if not 0 <= check_value("head", head, int) < heads:
            raise UserError(f"There is no head {head}; the model has heads 0 to {heads - 1}. Remedy: choose one.")
        return self.weights[:, head]

    def to_tsv(self, head: int | None = None) -> str:
        """Return a table: direction, step and one column per token."""
        lines = ["\t".join(["direction", "step", *self.tokens])]
        for direction, matrix in zip(self.directions, self.of_head(head), strict=True):
            for step, row in enumerate(matrix, start=1):
                lines.append("\t".join([direction, str(step), *(f"{weight:.6f}" for weight in row)]))
        return "\n".join(lines) + "\n"


def recurrence_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentence: str, layer: int = 0
) -> RecurrenceAttention:
    """
    Encode a sentence with a BiARN model and return the attention of the steps.

    Args:
        model (`PreTrainedModel`): A `BiARNTransformer` with an attentive recurrence encoder.
        tokenizer (`PreTrainedTokenizerBase`): Of the source.
        sentence (`str`): Plain text.
        layer (`int`, *optional*, defaults to 0): Layer of the recurrence encoder, from 0.

    Raises:
        ValueError: The model has no attentive recurrence encoder or no such layer, or the sentence is empty.
    """
    if is_blank(sentence):
        raise UserError("The sentence is empty. Remedy: give one with at least a word.")
    ids = encode_plain(tokenizer, sentence, return_tensors="pt")["input_ids"].to(model.device)
    with eval_mode(model):
        encoded = model.get_encoder()(ids, output_attentions=True)
    attentions = getattr(encoded, "recurrence_attentions", None)
    if attentions is None:
        kind = getattr(model.config, "recurrence_encoder_type", None)
        raise UserError(
            f"A {model.config.model_type} model with recurrence_encoder_type={kind!r} makes no attentive steps. "
            'Remedy: use a biarn_transformer with recurrence_encoder_type "biarn" or "arn".'
        )
    if not 0 <= check_value("layer", layer, int) < len(attentions):
        raise UserError(f"There is no layer {layer}; the recurrence encoder has {len(attentions)}, counted from 0.")
    weights = attentions[layer][0].float().cpu().numpy()
    if layer:
        return RecurrenceAttention([f"step {t}" for t in range(1, weights.shape[-1] + 1)], weights)
    return RecurrenceAttention(token_names(tokenizer, ids[0].tolist()), weights)


def plot_recurrence_attention(
    attention: RecurrenceAttention, path: str | Path, head: int | None = None, title: str | None = None
) -> None:
    """
    Plot the T x source attention as a heat map, one panel per direction.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        head (`int`, *optional*): A single head; by default the mean of all heads.
        title (`str`, *optional*): Above the panels.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is unknown.
    """
    from .plots import heat_maps

    panels = [
        (f"{direction}, {'mean of heads' if head is None else f'head {head}'}", matrix)
        for direction, matrix in zip(attention.directions, attention.of_head(head), strict=True)
    ]
    heat_maps(panels, attention.tokens, [str(t) for t in range(1, attention.weights.shape[2] + 1)], "step", path, title)


def inspect_attention(
    translator: Translator, sentence: str, output: str | None = None, layer: int = 0, head: int | None = None
) -> str:
    """Return the attention as a table, or plot it into a file and return a summary."""
    attention = recurrence_attention(translator.inspected_model(), translator.tokenizer, sentence, layer)
    if output is None:
        return attention.to_tsv(head)
    plot_recurrence_attention(attention, output, head)
    steps, count = attention.weights.shape[2:]
    return f"{output}: {' and '.join(attention.directions)}, {steps} steps over {count} tokens\n"
