"""Sweeps: the runs they name, that finished ones are kept, their table and their plot."""

import json
from unittest import mock

import pytest
from sweep import cells_of, is_done, main, read_axis, read_rows, with_seed

from recnmt_hf import UserError
from recnmt_hf.training.evidence import Evidence
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


RECIPE = """
model: {type: gret, preset: tiny, fields: {d_model: 32, encoder_layers: 1, decoder_layers: 1, num_capsules: 2}}
data: {train: [{generated: train, size: 60}], validation: [{generated: validation, size: 4}]}
tokenizer: {kind: word}
training: {max_steps: 2, max_tokens: 256, eval_steps: 2, save_steps: 2, bleu_samples: 2, use_cpu: true}
average: {count: 1}
test: {unseen: {generated: test, size: 4}}
"""


def test_rows_values_and_seeds_are_combined(tmp_path):
    (tmp_path / "rows.yaml").write_text("all:\nno gate: {model.fields.global_gate: false, model.preset: 'tiny'}\n")
    rows = read_rows(tmp_path / "rows.yaml")
    assert rows == {"all": [], "no gate": ["model.fields.global_gate=false", 'model.preset="tiny"']}
    axes = [read_axis("model.fields.num_capsules=2, 4"), read_axis("training.warmup_steps=[1]")]
    cells = cells_of(rows, axes, [1, 2])
    assert len(cells) == 8
    assert cells[-1].name == "no_gate,num_capsules=4,warmup_steps=1,seed=2" and cells[-1].seed == 2
    assert cells[-1].values == {"row": "no gate", "num_capsules": 4, "warmup_steps": 1}
    assert cells[-1].overrides[-2:] == ("training.warmup_steps=1", "training.seed=2")
    marked = cells_of({}, [("model.init_from", ["runs/{seed}/model"])], [5])
    assert marked[0].overrides == ("model.init_from=runs/{seed}/model", "training.seed=5")
    varied = cells_of({}, [("training.seed", [1, 2]), ("model.fields.num_capsules", [4])], [])
    assert varied == cells_of({}, [("model.fields.num_capsules", [4])], [1, 2])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    assert with_seed(marked[0].overrides, recipe) == ["model.init_from=runs/5/model", "training.seed=5"]
    assert with_seed(["model.init_from=runs/{seed}/model"], recipe) == ["model.init_from=runs/1/model"]
    same_ends = cells_of({}, [("a.x", [1]), ("b.x", [2])], [])
    assert same_ends[0].values == {"a.x": 1, "b.x": 2} and same_ends[0].seed is None


def test_an_interrupted_run_with_a_changed_recipe_is_not_done(tmp_path):
    """It has written its recipe beside the model of the earlier one."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    recipe, later = (Recipe.from_file(tmp_path / "small.yaml", [f"training.max_steps={steps}"]) for steps in (2, 4))
    train(recipe, tmp_path / "run")
    assert is_done(tmp_path / "run", recipe)
    later.save(tmp_path / "run/recipe.yaml")
    assert not is_done(tmp_path / "run", later) and not is_done(tmp_path / "run", recipe)
    with (
        mock.patch("recnmt_hf.training.finishing.test", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        train(later, tmp_path / "run", resume=True)
    assert not is_done(tmp_path / "run", later)  # the model is new, and not tested yet
    train(later, tmp_path / "run", resume=True)
    assert is_done(tmp_path / "run", later) and Evidence.load(tmp_path / "run/model").training["steps"] == 4


def test_finished_runs_are_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    words = ["small.yaml", "training.baseline_steps=0.5", "--seeds", "3", "--output", "out"]
    words += ["--vary", "model.fields.global_gate=true,false"]
    main([*words, "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition("\t")[0] for line in listed] == ["global_gate=true,seed=3", "global_gate=false,seed=3"]
    main([*words, "--plot", "out.png"])
    printed = capsys.readouterr()
    rows = [line.split("\t") for line in printed.out.splitlines() if "\t" in line]
    assert rows[0][:4] == ["global_gate", "seed", "parameters", "steps"] and rows[0][-2:] == ["unseen bleu", "unseen p"]
    assert [row[0] for row in rows[1:]] == ["true", "false"] and rows[1][-1] == "" and float(rows[2][-1]) <= 1
    assert int(rows[1][2]) - int(rows[2][2]) == 2 * 32 * 32 + 32  # the gate's weights
    assert "unseen bleu: mean (from, to) over seeds" in printed.out and (tmp_path / "out.png").stat().st_size > 1000
    assert (tmp_path / "out/sweep.tsv").read_text() == "".join("\t".join(row) + "\n" for row in rows)
    record = json.loads((tmp_path / "out/sweep.json").read_text())
    assert [each["name"] for each in record] == ["global_gate=true,seed=3", "global_gate=false,seed=3"]
    before = (tmp_path / "out/global_gate=true,seed=3/model/model.safetensors").stat().st_mtime_ns
    main(words)
    assert "(1 of 2) is done" in capsys.readouterr().err
    assert (tmp_path / "out/global_gate=true,seed=3/model/model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(SystemExit, match="choose one of unseen bleu, validation loss"):
        main([*words, "--score", "none"])
    with pytest.raises(UserError, match=r"global_gate=true,seed=3.*num_capsules=0"):
        main([*words, "model.fields.num_capsules=0"])


def test_a_run_that_fails_keeps_no_other_from_being_trained(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    words = ["small.yaml", "training.max_grad_norm=0", "training.warmup_steps=0", "test.unseen=null"]
    rates = ["--vary", "training.learning_rate=1e6,1e-3", "--output", "out"]
    with pytest.raises(SystemExit, match=r"1 of 2 runs failed: learning_rate=1000000\.0 \("):
        main([*words, *rates, "training.optim=sgd"])
    table = (tmp_path / "out/sweep.tsv").read_text().splitlines()
    assert len(table) == 2 and table[1].startswith("0.001\t")
