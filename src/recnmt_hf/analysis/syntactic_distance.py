"""Syntactic distances between words by the master gates of an ON-LSTM, and the binary tree that they define."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.text import tsv
from ..errors import UserError, short_repr
from ..inference.translator import Translator
from .sentences import DIRECTIONS, check_index, run_encoder


# Maximum number of tokens of a tree, which may have as many levels.
MOST_TOKENS = 500
# A leaf is the index of a token; any other node is a pair of trees.
Tree = int | tuple[Any, Any]


@dataclass
class SyntacticDistances:
    """The master-gate distances of a sentence (Shen et al., 2019, section 5.2)."""

    tokens: list[str]  # of the source
    # (layers, len(tokens), directions): share of the memory that each token closes, the forward direction first
    distances: np.ndarray

    def of(self, layer: int = -1, direction: str = "forward") -> np.ndarray:
        """
        Return the distances of one layer, counted from 0 (-1: the top one), in one direction.

        Raises:
            UserError: The layer or the direction does not exist.
        """
        names = DIRECTIONS[: self.distances.shape[2]]
        if layer != -1:
            check_index("layer", layer, len(self.distances))
        if direction not in names:
            raise UserError(
                f"direction={short_repr(direction)} does not exist in this model. Choose {' or '.join(names)}.",
                field="direction",
            )
        return self.distances[layer, :, DIRECTIONS.index(direction)]

    def tree(self, layer: int = -1, direction: str = "forward") -> Tree:
        """
        Return the binary tree: a sentence is split where the largest share of the memory is closed (before the token in
        the forward direction, after it in the backward direction), then each part in the same way. `UserError` for a
        sentence of more than 500 tokens.
        """
        if len(self.tokens) > MOST_TOKENS:
            raise UserError(f"The sentence has {len(self.tokens)} tokens; a tree can have at most {MOST_TOKENS}.")
        distances = self.of(layer, direction)
        return split(list(distances if direction == "forward" else np.concatenate([[0.0], distances[:-1]])), 0)

    def brackets(self, layer: int = -1, direction: str = "forward") -> str:
        """Return the tree as text with one pair of brackets per node."""

        def text(tree: Tree) -> str:
            return self.tokens[tree] if isinstance(tree, int) else f"({text(tree[0])} {text(tree[1])})"

        return text(self.tree(layer, direction))


def split(distances: Sequence[float], first: int) -> Tree:
    """Return the tree over tokens `first, first + 1, ..` from the distance of each to its predecessor."""
    if len(distances) == 1:
        return first
    place = 1 + int(np.argmax(distances[1:]))
    return split(distances[:place], first), split(distances[place:], first + place)


def nodes(tree: Tree) -> list[tuple[float, int, list[float]]]:
    """Return every inner node, bottom up: position over the tokens, height, and both of each child."""
    if isinstance(tree, int):
        return []
    below = [nodes(child) for child in tree]
    children = [part[-1][:2] if part else (float(child), 0) for child, part in zip(tree, below, strict=True)]
    place, height = sum(child[0] for child in children) / 2, 1 + max(child[1] for child in children)
    return [*below[0], *below[1], (place, height, [value for child in children for value in child])]


def syntactic_distances(translator: Translator, sentence: str) -> SyntacticDistances:
    """
    Encode a sentence with an onlstm_transformer and return the distances.

    Raises:
        ValueError: The model has no ON-LSTM layers, or the sentence is empty.
    """
    config = translator.inspected_model().config
    if "onlstm" not in getattr(config, "encoder_layer_types", ()):
        raise UserError(
            f'The {short_repr(config.model_type)} model has no ON-LSTM layers. Use one with "onlstm" in '
            "encoder_layer_types."
        )
    encoded, tokens = run_encoder(translator, sentence)
    layers = torch.stack([layer[0] for layer in encoded.master_gate_distances]).float().cpu().numpy()
    return SyntacticDistances(tokens, layers)


def inspect_tree(
    translator: Translator, sentence: str, output: str | None = None, layer: int = -1, direction: str = "forward"
) -> str:
    """Return the tree as brackets with a table of the distances, or plot both and return a summary."""
    from .plots import tree_and_bars

    state = syntactic_distances(translator, sentence)
    distances = state.of(layer, direction)
    if output is not None:
        place = "top layer" if layer == -1 else f"layer {layer}"
        title = f"Tree and distances by the master gates, {place}, {direction}"
        tree_and_bars(output, nodes(state.tree(layer, direction)), state.tokens, distances, title)
        return f"{output}: a tree over {len(state.tokens)} tokens\n"
    rows = [[token, f"{value:.6f}"] for token, value in zip(state.tokens, distances, strict=True)]
    return f"{state.brackets(layer, direction)}\n" + tsv([["token", "distance"], *rows])
