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
from ..inference.word_alignment import WordAlignment
from ..metrics.alignment import GoldAlignment
from ..models.user_errors import UserError


if TYPE_CHECKING:
    from matplotlib.figure import Figure


ENDINGS = (".png", ".svg", ".pdf")
TILTED: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "parse_math": False}


def check_picture(path: str | Path) -> Path:
    """Return the path of a picture, or raise a [`UserError`] if it cannot be plotted."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"{path} names no picture. Remedy: end it in {', '.join(ENDINGS)}.")
    with packages_of_extra("plots", "Plotting"):
        import matplotlib  # noqa: F401
    return path


@contextmanager
def canvas(path: str | Path, width: float, height: float, title: str | None = None) -> Iterator[Figure]:
    """Give a figure of a size in inches, and write it to a file at the end."""
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def heat_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    columns: Sequence[str],
    rows: Sequence[str],
    row_name: str,
    path: str | Path,
    title: str | None = None,
    marks: Sequence[tuple[str, Sequence[tuple[int, int]]]] = (),
) -> None:
    """
    Plot matrices with values from 0 to 1 as heat maps below each other, with a common scale.

    Args:
        panels (sequence of pairs): Headings and matrices `(len(rows), len(columns))`.
        columns, rows (sequences of `str`): Labels.
        row_name (`str`): Label of the y axis.
        title (`str`, *optional*): Title of the figure.
        marks (sequence of pairs, *optional*): Markers of matplotlib and the cells (row, column) to mark.
    """
    width, height = 1.6 + 0.42 * len(columns), 1.3 + 0.28 * len(rows)
    with canvas(path, width, height * len(panels), title) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        top = max(float(matrix.max()) for _, matrix in panels)
        for axis, (heading, matrix) in zip(axes, panels, strict=True):
            image = axis.imshow(matrix, cmap="Blues", vmin=0.0, vmax=top, aspect="auto")
            for marker, cells in marks:
                places = {"x": [column for _, column in cells], "y": [row for row, _ in cells]}
                axis.scatter(**places, marker=marker, s=50, facecolors="none", edgecolors="darkorange", linewidths=1.5)
            axis.set_title(heading, fontsize=10, loc="left", parse_math=False)
            axis.set_xticks(range(len(columns)), columns, fontsize=8, **TILTED)
            axis.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
            axis.set_ylabel(row_name, fontsize=9)
        figure.colorbar(image, ax=list(axes), shrink=0.8, label="attention weight")


def map_and_bars(
    path: str | Path,
    matrix: tuple[np.ndarray | None, Sequence[str], Sequence[str], str],
    bars: tuple[np.ndarray | None, Sequence[str], str],
    title: str | None = None,
) -> None:
    """
    Plot a heat map above bars; a part without values is omitted.

    Args:
        matrix: Values `(len(rows), len(columns))` from 0, labels of columns and rows, label of the y axis.
        bars: Values from 0 to 1, their labels, label of the y axis.
        title (`str`, *optional*): Title of the figure.
    """
    (values, columns, rows, row_name), (heights, labels, height_name) = matrix, bars
    sizes = ([1.3 + 0.2 * len(rows)] if values is not None else []) + ([2.4] if heights is not None else [])
    width = 2.2 + 0.42 * max(len(columns), len(labels))
    with canvas(path, width, sum(sizes) or 1.0, title) as figure:
        grids = figure.add_gridspec(max(len(sizes), 1), 1, height_ratios=sizes or [1.0])
        if values is not None:
            axis = figure.add_subplot(grids[0])
            image = axis.imshow(values, cmap="Blues", vmin=0.0, aspect="auto")
            axis.set_xticks(range(len(columns)), columns, fontsize=8, **TILTED)
            axis.set_yticks(range(len(rows)), rows, fontsize=7, parse_math=False)
            axis.set_ylabel(row_name, fontsize=9)
            figure.colorbar(image, ax=axis, shrink=0.8, label="share of the word")
        if heights is not None:
            axis = figure.add_subplot(grids[len(sizes) - 1])
            axis.bar(range(len(labels)), heights, color="steelblue")
            axis.set_xticks(range(len(labels)), labels, fontsize=8, **TILTED)
            axis.set_ylim(0.0, 1.0)
            axis.set_ylabel(height_name, fontsize=9)


def grid_of_scores(
    path: str | Path,
    values: Sequence[Sequence[Sequence[float]]],
    columns: Sequence[str],
    rows: Sequence[str],
    name: str,
) -> None:
    """
    Plot mean scores as a heat map with numbers, and their range where a cell has several scores.

    Args:
        values: Scores of each row and column, one per seed; a cell without scores stays empty.
        columns, rows (sequences of `str`): Labels.
        name (`str`): Name of the score.
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
    """
    Plot scores as points over the values of a setting, with a line through their means.

    Args:
        values (`dict`): Scores (one per seed) by value of the setting.
        axis_name (`str`): Name of the setting.
        name (`str`): Name of the score.
    """
    longest = max(map(len, values))
    with canvas(path, 2.5 + 0.7 * len(values), 3.2 + 0.05 * longest) as figure:
        axis = figure.add_subplot()
        axis.plot(range(len(values)), [float(np.mean(scores)) for scores in values.values()], color="steelblue")
        for place, scores in enumerate(values.values()):
            axis.scatter([place] * len(scores), scores, color="steelblue", s=18)
        axis.set_xticks(
            range(len(values)), list(values), fontsize=8, **(TILTED if longest > 4 else {"parse_math": False})
        )
        axis.set_xlabel(axis_name, parse_math=False)
        axis.set_ylabel(name, parse_math=False)


def lines_over_numbers(
    path: str | Path, lines: Mapping[str, Mapping[int, float]], axis_name: str, name: str, border: float | None = None
) -> None:
    """
    Plot scores as lines over numbers.

    Args:
        lines (`dict`): Scores by number, for each label of a line.
        axis_name (`str`): Label of the x axis.
        name (`str`): Name of the score.
        border (`float`, *optional*): Position of a vertical line.
    """
    with canvas(path, 6.4, 4.2) as figure:
        axis = figure.add_subplot()
        for label, scores in lines.items():
            numbers = sorted(scores)
            axis.plot(numbers, [scores[number] for number in numbers], marker="o", markersize=4, label=label)
        if border is not None:
            axis.axvline(border, color="gray", linestyle="--", linewidth=1.0)
        axis.set_xticks(sorted({number for scores in lines.values() for number in scores}))
        axis.set_xlabel(axis_name, parse_math=False)
        axis.set_ylabel(name, parse_math=False)
        axis.legend(fontsize=8)


def lines_of_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], axis_name: str, path: str | Path
) -> None:
    """
    Plot one panel per quantity, with one line per name.

    Args:
        panels (mapping): Points of each line, by title of the panel and label of the line.
        axis_name (`str`): Label of the x axes.
    """
    with canvas(path, 1.0 + 4.2 * len(panels), 3.4) as figure:
        for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for label, points in lines.items():
                marker = "o" if len(points) < 30 else None
                axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=3, label=label)
            axis.set_title(title, fontsize=10, loc="left", parse_math=False)
            axis.set_xlabel(axis_name, fontsize=9)
            if len(lines) > 1:
                axis.legend(fontsize=7)


def similarities_by_distance(
    path: str | Path,
    rows: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, np.ndarray]], Sequence[tuple[Any, ...]]]],
    title: str | None = None,
) -> None:
    """
    Plot for each row heat maps of similarities between its tokens, and curves by distance beside them.

    Args:
        rows: Name, tokens, headings with matrices `(len(tokens), len(tokens))` from -1 to 1, and for each distance: the
            distance, a value (or `None`) of the first curve, then mean, least and largest value of the second one.
        title (`str`, *optional*): Title of the figure.
    """
    columns = 1 + max(len(maps) for _, _, maps, _ in rows)
    side = 2.2 + 0.16 * max(len(tokens) for _, tokens, _, _ in rows)
    with canvas(path, 1.2 * side * columns, side * len(rows), title) as figure:
        axes = figure.subplots(len(rows), columns, squeeze=False)
        for of_row, (name, tokens, maps, distances) in zip(axes, rows, strict=True):
            for axis in of_row[len(maps) : -1]:
                axis.set_axis_off()
            for axis, (heading, matrix) in zip(of_row, maps, strict=False):
                image = axis.imshow(matrix, cmap="RdBu_r", vmin=-1.0, vmax=1.0)
                axis.set_title(f"{name}: {heading}", fontsize=9, loc="left")
                axis.set_xticks(range(len(tokens)), tokens, fontsize=7, **TILTED)
                axis.set_yticks(range(len(tokens)), tokens, fontsize=7, parse_math=False)
            axis, places = of_row[-1], [each[0] for each in distances]
            if distances and distances[0][1] is not None:
                axis.plot(places, [each[1] for each in distances], color="gray", label="position embeddings")
            axis.plot(places, [each[2] for each in distances], color="steelblue", label="recurrent embeddings")
            least, largest = [each[3] for each in distances], [each[4] for each in distances]
            axis.fill_between(places, least, largest, color="steelblue", alpha=0.2)
            axis.set_ylim(-1.05, 1.05)
            axis.set_xlabel("distance in tokens", fontsize=9)
            axis.set_ylabel("cosine", fontsize=9)
            axis.legend(fontsize=7)
        figure.colorbar(image, ax=axes[:, :-1], shrink=0.8, label="cosine")


def tree_and_bars(
    path: str | Path,
    nodes: Sequence[tuple[float, int, Sequence[float]]],
    labels: Sequence[str],
    heights: np.ndarray,
    height_name: str,
    title: str | None = None,
) -> None:
    """
    Plot a binary tree over labels, and bars below it.

    Args:
        nodes: x position and height of each inner node, with the x positions and heights of its two children.
        labels (sequence of `str`): Labels of the leaves.
        heights (`numpy.ndarray` of shape `(len(labels),)`): Heights of the bars, from 0 to 1.
        height_name (`str`): Label of the bars' y axis.
        title (`str`, *optional*): Title of the figure.
    """
    top = max((height for _, height, _ in nodes), default=1)
    with canvas(path, 1.6 + 0.5 * len(labels), 2.2 + 0.3 * top, title) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1 + 0.3 * top, 1.2])
        for place, height, children in nodes:
            for child, own in zip(children[::2], children[1::2], strict=True):
                above.plot([place, child], [height, own], color="steelblue")
        above.set_axis_off()
        below.bar(range(len(labels)), heights, color="steelblue")
        below.set_xticks(range(len(labels)), labels, fontsize=8, **TILTED)
        below.set_ylim(0.0, 1.0)
        below.set_ylabel(height_name, fontsize=9)


def plot_alignment(alignment: WordAlignment, path: str | Path, gold: GoldAlignment | None = None) -> None:
    """
    Plot the attention of a sentence pair as a heat map. Squares mark sure gold links, circles possible ones.

    Args:
        alignment ([`~recnmt_hf.inference.WordAlignment`]): Words and weights.
        gold ([`~recnmt_hf.metrics.GoldAlignment`], *optional*): Manual alignment.
    """
    marks = []
    if gold is not None:
        marks.append(("s", [(j, i) for i, j in sorted(gold.sure)]))
        marks.append(("o", [(j, i) for i, j in sorted(gold.possible - gold.sure)]))
    columns = [*alignment.source, "(end)"]
    heat_maps([("", alignment.weights)], columns, alignment.target, "translation", path, marks=marks)
