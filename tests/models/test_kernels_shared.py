"""Every fast path against its slow reference: outputs and gradients."""

import pytest
import torch
from torch import nn

from recnmt_hf.models import kernels_shared
from recnmt_hf.models.attention import eager_attention_forward
from recnmt_hf.models.kernels_cpu_matmuls import StepMatmuls
from recnmt_hf.models.seq2seq_loss import (
    FORBIDDEN,
    chunked_cross_entropy,
    chunked_cross_entropy_of_layer,
    losses_on_accelerator,
    losses_on_cpu,
    smoothed_cross_entropy,
)


@pytest.mark.parametrize("fast", ["1", "0"], ids=["fast", "slow"])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_has_its_rate_and_scale(p, fast, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
    states = torch.ones(401, 499, requires_grad=True)
    dropped = kernels_shared.dropout(states, p, True)
    zeros = (dropped == 0).float().mean().item()
    assert abs(zeros - p) < 0.005
    torch.testing.assert_close(dropped[dropped != 0].mean().item(), 1 / (1 - p), atol=1e-4, rtol=0)
    dropped.sum().backward()
    assert torch.equal(states.grad, dropped.detach())
    # neighbours, which share a draw, are dropped independently
    pairs = (dropped.flatten()[:-1] == 0) & (dropped.flatten()[1:] == 0)
    assert abs(pairs.float().mean().item() - p * p) < 0.005
    assert kernels_shared.dropout(states, p, False) is states and kernels_shared.dropout(states, 0.0, True) is states


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "additive"])
def test_attention_by_plain_matmuls(causal, masked):
    """Attention that training on the CPU may use instead of sdpa gives the same contexts and gradients."""
    module = nn.Module()
    module.is_causal = causal
    query, key, value = (torch.randn(2, 3, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = None
    if masked:
        keep = torch.ones(2, 1, 1, 6, dtype=torch.bool)
        keep[1, ..., 4:] = False
        if causal:
            keep = keep & torch.ones(6, 6, dtype=torch.bool).tril()
        mask = keep if masked == "bool" else torch.zeros(keep.shape).double().masked_fill(~keep, float("-inf"))
    found, weights = eager_attention_forward(module, query, key, value, mask, 8**-0.5)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal and mask is None)
    torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    downstream = torch.randn_like(expected)
    outputs = (found.transpose(1, 2), expected)
    gradients = [torch.autograd.grad((output * downstream).sum(), (query, key, value)) for output in outputs]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 7, 15, 16])
@torch.no_grad()
def test_attention_of_a_decoding_step(keys, dtype, monkeypatch):
    """Few queries attend as sdpa does, also where a row has padding; torch's softmax is used for long rows alone."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
    query, key, value = (torch.randn(60, 4, length, 16, dtype=dtype) for length in (3, keys, keys))
    mask = torch.ones(60, 1, 1, keys, dtype=torch.bool)
    mask[::2, ..., keys // 2 + 1 :] = False
    for given in (None, mask):
        found, _ = eager_attention_forward(nn.Module(), query, key, value, given, 0.25)
        expected = nn.functional.scaled_dot_product_attention(query, key, value, given)
        tolerance = {} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.0}  # their scores are rounded
        torch.testing.assert_close(found.transpose(1, 2), expected, **tolerance)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_matmuls_of_a_step_have_the_precision_of_autocast(autocast, with_bias):
    """Products are rounded as autocast rounds them; the bias is added, and all results given, in the weights' type."""
    weight, states, gradient = torch.randn(6, 3), torch.randn(4, 3), torch.randn(4, 6)
    bias = torch.randn(6) if with_bias else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        product = StepMatmuls(weight, bias)

    def rounded(tensor):
        return tensor.bfloat16() if autocast else tensor

    expected = (rounded(states) @ rounded(weight).t()).float() + (bias if with_bias else 0)
    torch.testing.assert_close(product(states), expected, atol=1e-6, rtol=0)
    expected = (rounded(gradient) @ rounded(weight)).float()
    torch.testing.assert_close(product.backward(gradient), expected, atol=1e-6, rtol=0)
    expected = (rounded(gradient).t() @ rounded(states)).float()
    found = product.weight_gradient(gradient[None], states[None])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def called_cross_entropy(states, weight, *args, **kwargs):
    """Compute the loss of an output layer that has to be called."""
    return chunked_cross_entropy_of_layer(lambda rows: rows @ weight.T, states, *args, **kwargs)


CHUNKED = [chunked_cross_entropy, called_cross_entropy]


@pytest.mark.parametrize("compute", CHUNKED)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_loss_in_chunks_of_any_size(compute, smoothing, bias, chunk):
    states = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    fixed = torch.randn(11, dtype=torch.float64) if bias else None
    labels = torch.randint(0, 11, (3, 5))
    labels[0, 3:] = labels[2] = -100
    loss = compute(states, weight, labels, fixed, smoothing, chunk_size=chunk)
    logits = nn.functional.linear(states, weight, fixed)
    expected = smoothed_cross_entropy(logits, labels, smoothing)
    torch.testing.assert_close(loss, expected)
    gradients = (torch.autograd.grad(3 * each, (states, weight)) for each in (loss, expected))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("compute", [losses_on_cpu, losses_on_accelerator])
def test_symbols_that_do_not_exist_have_no_share_of_the_smoothing(compute, monkeypatch):
    """As if a model imported from Marian had only the rows of its symbols."""
    monkeypatch.setattr("recnmt_hf.models.seq2seq_loss.losses_on_cpu", compute)
    states, weight = (torch.randn(size, 8, dtype=torch.float64, requires_grad=True) for size in (12, 11))
    labels = torch.randint(0, 7, (12,))
    labels[3] = -100
    bias = torch.randn(11, dtype=torch.float64)
    bias[7:] = FORBIDDEN
    expected = smoothed_cross_entropy(states @ weight[:7].T + bias[:7], labels, 0.1)
    logits = states @ weight.T + bias
    for loss in (
        smoothed_cross_entropy(logits, labels, 0.1, bias=bias[None]),
        *(chunked(states, weight, labels, bias, 0.1, chunk_size=5) for chunked in CHUNKED),
    ):
        torch.testing.assert_close(loss, expected)
        for inputs in (states, weight):
            wanted, found = (torch.autograd.grad(each, inputs, retain_graph=True)[0] for each in (expected, loss))
            torch.testing.assert_close(found, wanted)


def test_loss_of_a_called_layer():
    """An output layer with an adapter or a hook: called for each chunk, with the loss and gradients of all logits."""
    layer, calls = nn.Linear(8, 11).double(), []
    layer.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    states, labels = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True), torch.randint(0, 11, (3, 5))
    expected = smoothed_cross_entropy(layer(states), labels)
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy_of_layer(layer, states, labels), expected)
    loss = chunked_cross_entropy_of_layer(layer, states, labels, chunk_size=6)
    assert calls == [3, 15, 6, 6, 3], "a small batch is one chunk"
    wanted = (states, layer.weight, layer.bias)
    torch.testing.assert_close(*(torch.autograd.grad(each, wanted) for each in (loss, expected)))
    labels[1, 1] = 11
    with pytest.raises((IndexError, RuntimeError)):
        chunked_cross_entropy_of_layer(layer, states, labels)


def test_the_divisor_of_a_loss():
    """Real labels, or the number that the Trainer gives for all batches of a step."""
    states, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    labels = torch.tensor([[1, 2, -100], [6, -100, -100]])
    total = nn.functional.cross_entropy((states @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    for count, divisor in ((None, 3), (12, 12), (torch.tensor(12), 12), (0, 1), (torch.tensor(0), 1), (1, 1)):
        for loss in (
            smoothed_cross_entropy(states @ weight.T, labels, num_items_in_batch=count),
            *(chunked(states, weight, labels, num_items_in_batch=count) for chunked in CHUNKED),
        ):
            torch.testing.assert_close(loss, total / divisor)
    one = labels.masked_fill(labels != 6, -100)
    expected = nn.functional.cross_entropy((states @ weight.T)[1, :1], torch.tensor([6]))
    torch.testing.assert_close(chunked_cross_entropy(states, weight, one), expected)
    exact = states.double().requires_grad_()
    losses = (
        smoothed_cross_entropy(exact @ weight.double().T, labels, num_items_in_batch=7),
        *(chunked(exact, weight.double(), labels, num_items_in_batch=7) for chunked in CHUNKED),
    )
    expected, *found = (torch.autograd.grad(loss, exact)[0] for loss in losses)
    torch.testing.assert_close(found, [expected] * 2, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "loss_error", "gradient_error"),
    [(torch.float64, 1e-12, 1e-14), (torch.float32, 1e-5, 1e-7), (torch.bfloat16, 1e-5, 2e-3)],
    ids=["fp64", "fp32", "bf16"],
)
def test_losses_on_an_accelerator_are_those_on_the_cpu(dtype, loss_error, gradient_error, smoothing):
    logits = (20 * torch.randn(40, 300)).to(dtype)
    share = torch.rand(40, dtype=torch.promote_types(dtype, torch.float32))
    targets = torch.randint(0, 300, (40,))
    targets[:5] = logits[:5].argmin(dim=-1)  # as wrong as can be
    for given in (share, None):
        expected = losses_on_cpu(logits.clone(), targets, given, smoothing)
        found = losses_on_accelerator(logits.clone(), targets, given, smoothing)
        torch.testing.assert_close(found[0], expected[0], atol=loss_error, rtol=loss_error)
        if given is None:
            assert found[1] is None
        else:
            torch.testing.assert_close(found[1].to(expected[1].dtype), expected[1], atol=gradient_error, rtol=4e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_half_precision_are_summed_in_float32(smoothing):
    """Sums over a large vocabulary would be wrong by percents in bfloat16; under autocast the states decide nothing."""
    torch.manual_seed(6)
    states, weight = torch.randn(40, 8), torch.randn(3000, 8)
    labels = torch.randint(0, 3000, (40,))
    half = states.bfloat16(), weight.bfloat16()
    logits = half[0] @ half[1].T
    expected = nn.functional.cross_entropy(logits.double(), labels, label_smoothing=smoothing).float()
    found = smoothed_cross_entropy(logits, labels, smoothing)
    torch.testing.assert_close(found, expected)
    chunked = chunked_cross_entropy(*half, labels, None, smoothing, chunk_size=16)
    torch.testing.assert_close(chunked, expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(chunked_cross_entropy(states, weight, labels, None, smoothing), expected)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        wide = chunked_cross_entropy(states, weight, labels, None, smoothing)
    assert wide.dtype == torch.float32 and not torch.equal(wide, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_have_the_types_of_their_tensors(dtype):
    """In chunks, frozen or not; of a matrix summed in float32."""
    torch.manual_seed(6)
    states = torch.randn(40, 8).requires_grad_()
    weight, bias, labels = torch.randn(30, 8).requires_grad_(), 2 * torch.randn(30), torch.randint(0, 30, (40,))
    loss = 5 * smoothed_cross_entropy(states @ weight.T + bias, labels, 0.1)
    expected = torch.autograd.grad(loss, (states, weight))
    for types in ((torch.float32, torch.float32), (dtype, dtype)):
        given = [each.detach().to(kind).requires_grad_() for each, kind in zip((states, weight), types, strict=True)]
        with torch.autocast("cpu", dtype):
            loss = 5 * chunked_cross_entropy(*given, labels, bias, 0.1, chunk_size=7)
        found = torch.autograd.grad(loss, given)
        assert tuple(each.dtype for each in found) == types
        for each, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(each.float(), exact, atol=0.02 * exact.abs().max().item(), rtol=0.05)
    for frozen, given in (((states, weight.detach()), states), ((states.detach(), weight), weight)):
        (found,) = torch.autograd.grad(5 * chunked_cross_entropy(*frozen, labels, bias, 0.1), (given,))
        torch.testing.assert_close(found, expected[given is weight])


def test_extreme_logits_stay_finite():
    states, weight = torch.full((1, 2), 200.0, requires_grad=True), torch.tensor([[200.0, 200.0], [-200.0, -200.0]])
    weight.requires_grad_()
    loss = chunked_cross_entropy(states, weight, torch.tensor([1]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(weight.grad).all()
