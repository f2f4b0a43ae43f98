"""`recnmt train --plot`: curves of running and of finished runs."""

import json
import shutil

import pytest

from recnmt_hf.analysis.curves import curve_of_run
from recnmt_hf.commands.main import main
from recnmt_hf.training.checkpoints import mark_complete
from recnmt_hf.training.evidence import Evidence, curve_of


LOG = [
    {"step": 5, "loss": 4.0, "learning_rate": 1e-3, "grad_norm": 1.0},
    {"step": 10, "loss": 3.5, "learning_rate": 2e-3},
    {"step": 10, "eval_loss": 3.6, "eval_bleu": 1.5, "eval_runtime": 2.0, "eval_samples_per_second": 3.0},
    {"step": 10, "train_runtime": 3.0},
]
CURVE = [
    {"step": 5, "loss": 4.0, "learning_rate": 1e-3},
    {"step": 10, "loss": 3.5, "learning_rate": 2e-3, "eval_loss": 3.6, "eval_bleu": 1.5},
]


def run_with_a_checkpoint(folder):
    (folder / "checkpoint-10").mkdir(parents=True)
    (folder / "checkpoint-10/trainer_state.json").write_text(json.dumps({"log_history": LOG}))
    mark_complete(folder / "checkpoint-10")
    return folder


def test_a_row_for_each_step():
    assert curve_of(LOG) == CURVE


def test_panels_of_different_validation_sets_say_so(tmp_path, monkeypatch):
    """The sets are those of the recipes of runs and of the evidence of models; unknown ones are not compared."""
    titles = []
    monkeypatch.setattr("recnmt_hf.analysis.curves.line_panels", lambda output, panels, *_, **__: titles.append(panels))
    sets = {"a": [{"tsv": "x.tsv"}], "b": [{"tsv": "/data/x.tsv"}], "c": [{"tsv": "y.tsv"}], "unknown": None}
    for name, validation in sets.items():
        run = run_with_a_checkpoint(tmp_path / name)
        if name == "a":
            Evidence(recipe={"data": {"validation": validation}}).save(run)
        elif validation:
            (run / "recipe.yaml").write_text(json.dumps({"data": {"validation": validation}}))
    for names in ("ab", ["a", "unknown"], "bc", "abc"):
        assert main(["train", "--plot", *(str(tmp_path / name) for name in names)]) == 0
    assert ["Validation: BLEU (different sets)" in panels for panels in titles] == [False, False, True, True]
    assert all("Training: loss" in panels for panels in titles)


def test_curves_of_checkpoints_and_models(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    run = run_with_a_checkpoint(tmp_path / "run")
    assert curve_of_run(run) == CURVE
    (tmp_path / "model").mkdir()
    Evidence(curve=CURVE).save(tmp_path / "model")
    assert curve_of_run(tmp_path / "model") == CURVE
    picture = tmp_path / "curve.png"
    assert main(["train", "--plot", str(run), str(tmp_path / "model"), "--output", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    shutil.rmtree(run / "checkpoint-10")
    for words, code in (
        ([str(run)], "has no complete checkpoint or model"),
        ([str(tmp_path / "none")], "has no complete checkpoint or model"),
        ([str(run), str(run)], "repeats"),
        ([str(tmp_path / "model"), "-o", "a.txt"], "is not the name of an image file"),
    ):
        assert main(["train", "--plot", *words]) == 2
        assert code in capsys.readouterr().err
