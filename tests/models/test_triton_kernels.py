"""Triton kernels, run on the CPU by Triton's interpreter, against the plain references: outputs and gradients."""

import sys

import pytest
import torch

import recnmt_hf
from recnmt_hf.models import (
    kernels_attentional_steps,
    kernels_onlstm_transformer,
    kernels_triton,
    kernels_triton_gru,
    kernels_vrnmt,
    light_decoders,
)
from recnmt_hf.models.kernels_shared import on_cpu
from recnmt_hf.models.modeling_onlstm_transformer import ONLSTM


pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs the kernels on the device")


@pytest.fixture
def on_gpu(monkeypatch):
    """Follow the rules of accelerators, with kernels; the list of those launched."""
    launched = []
    for module in list(sys.modules.values()):
        if getattr(module, "on_cpu", None) is on_cpu:
            monkeypatch.setattr(module, "on_cpu", lambda tensor: False)

    def start():
        monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
        monkeypatch.setattr(kernels_triton, "observers", [lambda kernel: launched.append(kernel.fn.__name__) or True])
        return launched

    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    return start


def check_equal(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        scale = max(float(other.float().abs().max()), 1e-3)
        torch.testing.assert_close(one.float() / scale, other.float() / scale, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("chunk_size", "size", "length", "bidirectional", "autocast"),
    [(1, 20, 1, 1, 0), (4, 24, 2, 1, 0), (3, 33, 27, 1, 0), (1, 7, 63, 0, 0), (2, 20, 9, 1, 1)],
)
def test_on_lstm(on_gpu, chunk_size, size, length, bidirectional, autocast):
    torch.manual_seed(0)
    layer = ONLSTM(chunk_size, 5, size, bool(bidirectional))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    mask = torch.arange(length)[None, :] < torch.tensor([[length], [(length + 1) // 2]])
    inputs = torch.randn(2, length, 5).masked_fill(~mask[..., None], torch.nan)

    def run():
        own = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
            states, ends = layer(own, mask.long())
        total = (states.float() * torch.arange(states.shape[-1])).mean() + ends.float().square().mean()
        return [states, ends, *torch.autograd.grad(total, [own, *layer.parameters()])]

    expected, launched = run(), on_gpu()
    check_equal(run(), expected, 3e-2 if autocast else 2e-5)
    assert launched == ["step_forward"] * length + ["step_backward"] * length


CASES = {
    "RNNsearch*": ("RNMT", {"relation_layers": 0}, False),
    "RNNsearch": ("RNMT", {"relation_layers": 0, "decoder_type": "rnnsearch"}, False),
    "RNNsearch* in bfloat16": ("RNMT", {"relation_layers": 0}, True),
    "VRNMT": ("VRNMT", {}, False),
    "VRNMT in bfloat16": ("VRNMT", {"decoder_type": "rnnsearch"}, True),
    "a latent variable of the sentence": ("VRNMT", {"latent_level": "sentence"}, False),
    "SSRU": ("NMTTransformer", {"decoder_autoregression": "ssru"}, False),
    "BiARN": ("BiARNTransformer", {}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_models(on_gpu, name):
    prefix, fields, autocast = CASES[name]
    fields |= {"d_model": 20} if "Transformer" not in prefix else {}
    torch.manual_seed(0)
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=30, dropout=0.0, **fields)
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05 if "Transformer" in prefix else 0.2)
    target = torch.randint(4, 30, (2, 4))
    mask, target_mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]), torch.tensor([[1] * 4, [1, 1, 0, 0]])
    embedded = torch.randn(2, 5, config.d_model)

    def run():
        torch.manual_seed(1)
        model.zero_grad()
        # Attention by dot products reads all positions.
        padding = 0.0 if "Transformer" in prefix else torch.nan
        embeds = embedded.masked_fill(mask[..., None] == 0, padding).requires_grad_()
        inputs = {"attention_mask": mask, "decoder_attention_mask": target_mask, "decoder_input_ids": target}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs_embeds=embeds, labels=target.masked_fill(target_mask == 0, -100), **inputs)
        output.loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [output.loss.detach(), output.logits.detach(), embeds.grad, *gradients]

    expected, launched = run(), on_gpu()
    check_equal(run(), expected, 5e-2 if autocast else 1e-4)
    assert launched


@pytest.mark.parametrize(
    "example",
    [
        kernels_onlstm_transformer.example,
        kernels_attentional_steps.example,
        kernels_vrnmt.LatentPart.example,
        kernels_triton_gru.example,
        light_decoders.example,
    ],
)
def test_examples_that_are_compared_on_a_device(monkeypatch, example):
    """In float32: the interpreter does not round to bfloat16 as devices do."""
    place, launched = (torch.device("cpu"), torch.float32), []
    expected = example(*place)
    monkeypatch.setattr(kernels_triton, "observers", [lambda kernel: launched.append(kernel) or True])
    assert all(map(kernels_triton.is_close, example(*place), expected)) and launched


def test_a_difference_falls_back_with_one_warning(monkeypatch):
    """Also an error of the compiler, whatever it is."""
    monkeypatch.setattr(kernels_triton, "agreements", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    count = []

    def wrong(*place):
        count.append(0)
        return [torch.full((3,), float(len(count)))]

    def broken(*place):
        raise RuntimeError("no compiler")

    tensor = torch.ones(2)
    for name, example, words in (("a", wrong, "differ"), ("b", broken, "no compiler")):
        with pytest.warns(UserWarning, match=words):
            assert not kernels_triton.runs_triton(name, example, tensor)
        assert not kernels_triton.runs_triton(name, example, tensor)
    assert len(count) == 2
