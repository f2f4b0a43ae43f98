"""Logical inference: the data's parts, training that resumes, accuracies by number of operators."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
import torch
from logic import generate_logic
from logic_recipe import LogicRecipe
from logical_inference import LogicResult, main
from transformers import AutoModelForSequenceClassification, AutoTokenizer


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
