"""The script that converts LCSTS; its files are read as a corpus."""

import lcsts_to_tsv as script
import pytest

from recnmt_hf.data import Corpus


LCSTS = """<doc id=0>
    <human_label>4</human_label>
    <summary>
        新桥开放
    </summary>
    <short_text>
        昨天新桥
        开放
    </short_text>
</doc>
<doc id=1>
  <summary>贵</summary><human_label>2</human_label>
  <short_text>苹果\t贵</short_text>
</doc>
"""


def test_files_are_a_corpus(tmp_path):
    path, tsv = tmp_path / "PART_II.txt", tmp_path / "part_2.tsv"
    expected = [("昨天新桥开放", "新桥开放"), ("苹果 贵", "贵")]
    for text, options, pairs in (
        (LCSTS, [], expected),
        (LCSTS, ["--min-score", "3"], expected[:1]),
        (LCSTS.replace("<human_label>2</human_label>", ""), ["--min-score", "3"], expected),
    ):
        path.write_text(text, encoding="utf-8")
        script.main([str(path), str(tsv), *options])
        assert [(pair.source, pair.target) for pair in Corpus(tsv=tsv).pairs("zh", "zh")] == pairs


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        (LCSTS.replace("</doc>\n", "", 1), 1),
        (LCSTS[: LCSTS.rindex("</doc>")], 11),
        (LCSTS.replace("summary", "title"), 1),
        (LCSTS.replace(">4<", ">four<"), 1),
    ],
)
def test_damaged_documents(tmp_path, text, line):
    path, tsv = tmp_path / "PART_I.txt", tmp_path / "part_1.tsv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"line {line}:"):
        script.main([str(path), str(tsv)])
    assert not tsv.exists()
