"""Recurrent positional embeddings: from a saved model and a sentence to a table and a picture."""

import numpy as np
import pytest
import torch
from user_errors import rejects

from recnmt_hf import RPETransformerConfig, RPETransformerForConditionalGeneration, Translator
from recnmt_hf.analysis.recurrent_positions import SidePositions, positions_to_tsv, recurrent_positions
from recnmt_hf.commands.main import main


SENTENCE, TRANSLATION = "The dog sleeps.", "Der Hund schläft."


def save(path, tokenizer, **fields):
    torch.manual_seed(2)
    config = RPETransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), d_model=32, **fields)
    RPETransformerForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A saved model, untrained."""
    return save(tmp_path_factory.mktemp("rpe"), tokenizer)


def test_values_are_those_of_the_model(folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    source, target = recurrent_positions(translator, SENTENCE, TRANSLATION)
    ids = translator.tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    labels = translator.tokenizer(text_target=TRANSLATION, return_tensors="pt")["input_ids"]
    outputs = translator.model(input_ids=ids, labels=labels, output_attentions=True)
    for side, vectors in ((source, outputs.source_recurrent_positions), (target, outputs.target_recurrent_positions)):
        rows = vectors[0][0].detach().numpy()
        lengths = np.linalg.norm(rows, axis=1)
        np.testing.assert_allclose(side.recurrent, rows @ rows.T / np.outer(lengths, lengths), atol=1e-5)
        np.testing.assert_allclose(np.diagonal(side.absolute), 1, atol=1e-6)
        # Sinusoids know distances alone: every diagonal is one value.
        for distance in range(1, len(side.tokens)):
            assert np.ptp(np.diagonal(side.absolute, distance)) < 1e-6
    assert "".join(source.tokens).startswith("Thedogsleeps.")
    assert "".join(target.tokens[1:]).startswith("DerHundschläft") and len(target.tokens) == labels.shape[1]
    assert len(recurrent_positions(translator, SENTENCE)) == 2


def test_a_table_by_distance():
    recurrent = np.array([[1.0, 0.5, -0.25], [0.5, 1.0, 0.1], [-0.25, 0.1, 1.0]])
    absolute = np.array([[1.0, 0.9, 0.8], [0.9, 1.0, 0.9], [0.8, 0.9, 1.0]])
    sides = [SidePositions("source", list("abc"), recurrent, absolute), SidePositions("target", ["a"], recurrent, None)]
    sides.append(SidePositions("target", list("ab"), recurrent[:2, :2], None))
    assert positions_to_tsv(sides).splitlines() == [
        "side\tdistance\tpairs\tposition\trecurrent\tleast\tlargest",
        "source\t1\t2\t0.900000\t0.300000\t0.100000\t0.500000",
        "source\t2\t1\t0.800000\t-0.250000\t-0.250000\t-0.250000",
        "target\t1\t1\t\t0.500000\t0.500000\t0.500000",
    ]


def test_mistakes_are_named(folder, tiny_folder, tokenizer, tmp_path, capsys):
    translator = Translator.from_pretrained(folder, device="cpu")
    for field, texts in (("sentence", (" ", None)), ("translation", (SENTENCE, ""))):
        with rejects(field=field):
            recurrent_positions(translator, *texts)
    with rejects("Use an rpe_transformer with rpe_encoder"):
        recurrent_positions(Translator.from_pretrained(tiny_folder, device="cpu"), SENTENCE)
    bare = save(tmp_path, tokenizer, rpe_encoder=False, rpe_decoder=False)
    with rejects("Use an rpe_transformer with rpe_encoder"):
        recurrent_positions(Translator.from_pretrained(bare, device="cpu"), SENTENCE)
    assert main(["inspect", str(folder), SENTENCE, "-o", "picture.txt"]) == 2
    assert "is not the name of an image file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "sides"),
    [
        ({}, ["source", "target"]),
        ({"rpe_encoder": False}, ["target"]),
        ({"rpe_dim": 32, "rpe_decoder": False}, ["source"]),
    ],
    ids=str,
)
def test_one_command_gives_a_table_or_a_picture(tokenizer, tmp_path, capsys, fields, sides):
    """Of the sides that have a recurrence, with positions or without."""
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    path = save(tmp_path / "model", tokenizer, **fields)
    command = ["inspect", str(path), SENTENCE, "--target", TRANSLATION, "--device", "cpu"]
    assert main(command) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert sorted({line[0] for line in lines[1:]}) == sides
    assert all(bool(line[3]) == (fields.get("rpe_dim") != 32) for line in lines[1:])
    picture = tmp_path / "positions.png"
    assert main([*command, "-o", str(picture)]) == 0
    assert sides[-1] in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
