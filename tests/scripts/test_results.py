"""The comparison of models: tables, ranking, CSV and plots from evidence, and what it rejects."""

import csv
import json
import re
import shutil

import pytest
import results
from measures import gain_of, marks_of, scores_of
from pictures import check_pictures
from user_errors import rejects

from recnmt_hf.metrics.bleu import chrf_score, sacrebleu_score
from recnmt_hf.metrics.significance import compare_runs, holm
from recnmt_hf.training.evidence import Evidence, TestScore, sum_of_lines


REFERENCES = [f"the farmer number {i} invites the girl that the dog follows" for i in range(12)]
SIGNATURE = sacrebleu_score(REFERENCES, REFERENCES).signature
ROWS = "plain:\nON-LSTM: {model.type: onlstm_transformer}\ntwo*: {model.type: gret}\nlater: {model.type: rnmt}\n"
PAGE = "".join(
    f"<!-- results: small {name} -->\nold\n<!-- end -->\n"
    for name in ("table", "lengths_set", "tuned", "curves", "setup", "plots", "summary")
)


def translations(wrong):
    """Return the references with an error in the first ones."""
    return [text.replace("invites", "invited") if i < wrong else text for i, text in enumerate(REFERENCES)]


def add_run(root, name, seed, wrong, kind, hours, bleu, first_steps=None):
    """Write the folder of a run with that many wrong translations, and validation BLEU at steps 100, 200, ..."""
    folder = root / "model_cards/evidence/small" / f"{name}-{seed}"
    texts, steps = translations(wrong), 100 * len(bleu)
    (folder / "translations").mkdir(parents=True)
    (folder / "translations/set.de").write_text("".join(f"{text}\n" for text in texts))
    score = sacrebleu_score(texts, REFERENCES)
    stages = {} if first_steps is None else {"baseline_steps": first_steps}
    Evidence(
        model={"type": kind, "parameters": 1_250_000, "preset": "tiny"},
        languages=["en", "de"],
        recipe={"training": {"seed": seed, "max_tokens": 64, **stages}},
        data={"training_pairs": 40, "validation_pairs": 4},
        tokenizer={"kind": "bpe", "source_symbols": 50, "target_symbols": 50, "joint": True},
        training={
            **{"steps": steps, "seconds_per_step": 3600 * hours / steps, "seconds": 3600.0 * hours},
            **{"processes": 1, "hardware": "CPU (X, 1 thread)", "seed": seed},
        },
        curve=[
            {"step": 100 * k, "eval_loss": 3.0 - 0.1 * k, "eval_bleu": value} for k, value in enumerate(bleu, start=1)
        ],
        versions={"torch": "2"},
        tests=[
            TestScore(
                name="set",
                scores={"bleu": score.score},
                signature=score.signature,
                sentences=len(texts),
                source_sha256="a",
                reference_sha256=sum_of_lines(REFERENCES),
                decoding={"beams": 4, "length_penalty_type": "vaswani", "length_penalty": 0.6},
                translations="translations/set.de",
                dataset=[{"source": "data/set.en", "target": "data/set.de"}],
            )
        ],
    ).save(folder)


def add_speeds(folder, **speeds):
    """Write the file of measured speeds with these sentences per second of rows."""
    rows = {
        name: {
            "sentences_per_second": [speed, speed + 1, speed + 9],
            "training_tokens_per_second": [100 * speed],
            "training_mebibytes": [500 + speed],
        }
        for name, speed in speeds.items()
    }
    settings = {"beams": 4, "batch": 16, "max_tokens": 1024, "sentences": 12}
    (folder / "speed.json").write_text(json.dumps([{"hardware": "CPU (Y, 1 thread)", **settings, "rows": rows}]))


@pytest.fixture
def root(tmp_path):
    """A repository with two seeds of the baseline and of a row, and one of a row with two stages."""
    (tmp_path / "scripts/recipes/rows").mkdir(parents=True)
    (tmp_path / "scripts/recipes/rows/small.yaml").write_text(ROWS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/set.de").write_text("".join(f"{text}\n" for text in REFERENCES))
    (tmp_path / "data/set.en").write_text("a b c\n" * 7 + "a b c d e f\n" * 5)
    for seed, wrong in ((1, 8), (2, 10)):
        add_run(tmp_path, "plain", seed, wrong, "nmt_transformer", 1.0, [10.0, 20.0, 30.0, 25.0 + seed])
        add_run(tmp_path, "on_lstm", seed, wrong - 6, "onlstm_transformer", 2.0, [15.0, 28.0, 36.0, 40.0])
    add_run(tmp_path, "two", 1, 0, "gret", 2.0, [11.0, 21.0, 41.0, 42.0], first_steps=200)
    for seed in (1, 2):
        measured = {"recipe": {"bleu": 20.0 + seed, "length_ratio": 0.9}, "tuned": {"bleu": 21.0, "length_ratio": 1.0}}
        penalties = {"length_penalty": 0.6, "tuned_length_penalty": 1.0 + seed}
        place = tmp_path / f"model_cards/evidence/small/plain-{seed}/length_penalties.json"
        place.write_text(json.dumps({**penalties, "sets": dict.fromkeys(("validation", "set"), measured)}))
    add_speeds(tmp_path / "model_cards/evidence/small", plain=10, on_lstm=4)
    (tmp_path / "model_cards/small.md").write_text(PAGE)
    (tmp_path / "model_cards/gret.md").write_text("<!-- results: small family -->\n<!-- end -->\n")
    (tmp_path / "README.md").write_text("No section; <!-- results: other x -->\n\n<!-- end -->\n")
    return tmp_path


def table_in(text, section):
    """Return the rows of a section's table as cells by title."""
    lines = re.search(rf"<!-- results: small {section} -->\n(.*?)<!-- end -->", text, re.DOTALL)[1].splitlines()
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_everything_comes_from_the_evidence(root, capsys):
    folder = root / "model_cards/evidence/small"
    results.main(["small", "--root", str(root), "--references", str(root / "data"), "--samples", "200"])
    text = (root / "model_cards/small.md").read_text()
    plain, onlstm, two = table_in(text, "table")
    scores = [sacrebleu_score(translations(wrong), REFERENCES).score for wrong in (8, 10, 2, 4, 0)]
    bleu = f"{sum(scores[:2]) / 2:.2f} ± {abs(scores[0] - scores[1]) / 2**0.5:.2f}"
    assert plain["BLEU (length) set"] == f"{bleu} (1.00)"
    assert (two["BLEU (length) set"], two["model"], two["seeds"]) == ("100.00 (1.00)", "two* (two stages)", "1")
    chrf = [chrf_score(translations(wrong), REFERENCES).score for wrong in (2, 4)]
    assert onlstm["chrF set"] == f"{sum(chrf) / 2:.2f}"
    raw = [
        compare_runs([translations(8), translations(10)], [translations(2), translations(4)], REFERENCES, 200),
        compare_runs([translations(8)], [translations(0)], REFERENCES, 200),
    ]
    assert [plain["p set"], onlstm["p set"], two["p set"]] == ["", *(results.p_text(value) for value in holm(raw))]
    sentences, plain_lengths, *_ = table_in(text, "lengths_set")
    assert sentences == {"words": "sentences", "(0, 5]": "7", "(5, 10]": "5"}
    bleu = [sacrebleu_score(translations(wrong)[7:], REFERENCES[7:]).score for wrong in (8, 10)]
    assert plain_lengths["(5, 10]"] == f"{sum(bleu) / 2:.2f} (1.00)"
    (tuned,) = table_in(text, "tuned")
    assert list(tuned.values()) == ["plain", "2.0, 3.0", "21.50 (0.90)", *["21.00 (1.00)"] * 2]
    curve = {"steps": "plain", "100": "10.00", "200": "15.00", "300": "20.00", "400": "25.50"}
    assert table_in(text, "curves")[0] == curve
    assert [row["sentences/s"] for row in (plain, onlstm, two)] == ["11.0", "5.0", ""]
    assert "Speeds: random weights" in text
    assert "- Not run yet: later." in text and SIGNATURE in text

    with open(folder / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    places = [(line["model"], line["hardware"]) for line in lines]
    assert places == [(name, f"CPU ({cpu}, 1 thread)") for name in ("plain", "ON-LSTM") for cpu in "XY"] + [
        ("two*", "CPU (X, 1 thread)")
    ]
    assert [line["sentences_per_second"] for line in lines[:2]] == ["", "11.0000"]
    assert [line["training_tokens_per_second"] for line in lines[:2]] == ["", "1000.0000"]
    assert [float(line["p"]) for line in lines[2:]] == [round(p, 4) for p in (raw[0], raw[0], raw[1])]
    for name, title in (("bleu_over_hours.svg", "training hours"), ("bleu_over_speed.svg", "sentences per second")):
        picture = (folder / name).read_text()
        assert f"evidence/small/{name}" in text and f"BLEU over {title} on CPU" in picture
        assert "over seeds<" in picture and ("two* (two stages)" in picture) == ("hours" in title)
    assert "Without sentences per second: two* (two stages)." in text and "Without training hours" not in text
    (own,) = table_in((root / "model_cards/gret.md").read_text(), "family")[1:]
    assert own["model"] == "two* (two stages)" and "chrF set" not in own
    summary = text.rpartition("summary -->")[2]
    assert summary.count("\n| ") == 4 and "two* (two stages)" in summary and "training hours" not in summary

    # Again without references: the same from what is stored.
    capsys.readouterr()
    before = {path: path.read_bytes() for path in (folder / "table.csv", root / "model_cards/small.md")}
    results.main(["small", "--root", str(root)])
    assert before == {path: path.read_bytes() for path in before} and capsys.readouterr().err == ""


def test_missing_scores_are_named_and_stale_ones_ignored(root, capsys):
    results.main(["small", "--root", str(root)])
    error = capsys.readouterr().err
    assert "scores of plain on set" in error and "gain of two* over plain on set" in error
    assert "chrF set" not in table_in((root / "model_cards/small.md").read_text(), "table")[0]
    results.main(["small", "--root", str(root), "--references", str(root / "data"), "--samples", "5"])
    assert capsys.readouterr().err == ""
    file = root / "model_cards/evidence/small/two-1/translations/set.de"
    file.write_text(file.read_text().replace("girl", "boy", 1))
    results.main(["small", "--root", str(root)])
    error = capsys.readouterr().err
    assert "scores of two* on set" in error and "gain of two* over plain on set" in error
    assert "scores of plain" not in error
    with rejects("set", field=str(file.parents[1])):
        results.main(["small", "--root", str(root), "--references", str(root / "data")])


def test_a_verdict_follows_from_the_translations(root):
    """Three seeds with gains are a reproduction; with a control that gains as much, the cause is open."""
    folder, page = root / "model_cards/evidence/small", root / "model_cards/small.md"
    papers, rows = root / "scripts/recipes/rows/small_papers.yaml", root / "scripts/recipes/rows/small.yaml"
    rows.write_text(ROWS + "control: {model.type: gret}\n")
    papers.write_text("ON-LSTM: {family: onlstm_transformer, system: hybrid, verdict: true, control: control}\n")
    page.write_text("<!-- results: small verdicts -->\n<!-- end -->\n")

    def found():
        results.main(["small", "--root", str(root), "--references", str(root / "data"), "--samples", "200"])
        (line,) = table_in(page.read_text(), "verdicts")
        return line["seeds"], line["verdict"].strip("*")

    assert found() == ("2", "cannot say at this budget")
    add_run(root, "plain", 3, 9, "nmt_transformer", 1.0, [10.0, 20.0, 30.0, 28.0])
    assert found() == ("2", "cannot say at this budget")
    (line,), stored = table_in(page.read_text(), "verdicts"), json.loads((folder / "scores.json").read_text())["gains"]
    assert line["ours, set"].startswith(f"{stored['ON-LSTM over plain']['set']['difference']:+.2f} ")  # of two seeds
    add_run(root, "on_lstm", 3, 1, "onlstm_transformer", 2.0, [15.0, 28.0, 36.0, 40.0])
    assert found() == ("3", "reproduced")
    for seed in (1, 2, 3):
        add_run(root, "control", seed, 2, "gret", 2.0, [15.0, 28.0, 36.0, 40.0])
    assert found() == ("3", "gain without the stated cause")
    for seed in (1, 2, 3):  # as bad as the baseline
        shutil.rmtree(folder / f"on_lstm-{seed}")
        add_run(root, "on_lstm", seed, 12, "onlstm_transformer", 2.0, [15.0, 28.0, 36.0, 40.0])
    assert found() == ("3", "not reproduced")


def test_a_gain_by_length_alone_is_marked():
    """The longer output has fewer matching n-grams, and the smaller brevity penalty."""
    references = [[f"the farmer number {i} invites the girl that the dog follows today" for i in range(40)]]
    short = [text.removesuffix(" that the dog follows today") for text in references[0]]
    longer = [text.replace("number", "No.") for text in references[0]]
    entry = gain_of([short], [longer], references, 200, "13a")
    first, second = (scores_of(texts, references, "13a") for texts in (short, longer))
    assert first["length_ratio"] == pytest.approx(7 / 12) and second["brevity_penalty"] == 1
    assert entry["difference"] == pytest.approx(second["bleu"] - first["bleu"])
    assert entry["interval"][0] > 0 > entry["interval_without_penalty"][1]
    assert marks_of(entry, 1.0, -1.0) == ["length effect"]
    assert marks_of(entry, 1.0, 0.5) == ["length effect", "metrics disagree"]


def changed(path, *places, value):
    """Change an entry of a JSON file."""
    content = entry = json.loads(path.read_text())
    for place in places[:-1]:
        entry = entry[place]
    entry[places[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("places", "value", "words"),
    [
        (("training", "steps"), 300, ["but", "steps", "plain-1"]),
        (("recipe", "training", "max_tokens"), 65, ["but", "training.max_tokens"]),
        (("tests", 0, "decoding", "beams"), 5, ["but", "decoding of set"]),
        (("model", "parameters"), 5, ["but", "model", "on_lstm-1"]),
        (("training", "seed"), 3, ["but", "The seed"]),
        (("tests", 0, "scores"), {"rougeL": 1.0}, ["has no"]),
    ],
)
def test_runs_that_cannot_be_compared(root, places, value, words):
    """One error with the file, and nothing is written."""
    path = root / "model_cards/evidence/small/on_lstm-2/evidence.json"
    changed(path, *places, value=value)
    with rejects(*words, field=str(path)):
        results.main(["small", "--root", str(root)])
    assert (root / "model_cards/small.md").read_text() == PAGE
    assert not (root / "model_cards/evidence/small/table.csv").exists()


def test_missing_and_damaged_files(root, monkeypatch, capsys):
    folder = root / "model_cards/evidence/small"
    for name in ("on_lstm-1/evidence.json", "two-1/translations/set.de", "speed.json"):
        kept = (folder / name).read_text()
        (folder / name).unlink() if "-1" in name else (folder / name).write_text("[1]")
        with rejects(field=str(folder / name)):
            results.main(["small", "--root", str(root)])
        (folder / name).write_text(kept)
    (root / "data/set.de").write_text("another\n" * 12)
    with rejects("whose checksum is in the evidence", "set"):
        results.main(["small", "--root", str(root), "--references", str(root / "data")])
    (folder / "other-1").mkdir()
    with rejects(field=str(folder / "other-1")):
        results.main(["small", "--root", str(root)])
    monkeypatch.setattr("sys.argv", ["results.py", "small", "--root", str(root)])
    assert results.run() == 2 and str(folder / "other-1") in capsys.readouterr().err
    shutil.rmtree(folder)
    with rejects("has no folder ROW-SEED with evidence"):
        results.main(["small", "--root", str(root)])


def test_committed_files_are_those_of_the_evidence(repository, tmp_path, capsys):
    """`python scripts/results.py NAME` changes nothing, also no plot, and needs no references."""
    for name in ("README.md", "model_cards", "scripts/recipes/rows"):
        source, copy = repository / name, tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    tables = list(tmp_path.glob("model_cards/evidence/*/table.csv"))
    for table in tables:
        results.main([table.parent.name, "--root", str(tmp_path)])
        assert capsys.readouterr().err == ""
    assert len(tables) >= 4
    for path in (*results.documents_of(tmp_path), *tables):
        assert path.read_text() == (repository / path.relative_to(tmp_path)).read_text(), path.name
    for table in (table for table in tables if any(table.parent.glob("*.svg"))):
        check_pictures(table.parent, (repository / table.relative_to(tmp_path)).parent)
