"""Global state of a GRET: the words that each capsule reads, and the gate of each target token."""

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
    Routing, pooling and gates of the global representation of a sentence (Weng et al., 2020, Eqs. 2-11).

    Attributes:
        source (`list[str]`): Tokens of the source.
        target (`list[str]`): Tokens of the translation, including the end token. Each has the gate of the state that
            predicts it.
        routing (`numpy.ndarray` of shape `(layers, num_capsules, len(source))`, *optional*): Share of each word in
            each capsule after the last iteration. `None` for a model without capsules.
        pooling (`numpy.ndarray` of shape `(layers, num_capsules)`, *optional*): Weight of each capsule; `None`
            if the pooling is not attentive.
        gates (`numpy.ndarray` of shape `(len(target),)`, *optional*): Mean over the channels of the gate. `None` for a
            model without one.
    """

    source: list[str]
    target: list[str]
    routing: np.ndarray | None
    pooling: np.ndarray | None
    gates: np.ndarray | None

    def layer(self, layer: int = -1) -> int:
        """Return the index of a layer, counted from 0 (-1: the top one). Raises `UserError` if it does not exist."""
        count = 0 if self.routing is None else len(self.routing)
        if layer != -1 and not 0 <= check_value("layer", layer, int) < count:
            raise UserError(f"There is no layer {layer}; {count} have capsules, counted from 0. Remedy: choose one.")
        return count - 1 if layer == -1 else layer

    def to_tsv(self, layer: int = -1) -> str:
        """Return a table of a layer's capsules (weight and share of each word) and one of the gates."""
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
    Compute the global state of a sentence and its translation with a GRET.

    Args:
        translator ([`Translator`]): Holds a GRET.
        sentence (`str`): Plain text.
        translation (`str`, *optional*): By default the model's own.

    Raises:
        ValueError: The model has no global representation, or a text is empty.
    """
    for text, name in ((sentence, "sentence"), (translation, "translation")):
        if text is not None and is_blank(text):
            raise UserError(f"The {name} is empty. Remedy: give one with at least a word.")
    model = translator.inspected_model()
    if not getattr(model.config, "use_global_state", False):
        raise UserError(
            f"This {model.config.model_type} model has no global representation. Remedy: use a gret with "
            "use_global_state=true."
        )
    if not (model.config.global_capsule or model.config.global_gate):
        raise UserError("This gret has neither capsules nor a gate. Remedy: use one that has.")
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
    Plot the capsules of a layer over the source words as a heat map, and the gates of the target tokens as bars.

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


def inspect_global_state(
    translator: Translator, sentence: str, output: str | None = None, target: str | None = None, layer: int = -1
) -> str:
    """Return capsules and gates as tables, or plot them into a file and return a summary."""
    state = global_state(translator, sentence, target)
    if output is None:
        return state.to_tsv(layer)
    plot_global_state(state, output, layer)
    capsules = 0 if state.routing is None else state.routing.shape[1]
    return f"{output}: {capsules} capsules over {len(state.source)} tokens, {len(state.target)} target tokens\n"
