"""Syntactic distances between words by the master gates of an ON-LSTM, and the binary tree that they define."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..inference.eval_mode import eval_mode
from ..inference.translator import Translator
from .sentences import check_index, check_not_blank, token_names


# A leaf is the index of a token; any other node is a pair of trees.
Tree = int | tuple[Any, Any]
DIRECTIONS = ("forward", "backward")


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
            raise UserError("inspect.no_direction", field="direction", value=direction, names=" or ".join(names))
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


def nodes(tree: Tree) -> Iterator[tuple[float, int, list[float]]]:
    """Yield every inner node, bottom up: position over the tokens, height, and both of each child."""
    inner_nodes: list[tuple[float, int, list[float]]] = []

    def visit(node: Tree) -> tuple[float, int]:
        if isinstance(node, int):
            return float(node), 0
        children = [visit(child) for child in node]
        place, height = sum(child[0] for child in children) / 2, 1 + max(child[1] for child in children)
        inner_nodes.append((place, height, [value for child in children for value in child]))
        return place, height

    visit(tree)
    yield from inner_nodes


def syntactic_distances(translator: Translator, sentence: str) -> SyntacticDistances:
    """
    Encode a sentence with a model that has ON-LSTM layers and return the distances.

    Args:
        translator ([`Translator`]): Holds an onlstm_transformer.
        sentence (`str`): Plain text.

    Raises:
        ValueError: The model has no such layers, or the sentence is empty.
    """
    check_not_blank("sentence", sentence)
    model = translator.inspected_model()
    if "onlstm" not in getattr(model.config, "encoder_layer_types", ()):
        raise UserError("inspect.no_onlstm", value=model.config.model_type)
    source = translator.encode_source(sentence)
    with eval_mode(model):
        encoded = model.get_encoder()(torch.tensor([source], device=model.device), output_attentions=True)
    layers = torch.stack([layer[0] for layer in encoded.master_gate_distances]).float().cpu().numpy()
    return SyntacticDistances(token_names(translator.tokenizer, source), layers)


def inspect_tree(
    translator: Translator, sentence: str, output: str | None = None, layer: int = -1, direction: str = "forward"
) -> str:
    """Return the tree as brackets with a table of the distances, or plot both and return a summary."""
    from .plots import tree_and_bars

    state = syntactic_distances(translator, sentence)
    distances = state.of(layer, direction)
    if output is not None:
        tree_and_bars(output, list(nodes(state.tree(layer, direction))), state.tokens, distances, "distance")
        return f"{output}: a tree over {len(state.tokens)} tokens\n"
    table = "".join(f"{token}\t{value:.6f}\n" for token, value in zip(state.tokens, distances, strict=True))
    return f"{state.brackets(layer, direction)}\ntoken\tdistance\n{table}"
