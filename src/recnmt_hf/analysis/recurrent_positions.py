"""Similarity of recurrent positional embeddings by distance, compared with that of position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._plain_text import is_blank
from ..inference.backends.torch_model import shift_right
from ..inference.eval_mode import eval_mode
from ..inference.translator import Translator
from ..models.user_errors import UserError
from .token_names import token_names


@dataclass
class SidePositions:
    """
    The positions of one side of a sentence pair.

    Attributes:
        name (`str`): `"source"` or `"target"`.
        tokens (`list[str]`): Input tokens; on the target side shifted to the right, so the first is the start token.
        recurrent (`numpy.ndarray` of shape `(len(tokens), len(tokens))`): Cosine of the recurrent embeddings of each
            pair of tokens.
        absolute (`numpy.ndarray` of the same shape, *optional*): Cosine of the position embeddings added to
            the other channels; `None` if there are none.
    """

    name: str
    tokens: list[str]
    recurrent: np.ndarray
    absolute: np.ndarray | None

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
    for text, name in ((sentence, "sentence"), (translation, "translation")):
        if text is not None and is_blank(text):
            raise UserError(f"The {name} is empty. Remedy: give one with at least a word.")
    model = translator.inspected_model()
    if "source_recurrent_positions" not in getattr(getattr(model, "model", None), "extra_outputs", ()):
        raise UserError(
            f"This {model.config.model_type} model has no recurrent positional embeddings. Remedy: use an "
            "rpe_transformer."
        )
    if translation is None:
        translation = translator([sentence], beams=1)[0].text
    source = translator.encode_source(sentence)
    target = translator.target_ids(translation, "The translation")
    rows = [torch.tensor([each], device=model.device) for each in (source, target)]
    shifted = shift_right(model, rows[1])
    with eval_mode(model):
        found = model(input_ids=rows[0], decoder_input_ids=shifted, output_attentions=True, use_cache=False)
    stacks: list[tuple[str, list[str], Any, Any]] = [
        ("source", token_names(translator.tokenizer, source), found.source_recurrent_positions, model.get_encoder()),
        (
            "target",
            token_names(translator.target_tokenizer, shifted[0].tolist()),
            found.target_recurrent_positions,
            model.get_decoder(),
        ),
    ]
    sides = []
    for name, tokens, recurrent, stack in stacks:
        if recurrent:
            table = stack.embed_input.embed_positions
            absolute = None if table is None else cosines(table(len(tokens)))
            sides.append(SidePositions(name, tokens, cosines(recurrent[0][0]), absolute))
    if not sides:
        raise UserError(
            "This rpe_transformer has a recurrence on neither side. Remedy: use one with rpe_encoder or rpe_decoder, a "
            "rpe_type and rpe_dim above 0."
        )
    return sides


def plot_positions(sides: list[SidePositions], path: str | Path, title: str | None = None) -> None:
    """
    Plot for each side the similarities of position and recurrent embeddings as heat maps, and both by distance, with
    the range of the recurrent ones.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        title (`str`, *optional*): Above the panels.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is unknown.
    """
    from .plots import similarities_by_distance

    panels = []
    for side in sides:
        maps = [] if side.absolute is None else [("position embeddings", side.absolute)]
        panels.append((side.name, side.tokens, [*maps, ("recurrent embeddings", side.recurrent)], side.by_distance()))
    similarities_by_distance(path, panels, title)


def inspect_positions(
    translator: Translator, sentence: str, output: str | None = None, target: str | None = None
) -> str:
    """Return the similarities by distance as a table, or plot them into a file and return a summary."""
    sides = recurrent_positions(translator, sentence, target)
    if output is None:
        return positions_to_tsv(sides)
    plot_positions(sides, output)
    return f"{output}: {', '.join(f'{len(side.tokens)} {side.name} tokens' for side in sides)}\n"
