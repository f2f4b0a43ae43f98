"""Probing tasks: their files, the vectors that are read, the classifiers, and that they find what a vector holds."""

import csv
import gzip
import json

import pytest
import torch
from named_models import build_model
from probing import (
    GATED,
    MAJORITY,
    TASKS,
    Classifier,
    ClassifierOptions,
    Setting,
    main,
    majority_of,
    probe,
    read_task,
    sentence_vectors,
)

from recnmt_hf import Translator
from recnmt_hf.inference.model_settings import end_ids


SENTENCES = ["The dog sees a cat .", "A dog .", "The old man helps the woman .", "Cats sleep ."]


def write_task(folder, name="tree_depth", repeats=1, ending="txt"):
    """Sentences with two words more than others have label 1."""
    lines = []
    for part in ("tr", "va", "te"):
        for _ in range(repeats):
            lines += [f"{part}\t{int(len(sentence.split()) > 4)}\t{sentence}" for sentence in SENTENCES]
    text = "".join(f"{line}\n" for line in lines)
    path = folder / f"{name}.{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    return path


@pytest.fixture(scope="module")
def translators(tokenizer):
    made = {}
    for name, kind, fields in (
        ("hybrid", "onlstm_transformer", {}),
        ("ARN", "biarn_transformer", {}),
        ("RNN", "biarn_transformer", {"recurrence_encoder_type": "birnn"}),
        ("GRET", "gret", {}),
        ("RNMT", "rnmt", {}),
    ):
        torch.manual_seed(1)
        made[name] = Translator(build_model(kind, "tiny", len(tokenizer), {"d_model": 32, **fields}), tokenizer)
    return made


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_read_task(tmp_path, ending):
    write_task(tmp_path, ending=ending)
    task = read_task(tmp_path, "tree_depth")
    assert task.sentences == dict.fromkeys(("tr", "va", "te"), SENTENCES) and task.classes == 2
    assert task.labels["te"].tolist() == [1, 0, 1, 0]


def test_public_files(real_data):
    sizes = {}
    for name in TASKS:
        task = read_task(real_data / "probing_en", name)
        sizes[name] = (len(task.sentences["tr"]), len(task.sentences["te"]), task.classes)
    assert sizes["word_content"] == (9913, 2950, 999) and sizes["top_constituents"] == (1035, 174, 9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hybrid", {"final", "recurrent", "attention"}),
        ("ARN", {"final", "recurrence"}),
        ("RNN", {"final", "recurrence"}),
        ("GRET", {"final", "global"}),
        ("RNMT", {"final"}),
    ],
)
def test_vectors_are_means_over_the_words_alone(translators, name, expected):
    """Of each sentence alone, without its end token; whatever is beside it in a batch, and without dropout."""
    translator = translators[name]
    translator.model.train()
    found = sentence_vectors(translator, SENTENCES)
    assert set(found) == expected and translator.model.training
    encoder = translator.model.eval().get_encoder()
    for row, sentence in enumerate(SENTENCES):
        ids = translator.encode_source(sentence).ids
        assert ids[-1] in end_ids(translator.model)
        with torch.no_grad():
            output = encoder(torch.tensor([ids]), torch.ones(1, len(ids)))
        means = {
            "final": output.last_hidden_state[0, :-1],
            "recurrent": getattr(output, "recurrent_hidden_state", None),
            "attention": getattr(output, "attention_hidden_state", None),
            "recurrence": getattr(output, "recurrence_hidden_state", None),
        }
        for vector in expected - {"global"}:
            states = means[vector] if vector == "final" else means[vector][0]
            if vector in ("recurrent", "attention") or (name == "RNN" and vector == "recurrence"):
                states = states[:-1]
            torch.testing.assert_close(found[vector][row], states.mean(0), atol=1e-5, rtol=0)
        if "global" in expected:
            torch.testing.assert_close(found["global"][row], output.global_hidden_state[0], atol=1e-5, rtol=0)


def test_classifiers_by_their_equations():
    torch.manual_seed(0)
    classifier, vectors = Classifier(Setting(6, 0.0, 0.0), 4, 3, gated=True), torch.randn(5, 8)
    gate, first, last = classifier.gate, classifier.layers[0], classifier.layers[-1]
    for row, pair in enumerate(vectors):
        g = torch.sigmoid(gate.weight @ pair + gate.bias)
        x = g * pair[:4] + (1 - g) * pair[4:]
        expected = last.weight @ torch.sigmoid(first.weight @ x + first.bias) + last.bias
        torch.testing.assert_close(classifier(vectors)[row], expected)
    plain = Classifier(Setting(0, 0.0, 1e-4), 4, 3)
    assert {name: tuple(each.shape) for name, each in plain.named_parameters()} == {
        "layers.0.weight": (3, 4),
        "layers.0.bias": (3,),
    }


def test_probe(translators, tmp_path):
    write_task(tmp_path, repeats=8)
    task = read_task(tmp_path, "tree_depth")
    options = ClassifierOptions(hidden=[8], dropout=[0.0, 0.2], epochs=30, learning_rate=1e-2)
    results = probe(translators["RNN"], [task], options=options)
    assert [each.vector for each in results] == [MAJORITY, "final", "recurrence", GATED]
    # The same four sentences are in all parts: any vector tells them apart.
    assert all(each.accuracy == 1.0 and each.setting["hidden"] == 8 for each in results[1:])
    assert results[0] == majority_of(task) and results[0].accuracy == 0.5
    chosen = probe(translators["ARN"], [task], ["recurrence"], options)
    assert [each.vector for each in chosen] == [MAJORITY, "recurrence"]
    with pytest.raises(SystemExit, match="choose from final, recurrence, gated"):
        probe(translators["ARN"], [task], ["global"], options)


def test_the_program(tmp_path, tiny_folder, capsys):
    write_task(tmp_path, repeats=3)
    write_task(tmp_path, "past_present", repeats=3)
    output, figures = tmp_path / "out" / "table.csv", tmp_path / "figures.json"
    words = ["--tasks", "tree_depth", "past_present", "--hidden", "4", "--dropout", "0", "--epochs", "2"]
    words += ["--cache", str(tmp_path / "cache"), "-o", str(output), "--json", str(figures)]
    main([str(tiny_folder), str(tmp_path), *words])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split("\t") == ["task", "kind", MAJORITY, "final"]
    with open(output, newline="") as file:
        assert list(csv.reader(file)) == [line.split("\t") for line in printed]
    assert [each["task"] for each in json.loads(figures.read_text())] == ["tree_depth"] * 2 + ["past_present"] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1  # both have the same sentences
