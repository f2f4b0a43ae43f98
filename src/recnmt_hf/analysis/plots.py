"""
Plots with matplotlib (the extra `plots`). Each function writes a `.png`, `.svg` or `.pdf` file, and raises a
[`UserError`] if matplotlib is missing or the file has another ending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._extras import packages_of_extra
from ..data.files import open_output
from ..errors import UserError
from ..inference.word_alignment import WordAlignment
from ..metrics.alignment import GoldAlignment


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .global_state import GlobalState
    from .recurrent_positions import SidePositions


ENDINGS = (".png", ".svg", ".pdf")
ROTATED_LABELS: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "parse_math": False}


def check_picture(path: str | Path) -> Path:
    """Return the path of a picture, or raise a [`UserError`] if it cannot be plotted."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise UserError("plot.ending", field=str(path), endings=", ".join(ENDINGS))
    with packages_of_extra("plots", "Plotting"):
        import matplotlib  # noqa: F401
    return path


def label_cells(axis: Axes, columns: Sequence[str], rows: Sequence[str], row_name: str = "") -> None:
    """Label the columns and rows of a heat map."""
    axis.set_xticks(range(len(columns)), columns, fontsize=8, **ROTATED_LABELS)
    axis.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
    axis.set_ylabel(row_name, fontsize=9)


def add_bars(axis: Axes, heights: np.ndarray, labels: Sequence[str], name: str) -> None:
    """Plot bars with heights from 0 to 1."""
    axis.bar(range(len(labels)), heights, color="steelblue")
    axis.set_xticks(range(len(labels)), labels, fontsize=8, **ROTATED_LABELS)
    axis.set_ylim(0.0, 1.0)
    axis.set_ylabel(name, fontsize=9)


@contextmanager
def canvas(path: str | Path, width: float, height: float) -> Iterator[Figure]:
    """Give a figure of a size in inches, and write it to a file at the end."""
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def heat_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    columns: Sequence[str],
    rows: Sequence[str],
    row_name: str,
    path: str | Path,
    marks: Sequence[tuple[str, Sequence[tuple[int, int]]]] = (),
) -> None:
    """
    Plot matrices `(len(rows), len(columns))` from 0 to 1, with headings, as heat maps with a common scale. `marks` are
    markers of matplotlib and the cells (row, column) to mark.
    """
    width, height = 1.6 + 0.42 * len(columns), 1.3 + 0.28 * len(rows)
    with canvas(path, width, height * len(panels)) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        top = max(float(matrix.max()) for _, matrix in panels)
        for axis, (heading, matrix) in zip(axes, panels, strict=True):
            image = axis.imshow(matrix, cmap="Blues", vmin=0.0, vmax=top, aspect="auto")
            for marker, cells in marks:
                places = {"x": [column for _, column in cells], "y": [row for row, _ in cells]}
                axis.scatter(**places, marker=marker, s=50, facecolors="none", edgecolors="darkorange", linewidths=1.5)
            axis.set_title(heading, fontsize=10, loc="left", parse_math=False)
            label_cells(axis, columns, rows, row_name)
        figure.colorbar(image, ax=list(axes), shrink=0.8, label="attention weight")


def capsules_and_gates(path: str | Path, state: GlobalState, layer: int) -> None:
    """Plot the capsules of a layer as a heat map above the gates as bars; a part that the model lacks is omitted."""
    shares = None if state.routing is None else state.routing[layer]
    sizes = ([1.3 + 0.2 * len(shares)] if shares is not None else []) + ([2.4] if state.gates is not None else [])
    with canvas(path, 2.2 + 0.42 * max(len(state.source), len(state.target)), sum(sizes)) as figure:
        grids = figure.add_gridspec(len(sizes), 1, height_ratios=sizes)
        if shares is not None:
            rows, row_name = [str(capsule) for capsule in range(1, len(shares) + 1)], "capsule"
            if state.pooling is not None:
                rows = [f"{name} ({weight:.2f})" for name, weight in zip(rows, state.pooling[layer], strict=True)]
                row_name = "capsule (weight)"
            axis = figure.add_subplot(grids[0])
            image = axis.imshow(shares, cmap="Blues", vmin=0.0, aspect="auto")
            label_cells(axis, state.source, rows, row_name)
            figure.colorbar(image, ax=axis, shrink=0.8, label="share of the word")
        if state.gates is not None:
            add_bars(figure.add_subplot(grids[len(sizes) - 1]), state.gates, state.target, "gate")


def grid_of_scores(
    path: str | Path,
    values: Sequence[Sequence[Sequence[float]]],
    columns: Sequence[str],
    rows: Sequence[str],
    name: str,
) -> None:
    """
    Plot the scores (one per seed) of each row and column as a heat map of means, with their ranges. `name` is that of
    the score.
    """
    means = np.array([[np.mean(cell) if cell else np.nan for cell in row] for row in values])
    with canvas(path, 2.5 + 1.1 * len(columns), 1.5 + 0.5 * len(rows)) as figure:
        axis = figure.add_subplot()
        image = axis.imshow(means, cmap="Blues", aspect="auto")
        middle = (np.nanmin(means) + np.nanmax(means)) / 2
        for y, row in enumerate(values):
            for x, cell in enumerate(row):
                if cell:
                    spread = f"\n{min(cell):.2f} to {max(cell):.2f}" if len(cell) > 1 else ""
                    color = "white" if means[y, x] > middle else "black"
                    axis.text(x, y, f"{means[y, x]:.2f}{spread}", ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(columns)), columns, fontsize=8, parse_math=False)
        axis.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
        figure.colorbar(image, ax=axis, label=name)


def points_of_scores(path: str | Path, values: Mapping[str, Sequence[float]], axis_name: str, name: str) -> None:
    """Plot scores (one per seed) as points over the values of a setting, with a line through their means."""
    longest = max(map(len, values))
    with canvas(path, 2.5 + 0.7 * len(values), 3.2 + 0.05 * longest) as figure:
        axis = figure.add_subplot()
        axis.plot(range(len(values)), [float(np.mean(scores)) for scores in values.values()], color="steelblue")
        for place, scores in enumerate(values.values()):
            axis.scatter([place] * len(scores), scores, color="steelblue", s=18)
        axis.set_xticks(range(len(values)), list(values), fontsize=8, **ROTATED_LABELS)
        axis.set_xlabel(axis_name, parse_math=False)
        axis.set_ylabel(name, parse_math=False)


def labelled_points(
    path: str | Path,
    panels: Mapping[str, Mapping[str, tuple[float, float, float, float]]],
    axis_name: str,
    name: str,
) -> None:
    """Plot panels of points side by side, with a common legend: x, its deviation, y, its deviation by title, label."""
    labels = list(dict.fromkeys(label for points in panels.values() for label in points))
    with canvas(path, 2.6 + 3.8 * len(panels), max(3.6, 1.0 + 0.18 * len(labels))) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        handles: dict[str, Any] = {}
        for axis, (title, points) in zip(axes, panels.items(), strict=True):
            for label, (x, x_deviation, y, y_deviation) in points.items():
                number = labels.index(label)
                style: dict[str, Any] = {
                    "color": f"C{number % 10}",
                    "marker": "os^Dv"[(number + number // 10) % 5],
                    "markersize": 5,
                }
                deviations = {"xerr": x_deviation or None, "yerr": y_deviation or None, "capsize": 2}
                handles[label] = axis.errorbar(x, y, linestyle="none", **deviations, **style)
            axis.margins(0.1)
            axis.set_title(title, fontsize=10, loc="left", parse_math=False)
            axis.set_xlabel(axis_name, fontsize=9, parse_math=False)
            axis.set_ylabel(name, fontsize=9, parse_math=False)
        figure.legend([handles[label] for label in labels], labels, loc="outside right upper", fontsize=8)


def line_panels(
    path: str | Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    axis_name: str,
    border: float | None = None,
) -> None:
    """Plot panels with lines (points by title and label) side by side; `border` is the place of a vertical line."""
    with canvas(path, 1.0 + 4.2 * len(panels), 3.4) as figure:
        for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for label, points in lines.items():
                marker = "o" if len(points) < 30 else None
                axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=3, label=label)
            if border is not None:
                axis.axvline(border, color="gray", linestyle="--", linewidth=1.0)
            axis.set_title(title, fontsize=10, loc="left", parse_math=False)
            axis.set_xlabel(axis_name, fontsize=9)
            axis.xaxis.get_major_locator().set_params(integer=True)
            if len(lines) > 1:
                axis.legend(fontsize=7)


def similarities_by_distance(path: str | Path, sides: Sequence[SidePositions]) -> None:
    """Plot heat maps of the similarities between the tokens of each side, and curves by distance on the right."""
    columns = 2 if all(side.absolute is None for side in sides) else 3
    size = 2.2 + 0.16 * max(len(side.tokens) for side in sides)
    with canvas(path, 1.2 * size * columns, size * len(sides)) as figure:
        axes = figure.subplots(len(sides), columns, squeeze=False)
        for row_axes, side in zip(axes, sides, strict=True):
            maps = [("position embeddings", side.absolute), ("recurrent embeddings", side.recurrent)]
            maps = [(heading, matrix) for heading, matrix in maps if matrix is not None]
            for axis in row_axes[len(maps) : -1]:
                axis.set_axis_off()
            for axis, (heading, matrix) in zip(row_axes, maps, strict=False):
                image = axis.imshow(matrix, cmap="RdBu_r", vmin=-1.0, vmax=1.0)
                axis.set_title(f"{side.name}: {heading}", fontsize=9, loc="left")
                label_cells(axis, side.tokens, side.tokens)
            axis, distances = row_axes[-1], side.by_distance()
            places, absolute, means, least, largest = zip(*distances, strict=True) if distances else [()] * 5
            if distances and side.absolute is not None:
                axis.plot(places, absolute, color="gray", label="position embeddings")
            axis.plot(places, means, color="steelblue", label="recurrent embeddings")
            axis.fill_between(places, least, largest, color="steelblue", alpha=0.2)
            axis.set_ylim(-1.05, 1.05)
            axis.set_xlabel("distance in tokens", fontsize=9)
            axis.set_ylabel("cosine", fontsize=9)
            axis.legend(fontsize=7)
        figure.colorbar(image, ax=axes[:, :-1], shrink=0.8, label="cosine")


def tree_and_bars(
    path: str | Path, nodes: Sequence[tuple[float, int, Sequence[float]]], labels: Sequence[str], distances: np.ndarray
) -> None:
    """
    Plot a binary tree over labels, and distances from 0 to 1 as bars below it. A node has x position and height, and
    those of its two children.
    """
    top = max((height for _, height, _ in nodes), default=1)
    with canvas(path, 1.6 + 0.5 * len(labels), 2.2 + 0.3 * top) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1 + 0.3 * top, 1.2])
        for place, height, children in nodes:
            for child, own in zip(children[::2], children[1::2], strict=True):
                above.plot([place, child], [height, own], color="steelblue")
        above.set_axis_off()
        add_bars(below, distances, labels, "distance")


def plot_alignment(alignment: WordAlignment, path: str | Path, gold: GoldAlignment | None = None) -> None:
    """Plot the attention of a sentence pair as a heat map. Squares mark sure gold links, circles possible ones."""
    marks = []
    if gold is not None:
        links = (("s", gold.sure), ("o", gold.possible - gold.sure))
        marks = [(marker, [(j, i) for i, j in sorted(cells)]) for marker, cells in links]
    columns = [*alignment.source, "(end)"]
    heat_maps([("", alignment.weights)], columns, alignment.target, "translation", path, marks=marks)
