"""Every fast path against its slow reference: outputs and gradients."""

import pytest
import torch
from torch import nn

from recnmt_hf.models import fast_paths
from recnmt_hf.models.attention import eager_attention_forward
from recnmt_hf.models.seq2seq_loss import ChunkedCrossEntropy, chunked_cross_entropy, smoothed_cross_entropy


@pytest.fixture(params=["fast", "slow"])
def paths(request, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1" if request.param == "fast" else "0")
    return request.param


def test_the_switch(monkeypatch):
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("RECNMT_FAST_PATHS", value)
        assert fast_paths.enabled() is expected


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_has_its_rate_and_scale(paths, p):
    states = torch.ones(401, 499, requires_grad=True)
    dropped = fast_paths.dropout(states, p, True)
    zeros = (dropped == 0).float().mean().item()
    assert abs(zeros - p) < 0.005
    torch.testing.assert_close(dropped[dropped != 0].mean().item(), 1 / (1 - p), atol=1e-4, rtol=0)
    dropped.sum().backward()
    assert torch.equal(states.grad, dropped.detach())
    # neighbours, which share a draw, are dropped independently
    pairs = (dropped.flatten()[:-1] == 0) & (dropped.flatten()[1:] == 0)
    assert abs(pairs.float().mean().item() - p * p) < 0.005
    assert fast_paths.dropout(states, p, False) is states and fast_paths.dropout(states, 0.0, True) is states


def test_dropout_follows_the_seed():
    states = torch.ones(7, 11)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(fast_paths.dropout(states, 0.5, True))
    assert torch.equal(*draws) and not torch.equal(draws[0], fast_paths.dropout(states, 0.5, True))


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 6, 64])
@pytest.mark.parametrize("shape", [(32, 32), (32, 100), (100, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_projection_of_few_rows(rows, shape, bias):
    linear = nn.Linear(*shape, bias=bias)
    states = torch.randn(rows, 1, shape[0])
    with torch.no_grad():
        torch.testing.assert_close(fast_paths.project(linear, states), linear(states), atol=1e-5, rtol=1e-5)
    states.requires_grad_()
    assert fast_paths.project(linear, states).requires_grad


def test_projection_calls_what_is_not_a_plain_linear():
    class Adapter(nn.Linear):
        def forward(self, states):
            return super().forward(states) + 1

    linear, adapter = nn.Linear(8, 8), Adapter(8, 8)
    states = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(fast_paths.project(adapter, states), adapter(states))
        seen = []
        linear.register_forward_hook(lambda *args: seen.append(args))
        fast_paths.project(linear, states)
    assert len(seen) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "additive"])
def test_attention_by_plain_products(causal, masked):
    """What training on the CPU may take instead of sdpa: the same contexts and gradients."""
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
    gradients = [
        torch.autograd.grad((output * downstream).sum(), (query, key, value))
        for output in (found.transpose(1, 2), expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_choice_of_plain_products(monkeypatch):
    query, key = torch.randn(2, 2, 5, 4, requires_grad=True), torch.randn(2, 2, 5, 4)
    assert fast_paths.prefers_plain_products(query, key, 0.1)
    assert not fast_paths.prefers_plain_products(query, key, 0.0)
    assert fast_paths.prefers_plain_products(query.bfloat16(), key.bfloat16(), 0.0)
    assert not fast_paths.prefers_plain_products(query.detach().bfloat16(), key.bfloat16(), 0.0)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert not fast_paths.prefers_plain_products(query, key, 0.1)


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_loss_in_chunks_of_any_size(smoothing, bias, chunk):
    states = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    fixed = torch.randn(11, dtype=torch.float64) if bias else None
    labels = torch.randint(0, 11, (3, 5))
    labels[0, 3:] = labels[2] = -100
    loss = chunked_cross_entropy(states, weight, labels, fixed, smoothing, chunk_size=chunk)
    logits = nn.functional.linear(states, weight, fixed)
    expected = smoothed_cross_entropy(logits, labels, smoothing)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(*(torch.autograd.grad(3 * each, (states, weight)) for each in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


def test_chunked_loss_gradcheck():
    states = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -100, 4, 0])

    def loss(states, weight):
        return ChunkedCrossEntropy.apply(states, weight, None, labels, 3, 0.2, 2, torch.float64, True)

    assert torch.autograd.gradcheck(loss, (states, weight))


def test_loss_without_any_label_is_zero():
    states, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels = torch.full((2, 3), -100)
    for loss in (
        chunked_cross_entropy(states, weight, labels, label_smoothing=0.1),
        smoothed_cross_entropy(states @ weight.T, labels, 0.1),
    ):
        assert loss.item() == 0.0


def test_extreme_logits_stay_finite():
    states, weight = torch.full((1, 2), 200.0, requires_grad=True), torch.tensor([[200.0, 200.0], [-200.0, -200.0]])
    weight.requires_grad_()
    loss = chunked_cross_entropy(states, weight, torch.tensor([1]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(weight.grad).all()
