"""Logical inference: the data's parts, training that resumes, accuracies by number of operators."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
import torch
from logic import RELATIONS, WORDS, LogicPair, generate_logic
from logic_recipe import LogicRecipe
from logical_inference import (
    MAJORITY,
    LogicResult,
    PairCollator,
    load_logic,
    logic_tokenizer,
    main,
    table_of,
    tokenized,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recnmt_hf import UserError


SMALL = {"preset": "logic_hybrid", "fields": {"d_model": 32, "encoder_ffn_dim": 32}}
# Small enough for a test: some 300 pairs to train on.
DATA = {"pairs": 4000, "most_operators": 2}


def recipe_file(folder, models=None, epochs=2):
    content = {
        "models": models or {"hybrid": SMALL},
        "data": DATA,
        "training": {"epochs": epochs, "batch_size": 32, "use_cpu": True},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(content))
    return path


# -- data --------------------------------------------------------------------------------------------------------------


def test_every_nth_pair_is_for_validation():
    recipe = LogicRecipe({"hybrid": SMALL}, {**DATA, "validation_every": 7})
    training, validation, tests = load_logic(recipe)
    corpus = generate_logic(DATA["pairs"])
    every = [pair for of_bin in corpus["train"][:3] for pair in of_bin]
    assert validation == every[::7] and sorted(training + validation) == sorted(every)
    assert tests == corpus["test"] and all(pair.operators <= 2 for pair in training)


def test_tokens_are_the_words_alone():
    tokenizer = logic_tokenizer()
    pair = LogicPair("#", "( not a )", "( b ( and ( not f ) ) )")
    row = tokenized([pair], tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(row["pair_input_ids"]) == pair.right.split()
    assert row["labels"] == RELATIONS.index("#") and row["length"] == 10
    assert len(tokenizer) == len(WORDS) + 4
    assert tokenizer.unk_token_id not in tokenizer(" ".join(WORDS))["input_ids"]


def test_batches_are_padded_on_the_right():
    rows = tokenized([LogicPair("<", "a", "( not b )"), LogicPair("=", "( not c )", "d")], logic_tokenizer())
    batch = PairCollator(0)(list(rows))
    assert batch["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch["pair_attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["input_ids"][0, 1:].tolist() == [0, 0, 0] and batch["labels"].tolist() == [0, 2]


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "models"),
        ({"models": {"a/b": SMALL}}, "a/b"),
        ({"models": {"a": {"fields": {"d_modl": 8}}}}, "models.a.fields.d_modl"),
        ({"models": {"a": SMALL}, "data": {"pairs": 0}}, "data.pairs"),
        ({"models": {"a": SMALL}, "training": {"schedule": "plateau", "warmup_steps": 9}}, "training.warmup_steps"),
    ],
)
def test_wrong_recipes_are_refused_before_training(tmp_path, content, field):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(content))
    with pytest.raises((UserError, SystemExit), match=field):
        LogicRecipe.from_file(path)


def test_the_shipped_recipe(repository):
    """Figure 1's four encoders in the papers' setting."""
    path = repository / "scripts/recipes/logic/logical_inference.yaml"
    recipe = LogicRecipe.from_file(path, ["training.epochs=3", "models.SAN=null"])
    assert {name: recipe.config(name, 15).encoder_layer_types for name in recipe.models} == {
        "LSTM": ["lstm", "lstm"],
        "ON-LSTM": ["onlstm", "onlstm"],
        "hybrid": ["onlstm", "attention"],
    }
    assert recipe.data.most_operators == 6 and recipe.training.epochs == 3 and recipe.training.schedule == "linear"


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a recipe and its finished run of two models."""
    folder = tmp_path_factory.mktemp("logic")
    lstm = {"preset": "logic_lstm", "fields": {"d_model": 24}}
    path = recipe_file(folder, {"hybrid": SMALL, "LSTM": lstm})
    main([str(path), "-o", str(folder / "out"), "--plot", str(folder / "plot.png")])
    return folder


@pytest.mark.slow
def test_results_are_those_of_the_saved_model(finished):
    """Accuracies and the majority class, counted anew from the folder that was written."""
    results = [LogicResult(**each) for each in json.loads((finished / "out" / "logic.json").read_text())]
    assert [each.name for each in results] == ["hybrid", "LSTM"]
    assert (finished / "plot.png").stat().st_size > 5000
    tests = generate_logic(DATA["pairs"])["test"]
    for result in results:
        folder = finished / "out" / result.name / "model"
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert sum(each.numel() for each in model.parameters()) == result.parameters
        for operators in (1, 4, 11):
            pairs = tests[operators]
            right = 0
            for pair in pairs:
                sides = [torch.tensor([tokenizer(side)["input_ids"]]) for side in pair[1:]]
                with torch.no_grad():
                    best = model(sides[0], pair_input_ids=sides[1]).logits.argmax().item()
                right += model.config.id2label[best] == pair.relation
            assert result.accuracy[str(operators)] == pytest.approx(right / len(pairs))
            most = Counter(pair.relation for pair in pairs).most_common(1)[0][1]
            assert result.majority[str(operators)] == pytest.approx(most / len(pairs))


def test_finished_models_are_kept(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in (finished / "out").rglob("*") if path.is_file()}
    capsys.readouterr()
    main([str(finished / "recipe.yaml"), "-o", str(finished / "out")])
    printed = capsys.readouterr()
    assert "hybrid (1 of 2) is done." in printed.err and "LSTM (2 of 2) is done." in printed.err
    table = [line.split("\t") for line in printed.out.splitlines()]
    assert [row[0] for row in table] == ["model", "hybrid", "LSTM", MAJORITY, "pairs"]
    after = {path: path.stat().st_mtime_ns for path in before}
    assert {path for path in before if before[path] != after[path]} <= {
        finished / "out" / "logic.json",
        finished / "out" / "logic.tsv",
    }


def test_another_recipe_does_not_overwrite(finished, tmp_path):
    output = shutil.copytree(finished / "out", tmp_path / "out")
    words = [str(finished / "recipe.yaml"), "training.seed=2", "models.LSTM=null", "-o", str(output)]
    with pytest.raises(SystemExit, match="another recipe"):
        main(words)
    (output / "hybrid" / "own.txt").write_text("mine")
    main([*words, "training.epochs=1", "--overwrite"])
    assert (output / "hybrid" / "own.txt").read_text() == "mine"
    assert "1" in (output / "logic.tsv").read_text().splitlines()[1].split("\t")[2]
    assert (output / "LSTM" / "logic.json").is_file()


def test_folders_of_others_stay(tmp_path):
    (tmp_path / "out" / "hybrid").mkdir(parents=True)
    (tmp_path / "out" / "hybrid" / "letter.txt").write_text("mine")
    with pytest.raises(SystemExit, match="not empty"):
        main([str(recipe_file(tmp_path)), "-o", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out" / "hybrid").iterdir()] == ["letter.txt"]


KILLED = """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    import logical_inference

    when, mark = sys.argv[2], logical_inference.mark_complete

    def killed(folder):
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        mark(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    logical_inference.mark_complete = killed
    logical_inference.main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_run_goes_on_to_the_same_model(tmp_path, repository, when):
    """Whether the first epoch's checkpoint was whole or not: the same weights as without the kill."""
    path = recipe_file(tmp_path, epochs=3)
    words = [str(path), "-o", str(tmp_path / "killed")]
    command = [sys.executable, "-c", textwrap.dedent(KILLED), repository / "scripts/experiments", when, *words]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here: with more, sums differ in their last digits
    result = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert len(list((tmp_path / "killed" / "hybrid").glob("checkpoint-*"))) == 1
    main(words)
    main([str(path), "-o", str(tmp_path / "whole")])
    weights = [
        (tmp_path / each / "hybrid" / "model" / "model.safetensors").read_bytes() for each in ("killed", "whole")
    ]
    assert weights[0] == weights[1]
    left = [path.name for path in (tmp_path / "killed" / "hybrid").glob("checkpoint-*")]
    assert 1 <= len(left) <= 2


def test_the_table_has_the_majority_class():
    rows = table_of([LogicResult("a", 10, 1.0, 0.5, {1: 0.5}, {1: 4}, {1: 0.25})])
    assert rows[1] == ["a", "10", "1", "50.00", "50.00"] and rows[2] == [MAJORITY, "", "", "", "25.00"]
