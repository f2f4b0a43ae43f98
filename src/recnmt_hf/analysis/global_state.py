"""Global state of a GRET: routing weights of each capsule, and the gate of each target token."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.text import tsv
from ..inference.translator import Translator
from . import plots
from .sentences import cells, check_index, require, run_pair, token_names


@dataclass
class GlobalState:
    """Routing, pooling and gates of the global representation of a sentence (Weng et al., 2020, Eqs. 2-11)."""

    source: list[str]  # tokens
    target: list[str]  # tokens including the end token, each with the gate of the state that predicts it
    # (layers, num_capsules, len(source)): share of each word in each capsule at last; None without capsules
    routing: np.ndarray | None
    pooling: np.ndarray | None  # (layers, num_capsules): weight of each capsule; None if the pooling is not attentive
    gates: np.ndarray | None  # (len(target),): mean over the channels of the gate; None without gate


def global_state(translator: Translator, sentence: str, translation: str | None = None) -> GlobalState:
    """Compute the global state of a sentence and a translation (default: the model's own), or raise `UserError`."""
    config = translator.inspected_model().config
    has = getattr(config, "use_global_state", False) and (config.global_capsule or config.global_gate)
    remedy = "Use a gret with use_global_state=true and global_capsule or global_gate."
    require(has, translator, "capsules and no gate of a global state", remedy)
    outputs, source, target = run_pair(translator, sentence, translation)

    def stacked(layers: tuple[torch.Tensor, ...] | None) -> np.ndarray | None:
        return None if not layers else torch.stack([layer[0] for layer in layers]).float().cpu().numpy()

    gates = None if not outputs.global_gates else outputs.global_gates[0][0].float().mean(dim=-1).cpu().numpy()
    return GlobalState(
        token_names(translator.tokenizer, source.ids),
        token_names(translator.target_tokenizer, target.ids),
        stacked(outputs.routing_weights),
        stacked(outputs.pooling_weights),
        gates,
    )


def capsules_and_gates(path: str | Path, state: GlobalState, layer: int) -> None:
    """Plot the capsules of a layer as a heat map above the gates as bars; a part that the model lacks is omitted."""
    shares = None if state.routing is None else state.routing[layer]
    sizes = ([1.8 + 0.22 * len(shares)] if shares is not None else []) + ([2.7] if state.gates is not None else [])
    columns = max(len(state.source), len(state.target))
    width = 2.6 + plots.cell_width(columns) * columns
    with plots.canvas(path, width, sum(sizes), "Global state of the source") as figure:
        grids = figure.add_gridspec(len(sizes), 1, height_ratios=sizes)
        if shares is not None:
            rows, row_name = [str(capsule) for capsule in range(1, len(shares) + 1)], "capsule"
            if state.pooling is not None:
                rows = [f"{name} ({weight:.2f})" for name, weight in zip(rows, state.pooling[layer], strict=True)]
                row_name = "capsule (weight)"
            axis = figure.add_subplot(grids[0])
            axis.set_title(f"Share of each source token in the capsules, layer {layer}")
            image = axis.imshow(shares, cmap=plots.SEQUENTIAL, vmin=0.0, aspect="auto")
            plots.label_cells(axis, state.source, rows, "source token", row_name)
            figure.colorbar(image, ax=axis, label="share of the token")
        if state.gates is not None:
            axis = figure.add_subplot(grids[len(sizes) - 1])
            axis.set_title("Gate: how much of the global state each target token reads")
            plots.add_bars(axis, state.gates, state.target, "gate (mean of channels)", "target token")


def inspect_global_state(
    translator: Translator, sentence: str, output: str | None = None, target: str | None = None, layer: int = -1
) -> str:
    """
    Return tables of a layer's capsules (weight and share of each token) and of the gates, or plot both and return a
    summary. -1 is the top layer.
    """
    state = global_state(translator, sentence, target)
    routing = np.zeros((0, 0, 0)) if state.routing is None else state.routing
    layer = len(routing) - 1 if layer == -1 else check_index("layer", layer, len(routing))
    if output is not None:
        capsules_and_gates(output, state, layer)
        sizes = f"{routing.shape[1]} capsules over {len(state.source)} tokens"
        return f"{output}: {sizes}, {len(state.target)} target tokens\n"
    rows = [["capsule", "weight", *state.source]] if len(routing) else []
    for capsule, shares in enumerate(routing[layer] if len(routing) else ()):
        weights = [""] if state.pooling is None else cells([state.pooling[layer][capsule]])
        rows.append([str(capsule + 1), *weights, *cells(shares)])
    if state.gates is not None:
        rows += [["target", "gate"], *map(list, zip(state.target, cells(state.gates), strict=True))]
    return tsv(rows)
