"""Learning curves of training runs: loss and validation scores by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingFileError, UserError
from ..training.checkpoints import newest_checkpoint, state_of
from ..training.evidence import EVIDENCE, Evidence, curve_of
from ..training.output_folder import BASELINE, FINAL
from .plots import QUANTITIES, line_panels


Curve = Sequence[Mapping[str, Any]]


def curve_of_run(path: str | Path) -> Curve:
    """
    Return the curve of a run from the log of its newest checkpoint, or from the evidence of its finished model.

    Raises:
        UserError: The folder has no run, or the run has not logged anything yet.
    """
    path = Path(path)
    if not path.is_dir():
        raise MissingFileError("file.missing_folder", field=str(path))
    newest = newest_checkpoint(path) or newest_checkpoint(path / BASELINE)
    curve: Curve = curve_of(state_of(newest).get("log_history", [])) if newest is not None else []
    for folder in (path, path / FINAL):
        if not curve and (folder / EVIDENCE).is_file():
            curve = Evidence.load(folder).curve
    if not curve:
        raise UserError("curve.missing", field=str(path))
    return curve


def plot_curves(runs: Mapping[str, Curve], output: str | Path) -> None:
    """Plot a panel for each logged quantity (training loss, validation loss, BLEU, ...), with a line for each run."""
    names = dict.fromkeys(name for curve in runs.values() for row in curve for name in row)
    panels, axes = {}, {}
    for name in (name for name in names if name not in ("step", "learning_rate", "eval_perplexity")):
        lines = {run: [(row["step"], row[name]) for row in curve if name in row] for run, curve in runs.items()}
        kind, quantity = ("validation", "eval_") if name.startswith("eval_") else ("training", "mean_")
        metric = name.removeprefix(quantity)
        title = f"{kind.capitalize()}: {metric if metric not in QUANTITIES else QUANTITIES[metric].partition(' (')[0]}"
        panels[title] = {run: points for run, points in lines.items() if points}
        axes[title] = QUANTITIES.get(metric, metric)
    line_panels(output, panels, "training step", title="Learning curves", names=axes)
