"""The best of several hypotheses, as a function and on the command line."""

import json

import pytest
import sacrebleu
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.metrics import choose_best, oracle_scores


REFERENCES = ["the dog sees a cat .", "we read an old book ."]
LISTS = [["a dog is here .", "the dog sees the cat .", "the dog sees a cat ."], ["we read .", "we read an old boot ."]]


def test_the_best_of_each_sentence():
    assert choose_best(LISTS, REFERENCES) == choose_best(LISTS, [REFERENCES], "chrf") == [LISTS[0][2], LISTS[1][1]]
    for by, metric in (("bleu", sacrebleu.BLEU(effective_order=True)), ("chrf", sacrebleu.CHRF())):
        for own, reference, found in zip(LISTS, REFERENCES, choose_best(LISTS, REFERENCES, by), strict=True):
            scores = [metric.sentence_score(text, [reference]).score for text in own]
            assert scores[own.index(found)] == max(scores)
    assert choose_best([["x", "x", "y"]], ["z"]) == ["x"]
    bleu, chrf = oracle_scores(LISTS, REFERENCES)
    assert bleu.score == pytest.approx(sacrebleu.corpus_bleu([LISTS[0][2], LISTS[1][1]], [REFERENCES]).score)
    assert chrf.name == "chrF2" and chrf.score > 80
    with rejects("option.value", "by"):
        choose_best(LISTS, REFERENCES, "ter")
    for wrong, code in (
        ([["a"], []], "metric.nothing_to_score"),
        (["ab", ["b"]], "sentence.not_a_list"),
        ([["a", None], ["b"]], "sentence.not_text"),
    ):
        with rejects(code):
            choose_best(wrong, REFERENCES)


def test_on_the_command_line(tmp_path, capsys):
    records = [{"line": line, "text": text} for line, own in enumerate(LISTS) for text in own]
    files = {"best.jsonl": [json.dumps(record) for record in records], "reference": REFERENCES}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    words = ["evaluate", str(tmp_path / "best.jsonl"), "-r", str(tmp_path / "reference"), "--oracle"]
    assert main([*words, "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())["systems"][str(tmp_path / "best.jsonl")]
    assert f"best of 3, by sentence: BLEU {report['oracle'][0]['score']:.2f}" in printed
    assert report["oracle"][0]["score"] > report["scores"][0]["score"]
    assert report["scores"][0]["score"] == pytest.approx(
        sacrebleu.corpus_bleu([own[0] for own in LISTS], [REFERENCES]).score
    )
    for wrong in ("text", '{"text": "a"}', '{"line": 1, "text": "a"}', '{"line": 0, "text": 1}', "[]"):
        (tmp_path / "best.jsonl").write_text(f"{wrong}\n")
        assert main(words) == 2
        assert "[records.line]" in capsys.readouterr().err
    assert main([*words, "--rouge", "words"]) == 2 and "[usage.excludes]" in capsys.readouterr().err
