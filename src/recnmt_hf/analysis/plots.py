"""Pictures, with matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


ENDINGS = (".png", ".svg", ".pdf")


def heat_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    columns: Sequence[str],
    rows: Sequence[str],
    row_name: str,
    path: str | Path,
    title: str | None = None,
) -> None:
    """
    Matrices with values from 0 to 1 as heat maps below each other, with one scale.

    Args:
        panels (sequence of pairs): A heading and a matrix `(len(rows), len(columns))`.
        columns, rows (sequences of `str`): Labels.
        row_name (`str`): What a row is.
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        title (`str`, *optional*): Above all panels.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is unknown; the message says the remedy.
    """
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} names no picture. Remedy: end it in {', '.join(ENDINGS)}.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('Plots need matplotlib. Remedy: pip install "recnmt-hf[plots]".') from error
    width, height = 1.6 + 0.42 * len(columns), 1.3 + 0.28 * len(rows)
    figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    top = max(float(matrix.max()) for _, matrix in panels)
    for axis, (heading, matrix) in zip(axes, panels, strict=True):
        image = axis.imshow(matrix, cmap="Blues", vmin=0.0, vmax=top, aspect="auto")
        axis.set_title(heading, fontsize=10, loc="left", parse_math=False)
        tilted = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        axis.set_xticks(range(len(columns)), columns, fontsize=8, parse_math=False, **tilted)
        axis.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
        axis.set_ylabel(row_name, fontsize=9)
    figure.colorbar(image, ax=list(axes), shrink=0.8, label="attention weight")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
