"""Triton kernels, run on the CPU by Triton's interpreter, against the plain references: outputs and gradients."""

import sys

import pytest
import torch
from triton_examples import WITH_KERNELS

import recnmt_hf
from recnmt_hf.models import kernels_triton
from recnmt_hf.models.kernels_shared import on_cpu
from recnmt_hf.models.modeling_onlstm_transformer import ONLSTM


pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs the kernels on the device")


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    """Round to bfloat16 as devices do; Triton's interpreter cuts the further digits off."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


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


def check(on_gpu, run, module, dtype, tolerance):
    """
    Compare results of the kernels with those of torch's operators; return the kernels launched. In "bfloat16" (weights,
    too) or with "autocast" the kernels may be twice as far from float32 as torch. `run` takes module and data type.
    """
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    exact = run(module.to(kind).float(), torch.float32)
    module.to(kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        expected, launched = run(module, kind), on_gpu()
        found = run(module, kind)
    for one, other, third in zip(found, expected, exact, strict=True):
        size = max(float(third.detach().abs().max()), 1e-3)
        if dtype == "float32":
            torch.testing.assert_close(one / size, other / size, atol=tolerance, rtol=0)
        else:
            errors = [float((each.float() - third).norm() / third.norm().clamp(min=1e-3)) for each in (one, other)]
            assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(torch.bfloat16).eps
    return launched


@pytest.mark.parametrize(
    ("chunk_size", "size", "length", "bidirectional"),
    [(1, 20, 1, True), (4, 24, 2, True), (3, 33, 27, True), (1, 7, 63, False)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_on_lstm(on_gpu, chunk_size, size, length, bidirectional, dtype):
    torch.manual_seed(0)
    layer = ONLSTM(chunk_size, 5, size, bidirectional)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    mask = torch.arange(length)[None, :] < torch.tensor([[length], [(length + 1) // 2]])
    inputs = torch.randn(2, length, 5).masked_fill(~mask[..., None], torch.nan)

    def run(layer, kind):
        own = inputs.to(kind, copy=True).requires_grad_()
        states, ends = layer(own, mask.long())
        total = (states.float() * torch.arange(states.shape[-1])).mean() + ends.float().square().mean()
        return [states.detach(), ends.detach(), *torch.autograd.grad(total, [own, *layer.parameters()])]

    launched = check(on_gpu, run, layer, dtype, 2e-5)
    assert launched == ["step_forward"] * length + ["step_backward"] * length


# Family, fields, and the lengths of the longest source and target.
CASES = {
    "RNNsearch*": ("RNMT", {"relation_layers": 0}, 63, 2),
    "RNNsearch* of one word": ("RNMT", {"relation_layers": 0}, 1, 1),
    "RNNsearch": ("RNMT", {"relation_layers": 0, "decoder_type": "rnnsearch"}, 2, 11),
    "VRNMT": ("VRNMT", {}, 27, 2),
    "VRNMT on RNNsearch": ("VRNMT", {"decoder_type": "rnnsearch"}, 5, 4),
    "a latent variable of the sentence": ("VRNMT", {"latent_level": "sentence"}, 2, 11),
    "SSRU": ("NMTTransformer", {"decoder_autoregression": "ssru"}, 2, 63),
    "BiARN": ("BiARNTransformer", {}, 27, 2),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_models(on_gpu, name, dtype):
    prefix, fields, length, target_length = CASES[name]
    if "Transformer" not in prefix:
        # Of two numbers that are nearly equal, rounding decides which has the gradient of their maximum.
        fields |= {"d_model": 20, "readout": "maxout" if dtype == "float32" else "tanh"}
    torch.manual_seed(0)
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=30, dropout=0.0, **fields)
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05 if "Transformer" in prefix else 0.2)
    target = torch.randint(4, 30, (2, target_length))
    mask, target_mask = (
        (torch.arange(longest) < torch.tensor([[longest], [(longest + 1) // 2]])).long()
        for longest in (length, target_length)
    )
    embedded = torch.randn(2, length, config.d_model)

    def run(model, kind):
        torch.manual_seed(1)
        # Attention by dot products reads all positions.
        padding = 0.0 if "Transformer" in prefix else torch.nan
        embeds = embedded.to(kind).masked_fill(mask[..., None] == 0, padding).requires_grad_()
        inputs = {"attention_mask": mask, "decoder_attention_mask": target_mask, "decoder_input_ids": target}
        output = model(inputs_embeds=embeds, labels=target.masked_fill(target_mask == 0, -100), **inputs)
        output.loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return [output.loss.detach(), output.logits.detach(), embeds.grad, *gradients]

    assert check(on_gpu, run, model, dtype, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", WITH_KERNELS, ids=lambda family: family.__name__.rpartition(".")[2])
def test_examples_that_are_compared_on_a_device(monkeypatch, family, dtype):
    device, launched = torch.device("cpu"), []
    expected = family.example(device, torch.float32)
    monkeypatch.setattr(kernels_triton, "observers", [lambda kernel: launched.append(kernel) or True])
    assert all(map(kernels_triton.is_close, family.example(device, dtype), expected)) and launched


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
