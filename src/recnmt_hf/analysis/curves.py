"""Learning curves of training runs: loss and validation scores by step."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..training.checkpoints import BASELINE, RECIPE, mapping_in, newest_checkpoint, state_of
from ..training.evidence import Evidence, curve_of, without_private
from .plots import QUANTITIES, line_panels


Curve = Sequence[Mapping[str, Any]]


def curve_of_run(path: str | Path) -> Curve:
    """Return the curve of a run from its newest checkpoint or its finished model; `UserError` if it has neither."""
    path = Path(path)
    newest = newest_checkpoint(path) or newest_checkpoint(path / BASELINE)
    curve: Curve = curve_of(state_of(newest).get("log_history", [])) if newest is not None else []
    curve = curve or Evidence.load(path).curve
    if not curve:
        raise UserError(f"{path} has no complete checkpoint or model with a log. Pass the folder of a run.", field=path)
    return curve


def validation_of_run(path: str | Path) -> Any:
    """Return the validation corpora in the recipe of a run or a model; `None` if they are unknown."""
    data = (mapping_in(Path(path) / RECIPE) or Evidence.load(path).recipe).get("data")
    return without_private(data.get("validation")) if isinstance(data, dict) else None


def plot_curves(runs: Mapping[str, Curve], output: str | Path, validation: Iterable[Any] = ()) -> None:
    """Plot a panel for each logged quantity with a line for each run; say where the corpora of `validation` differ."""
    sets = {json.dumps(corpora, sort_keys=True, default=str) for corpora in validation if corpora is not None}
    different = " (different sets)" if len(sets) > 1 else ""
    names = dict.fromkeys(name for curve in runs.values() for row in curve for name in row)
    panels, axes = {}, {}
    for name in (name for name in names if name not in ("step", "learning_rate", "eval_perplexity")):
        lines = {run: [(row["step"], row[name]) for row in curve if name in row] for run, curve in runs.items()}
        kind, quantity = ("validation", "eval_") if name.startswith("eval_") else ("training", "mean_")
        metric = name.removeprefix(quantity)
        title = f"{kind.capitalize()}: {metric if metric not in QUANTITIES else QUANTITIES[metric].partition(' (')[0]}"
        title += different if kind == "validation" else ""
        panels[title] = {run: points for run, points in lines.items() if points}
        axes[title] = QUANTITIES.get(metric, metric)
    line_panels(output, panels, "training step", title="Learning curves", names=axes)
