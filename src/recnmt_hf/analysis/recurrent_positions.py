"""What recurrent positional embeddings say of a sentence that position embeddings do not: similarity by distance."""

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
        tokens (`list[str]`): What the side reads; on the target side it is what stands before each token of the
            translation, so the first one is its start.
        recurrent (`numpy.ndarray` of shape `(len(tokens), len(tokens))`): Cosines of the recurrent embeddings of each
            two tokens.
        absolute (`numpy.ndarray` of the same shape, *optional*): Cosines of the position embeddings that the other
            channels get; `None` where they get none.
    """

    name: str
    tokens: list[str]
    recurrent: np.ndarray
    absolute: np.ndarray | None

    def by_distance(self) -> list[tuple[int, float | None, float, float, float]]:
        """
        For each distance between two tokens the mean cosine of their position embeddings, and the mean, least and
        largest cosine of their recurrent embeddings. Position embeddings that know no words have one cosine for all
        pairs; what the recurrence adds is the range.
        """
        rows = []
        for distance in range(1, len(self.tokens)):
            recurrent = np.diagonal(self.recurrent, distance)
            absolute = None if self.absolute is None else float(np.diagonal(self.absolute, distance).mean())
            least, largest = float(recurrent.min()), float(recurrent.max())
            rows.append((distance, absolute, float(recurrent.mean()), least, largest))
        return rows


def positions_to_tsv(sides: list[SidePositions]) -> str:
    """A row for each side and distance: similarity of position embeddings, and of recurrent ones with its range."""
    lines = ["\t".join(["side", "distance", "pairs", "position", "recurrent", "least", "largest"])]
    for side in sides:
        for distance, absolute, *recurrent in side.by_distance():
            cells = ["" if absolute is None else f"{absolute:.6f}", *(f"{value:.6f}" for value in recurrent)]
            lines.append("\t".join([side.name, str(distance), str(len(side.tokens) - distance), *cells]))
    return "\n".join(lines) + "\n"


def cosines(vectors: torch.Tensor) -> np.ndarray:
    """The cosine of each two rows of `(length, d)`, `(length, length)`."""
    rows = torch.nn.functional.normalize(vectors.double(), dim=-1)
    return (rows @ rows.T).cpu().numpy()


@torch.no_grad()
def recurrent_positions(translator: Translator, sentence: str, translation: str | None = None) -> list[SidePositions]:
    """
    Reads a sentence, and a translation of it, with a model that has recurrent positional embeddings (Chen et al., 2019,
    Eq. 6).

    Args:
        translator ([`Translator`]): Of an rpe_transformer.
        sentence (`str`): Plain text.
        translation (`str`, *optional*): A translation; `None`: the model's own.

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
    sides: list[tuple[str, list[str], Any, Any]] = [
        ("source", token_names(translator.tokenizer, source), found.source_recurrent_positions, model.get_encoder()),
        (
            "target",
            token_names(translator.target_tokenizer, shifted[0].tolist()),
            found.target_recurrent_positions,
            model.get_decoder(),
        ),
    ]
    shown = []
    for name, tokens, recurrent, stack in sides:
        if recurrent:
            table = stack.embed_input.embed_positions
            absolute = None if table is None else cosines(table(len(tokens)))
            shown.append(SidePositions(name, tokens, cosines(recurrent[0][0]), absolute))
    if not shown:
        raise UserError(
            "This rpe_transformer has a recurrence on neither side (rpe_type, rpe_dim, rpe_encoder, rpe_decoder), so "
            "there is nothing to show of it."
        )
    return shown


def plot_positions(sides: list[SidePositions], path: str | Path, title: str | None = None) -> None:
    """
    Writes for each side the similarities of its position embeddings and of its recurrent ones as heat maps, and both by
    distance, with the range of the recurrent ones.

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
