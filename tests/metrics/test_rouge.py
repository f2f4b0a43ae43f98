"""ROUGE against independent counts, on words, characters and as the original script counts English."""

from collections import Counter
from importlib.metadata import version

import pytest
from user_errors import rejects

from recnmt_hf import Rouge
from recnmt_hf.commands.main import main
from recnmt_hf.metrics import compare_systems, rouge_scores
from recnmt_hf.metrics.rouge import units_of


CHINESE = ["我们 喜欢猫ab", "狗在公园里跑", "他 看见了一座新桥"]
REFERENCES = ["我喜欢猫abc", "公园里有三只狗在跑", "新桥"]


def f1(matches, hypothesis, reference):
    return 2 * matches / (hypothesis + reference) if matches else 0.0


def longest_common(a, b):
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            best[i + 1][j + 1] = best[i][j] + 1 if x == y else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


def by_definition(hypotheses, references):
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004) over lists of units."""
    totals = [0.0, 0.0, 0.0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        for n in (1, 2):
            grams = [Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (hypothesis, reference)]
            counts = [sum(each.values()) for each in (grams[0] & grams[1], *grams)]
            totals[n - 1] += f1(*counts)
        totals[2] += f1(longest_common(hypothesis, reference), len(hypothesis), len(reference))
    return [100 * total / len(hypotheses) for total in totals]


def test_characters():
    found = rouge_scores(CHINESE, REFERENCES, "characters")
    units = [[[*line.replace(" ", "")] for line in lines] for lines in (CHINESE, REFERENCES)]
    assert [each.score for each in found] == pytest.approx(by_definition(*units), abs=1e-9)
    assert [each.name for each in found] == ["ROUGE-1 F1", "ROUGE-2 F1", "ROUGE-L F1"]
    tool = f"tool:rouge-score|version:{version('rouge-score')}"
    assert found[0].signature == f"nrefs:1|units:characters|{tool}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("मेरा नाम, क्‍या?", ["मेरा", "नाम", "क्या"]),  # vowel signs and joiners do not divide words
        ("cafe\u0301 CAFÉ", ["café", "café"]),
        ("ภาษาไทย ที่นี่", ["ภาษาไทย", "ที่นี่"]),
        ("a_b 1.5, I'm ❤️ so-so!", ["a_b", "1", "5", "i", "m", "so", "so"]),
        ("狗。猫", ["狗", "猫"]),
        ("", []),
    ],
)
def test_words_of_scripts_with_marks(text, words):
    assert units_of("words")(text) == words


def test_words_know_every_script_and_english_only_its_own():
    german = (["Der Hüne grüßt Öl."], ["der hüne trinkt öl"])
    assert [each.score for each in rouge_scores(*german)] == pytest.approx(
        by_definition([["der", "hüne", "grüßt", "öl"]], [["der", "hüne", "trinkt", "öl"]])
    )
    assert rouge_scores(["狗"], ["狗"], "english")[0].score == 0 < rouge_scores(["狗"], ["狗"], "words")[0].score
    stemmed = rouge_scores(["the dogs were running"], ["the dog runs"], "english")
    assert stemmed[0].score == pytest.approx(100 * f1(3, 4, 3))


def test_the_best_of_several_references_counts():
    second = ["我们喜欢猫ab", "猫", "一座新桥"]
    both = rouge_scores(CHINESE, [REFERENCES, second], "characters")
    single = [[[*each.replace(" ", "")] for each in lines] for lines in (CHINESE, REFERENCES, second)]
    best = [max(by_definition([single[0][i]], [stream[i]])[0] for stream in single[1:]) for i in range(len(CHINESE))]
    assert both[0].score == pytest.approx(sum(best) / 3) and "nrefs:2" in both[0].signature
    metric = Rouge()
    rows = [list(pair) for pair in zip(REFERENCES, second, strict=True)]
    found = metric.compute(predictions=CHINESE, references=rows, units="characters")
    assert [found[kind] for kind in ("rouge1", "rouge2", "rougeL")] == [each.score for each in both]
    assert found["signature"] == both[0].signature


def test_errors():
    with rejects(field="units"):
        rouge_scores(["a"], ["a"], "bytes")
    with rejects(field="reference 1"):
        rouge_scores(["a", "b"], ["a"])
    with rejects(field="metric"):
        compare_systems({"a": ["x"], "b": ["y"]}, ["x"], metric="rouge9")
    assert [each.score for each in rouge_scores(["", "a"], ["b", "a"])] == [50.0, 0.0, 50.0]


def test_the_command(tmp_path, capsys, monkeypatch):
    names = {"a": CHINESE, "b": REFERENCES, "ref": REFERENCES, "src": ["长" * 20, "短", "短短"]}
    for name, lines in names.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = ["-r", "ref", "-s", "src", "--rouge", "characters", "--samples", "20"]
    assert main(["evaluate", "a", "b", *options]) == 0
    said = capsys.readouterr().out
    scores = rouge_scores(CHINESE, REFERENCES, "characters")
    assert all(f"  {score}\n" in said for score in scores) and "BLEU" not in said
    assert "ROUGE-L F1 of sources with (0, 15] characters: 100.00 (2 sentences)" in said
    assert f"b: ROUGE-L F1 100.00 (+{100 - scores[2].score:.2f})" in said
