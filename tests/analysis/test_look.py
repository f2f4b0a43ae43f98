"""The look of plots: sizes, and files that are the same for the same values."""

from unittest import mock

import numpy as np
import pytest

from recnmt_hf.analysis.plots import WIDTH, heat_maps


pytest.importorskip("matplotlib", reason="the extra plots is not installed")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_values_give_the_same_file(tmp_path, ending):
    for number in (1, 2):
        heat_maps([("", np.eye(2))], ["a", "b"], ["c", "a"], "rows", tmp_path / f"{number}.{ending}", title="a")
    one, two = ((tmp_path / f"{number}.{ending}").read_bytes() for number in (1, 2))
    assert one == two and b"atplotlib v" not in one


@pytest.mark.parametrize("words", [2, 12, 25])
def test_pictures_of_sentences_are_readable(tmp_path, words):
    """At most as wide as a page, with texts of eight points or more inside of it that do not overlap along an axis."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    labels, panels = [f"word{number}" for number in range(words)], [("one", np.eye(words)), ("two", np.eye(words))]
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as saved:
        heat_maps(panels, labels, labels, "step", tmp_path / "a.png", title="t")
    figure = saved.call_args.args[0]
    assert figure.get_figwidth() <= WIDTH
    for text in (text for text in figure.findobj(Text) if text.get_visible() and text.get_text()):
        box = text.get_window_extent()
        assert text.get_fontsize() >= 8
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1, text
    for axes in figure.axes[:2]:
        places = sorted(label.get_window_extent().y0 for label in axes.get_yticklabels())
        assert min(np.diff(places)) >= 9 * figure.dpi / 72
