"""
The look of all plots: colours, fonts and sizes. No other module of the package names a colour or a font.

Lines and points have colours of Okabe and Ito (2008, *Color Universal Design*), which readers with any kind of colour
vision can tell apart, and different markers. Heat maps have perceptually uniform colours. Pictures are narrow enough
for a page of GitHub to show their text in a readable size.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import RLock
from typing import TYPE_CHECKING, Any

from transformers.utils import logging


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


logger = logging.get_logger(__name__)

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
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
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
UNKNOWN = "?"  # replaces a character that no installed font has
LAST_RESORT = re.compile("last ?resort", re.IGNORECASE)  # fonts that have a box for every character
# matplotlib's settings are global: plots of several threads are drawn one after the other.
_LOCK = RLock()


@contextmanager
def style() -> Iterator[None]:
    """Apply the look to all plots within a `with` block."""
    import matplotlib

    settings: Any = STYLE
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


# -- fonts -------------------------------------------------------------------------------------------------------------


def show_all_characters(figure: Figure) -> None:
    """
    Draw the texts of a figure with installed fonts that have their characters. Characters that none has are replaced by
    question marks, with a note in the figure and a warning.
    """
    from matplotlib.text import Text

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        axis.get_ticklabels()  # sets the texts that `findobj` finds
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    characters = frozenset(character for text in texts for character in text.get_text() if not character.isspace())
    families, missing = families_of(characters)
    if families:
        for text in texts:
            text.set_fontfamily([*text.get_fontfamily(), *families])
    if missing:
        for axes in figure.axes:
            replace_labels(axes, missing)
        for text in texts:
            text.set_text(remove_characters(text.get_text(), missing))
        shown = " ".join(sorted(missing)[:20])
        logger.warning(
            f"No installed font has these characters, so the plot has {UNKNOWN} instead: {shown}. Install a font that "
            "has them, such as Noto Sans CJK for Chinese, Japanese and Korean."
        )
        note = f"{UNKNOWN}: no installed font has the character"
        figure.supxlabel(note, x=0.01, horizontalalignment="left", fontsize=SMALL, color=ACCENT)


def remove_characters(text: str, characters: Collection[str]) -> str:
    """Return a text with question marks in place of characters."""
    return "".join(UNKNOWN if character in characters else character for character in text)


def replace_labels(axes: Axes, characters: Collection[str]) -> None:
    """Replace characters in the labels of ticks, which axes write anew whenever they are drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        if any(character in characters for label in labels for character in label):
            axis.set_ticklabels([remove_characters(label, characters) for label in labels])


@lru_cache(maxsize=32)
def families_of(characters: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """
    Return the families of installed fonts to use after the first one, and the characters that none has. Each next
    family is the one with most of the characters that are still missing.
    """
    from matplotlib import font_manager

    missing = missing_characters(font_manager.findfont("DejaVu Sans"), characters)
    if not missing:
        return (), missing
    add_new_fonts()
    found: dict[str, frozenset[str]] = {}
    for entry in font_manager.fontManager.ttflist:
        if entry.style == "normal" and not LAST_RESORT.search(entry.name):
            found.setdefault(entry.name, missing - missing_characters(entry.fname, missing))
    families: list[str] = []
    while missing and found:
        best = max(sorted(found), key=lambda name: len(found[name] & missing))
        if not found[best] & missing:
            break
        families.append(best)
        missing -= found.pop(best)
    return tuple(families), missing


def missing_characters(path: str, characters: frozenset[str]) -> frozenset[str]:
    """Return the characters that a font lacks: all if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
    except (OSError, RuntimeError, ValueError):
        return characters
    return frozenset(character for character in characters if not font.get_char_index(ord(character)))


def add_new_fonts() -> None:
    """Add fonts installed since matplotlib stored its list of fonts, which it does once per user."""
    from matplotlib import font_manager

    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in sorted(set(font_manager.findSystemFonts()) - known):
        try:
            font_manager.fontManager.addfont(path)
        except (OSError, RuntimeError, ValueError):
            continue  # a format that matplotlib does not read
