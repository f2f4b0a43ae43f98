"""Pictures, with matplotlib (the extra `plots`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.files import open_output
from ..inference.word_alignment import WordAlignment
from ..metrics.alignment import GoldAlignment
from ..models.user_errors import UserError


ENDINGS = (".png", ".svg", ".pdf")


def check_picture(path: str | Path) -> Path:
    """The path of a picture that can be written; raises `ValueError` with the remedy otherwise."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"{path} names no picture. Remedy: end it in {', '.join(ENDINGS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('Plots need matplotlib. Remedy: pip install "recnmt-hf[plots]".')
    return path


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
    Matrices with values from 0 to 1 as heat maps below each other, with one scale.

    Args:
        panels (sequence of pairs): A heading and a matrix `(len(rows), len(columns))`.
        columns, rows (sequences of `str`): Labels.
        row_name (`str`): What a row is.
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        title (`str`, *optional*): Above all panels.
        marks (sequence of pairs, *optional*): A marker of matplotlib and the cells (row, column) that carry it.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is unknown; the message says the remedy.
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = 1.6 + 0.42 * len(columns), 1.3 + 0.28 * len(rows)
    figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    top = max(float(matrix.max()) for _, matrix in panels)
    for axis, (heading, matrix) in zip(axes, panels, strict=True):
        image = axis.imshow(matrix, cmap="Blues", vmin=0.0, vmax=top, aspect="auto")
        for marker, cells in marks:
            places = {"x": [column for _, column in cells], "y": [row for row, _ in cells]}
            axis.scatter(**places, marker=marker, s=50, facecolors="none", edgecolors="darkorange", linewidths=1.5)
        axis.set_title(heading, fontsize=10, loc="left", parse_math=False)
        tilted = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        axis.set_xticks(range(len(columns)), columns, fontsize=8, parse_math=False, **tilted)
        axis.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
        axis.set_ylabel(row_name, fontsize=9)
    figure.colorbar(image, ax=list(axes), shrink=0.8, label="attention weight")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def map_and_bars(
    path: str | Path,
    matrix: tuple[np.ndarray | None, Sequence[str], Sequence[str], str],
    bars: tuple[np.ndarray | None, Sequence[str], str],
    title: str | None = None,
) -> None:
    """
    A heat map above bars, each left out where there are no values.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        matrix: Values `(len(rows), len(columns))` from 0, labels of columns and rows, what a row is.
        bars: Values from 0 to 1, their labels, what they are.
        title (`str`, *optional*): Above both.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    (values, columns, rows, row_name), (heights, labels, height_name) = matrix, bars
    sizes = ([1.3 + 0.2 * len(rows)] if values is not None else []) + ([2.4] if heights is not None else [])
    width = 2.2 + 0.42 * max(len(columns), len(labels))
    figure = Figure(figsize=(width, sum(sizes) or 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    grids = figure.add_gridspec(max(len(sizes), 1), 1, height_ratios=sizes or [1.0])
    tilted: Any = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "fontsize": 8, "parse_math": False}
    if values is not None:
        axis = figure.add_subplot(grids[0])
        image = axis.imshow(values, cmap="Blues", vmin=0.0, aspect="auto")
        axis.set_xticks(range(len(columns)), columns, **tilted)
        axis.set_yticks(range(len(rows)), rows, fontsize=7, parse_math=False)
        axis.set_ylabel(row_name, fontsize=9)
        figure.colorbar(image, ax=axis, shrink=0.8, label="share of the word")
    if heights is not None:
        axis = figure.add_subplot(grids[len(sizes) - 1])
        axis.bar(range(len(labels)), heights, color="steelblue")
        axis.set_xticks(range(len(labels)), labels, **tilted)
        axis.set_ylim(0.0, 1.0)
        axis.set_ylabel(height_name, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def grid_of_scores(
    path: str | Path,
    values: Sequence[Sequence[Sequence[float]]],
    columns: Sequence[str],
    rows: Sequence[str],
    name: str,
) -> None:
    """
    Means of scores as a heat map with numbers, with their range where there are several.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        values: For each row and column the scores, of several seeds perhaps; none leaves the cell empty.
        columns, rows (sequences of `str`): Labels.
        name (`str`): Of the score.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    means = np.array([[np.mean(cell) if cell else np.nan for cell in row] for row in values])
    figure = Figure(figsize=(2.5 + 1.1 * len(columns), 1.5 + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
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
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def points_of_scores(path: str | Path, values: Mapping[str, Sequence[float]], axis_name: str, name: str) -> None:
    """
    Scores as points above what was varied, with a line through their means.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        values (`dict`): For each value of what was varied the scores, of several seeds perhaps.
        axis_name (`str`): What was varied.
        name (`str`): Of the score.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(map(len, values))
    figure = Figure(figsize=(2.5 + 0.7 * len(values), 3.2 + 0.05 * longest), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    axis.plot(range(len(values)), [float(np.mean(scores)) for scores in values.values()], color="steelblue")
    for place, scores in enumerate(values.values()):
        axis.scatter([place] * len(scores), scores, color="steelblue", s=18)
    tilted: Any = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if longest > 4 else {}
    axis.set_xticks(range(len(values)), list(values), fontsize=8, parse_math=False, **tilted)
    axis.set_xlabel(axis_name, parse_math=False)
    axis.set_ylabel(name, parse_math=False)
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def lines_over_numbers(
    path: str | Path, lines: Mapping[str, Mapping[int, float]], axis_name: str, name: str, border: float | None = None
) -> None:
    """
    Scores as lines over numbers.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        lines (`dict`): For each name the scores by number.
        axis_name (`str`): What the numbers count.
        name (`str`): Of the score.
        border (`float`, *optional*): Where to draw a vertical line.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
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
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def lines_of_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], axis_name: str, path: str | Path
) -> None:
    """
    A panel for each quantity, a line in it for each name.

    Args:
        panels (mapping): For each title the points of each line.
        axis_name (`str`): Below all panels.
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 4.2 * len(panels), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, points in lines.items():
            marker = "o" if len(points) < 30 else None
            axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=3, label=label)
        axis.set_title(title, fontsize=10, loc="left", parse_math=False)
        axis.set_xlabel(axis_name, fontsize=9)
        if len(lines) > 1:
            axis.legend(fontsize=7)
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def similarities_by_distance(
    path: str | Path,
    rows: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, np.ndarray]], Sequence[tuple[Any, ...]]]],
    title: str | None = None,
) -> None:
    """
    For each row heat maps of similarities between its tokens, and beside them curves by distance.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        rows: Name, tokens, headings with matrices `(len(tokens), len(tokens))` from -1 to 1, and for each distance: the
            distance, a value (or `None`) of the first curve, then mean, least and largest value of the second one.
        title (`str`, *optional*): Above all.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 1 + max(len(maps) for _, _, maps, _ in rows)
    side = 2.2 + 0.16 * max(len(tokens) for _, tokens, _, _ in rows)
    figure = Figure(figsize=(1.2 * side * columns, side * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    tilted: Any = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "fontsize": 7, "parse_math": False}
    for of_row, (name, tokens, maps, distances) in zip(axes, rows, strict=True):
        for axis in of_row[len(maps) : -1]:
            axis.set_axis_off()
        for axis, (heading, matrix) in zip(of_row, maps, strict=False):
            image = axis.imshow(matrix, cmap="RdBu_r", vmin=-1.0, vmax=1.0)
            axis.set_title(f"{name}: {heading}", fontsize=9, loc="left")
            axis.set_xticks(range(len(tokens)), tokens, **tilted)
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
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def tree_and_bars(
    path: str | Path,
    nodes: Sequence[tuple[float, int, Sequence[float]]],
    labels: Sequence[str],
    heights: np.ndarray,
    height_name: str,
    title: str | None = None,
) -> None:
    """
    A binary tree over labels, and below it bars.

    Args:
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        nodes: Place over the labels and height of each inner node, with place and height of both its children.
        labels (sequence of `str`): Of the leaves.
        heights (`numpy.ndarray` of shape `(len(labels),)`): Of the bars, from 0 to 1.
        height_name (`str`): What they are.
        title (`str`, *optional*): Above both.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    path = check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top = max((height for _, height, _ in nodes), default=1)
    figure = Figure(figsize=(1.6 + 0.5 * len(labels), 2.2 + 0.3 * top), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1 + 0.3 * top, 1.2])
    for place, height, children in nodes:
        for child, own in zip(children[::2], children[1::2], strict=True):
            above.plot([place, child], [height, own], color="steelblue")
    above.set_axis_off()
    below.bar(range(len(labels)), heights, color="steelblue")
    below.set_xticks(
        range(len(labels)), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8, parse_math=False
    )
    below.set_ylim(0.0, 1.0)
    below.set_ylabel(height_name, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    with open_output(path, binary=True) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())


def plot_alignment(alignment: WordAlignment, path: str | Path, gold: GoldAlignment | None = None) -> None:
    """
    A sentence pair's attention as a heat map, with gold links marked: squares are sure, circles possible.

    Args:
        alignment ([`~recnmt_hf.inference.WordAlignment`]): Words and weights.
        path (`str` or `Path`): `.png`, `.svg` or `.pdf`.
        gold ([`~recnmt_hf.metrics.GoldAlignment`], *optional*): Links made by hand.

    Raises:
        ValueError: As in [`heat_maps`].
    """
    marks = []
    if gold is not None:
        marks.append(("s", [(j, i) for i, j in sorted(gold.sure)]))
        marks.append(("o", [(j, i) for i, j in sorted(gold.possible - gold.sure)]))
    columns = [*alignment.source, "(end)"]
    heat_maps([("", alignment.weights)], columns, alignment.target, "translation", path, marks=marks)
