"""Packed weights: the results of the plain layers, for every family and for models of transformers."""

import copy

import pytest
import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

import recnmt_hf
from recnmt_hf.inference.devices import pack_weights
from recnmt_hf.models import kernels_cpu_matmuls
from recnmt_hf.models.kernels_cpu_matmuls import PackedWeight


pytestmark = pytest.mark.skipif(not kernels_cpu_matmuls.has_onednn(), reason="this build of torch has no oneDNN")
SIZES = {"vocab_size": 60, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pack small weights too."""
    monkeypatch.setattr(kernels_cpu_matmuls, "SMALLEST_PACKED_MATMUL", {torch.float32: 1})


def packed_layers(model):
    """Return the layers whose weight was packed by a call."""
    return [
        layer for layer in model.modules() if type(layer) is nn.Linear and layer.packed_weight.content[1] is not None
    ]


def marian():
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return MarianMTModel(MarianConfig(**SIZES, **heads, **ids)).eval()


def test_models_of_transformers():
    model, ids = marian(), torch.randint(3, 60, (3, 6))
    with torch.no_grad():
        expected = model(ids, decoder_input_ids=ids).logits
        pack_weights(model)
        torch.testing.assert_close(model(ids, decoder_input_ids=ids).logits, expected)
    assert len(packed_layers(model)) == len([layer for layer in model.modules() if type(layer) is nn.Linear])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        copied.final_logits_bias.zero_()
        assert not copied(ids, decoder_input_ids=ids).logits.any(), "the copy has layers of its own"
        torch.testing.assert_close(model(ids, decoder_input_ids=ids).logits, expected)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None


def test_every_family_translates_the_same(any_family, sentences):
    """Hypotheses and scores are those of the plain layers; the search multiplies by packed weights."""
    settings = {"beams": 2, "max_length_factor": 0.6, "max_length_extra": 6}
    expected = any_family(sentences, **settings)
    model = copy.deepcopy(any_family.model)
    pack_weights(model)
    packed = recnmt_hf.Translator(model, any_family.tokenizer, check=False)
    for one, other in zip(packed(sentences, **settings), expected, strict=True):
        assert one.text == other.text
        assert one.score == pytest.approx(other.score, abs=1e-4)
    assert model.lm_head in packed_layers(model)


def test_translators_pack(tiny_folder, monkeypatch):
    def packs(**settings):
        translator = recnmt_hf.Translator.from_pretrained(tiny_folder, device="cpu", **settings)
        return any(isinstance(vars(one).get("packed_weight"), PackedWeight) for one in translator.model.modules())

    assert packs() and not packs(quantization="int8")
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert not packs()
