"""Syntactic distances: from distances to a tree, and from a saved model and a sentence to text and a picture."""

import numpy as np
import pytest
import torch
from user_errors import rejects

from recnmt_hf import ONLSTMTransformerConfig, ONLSTMTransformerForConditionalGeneration, Translator
from recnmt_hf.analysis.syntactic_distance import SyntacticDistances, nodes, syntactic_distances
from recnmt_hf.commands.main import main


SENTENCE = "The dog sleeps."


def save(path, tokenizer, **fields):
    torch.manual_seed(2)
    config = ONLSTMTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), d_model=32, **fields)
    ONLSTMTransformerForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A saved model, untrained."""
    return save(tmp_path_factory.mktemp("onlstm"), tokenizer)


def test_a_sentence_is_split_where_the_memory_is_closed_most():
    """Before the token that closes it, or behind it where the sentence is read from its end."""
    forward, backward = [0.9, 0.2, 0.5, 0.1], [0.1, 0.6, 0.2, 0.9]
    state = SyntacticDistances(list("abcd"), np.array([[[0.0, 0.0]] * 4, list(zip(forward, backward, strict=True))]))
    assert state.tree() == ((0, 1), (2, 3)) and state.brackets() == "((a b) (c d))"
    assert state.brackets(direction="backward") == "((a b) (c d))"
    assert state.brackets(0) == "(a (b (c d)))"  # ties: the first
    assert SyntacticDistances(["a"], np.zeros((1, 1, 1))).brackets() == "a"
    with rejects("tokens; a tree can have at most", "501"):
        SyntacticDistances(["a"] * 501, np.zeros((1, 501, 1))).brackets()
    assert SyntacticDistances(["a"] * 500, np.zeros((1, 500, 1))).brackets().count("(") == 499
    steep = SyntacticDistances(list("abcd"), np.array([[[0.0], [0.1], [0.2], [0.3]]]))
    assert steep.brackets() == "(((a b) c) d)"
    assert list(nodes(steep.tree())) == [
        (0.5, 1, [0.0, 0, 1.0, 0]),
        (1.25, 2, [0.5, 1, 2.0, 0]),
        (2.125, 3, [1.25, 2, 3.0, 0]),
    ]


def test_values_are_those_of_the_model(folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    state = syntactic_distances(translator, SENTENCE)
    ids = translator.tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    outputs = translator.model.get_encoder()(ids, output_attentions=True)
    np.testing.assert_allclose(state.distances[0], outputs.master_gate_distances[0][0].detach(), atol=1e-6)
    assert "".join(state.tokens).startswith("Thedogsleeps.") and state.distances.shape == (1, len(state.tokens), 2)


def test_mistakes_are_named(folder, tiny_folder, tokenizer, tmp_path, capsys):
    state = syntactic_distances(Translator.from_pretrained(folder, device="cpu"), SENTENCE)
    with rejects("1", field="layer"):
        state.of(1)
    with rejects("does not exist in this model", "forward or backward"):
        state.of(direction="up")
    with rejects(field="sentence"):
        syntactic_distances(Translator.from_pretrained(folder, device="cpu"), " ")
    for path in (tiny_folder, save(tmp_path, tokenizer, encoder_layer_types=["lstm", "attention"])):
        with rejects('Use one with "onlstm" in'):
            syntactic_distances(Translator.from_pretrained(path, device="cpu"), SENTENCE)
    single = save(tmp_path / "single", tokenizer, rnn_bidirectional=False)
    assert main(["inspect", str(single), SENTENCE, "--direction", "backward", "--device", "cpu"]) == 2
    assert "does not exist in this model" in capsys.readouterr().err


def test_one_command_gives_text_or_a_picture(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    command = ["inspect", str(folder), SENTENCE, "--device", "cpu"]
    assert main(command) == 0
    brackets, heading, *rows = capsys.readouterr().out.splitlines()
    assert brackets.count("(") == len(rows) - 1 and heading == "token\tdistance"
    assert brackets.replace("(", "").replace(")", "").split() == [row.split("\t")[0] for row in rows]
    assert all(0 < float(row.split("\t")[1]) < 1 for row in rows)
    picture = tmp_path / "tree.png"
    assert main([*command, "--direction", "backward", "--layer", "0", "-o", str(picture)]) == 0
    assert "a tree over" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
