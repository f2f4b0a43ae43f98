"""Shares that recurrences in place of self-attention keep and write at each token."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from ..data.text import tsv
from ..inference.translator import Translator
from . import plots
from .sentences import cells, require, run_pair, token_names


@dataclass
class Forgetting:
    """
    A recurrent layer over a sentence, from left to right in the order of its tokens. `kept` is the share of the memory
    that survives a token, `written` the weight of the token itself (z of minGRU, b of gated DeltaNet, dt of Mamba-2, i'
    of mLSTM relative to the largest so far), each `(heads, tokens)`; minGRU has one head, the mean of its channels.
    """

    name: str  # side, layer and direction
    tokens: list[str]
    kept: np.ndarray
    written: np.ndarray

    @property
    def half_life(self) -> np.ndarray:
        """Number of tokens after which half of a memory is left at the mean rate, for each head."""
        return np.log(0.5) / np.minimum(np.log(np.maximum(self.kept, 1e-30)).mean(axis=1), -1e-9)


def forgetting(translator: Translator, sentence: str, translation: str | None = None) -> list[Forgetting]:
    """Return all recurrent layers for a sentence and a translation (default: the model's own), or raise `UserError`."""
    model = translator.inspected_model()
    gates = {name: part for name, part in model.named_modules() if type(part).__name__ == "Gates"}
    require(gates, translator, "such recurrences", "Use encoder_mixer or decoder_autoregression, e.g. gated_delta.")
    found: dict[str, Any] = {}

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        kept, log_kept, written = inputs
        pair = (log_kept.exp(), written) if kept is None else (part.mean(-1, keepdim=True) for part in (kept, written))
        found[name] = tuple(part[0].T.float().cpu().numpy() for part in pair)  # of one sentence

    hooks = [part.register_forward_hook(partial(record, name)) for name, part in gates.items()]
    try:
        _, source, target = run_pair(translator, sentence, translation)
    finally:
        for hook in hooks:
            hook.remove()
    layers = []
    for name, both in found.items():
        side, index = ("encoder" if ".encoder." in f".{name}" else "decoder"), name.split("layers.")[1].split(".")[0]
        direction = {True: ", backward", False: ""}[".back." in name]
        own, tokenizer = (source, translator.tokenizer) if side == "encoder" else (target, translator.target_tokenizer)
        tokens = token_names(tokenizer, own.ids)
        kept, written = (part[:, ::-1] if direction else part for part in both)
        tokens = tokens if side == "encoder" else ["<start>", *tokens][: kept.shape[1]]  # what the decoder reads
        layers.append(Forgetting(f"{side} {index}{direction}", tokens, kept, written))
    return layers


def plot_forgetting(path: str, layers: list[Forgetting]) -> None:
    """Plot the kept share of each layer as a heat map of heads and tokens."""
    heights, columns = [1.2 + 0.22 * len(layer.kept) for layer in layers], max(len(layer.tokens) for layer in layers)
    width = 2.6 + plots.cell_width(columns) * columns
    with plots.canvas(path, width, sum(heights), "Share of the memory that survives each token") as figure:
        grids = figure.add_gridspec(len(layers), 1, height_ratios=heights)
        for number, layer in enumerate(layers):
            axis = figure.add_subplot(grids[number])
            axis.set_title(layer.name)
            image = axis.imshow(layer.kept, cmap=plots.SEQUENTIAL, vmin=0.0, vmax=1.0, aspect="auto")
            plots.label_cells(axis, layer.tokens, [str(head) for head in range(len(layer.kept))], "token", "head")
            figure.colorbar(image, ax=axis, label="share")


def inspect_forgetting(
    translator: Translator, sentence: str, output: str | None = None, target: str | None = None
) -> str:
    """Return a table of the kept share and the weight of each token, and half-lives, or plot the kept shares."""
    layers = forgetting(translator, sentence, target)
    if output is not None:
        plot_forgetting(output, layers)
        return f"{output}: {len(layers)} recurrent layers\n"
    rows = [["layer", "head", "value", "half-life", "tokens"]]
    for layer in layers:
        rows.append([layer.name, "", "", "", *layer.tokens])
        for head, half_life in enumerate(layer.half_life):
            rows.append([layer.name, str(head), "kept", f"{half_life:.1f}", *cells(layer.kept[head])])
            rows.append([layer.name, str(head), "written", "", *cells(layer.written[head])])
    return tsv(rows)
