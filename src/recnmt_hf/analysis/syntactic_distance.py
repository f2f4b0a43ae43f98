"""What the master gates of an ON-LSTM say of a sentence: distances between its words, and a binary tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._plain_text import is_blank
from .._values import check_value
from ..inference.eval_mode import eval_mode
from ..inference.translator import Translator
from ..models.user_errors import UserError
from .token_names import token_names


# A leaf is the place of a token, anything else a pair of trees.
Tree = int | tuple[Any, Any]
DIRECTIONS = ("forward", "backward")


@dataclass
class SyntacticDistances:
    """
    The master-gate distances of a sentence (Shen et al., 2019, section 5.2).

    Attributes:
        tokens (`list[str]`): Of the source.
        distances (`numpy.ndarray` of shape `(layers, len(tokens), directions)`): For each ON-LSTM layer the share of
            its memory that a token closes, the forward direction first.
    """

    tokens: list[str]
    distances: np.ndarray

    def of(self, layer: int = -1, direction: str = "forward") -> np.ndarray:
        """
        The distances of one layer, counted from 0 (-1 is the top one), in one direction.

        Raises:
            ValueError: There is no such layer, or none that runs in this direction.
        """
        count, directions = len(self.distances), self.distances.shape[2]
        if layer != -1 and not 0 <= check_value("layer", layer, int) < count:
            raise UserError(f"There is no layer {layer}; {count} are ON-LSTM, counted from 0. Remedy: choose one.")
        if direction not in DIRECTIONS[:directions]:
            known = " or ".join(DIRECTIONS[:directions])
            raise UserError(f"There is no direction {direction!r} here. Remedy: choose {known}.")
        return self.distances[layer, :, DIRECTIONS.index(direction)]

    def tree(self, layer: int = -1, direction: str = "forward") -> Tree:
        """
        The binary tree of these distances: a sentence falls into two where the memory is closed most, before a token of
        which the forward direction says so, behind one of which the backward direction does; then so does each part.
        """
        distances = self.of(layer, direction)
        before = distances if direction == "forward" else np.concatenate([[0.0], distances[:-1]])
        return split(list(before), 0)

    def brackets(self, layer: int = -1, direction: str = "forward") -> str:
        """The tree as text, a pair of brackets for each of its nodes."""

        def text(tree: Tree) -> str:
            return self.tokens[tree] if isinstance(tree, int) else f"({text(tree[0])} {text(tree[1])})"

        return text(self.tree(layer, direction))


def split(before: Sequence[float], first: int) -> Tree:
    """The tree over tokens `first, first + 1, ..`, of which `before` says how far each is from the one before it."""
    if len(before) == 1:
        return first
    place = 1 + int(np.argmax(before[1:]))
    return split(before[:place], first), split(before[place:], first + place)


def nodes(tree: Tree) -> Iterator[tuple[float, int, list[float]]]:
    """Every inner node from the leaves up: its place over the tokens, its height, and its children's places."""

    def visit(each: Tree) -> tuple[float, int]:
        if isinstance(each, int):
            return float(each), 0
        children = [visit(child) for child in each]
        place, height = sum(child[0] for child in children) / 2, 1 + max(child[1] for child in children)
        found.append((place, height, [value for child in children for value in child]))
        return place, height

    found: list[tuple[float, int, list[float]]] = []
    visit(tree)
    yield from found


def syntactic_distances(translator: Translator, sentence: str) -> SyntacticDistances:
    """
    Reads a sentence with a model that has ON-LSTM layers.

    Args:
        translator ([`Translator`]): Of an onlstm_transformer.
        sentence (`str`): Plain text.

    Raises:
        ValueError: The model has no such layers, or the sentence is empty.
    """
    if is_blank(sentence):
        raise UserError("The sentence is empty. Remedy: give one with at least a word.")
    model = translator.inspected_model()
    if "onlstm" not in getattr(model.config, "encoder_layer_types", ()):
        raise UserError(
            f"This {model.config.model_type} model has no ON-LSTM layers. Remedy: use an onlstm_transformer with "
            "'onlstm' among its encoder_layer_types."
        )
    source = translator.encode_source(sentence)
    with eval_mode(model):
        encoded = model.get_encoder()(torch.tensor([source], device=model.device), output_attentions=True)
    found = encoded.master_gate_distances
    layers = torch.stack([layer[0] for layer in found]).float().cpu().numpy()
    return SyntacticDistances(token_names(translator.tokenizer, source), layers)


def plot_tree(
    state: SyntacticDistances, path: str | Path, layer: int = -1, direction: str = "forward", title: str | None = None
) -> None:
    """
    Writes the tree over the tokens, and below them their distances as bars.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        layer, direction: As in [`SyntacticDistances.of`].
        title (`str`, *optional*): Above the tree.

    Raises:
        ValueError: There is no such layer or direction, matplotlib is missing, or the file's ending is unknown.
    """
    from .plots import tree_and_bars

    distances = state.of(layer, direction)
    tree_and_bars(path, list(nodes(state.tree(layer, direction))), state.tokens, distances, "distance", title)
