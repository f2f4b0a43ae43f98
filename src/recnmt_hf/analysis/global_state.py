"""What a GRET makes of a sentence: which words its capsules read, and how far its gate opens for each target token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .._plain_text import is_blank
from .._values import check_value
from ..inference.backends.torch_model import shift_right
from ..inference.eval_mode import eval_mode
from ..inference.translator import Translator
from ..models.user_errors import UserError
from .token_names import token_names


@dataclass
class GlobalState:
    """
    How the vector of a source sentence came about and where it went (Weng et al., 2020, Eqs. 2-11).

    Attributes:
        source (`list[str]`): Tokens of the source.
        target (`list[str]`): Tokens of the translation, the end included; the gate of each is that of the state from
            which it is predicted.
        routing (`numpy.ndarray` of shape `(layers, num_capsules, len(source))`, *optional*): What each capsule took of
            each word in the last iteration. `None` for a model without capsules.
        pooling (`numpy.ndarray` of shape `(layers, num_capsules)`, *optional*): The weight of each capsule; `None`
            where the pooling is not attentive.
        gates (`numpy.ndarray` of shape `(len(target),)`, *optional*): Mean over the channels of the gate. `None` for a
            model without one.
    """

    source: list[str]
    target: list[str]
    routing: np.ndarray | None
    pooling: np.ndarray | None
    gates: np.ndarray | None

    def layer(self, layer: int = -1) -> int:
        """A layer that is summed up, counted from 0; -1 is the top one. Raises `ValueError` if there is none."""
        count = 0 if self.routing is None else len(self.routing)
        if layer != -1 and not 0 <= check_value("layer", layer, int) < count:
            raise UserError(f"There is no layer {layer}; capsules sum up {count}, counted from 0. Remedy: choose one.")
        return count - 1 if layer == -1 else layer

    def to_tsv(self, layer: int = -1) -> str:
        """A table of a layer's capsules (weight, and share of each word), and one of the gates."""
        lines, number = [], self.layer(layer)
        if self.routing is not None:
            lines.append("\t".join(["capsule", "weight", *self.source]))
            for capsule, row in enumerate(self.routing[number], start=1):
                weight = "" if self.pooling is None else f"{self.pooling[number][capsule - 1]:.6f}"
                lines.append("\t".join([str(capsule), weight, *(f"{share:.6f}" for share in row)]))
        if self.gates is not None:
            lines += ["\t".join(["target", "gate"])]
            lines += [f"{token}\t{gate:.6f}" for token, gate in zip(self.target, self.gates, strict=True)]
        return "\n".join(lines) + "\n"


def global_state(translator: Translator, sentence: str, translation: str | None = None) -> GlobalState:
    """
    Reads a sentence with a GRET, and a translation of it.

    Args:
        translator ([`Translator`]): Of a GRET.
        sentence (`str`): Plain text.
        translation (`str`, *optional*): A translation; `None`: the model's own.

    Raises:
        ValueError: The model has no global representation, or a text is empty.
    """
    for text, name in ((sentence, "sentence"), (translation, "translation")):
        if text is not None and is_blank(text):
            raise UserError(f"The {name} is empty. Remedy: give one with at least a word.")
    model = translator.inspected_model()
    if not getattr(model.config, "use_global_state", False):
        raise UserError(
            f"This {model.config.model_type} model makes no global representation. Remedy: use a gret with "
            "use_global_state=true."
        )
    if not (model.config.global_capsule or model.config.global_gate):
        raise UserError("This gret has neither capsules nor a gate, so there is nothing to show of it.")
    if translation is None:
        translation = translator([sentence], beams=1)[0].text
    source = translator.encode_source(sentence)
    target = translator.target_ids(translation, "The translation")
    rows = [torch.tensor([each], device=model.device) for each in (source, target)]
    with eval_mode(model):
        found = model(
            input_ids=rows[0],
            decoder_input_ids=shift_right(model, rows[1]),
            output_attentions=True,
            use_cache=False,
        )

    def stacked(layers: tuple[torch.Tensor, ...] | None) -> np.ndarray | None:
        return None if not layers else torch.stack([layer[0] for layer in layers]).float().cpu().numpy()

    gates = None if not found.global_gates else found.global_gates[0][0].float().mean(dim=-1).cpu().numpy()
    return GlobalState(
        token_names(translator.tokenizer, source),
        token_names(translator.target_tokenizer, target),
        stacked(found.routing_weights),
        stacked(found.pooling_weights),
        gates,
    )


def plot_global_state(state: GlobalState, path: str | Path, layer: int = -1, title: str | None = None) -> None:
    """
    Writes a layer's capsules by source words as a heat map, and the gates by target tokens as bars.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        layer (`int`, *optional*, defaults to -1): As in [`GlobalState.layer`].
        title (`str`, *optional*): Above the panels.

    Raises:
        ValueError: There is no such layer, matplotlib is missing, or the file's ending is unknown.
    """
    from .plots import map_and_bars

    number = state.layer(layer)
    weights = None if state.routing is None else state.routing[number]
    pooled = None if state.pooling is None else state.pooling[number]
    rows = [] if weights is None else [str(k) for k in range(1, len(weights) + 1)]
    if pooled is not None:
        rows = [f"{name} ({weight:.2f})" for name, weight in zip(rows, pooled, strict=True)]
    map_and_bars(
        path,
        (weights, state.source, rows, "capsule (weight)" if pooled is not None else "capsule"),
        (state.gates, state.target, "gate"),
        title,
    )
