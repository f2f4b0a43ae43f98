"""Syntactic distances between words by the master gates of an ON-LSTM, and the binary tree that they define."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ..data.text import tsv
from ..inference.translator import Translator
from ..options import check_value
from . import plots
from .sentences import DIRECTIONS, cells, check_index, require, run_encoder


Tree = int | tuple[Any, Any]  # a leaf is the index of a token; any other node is a pair of trees


@dataclass
class SyntacticDistances:
    """The master-gate distances of a sentence (Shen et al., 2019, section 5.2)."""

    tokens: list[str]  # of the source
    # (layers, len(tokens), directions): share of the memory that each token closes, the forward direction first
    distances: np.ndarray

    def of(self, layer: int = -1, direction: str = "forward") -> np.ndarray:
        """Return the distances of a layer (-1: the top one) in a direction; `UserError` if one does not exist."""
        check_value("direction", direction, Literal[DIRECTIONS[: self.distances.shape[2]]])
        if layer != -1:
            check_index("layer", layer, len(self.distances))
        return self.distances[layer, :, DIRECTIONS.index(direction)]

    def tree(self, layer: int = -1, direction: str = "forward") -> Tree:
        """
        Return the binary tree: a sentence is split where the largest share of the memory is closed (before the token in
        the forward direction, after it in the backward direction), then each part in the same way.
        """
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
    """Encode a sentence with an onlstm_transformer and return the distances; `UserError` without ON-LSTM layers."""
    has = "onlstm" in getattr(translator.inspected_model().config, "encoder_layer_types", ())
    require(has, translator, "ON-LSTM layers", 'Use one with "onlstm" in encoder_layer_types.')
    encoded, tokens = run_encoder(translator, sentence)
    layers = torch.stack([layer[0] for layer in encoded.master_gate_distances]).float().cpu().numpy()
    return SyntacticDistances(tokens, layers)


def inspect_tree(
    translator: Translator, sentence: str, output: str | None = None, layer: int = -1, direction: str = "forward"
) -> str:
    """Return the tree as brackets with a table of the distances, or plot both and return a summary."""
    state = syntactic_distances(translator, sentence)
    tokens, distances = state.tokens, state.of(layer, direction)
    if output is None:
        rows = zip(tokens, cells(distances), strict=True)
        return f"{state.brackets(layer, direction)}\n" + tsv([["token", "distance"], *rows])
    place = "top layer" if layer == -1 else f"layer {layer}"
    inner = nodes(state.tree(layer, direction))
    top = max((height for _, height, _ in inner), default=1)
    width = 1.6 + max(0.3, plots.cell_width(len(tokens))) * len(tokens)
    title = f"Tree and distances by the master gates, {place}, {direction}"
    with plots.canvas(output, width, 2.4 + 0.25 * top, title) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1 + 0.3 * top, 1.6])
        for middle, height, children in inner:
            for child, own in zip(children[::2], children[1::2], strict=True):
                above.plot([middle, child], [height, own], color=plots.MAIN)
        above.set_axis_off()
        plots.add_bars(below, distances, tokens, "share of memory\nclosed", "source token")
    return f"{output}: a tree over {len(tokens)} tokens\n"
