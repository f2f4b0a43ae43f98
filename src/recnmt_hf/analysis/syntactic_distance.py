"""Syntactic distances between words by the master gates of an ON-LSTM, and the binary tree that they define."""

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


# A leaf is the index of a token; any other node is a pair of trees.
Tree = int | tuple[Any, Any]
DIRECTIONS = ("forward", "backward")


@dataclass
class SyntacticDistances:
    """
    The master-gate distances of a sentence (Shen et al., 2019, section 5.2).

    Attributes:
        tokens (`list[str]`): Source tokens.
        distances (`numpy.ndarray` of shape `(layers, len(tokens), directions)`): Share of the memory that each token
            closes in each ON-LSTM layer, the forward direction first.
    """

    tokens: list[str]
    distances: np.ndarray

    def of(self, layer: int = -1, direction: str = "forward") -> np.ndarray:
        """
        Return the distances of one layer, counted from 0 (-1: the top one), in one direction.

        Raises:
            UserError: The layer or the direction does not exist.
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
        Return the binary tree: a sentence is split where the largest share of the memory is closed (before the token in
        the forward direction, after it in the backward direction), then each part in the same way.
        """
        distances = self.of(layer, direction)
        before = distances if direction == "forward" else np.concatenate([[0.0], distances[:-1]])
        return split(list(before), 0)

    def brackets(self, layer: int = -1, direction: str = "forward") -> str:
        """Return the tree as text with one pair of brackets per node."""

        def text(tree: Tree) -> str:
            return self.tokens[tree] if isinstance(tree, int) else f"({text(tree[0])} {text(tree[1])})"

        return text(self.tree(layer, direction))


def split(before: Sequence[float], first: int) -> Tree:
    """Return the tree over tokens `first, first + 1, ..`; `before` holds the distance of each from its predecessor."""
    if len(before) == 1:
        return first
    place = 1 + int(np.argmax(before[1:]))
    return split(before[:place], first), split(before[place:], first + place)


def nodes(tree: Tree) -> Iterator[tuple[float, int, list[float]]]:
    """Yield every inner node, bottom up: its position over the tokens, its height, and its children's positions."""

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
    Encode a sentence with a model that has ON-LSTM layers and return the distances.

    Args:
        translator ([`Translator`]): Holds an onlstm_transformer.
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
    Plot the tree over the tokens, and their distances as bars below.

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


def inspect_tree(
    translator: Translator, sentence: str, output: str | None = None, layer: int = -1, direction: str = "forward"
) -> str:
    """Return the tree as brackets with a table of the distances, or plot both into a file and return a summary."""
    state = syntactic_distances(translator, sentence)
    if output is not None:
        plot_tree(state, output, layer, direction)
        return f"{output}: a tree over {len(state.tokens)} tokens\n"
    rows = zip(state.tokens, state.of(layer, direction), strict=True)
    table = "".join(f"{token}\t{distance:.6f}\n" for token, distance in rows)
    return f"{state.brackets(layer, direction)}\ntoken\tdistance\n{table}"
