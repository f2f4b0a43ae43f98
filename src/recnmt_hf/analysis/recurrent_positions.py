"""Similarity of recurrent positional embeddings by distance, compared with that of position embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.text import tsv
from ..inference.backends.torch_model import shift_right
from ..inference.translator import Translator
from . import plots
from .sentences import cells, require, run_pair, token_names


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


def cosines(vectors: torch.Tensor) -> np.ndarray:
    """Return the cosine of each pair of rows of `(length, d)` as `(length, length)`."""
    rows = torch.nn.functional.normalize(vectors.double(), dim=-1)
    return (rows @ rows.T).cpu().numpy()


@torch.no_grad()
def recurrent_positions(translator: Translator, sentence: str, translation: str | None = None) -> list[SidePositions]:
    """Compute the similarities for each side with a recurrence; the translation defaults to the model's own."""
    model = translator.inspected_model()
    outputs, source, target = run_pair(translator, sentence, translation)
    shifted = shift_right(model, torch.tensor([target.ids]), [target])[0].tolist()
    sides = []
    for side, tokenizer, ids, stack in (
        ("source", translator.tokenizer, source.ids, model.get_encoder()),
        ("target", translator.target_tokenizer, shifted, model.get_decoder()),
    ):
        if vectors := getattr(outputs, f"{side}_recurrent_positions", None):
            tokens = token_names(tokenizer, ids)
            table = stack.embed_input.embed_positions
            absolute = None if table is None else cosines(table(len(tokens)))
            sides.append(SidePositions(side, tokens, cosines(vectors[0][0]), absolute))
    remedy = "Use an rpe_transformer with rpe_encoder or rpe_decoder, an rpe_type, and rpe_dim above 0."
    require(sides, translator, "recurrent positional embeddings", remedy)
    return sides


def similarities_by_distance(path: str | Path, sides: Sequence[SidePositions]) -> None:
    """Plot heat maps of the similarities between the tokens of each side, and curves by distance below them."""
    columns = 1 if all(side.absolute is None for side in sides) else 2
    size = 1.1 + 0.16 * max(len(side.tokens) for side in sides)
    title = "Similarity (cosine) of the positions of tokens"
    with plots.canvas(path, size * columns + 1.0, (size + 2.2) * len(sides), title) as figure:
        grid = figure.add_gridspec(2 * len(sides), columns, height_ratios=[size, 2.0] * len(sides))
        for row, side in enumerate(sides):
            maps = [] if side.absolute is None else [("position", side.absolute)]
            maps.append(("recurrent", side.recurrent))
            axes = [figure.add_subplot(grid[2 * row, column]) for column in range(len(maps))]
            for axis, (kind, matrix) in zip(axes, maps, strict=True):
                image = axis.imshow(matrix, cmap=plots.DIVERGING, vmin=-1.0, vmax=1.0)
                axis.set_title(f"{side.name}: {kind} embeddings")
                plots.label_cells(axis, side.tokens, side.tokens)
            figure.colorbar(image, ax=axes, shrink=0.8, label="cosine")
            axis = figure.add_subplot(grid[2 * row + 1, :])
            axis.set_title(f"{side.name}: mean by distance, and range of the recurrent embeddings")
            if distances := side.by_distance():
                places, absolute, means, least, largest = zip(*distances, strict=True)
                axis.fill_between(places, least, largest, color=plots.MAIN, alpha=0.2, linewidth=0)
                axis.plot(places, means, color=plots.MAIN, label="recurrent embeddings")
                if side.absolute is not None:
                    axis.plot(places, absolute, color=plots.ACCENT, linestyle="--", label="position embeddings")
                axis.legend(loc="lower left", ncols=2)
            axis.set_ylim(-1.05, 1.05)
            plots.count_whole(axis)
            axis.set_xlabel("distance (tokens)")
            axis.set_ylabel("cosine")


def inspect_positions(
    translator: Translator, sentence: str, output: str | None = None, target: str | None = None
) -> str:
    """Return the similarities by distance as a table, or plot them, with all pairs, and return a summary."""
    sides = recurrent_positions(translator, sentence, target)
    if output is None:
        rows = [["side", "distance", "pairs", "position", "recurrent", "least", "largest"]]
        for side in sides:
            for distance, absolute, *recurrent in side.by_distance():
                position = [""] if absolute is None else cells([absolute])
                rows.append([side.name, str(distance), str(len(side.tokens) - distance), *position, *cells(recurrent)])
        return tsv(rows)
    similarities_by_distance(output, sides)
    return f"{output}: {', '.join(f'{len(side.tokens)} {side.name} tokens' for side in sides)}\n"
