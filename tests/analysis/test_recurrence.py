"""Attention of a recurrence encoder: from a saved model and a sentence to a table and a picture."""

import numpy as np
import pytest
import torch
from user_errors import rejects

from recnmt_hf import BiARNTransformerConfig, BiARNTransformerForConditionalGeneration, Translator
from recnmt_hf.analysis.plots import heat_maps
from recnmt_hf.analysis.recurrence import recurrence_attention
from recnmt_hf.commands.main import main


SENTENCE = "The dog sleeps."


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A saved BiARN of two layers, untrained."""
    torch.manual_seed(2)
    config = BiARNTransformerConfig.from_preset(
        "tiny", vocab_size=len(tokenizer), d_model=32, recurrence_encoder_layers=2, recurrence_steps=5
    )
    path = tmp_path_factory.mktemp("biarn")
    BiARNTransformerForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_weights_are_those_of_the_encoder(folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    ids = translator.tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    expected = translator.model.get_encoder()(ids, output_attentions=True).recurrence_attentions
    found = recurrence_attention(translator, SENTENCE)
    assert found.directions == ("forward", "backward") and len(found.tokens) == ids.shape[1]
    assert "".join(found.tokens).startswith("Thedogsleeps.")
    np.testing.assert_allclose(found.weights, expected[0][0].detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(found.of_head().sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(found.of_head(2), found.weights[:, 2])
    above = recurrence_attention(translator, SENTENCE, layer=1)
    assert above.tokens == [f"step {t}" for t in range(1, 6)] and above.weights.shape == (2, 4, 5, 5)


def test_mistakes_are_named(folder, tiny_folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    with rejects("2", field="layer"):
        recurrence_attention(translator, SENTENCE, layer=2)
    with rejects("4", field="head"):
        recurrence_attention(translator, SENTENCE).of_head(4)
    with rejects(field="sentence"):
        recurrence_attention(translator, " ")
    plain = Translator.from_pretrained(tiny_folder, device="cpu")
    with rejects("Use a biarn_transformer with"):
        recurrence_attention(plain, SENTENCE)
    with rejects(field="picture.txt"):
        heat_maps([("", np.ones((1, 1)))], ["a"], ["1"], "step", "picture.txt")
    with rejects(field="large.png"):
        heat_maps([("", np.ones((160, 160)))], ["a"] * 160, ["b"] * 160, "step", "large.png")


def test_dollars_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    heat_maps([("from $5 to $x_{$", np.ones((1, 1)))], ["$5 of $\\b"], ["$"], "step", tmp_path / "a.png")
    assert (tmp_path / "a.png").is_file()


def test_one_command_gives_a_table(folder, capsys):
    assert main(["inspect", str(folder), SENTENCE, "--device", "cpu"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["direction", "step", "The", "dog"] and len(lines) == 1 + 2 * 5
    assert {line[0] for line in lines[1:]} == {"forward", "backward"}
    assert all(abs(sum(map(float, line[2:])) - 1) < 1e-4 for line in lines[1:])


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_one_command_gives_a_picture(folder, tmp_path, capsys, ending):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    path = tmp_path / f"attention.{ending}"
    assert main(["inspect", str(folder), SENTENCE, "-o", str(path), "--device", "cpu", "--head", "1"]) == 0
    assert "forward and backward, 5 steps over" in capsys.readouterr().out
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<svg" in path.read_bytes()
    assert path.stat().st_size > 5000


@pytest.mark.parametrize("nothing", ["\u200b", "\ufeff \u00ad", "\x07"])
def test_a_blank_sentence(folder, nothing):
    translator = Translator.from_pretrained(folder, device="cpu")
    with rejects(field="sentence"):
        recurrence_attention(translator, nothing)


def test_control_tokens_in_a_sentence_are_text(folder):
    translator = Translator.from_pretrained(folder, device="cpu")
    taking = type(translator.tokenizer)(
        tokenizer_object=translator.tokenizer.backend_tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    found = recurrence_attention(Translator(translator.model, taking), "dog </s> dog")
    assert found.tokens.count("</s>") == 1 and found.tokens[-1] == "</s>"


@pytest.mark.parametrize("wrong", ["1", 1.5, True])
def test_layers_and_heads_are_whole_numbers(folder, wrong):
    translator = Translator.from_pretrained(folder, device="cpu")
    with rejects(field="layer"):
        recurrence_attention(translator, SENTENCE, layer=wrong)
    with rejects(field="head"):
        recurrence_attention(translator, SENTENCE).of_head(wrong)
