"""
Plots with matplotlib (the extra `plots`), and their look; no other module names a colour or a font. Each function
writes a `.png`, `.svg` or `.pdf` file, and raises a [`UserError`] if matplotlib is missing or the file has another
ending. The same values give the same file.

Lines and points have colours of Okabe and Ito (2008, *Color Universal Design*), which readers with any kind of colour
vision can tell apart, and different markers. Heat maps have perceptually uniform colours. Pictures are narrow enough
for a page of GitHub to show their text in a readable size.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.files import open_output
from ..errors import UserError, packages_of_extra
from ..inference.results import WordAlignment
from ..metrics.alignment import GoldAlignment


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Blue, vermilion, green, purple, orange, sky blue, black. The eighth colour, yellow, is hardly visible on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MAIN, ACCENT, NEUTRAL = COLORS[0], COLORS[1], "#707070"
HALO = "white"  # borders of marks on heat maps
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"  # values from 0 (dark) up; from -1 (blue) to 1 (red)
WIDTH = 8.0  # inches: of several panels, and the limit of heat maps whose labels have room in it
SMALLEST_WIDTH = 4.5  # inches
# Square inches of a picture, as of a heat map of 150 tokens. matplotlib takes gigabytes of memory for larger ones.
LARGEST_AREA = 1300
DPI = 150
STYLE = Path(__file__).with_name("plots.mplstyle")
ROTATED_LABELS: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
# Endings of pictures, and what their files would otherwise have of the time and of matplotlib.
METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
# Names of axes by metric, with units where there are any.
QUANTITIES = {
    "accuracy": "accuracy (%)",
    "bleu": "BLEU",
    "loss": "loss (nats per target token)",
    "perplexity": "perplexity",
    **{f"rouge{kind}": f"ROUGE-{kind}" for kind in ("1", "2", "L", "Lsum")},
}
# matplotlib's settings are global: plots of several threads are drawn one after the other.
_LOCK = RLock()


def check_picture(path: str | Path) -> Path:
    """Return the path of a picture, or raise a [`UserError`] if it cannot be plotted."""
    path = Path(path)
    if path.suffix.lower() not in METADATA:
        endings = ", ".join(METADATA)
        raise UserError(f"{path} is not the name of an image file. Use one of the extensions {endings}.", field=path)
    with packages_of_extra("plots", "Plotting"):
        import matplotlib  # noqa: F401
    return path


@contextmanager
def canvas(path: str | Path, width: float, height: float, title: str = "") -> Iterator[Figure]:
    """Yield a figure of a size in inches, and write it to a file at the end; reject sizes that need much memory."""
    path = check_picture(path)
    if width * height > LARGEST_AREA:
        raise UserError(f"The picture {path} would be too large.", field=path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    with _LOCK, matplotlib.rc_context(fname=STYLE):
        fonts = matplotlib.rcParams["font.sans-serif"]
        matplotlib.rcParams["font.family"] = [name for name in fonts if name in installed]
        size = max(width, SMALLEST_WIDTH), height + (0.3 if title else 0.0)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        if title:  # in lines that fit
            figure.suptitle(textwrap.fill(title, int(12.5 * size[0])), x=0.01, horizontalalignment="left")
        yield figure
        ending = path.suffix.lower()
        with open_output(path, binary=True) as file:
            figure.savefig(file, format=ending[1:], metadata=METADATA[ending])


@contextmanager
def panel_axes(
    path: str | Path, headings: Sequence[str], labels: Sequence[str], title: str, height: float
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """Give a figure of panels with headings, two in a row, with room for a legend of labels below them."""
    columns = min(2, len(headings))
    rows = -(-len(headings) // columns)
    width = WIDTH if columns > 1 else 6.0
    legend = 0.2 * -(-len(labels) // legend_columns(labels, width)) if len(labels) > 1 else 0.0
    with canvas(path, width, height * rows + legend, title) as figure:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in axes[len(headings) :]:
            axis.set_visible(False)
        for axis, heading in zip(axes, headings, strict=False):
            axis.set_title(heading)
        yield figure, axes[: len(headings)]


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many columns of a legend fit below a figure of a width in inches."""
    return max(1, min(len(labels), int(11 * width / (max(map(len, labels)) + 6))))


def series(number: int) -> dict[str, str]:
    """Return color and marker of a series of points, counted from 0: all pairs of both before one comes again."""
    count = len(COLORS)
    return {"color": COLORS[number % count], "marker": MARKERS[(number + number // count) % len(MARKERS)]}


def cell_width(columns: int) -> float:
    """Return the width of a column of a heat map in inches: as wide as the page allows, within limits."""
    return min(0.42, max(0.2, (WIDTH - 2.2) / max(columns, 1)))


def label_cells(
    axis: Axes, columns: Sequence[str], rows: Sequence[str], column_name: str = "", row_name: str = ""
) -> None:
    """Label the columns and rows of a heat map."""
    axis.set_xticks(range(len(columns)), columns, **ROTATED_LABELS)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel(column_name)
    axis.set_ylabel(row_name)
    axis.spines[:].set_visible(True)


def count_whole(axis: Axes) -> None:
    """Label whole numbers alone on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def add_bars(axis: Axes, heights: np.ndarray, labels: Sequence[str], name: str, label_name: str) -> None:
    """Plot bars with heights from 0 to 1."""
    axis.bar(range(len(labels)), heights, color=MAIN)
    axis.set_xticks(range(len(labels)), labels, **ROTATED_LABELS)
    axis.set_xlim(-0.6, len(labels) - 0.4)
    axis.set_ylim(0.0, 1.0)
    axis.set_xlabel(label_name)
    axis.set_ylabel(name)


def heat_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    columns: Sequence[str],
    rows: Sequence[str],
    row_name: str,
    path: str | Path,
    marks: Sequence[tuple[str, Sequence[tuple[int, int]]]] = (),
    title: str = "",
    column_name: str = "",
    name: str = "attention weight",
) -> None:
    """
    Plot matrices `(len(rows), len(columns))` of values from 0 upwards, with headings, as heat maps with a common scale,
    which is called `name`. `marks` are markers of matplotlib and the cells (row, column) to mark.
    """
    width, height = 2.2 + cell_width(len(columns)) * len(columns), 1.4 + 0.24 * len(rows)
    with canvas(path, width, height * len(panels), title) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        top = max(float(matrix.max()) for _, matrix in panels)
        for axis, (heading, matrix) in zip(axes, panels, strict=True):
            image = axis.imshow(matrix, cmap=SEQUENTIAL, vmin=0.0, vmax=top, aspect="auto")
            for marker, cells in marks:
                places = {"x": [column for _, column in cells], "y": [row for row, _ in cells]}
                for color, line in ((HALO, 3.5), (ACCENT, 1.8)):
                    axis.scatter(**places, marker=marker, s=60, facecolors="none", edgecolors=color, linewidths=line)
            axis.set_title(heading)
            label_cells(axis, columns, rows, column_name, row_name)
        figure.colorbar(image, ax=list(axes), shrink=0.8, label=name)


def line_panels(
    path: str | Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    axis_name: str,
    border: float | None = None,
    title: str = "",
    names: Mapping[str, str] | None = None,
    border_name: str = "",
) -> None:
    """
    Plot panels with lines (points by title and label), two side by side. `names` are those of the vertical axes by
    title; `border` is the place of a vertical line with a name.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    with panel_axes(path, list(panels), [*labels, *filter(None, [border_name])], title, height=2.6) as (figure, axes):
        handles: dict[str, Any] = {}
        for axis, (heading, lines) in zip(axes, panels.items(), strict=True):
            for label, points in lines.items():
                style: dict[str, Any] = series(labels.index(label))
                style["markevery"] = max(1, len(points) // 30)
                (handles[label],) = axis.plot([x for x, _ in points], [y for _, y in points], **style)
            if border is not None:
                handles[border_name] = axis.axvline(border, color=NEUTRAL, linestyle="--", linewidth=1.0)
            axis.set_xlabel(axis_name)
            axis.set_ylabel((names or {}).get(heading, ""))
            count_whole(axis)
        if len(handles) > 1:
            columns = legend_columns(list(handles), figure.get_figwidth())
            figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=columns)


def plot_alignment(alignment: WordAlignment, path: str | Path, gold: GoldAlignment | None = None) -> None:
    """Plot the attention of a sentence pair as a heat map. Squares mark sure gold links, circles possible ones."""
    marks, title = [], "Attention of each translated word to the source words"
    if gold is not None:
        links = (("s", gold.sure), ("o", gold.possible - gold.sure))
        marks = [(marker, [(j, i) for i, j in sorted(cells)]) for marker, cells in links]
        title += " (squares: sure gold links, circles: possible)"
    columns = [*alignment.source, "(end)"]
    panels, names = [("", alignment.weights)], {"column_name": "source word", "title": title}
    heat_maps(panels, columns, alignment.target, "translated word", path, marks=marks, **names)
