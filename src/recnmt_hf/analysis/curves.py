"""Curves of training runs: loss and validation by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..models.user_errors import MissingFileError, UserError
from ..training.checkpoints import newest_checkpoint, state_of
from ..training.evidence import EVIDENCE, Evidence, curve_of
from ..training.metrics import without_prefix
from ..training.output_folder import BASELINE, FINAL
from .plots import lines_of_curves


Curve = Sequence[Mapping[str, Any]]


def curve_of_run(path: str | Path) -> Curve:
    """
    Loss and validation by step of a run: of its newest checkpoint's log, or what its finished model keeps.

    Raises:
        UserError: There is no run, or it has logged nothing yet.
    """
    path = Path(path)
    if not path.is_dir():
        raise MissingFileError(f"{path} is no folder. Remedy: give the folder of a training run.")
    newest = newest_checkpoint(path) or newest_checkpoint(path / BASELINE)
    found: Curve = []
    if newest is not None:
        found = curve_of(state_of(newest).get("log_history", []))
    for folder in (path, path / FINAL):
        if not found and (folder / EVIDENCE).is_file():
            found = Evidence.load(folder).curve
    if not found:
        raise UserError(
            f"{path} has no curve: there is no complete checkpoint, and no model with a log. Remedy: give the folder "
            "of a training run that has saved a checkpoint."
        )
    return found


def plot_curves(runs: Mapping[str, Curve], output: str | Path) -> None:
    """
    A panel for each thing that was logged (training loss, validation loss, BLEU, ...), a line in it for each run.

    Args:
        runs (mapping): Names of runs and their curves.
        output (`str` or `Path`): `.png`, `.svg` or `.pdf`.

    Raises:
        UserError: matplotlib is missing, or the ending is unknown.
    """
    names = dict.fromkeys(name for curve in runs.values() for row in curve for name in row)
    panels = {}
    for name in names:
        if name in ("step", "learning_rate", "eval_perplexity"):
            continue
        lines = {run: [(row["step"], row[name]) for row in curve if name in row] for run, curve in runs.items()}
        title = f"validation {without_prefix(name)}" if name.startswith("eval_") else f"training {name}"
        panels[title] = {run: points for run, points in lines.items() if points}
    lines_of_curves(panels, "step", output)
