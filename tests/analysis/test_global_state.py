"""Global state of a sentence: from a saved GRET and a sentence to tables and a picture."""

import numpy as np
import pytest
import torch
from user_errors import rejects

from recnmt_hf import GRETConfig, GRETForConditionalGeneration, Translator
from recnmt_hf.analysis.global_state import global_state
from recnmt_hf.commands.main import main


SENTENCE, TRANSLATION = "The dog sleeps.", "Der Hund schläft."


def save(path, tokenizer, **fields):
    torch.manual_seed(2)
    config = GRETConfig.from_preset("tiny", vocab_size=len(tokenizer), d_model=32, num_capsules=5, **fields)
    GRETForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A saved GRET, untrained."""
    return save(tmp_path_factory.mktemp("gret"), tokenizer)


def test_values_are_those_of_the_model(folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    state = global_state(translator, SENTENCE, TRANSLATION)
    source = translator.tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    labels = translator.tokenizer(text_target=TRANSLATION, return_tensors="pt")["input_ids"]
    outputs = translator.model(input_ids=source, labels=labels, output_attentions=True)
    for layer in range(2):
        np.testing.assert_allclose(state.routing[layer], outputs.routing_weights[layer][0].detach(), atol=1e-6)
        np.testing.assert_allclose(state.pooling[layer], outputs.pooling_weights[layer][0].detach(), atol=1e-6)
    np.testing.assert_allclose(state.gates, outputs.global_gates[0][0].mean(-1).detach(), atol=1e-6)
    assert "".join(state.source).startswith("Thedogsleeps.") and "".join(state.target).startswith("DerHundschläft.")
    assert len(global_state(translator, SENTENCE).target) >= 1


def test_mistakes_are_named(folder, tiny_folder, tokenizer, tmp_path, capsys):
    translator = Translator.from_pretrained(folder, device="cpu")
    with rejects("2", field="layer"):
        global_state(translator, SENTENCE, TRANSLATION).to_tsv(2)
    for field, texts in (("sentence", (" ", None)), ("translation", (SENTENCE, ""))):
        with rejects(field=field):
            global_state(translator, *texts)
    with rejects("Use a gret with use_global_state=true"):
        global_state(Translator.from_pretrained(tiny_folder, device="cpu"), SENTENCE)
    bare = save(tmp_path, tokenizer, global_capsule=False, global_gate=False)
    with rejects("Use a gret with use_global_state=true"):
        global_state(Translator.from_pretrained(bare, device="cpu"), SENTENCE)
    assert main(["inspect", str(folder), SENTENCE, "-o", "picture.txt"]) == 2
    assert "is not the name of an image file" in capsys.readouterr().err


def test_one_command_gives_tables(folder, capsys):
    command = ["inspect", str(folder), SENTENCE, "--target", TRANSLATION, "--device", "cpu"]
    assert main(command) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["capsule", "weight", "The", "dog"]
    capsules = lines[1:6]
    assert all(abs(sum(map(float, line[2:])) - 1) < 1e-4 for line in capsules)
    assert abs(sum(float(line[1]) for line in capsules) - 1) < 1e-4
    assert (
        lines[6] == ["target", "gate"]
        and lines[7][0].startswith("D")
        and all(0 < float(line[1]) < 1 for line in lines[7:])
    )
    assert main([*command, "--layer", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1] != "\t".join(capsules[0])


@pytest.mark.parametrize(
    ("fields", "summary"),
    [
        ({}, "5 capsules over"),
        ({"global_capsule": False}, "0 capsules over"),
        ({"global_gate": False, "capsule_pooling": "mean"}, "5 capsules over"),
    ],
    ids=str,
)
def test_one_command_gives_a_picture(tokenizer, tmp_path, capsys, fields, summary):
    """Of what the model has: capsules, gates or both."""
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    path = save(tmp_path / "model", tokenizer, **fields)
    picture = tmp_path / "global.png"
    assert main(["inspect", str(path), SENTENCE, "--target", TRANSLATION, "-o", str(picture), "--device", "cpu"]) == 0
    assert summary in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
