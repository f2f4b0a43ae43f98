"""Packed weights: the results of the plain layers, for every family and for models of transformers."""

import copy
import io

import pytest
import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

import recnmt_hf
from recnmt_hf.inference import packing
from recnmt_hf.inference.packing import PackedWeight, pack_weights, packed_types
from recnmt_hf.inference.quantization import quantize_model
from recnmt_hf.models.kernels_shared import has_wide_matmul, project


pytestmark = pytest.mark.skipif(not has_wide_matmul(), reason="this build of torch has no oneDNN")
SIZES = {"vocab_size": 60, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}


def packed_layers(model):
    """Return the layers whose weight was packed by a call."""
    return [
        layer for layer in model.modules() if type(layer) is nn.Linear and layer.packed_weight.content[1] is not None
    ]


def marian():
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return MarianMTModel(MarianConfig(**SIZES, **heads, **ids)).eval()


@pytest.fixture
def linear():
    layer = nn.Linear(24, 40)
    layer.packed_weight = PackedWeight()
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.GELU()])
def test_a_packed_layer_computes_the_same(dtype, rows, bias, activation):
    layer = nn.Linear(48, 33, bias=bias).to(dtype)
    states = torch.randn(rows, 2, 48, dtype=dtype)
    layer.packed_weight = PackedWeight()
    with torch.no_grad():
        tolerance = {} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
        expected = layer(states) if activation is None else activation(layer(states))
        torch.testing.assert_close(project(layer, states, activation), expected, **tolerance)
    assert (layer.packed_weight.content[1] is not None) == (dtype in packed_types())


def test_a_type_that_the_processor_lacks(linear, monkeypatch):
    """The layer computes it as usual."""
    monkeypatch.setattr(packing, "packed_types", lambda: (torch.float32,))
    states = torch.randn(5, 24, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(project(linear.bfloat16(), states), nn.functional.linear(states, linear.weight, linear.bias))
    assert linear.packed_weight.content[1] is None


@pytest.mark.parametrize("quantized", [False, True])
def test_a_relu_is_part_of_the_matmul_unless_something_observes_it(linear, quantized, monkeypatch):
    model = nn.Sequential(linear, nn.ReLU())
    layer, relu = quantize_model(model) if quantized else model
    states = torch.randn(300, 24)
    with torch.no_grad():
        expected, called = relu(layer(states)), []
        monkeypatch.setattr(nn.ReLU, "forward", lambda self, product: called.append(self) or product.clamp(min=0))
        torch.testing.assert_close(project(layer, states, relu), expected)
        assert not called
        for observed in (relu, layer):
            seen = []
            hook = observed.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
            torch.testing.assert_close(project(layer, states, relu), expected)
            hook.remove()
            assert len(seen) == len(called) == 1, "a hook sees the call"
            called.clear()


def test_a_changed_weight_is_packed_again(linear):
    states = torch.randn(3, 24)
    with torch.no_grad():
        project(linear, states)
        linear.weight.mul_(2)
        linear.bias.add_(1)
        torch.testing.assert_close(project(linear, states), linear(states))
        linear.load_state_dict(nn.Linear(24, 40).state_dict())
        torch.testing.assert_close(project(linear, states), linear(states))
        linear.weight = nn.Parameter(torch.zeros(40, 24))
        torch.testing.assert_close(project(linear, states), linear.bias.expand(3, 40))


def test_training_hooks_and_autocast_use_the_layer_itself(linear):
    states = torch.randn(3, 24)
    project(linear, states).sum().backward()
    assert linear.weight.grad is not None
    seen = []
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert project(linear, states).dtype == torch.bfloat16
        assert project(linear.double(), states.double()).dtype == torch.float64
        linear.float().register_forward_hook(lambda *_: seen.append(True))
        project(linear, states)
    assert seen and linear.packed_weight.content[1] is None


def test_copies_and_files_hold_no_packed_weight(linear):
    with torch.no_grad():
        project(linear, torch.randn(3, 24))
    copied = copy.deepcopy(linear)
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert other.packed_weight.content[1] is None and linear.packed_weight.content[1] is not None
    assert set(linear.state_dict()) == {"weight", "bias"}


def test_models_of_transformers(linear):
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


def test_every_family_translates_the_same(any_family, corpus):
    """Hypotheses and scores are those of the plain layers; the search multiplies by packed weights."""
    sentences = [pair.en for pair in corpus["test"][:6]]
    settings = {"beams": 2, "max_length_factor": 0.6, "max_length_extra": 6}
    expected = any_family(sentences, **settings)
    model = copy.deepcopy(any_family.model)
    pack_weights(model)
    packed = recnmt_hf.Translator(model, any_family.tokenizer, check=False)
    for one, other in zip(packed(sentences, **settings), expected, strict=True):
        assert one.text == other.text
        assert one.score == pytest.approx(other.score, abs=1e-4)
    assert model.lm_head in packed_layers(model)


def test_translators_pack_where_it_is_faster(tiny_folder, monkeypatch):
    for is_faster in (False, True):
        monkeypatch.setattr(packing, "is_amd", lambda is_faster=is_faster: is_faster)
        translator = recnmt_hf.Translator.from_pretrained(tiny_folder, device="cpu")
        assert hasattr(translator.model.lm_head, "packed_weight") == is_faster
    quantized = recnmt_hf.Translator.from_pretrained(tiny_folder, quantization="int8")
    assert not any(isinstance(vars(one).get("packed_weight"), PackedWeight) for one in quantized.model.modules())
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert not packing.suits_packing()
