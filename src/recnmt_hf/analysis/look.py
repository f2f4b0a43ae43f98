"""
The look of all plots: colours, fonts and sizes. No other module of the package names a colour or a font.

Lines and points have colours of Okabe and Ito (2008, *Color Universal Design*), which readers with any kind of colour
vision can tell apart, and different markers. Heat maps have perceptually uniform colours. Pictures are narrow enough
for a page of GitHub to show their text in a readable size.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Blue, vermilion, green, purple, orange, sky blue, black. The eighth colour, yellow, is hardly visible on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MAIN, ACCENT, NEUTRAL = COLORS[0], COLORS[1], "#707070"
GRID, HALO = "#E5E5E5", "white"  # lines behind points; borders of marks on heat maps
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"  # values from 0 (dark) up; from -1 (blue) to 1 (red)

WIDTH = 8.0  # inches: of several panels, and the limit of heat maps whose labels have room in it
SMALLEST_WIDTH = 4.5  # inches
DPI = 150
SMALL = 8  # points: of labels within plots

STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.parse_math": False,  # texts of users may have dollars
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "figure.titlesize": 11,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text, for small files that can be searched and compared
    "svg.hashsalt": "recnmt_hf",  # names within an SVG file do not change from run to run
}
# Fonts for characters that the first one lacks, where they are installed.
FURTHER_FONTS = (
    *(f"Noto Sans CJK {region}" for region in ("SC", "TC", "JP", "KR")),
    *("Noto Sans SC", "Noto Sans JP", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans"),
    *("PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Ethiopic", "Noto Sans Bengali", "Noto Sans Tamil"),
)
# matplotlib's settings are global: plots of several threads are drawn one after the other.
_LOCK = RLock()


@contextmanager
def style() -> Iterator[None]:
    """Apply the look to all plots within a `with` block."""
    import matplotlib
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    fonts = ["DejaVu Sans", *(name for name in FURTHER_FONTS if name in installed)]
    settings: Any = {**STYLE, "font.family": fonts}
    with _LOCK, matplotlib.rc_context(settings):
        yield


def series(number: int) -> dict[str, str]:
    """Return color and marker of a series of points, counted from 0: all pairs of both before one comes again."""
    count = len(COLORS)
    return {"color": COLORS[number % count], "marker": MARKERS[(number + number // count) % len(MARKERS)]}


def text_color(background: Collection[float]) -> str:
    """Return black or white, whichever is readable on a background (red, green, blue, ... from 0 to 1)."""
    red, green, blue, *_ = background
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def set_title(figure: Figure, title: str) -> None:
    """Set the title of a figure, broken into lines that fit."""
    lines = textwrap.fill(title, int(12.5 * figure.get_figwidth()))
    figure.suptitle(lines, x=0.01, horizontalalignment="left")
