"""Relation scores of RNMT: from a saved model and a sentence to a table and a picture."""

import numpy as np
import pytest
import torch
from user_errors import rejects

from recnmt_hf import RNMTConfig, RNMTForConditionalGeneration, Translator
from recnmt_hf.analysis.relations import relation_scores
from recnmt_hf.commands.main import main


SENTENCE = "The dog sleeps."


def saved(tmp_path_factory, tokenizer, **fields):
    torch.manual_seed(2)
    config = RNMTConfig.from_preset("tiny", vocab_size=len(tokenizer), d_model=32, init_uniform=None, **fields)
    path = tmp_path_factory.mktemp("rnmt")
    RNMTForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    return saved(tmp_path_factory, tokenizer)


def test_scores_are_those_of_the_encoder(folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    ids = translator.tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    expected = translator.model.get_encoder()(ids, output_attentions=True).relation_scores
    assert len(expected) == 2
    for layer in (0, 1):
        found = relation_scores(translator, SENTENCE, layer)
        np.testing.assert_allclose(found.scores, expected[layer][0].detach().numpy(), atol=1e-6)
        assert found.scores.shape == (len(found.tokens),) * 2 and found.scores.std() > 0


def test_the_command_writes_a_table_and_a_picture(folder, tmp_path, capsys):
    assert main(["inspect", str(folder), SENTENCE, "--layer", "1"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows[0][1:] == [row[0] for row in rows[1:]] and float(rows[1][1]) > 0
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    picture = tmp_path / "relations.png"
    assert main(["inspect", str(folder), SENTENCE, "--output", str(picture)]) == 0
    assert picture.stat().st_size > 5_000 and "relations of" in capsys.readouterr().out
    drawing = tmp_path / "relations.svg"
    assert main(["inspect", str(folder), SENTENCE, "--output", str(drawing)]) == 0
    assert "length of the relation vector" in drawing.read_text() and "attention" not in drawing.read_text()


def test_mistakes_are_named(folder, tmp_path_factory, tokenizer):
    translator = Translator.from_pretrained(folder, device="cpu")
    with rejects("2", field="layer"):
        relation_scores(translator, SENTENCE, 2)
    plain = Translator.from_pretrained(saved(tmp_path_factory, tokenizer, relation_layers=0), device="cpu")
    with rejects("model has no relation layers"):
        relation_scores(plain, SENTENCE)
