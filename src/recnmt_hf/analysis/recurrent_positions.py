"""Similarity of recurrent positional embeddings by distance, compared with that of position embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from ..inference.backends.torch_model import shift_right
from ..inference.translator import Translator
from .sentences import check_not_blank, run_pair, token_names


@dataclass
class SidePositions:
    """The positions of one side of a sentence pair."""

    name: str  # "source" or "target"
    tokens: list[str]  # of the input; on the target side shifted to the right, so the first is the start token
    recurrent: np.ndarray  # (len(tokens), len(tokens)): cosines of recurrent embeddings
    absolute: np.ndarray | None  # the same of position embeddings added to the other channels, if there are any

    def by_distance(self) -> list[tuple[int, float | None, float, float, float]]:
        """
        Return for each distance between two tokens the mean cosine of their position embeddings, and the mean, least
        and largest cosine of their recurrent embeddings. Position embeddings do not depend on words, so all pairs at
        one distance have the same cosine; with a recurrence they differ.
        """
        rows = []
        for distance in range(1, len(self.tokens)):
            recurrent = np.diagonal(self.recurrent, distance)
            absolute = None if self.absolute is None else float(np.diagonal(self.absolute, distance).mean())
            least, largest = float(recurrent.min()), float(recurrent.max())
            rows.append((distance, absolute, float(recurrent.mean()), least, largest))
        return rows


def positions_to_tsv(sides: list[SidePositions]) -> str:
    """Return a row per side and distance: cosine of position embeddings, and of recurrent ones with its range."""
    lines = ["\t".join(["side", "distance", "pairs", "position", "recurrent", "least", "largest"])]
    for side in sides:
        for distance, absolute, *recurrent in side.by_distance():
            cells = ["" if absolute is None else f"{absolute:.6f}", *(f"{value:.6f}" for value in recurrent)]
            lines.append("\t".join([side.name, str(distance), str(len(side.tokens) - distance), *cells]))
    return "\n".join(lines) + "\n"


def cosines(vectors: torch.Tensor) -> np.ndarray:
    """Return the cosine of each pair of rows of `(length, d)` as `(length, length)`."""
    rows = torch.nn.functional.normalize(vectors.double(), dim=-1)
    return (rows @ rows.T).cpu().numpy()


@torch.no_grad()
def recurrent_positions(translator: Translator, sentence: str, translation: str | None = None) -> list[SidePositions]:
    """
    Compute the similarities for a sentence and its translation (Chen et al., 2019, Eq. 6).

    Args:
        translator ([`Translator`]): Holds an rpe_transformer.
        sentence (`str`): Plain text.
        translation (`str`, *optional*): By default the model's own.

    Returns:
        [`SidePositions`] of the sides that have a recurrence, source first.

    Raises:
        ValueError: The model has no such embeddings, or a text is empty.
    """
    check_not_blank("sentence", sentence)
    if translation is not None:
        check_not_blank("translation", translation)
    model = translator.inspected_model()
    if "source_recurrent_positions" not in getattr(getattr(model, "model", None), "extra_outputs", ()):
        raise UserError("inspect.no_recurrent_positions", value=model.config.model_type)
    outputs, source, target = run_pair(translator, sentence, translation)
    names = token_names(translator.tokenizer, source)
    shifted = shift_right(model, torch.tensor([target]))[0].tolist()
    target_names = token_names(translator.target_tokenizer, shifted)
    sides = []
    for side, tokens, vectors, stack in (
        ("source", names, outputs.source_recurrent_positions, model.get_encoder()),
        ("target", target_names, outputs.target_recurrent_positions, model.get_decoder()),
    ):
        if vectors:
            table = stack.embed_input.embed_positions
            absolute = None if table is None else cosines(table(len(tokens)))
            sides.append(SidePositions(side, tokens, cosines(vectors[0][0]), absolute))
    if not sides:
        raise UserError("inspect.no_recurrent_positions", value=model.config.model_type)
    return sides


def inspect_positions(
    translator: Translator, sentence: str, output: str | None = None, target: str | None = None
) -> str:
    """
    Return the similarities by distance as a table, or plot them by distance and as heat maps of all pairs and return a
    summary.
    """
    from .plots import similarities_by_distance

    sides = recurrent_positions(translator, sentence, target)
    if output is None:
        return positions_to_tsv(sides)
    panels = []
    for side in sides:
        maps = [] if side.absolute is None else [("position embeddings", side.absolute)]
        panels.append((side.name, side.tokens, [*maps, ("recurrent embeddings", side.recurrent)], side.by_distance()))
    similarities_by_distance(output, panels)
    return f"{output}: {', '.join(f'{len(side.tokens)} {side.name} tokens' for side in sides)}\n"
