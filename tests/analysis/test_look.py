"""The look of plots: colours, sizes, fonts, and files that are the same for the same values."""

import re

import numpy as np
import pytest

from recnmt_hf.analysis import look
from recnmt_hf.analysis.plots import grid_of_scores, heat_maps, labelled_points, line_panels


pytest.importorskip("matplotlib", reason="the extra plots is not installed")

# Machado et al. (2009): what readers without one kind of cones see, in linear RGB.
SEEN = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colors, matrix):
    """Return CIELAB values of sRGB colors as seen through a matrix."""
    rgb = np.asarray(colors)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(linear @ np.array(matrix).T, 0, 1) @ XYZ.T / XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("vision", SEEN)
def test_colors_can_be_told_apart(vision):
    """Of lines by any reader, in pairs; heat maps become lighter evenly, or darker evenly from their middle."""
    import matplotlib
    from matplotlib.colors import to_rgb

    colors = lab([to_rgb(color) for color in look.COLORS], SEEN[vision])
    distances = np.linalg.norm(colors[:, None] - colors[None], axis=-1)
    assert distances[np.triu_indices(len(colors), 1)].min() > 12
    assert np.abs(colors[:, 0] - 100).min() > 20  # on white
    lightness = lab(matplotlib.colormaps[look.SEQUENTIAL](np.linspace(0, 1, 50))[:, :3], SEEN[vision])[:, 0]
    assert (np.diff(lightness) > 0).all()
    lightness = lab(matplotlib.colormaps[look.DIVERGING](np.linspace(0, 1, 51))[:, :3], SEEN[vision])[:, 0]
    assert (np.diff(lightness[:26]) > 0).all() and (np.diff(lightness[25:]) < 0).all()


def test_fifteen_series_differ():
    styles = [tuple(look.series(number).items()) for number in range(len(look.COLORS) * len(look.MARKERS))]
    assert len(set(styles)) == len(styles) and look.series(0)["marker"] != look.series(len(look.COLORS))["marker"]


def test_colors_and_fonts_are_named_in_one_place(repository):
    named = re.compile(r"""["']#[0-9A-Fa-f]{6}["']|(?:color|cmap|colors)=["'](?!none)|font(?:size|family)=\d""")
    for path in [*(repository / "src").rglob("*.py"), repository / "scripts/results.py"]:
        assert path.name == "look.py" or not named.search(path.read_text()), path


DRAW = {
    "heat map": lambda path, label: heat_maps([("", np.eye(2))], [label, "b"], ["c", label], "rows", path, title=label),
    "grid": lambda path, label: grid_of_scores(path, [[[1.0], [2.0, 3.0]]], [label, "b"], ["c"], "BLEU", title="t"),
    "points": lambda path, label: labelled_points(path, {label: {label: (1, 0, 2, 0.5)}}, "hours", "BLEU", "title"),
    "lines": lambda path, label: line_panels(path, {label: {label: [(1, 2.0)], "b": [(2, 1.0)]}}, "steps", title="t"),
}


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_values_give_the_same_file(tmp_path, ending):
    for number in (1, 2):
        DRAW["heat map"](tmp_path / f"{number}.{ending}", "a")
    one, two = ((tmp_path / f"{number}.{ending}").read_bytes() for number in (1, 2))
    assert one == two and b"atplotlib v" not in one


def texts_of(path):
    """Return the texts of an SVG file, and the fonts that they name."""
    text = path.read_text()
    return re.findall(r"<text[^>]*>(.*?)</text>", text), " ".join(re.findall(r"font(?:-family)?: ([^;\"]*)", text))


@pytest.mark.parametrize("kind", DRAW)
def test_characters_without_a_font(tmp_path, monkeypatch, caplog, kind):
    """They are replaced by question marks, with a note in the picture and a warning, instead of boxes."""
    monkeypatch.setattr(look.logger, "propagate", True)
    DRAW[kind](tmp_path / "a.svg", "x\U0010ffff\U0010fffe y")
    texts, _ = texts_of(tmp_path / "a.svg")
    assert "x?? y" in texts and "?: no installed font has the character" in texts
    assert "No installed font" in caplog.text and "\U0010ffff" in caplog.text
    DRAW[kind](tmp_path / "b.svg", "Mädchen, что")
    texts, fonts = texts_of(tmp_path / "b.svg")
    assert "Mädchen, что" in texts and not any("?" in text for text in texts) and "DejaVu Sans" in fonts


@pytest.fixture
def font(tmp_path, monkeypatch):
    """A font with one character that no other font has, and a function that tells matplotlib of it as if installed."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.ttLib.tables._g_l_y_f import Glyph
    from matplotlib import font_manager

    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "own"])
    builder.setupCharacterMap({0x10FFFD: "own"})
    builder.setupGlyf({".notdef": Glyph(), "own": Glyph()})
    builder.setupHorizontalMetrics({".notdef": (500, 0), "own": (900, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Own Font", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "own.ttf")
    known = font_manager.fontManager.ttflist
    monkeypatch.setattr(font_manager.fontManager, "ttflist", list(known))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "own.ttf")])
    look.families_of.cache_clear()
    yield
    look.families_of.cache_clear()


def test_a_font_that_has_the_characters_is_found(tmp_path, font):
    """Also if it was installed after matplotlib stored its list of fonts."""
    DRAW["heat map"](tmp_path / "a.svg", "x\U0010fffd")
    texts, fonts = texts_of(tmp_path / "a.svg")
    assert "x\U0010fffd" in texts and "Own Font" in fonts and not any("?" in text for text in texts)
    DRAW["heat map"](tmp_path / "a.png", "x\U0010fffd")


TITLE = "A title of several words, too long for one line of a narrow figure"


@pytest.mark.parametrize("words", [2, 12, 25])
def test_pictures_of_sentences_are_readable(tmp_path, words):
    """At most as wide as a page, with texts of eight points or more inside of it that do not overlap along an axis."""
    from matplotlib.text import Text

    labels = [f"word{number}" for number in range(words)]
    drawn = []
    original = look.show_all_characters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "show_all_characters", lambda figure: (original(figure), drawn.append(figure)))
        heat_maps(
            [("one", np.eye(words)), ("two", np.eye(words))], labels, labels, "step", tmp_path / "a.png", title="t"
        )
    (figure,) = drawn
    assert figure.get_figwidth() <= look.WIDTH
    for text in (text for text in figure.findobj(Text) if text.get_visible() and text.get_text()):
        box = text.get_window_extent()
        assert text.get_fontsize() >= look.SMALL
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1, text
    for axes in figure.axes[:2]:
        places = sorted(label.get_window_extent().y0 for label in axes.get_yticklabels())
        assert min(np.diff(places)) >= 9 * figure.dpi / 72
