"""Every fast path against its slow reference: outputs and gradients."""

import pytest
import torch
from gradients import check_gradients
from torch import nn
from user_errors import rejects

from recnmt_hf.models import kernels_recurrent_layers, kernels_shared
from recnmt_hf.models.attention import eager_attention_forward
from recnmt_hf.models.kernels_recurrent_layers import StepMatmuls
from recnmt_hf.models.seq2seq_loss import (
    FORBIDDEN,
    ChunkedCrossEntropy,
    check_labels,
    chunked_cross_entropy,
    chunked_cross_entropy_of_layer,
    losses_on_accelerator,
    losses_on_cpu,
    smoothed_cross_entropy,
)


@pytest.fixture(params=["fast", "slow"])
def paths(request, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1" if request.param == "fast" else "0")
    return request.param


def test_the_switch(monkeypatch):
    for value, expected in (("0", False), ("1", True), ("auto", True), ("", True)):
        monkeypatch.setenv("RECNMT_FAST_PATHS", value)
        assert kernels_shared.enabled() is expected
        assert kernels_shared.setting() == (value or "auto")
    monkeypatch.setenv("RECNMT_FAST_PATHS", "yes")
    with rejects("environment.fast_paths", "RECNMT_FAST_PATHS"):
        kernels_shared.setting()
    monkeypatch.delenv("RECNMT_FAST_PATHS")
    assert kernels_shared.setting() == "auto"


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_has_its_rate_and_scale(paths, p):
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


def test_dropout_follows_the_seed():
    states = torch.ones(128, 99)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(kernels_shared.dropout(states, 0.5, True))
    assert torch.equal(*draws) and not torch.equal(draws[0], kernels_shared.dropout(states, 0.5, True))


@pytest.mark.parametrize("rows", [kernels_shared.SMALLEST_DROPOUT // 64 - 1, kernels_shared.SMALLEST_DROPOUT // 64])
def test_few_elements_are_dropped_by_torch(rows):
    states = torch.ones(rows, 64)
    torch.manual_seed(3)
    own = kernels_shared.dropout(states, 0.5, True)
    torch.manual_seed(3)
    assert torch.equal(own, nn.functional.dropout(states, 0.5)) == (states.numel() < kernels_shared.SMALLEST_DROPOUT)


# -- matmuls in float32 ------------------------------------------------------------------------------------------------


@pytest.fixture
def wide(monkeypatch):
    """Use oneDNN's matmuls wherever they are possible, and list their calls."""
    if not kernels_shared.has_wide_matmul():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
    monkeypatch.setattr(kernels_shared, "SMALLEST_WIDE_WEIGHT", 1)
    calls = []
    multiply = kernels_shared.onednn_linear
    for module in (kernels_shared, kernels_recurrent_layers):
        monkeypatch.setattr(module, "onednn_linear", lambda *args: calls.append(args) or multiply(*args))
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["rows", "columns", "slices"])
def test_wide_matmuls_equal_the_plain_ones(layout, bias, wide):
    """Outputs and all gradients, for tensors in any memory order."""
    torch.manual_seed(1)
    states, weight, offset = torch.randn(3, 8, 24), torch.randn(40, 24), torch.randn(40) if bias else None
    if layout == "columns":
        states, weight = states.transpose(0, 1), torch.randn(24, 40).t()
    elif layout == "slices":
        states, weight = torch.randn(3, 8, 30)[..., :24], torch.randn(40, 30)[:, 6:]
    found = []
    for run in (kernels_shared.wide_linear, nn.functional.linear):
        given = [each.detach().requires_grad_() for each in (states, weight, offset) if each is not None]
        output = run(*given)
        (output * torch.arange(40.0)).sum().backward()
        with torch.no_grad():
            found.append([output, run(*given), *(each.grad for each in given)])
    for own, plain in zip(*found, strict=True):
        torch.testing.assert_close(own, plain, atol=1e-4, rtol=1e-5)
    assert len(wide) == 4  # forward, both gradients, and without gradients
    left, right = torch.randn(30, 50).t(), torch.randn(20, 30).t()
    torch.testing.assert_close(kernels_shared.wide_product(left, right), left @ right, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("wider", ["left", "right"])
def test_products_of_a_transposed_side(wider, wide, monkeypatch):
    """As a weight's gradient is made, in whatever order memory suits; by torch's own matmuls where that is wanted."""
    sides = (torch.randn(9, 30), torch.randn(9, 12))
    left, right = sides if wider == "left" else sides[::-1]
    expected = left.t() @ right
    found = kernels_recurrent_layers.transposed_product(left, right)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert found.is_contiguous() and len(wide) == 1
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert torch.equal(kernels_recurrent_layers.transposed_product(left, right), expected) and len(wide) == 1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_many_calls_are_put_in_order_once(bias, transposed, wide, monkeypatch):
    """From the first call of several rows on; not for few calls, with gradients, or where torch's matmuls serve."""
    many = kernels_recurrent_layers.FEWEST_PACKED_CALLS
    weight, offset = torch.randn(40, 24), torch.randn(40) if bias else None
    weight = torch.randn(24, 40).t() if transposed else weight
    repeated, orders = kernels_recurrent_layers.RepeatedLinear(weight, many), []
    with torch.no_grad():
        for rows in (1, 5, 16, 1, 3):  # as sentences begin and end
            states = torch.randn(rows, 24)
            expected = nn.functional.linear(states, weight, offset)
            torch.testing.assert_close(repeated(states, offset), expected, atol=1e-4, rtol=1e-5)
            orders.append(repeated.packed)
        assert orders[0] is None and orders[1] is not None and all(each is orders[1] for each in orders[1:])
        assert not wide  # which would have put the weight in order at each call
        few = kernels_recurrent_layers.RepeatedLinear(weight, many - 1)
        assert not few.is_packed(torch.randn(16, 24))
        monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
        assert not kernels_recurrent_layers.RepeatedLinear(weight, many).is_packed(torch.randn(16, 24))
        monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
    assert not kernels_recurrent_layers.RepeatedLinear(weight, many).is_packed(torch.randn(16, 24))
    with torch.no_grad():
        assert kernels_recurrent_layers.RepeatedLinear(weight, many).is_packed(torch.randn(16, 24))


def test_wide_matmuls_under_transformations(wide):
    """Gradients of gradients, of single samples, and none of what asks for none."""
    weight, states = torch.randn(12, 9, requires_grad=True), torch.randn(10, 9, requires_grad=True)

    def penalty(run):
        (gradient,) = torch.autograd.grad(run(states, weight).tanh().sum(), states, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    torch.testing.assert_close(penalty(kernels_shared.wide_linear), penalty(nn.functional.linear), atol=1e-4, rtol=1e-4)
    of_one = torch.func.grad(lambda weight, each: kernels_shared.wide_linear(each, weight).square().sum())
    batch = torch.randn(4, 10, 9)
    found = torch.func.vmap(of_one, in_dims=(None, 0))(weight.detach(), batch)
    expected = torch.stack([of_one(weight.detach(), each) for each in batch])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    frozen = kernels_shared.wide_linear(states.detach(), weight)
    frozen.sum().backward()
    assert weight.grad is not None and states.grad is None


def test_where_matmuls_are_not_wide(wide, monkeypatch):
    """By rule: other types, few rows, watchers, autocast, and processors that gain nothing."""
    from torch.utils.flop_counter import FlopCounterMode

    weight = torch.randn(12, 9)
    assert not kernels_shared.takes_wide(torch.randn(kernels_shared.FEWEST_WIDE_ROWS - 1, 9), weight)
    states = torch.randn(kernels_shared.FEWEST_WIDE_ROWS, 9)
    assert kernels_shared.takes_wide(states, weight)
    assert not kernels_shared.takes_wide(states.double(), weight.double())
    with FlopCounterMode(display=False) as counter:
        kernels_shared.wide_linear(states, weight)
    assert counter.get_total_flops() == 2 * len(states) * 12 * 9
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels_shared.wide_linear(states, weight).dtype == torch.bfloat16
    assert not wide
    monkeypatch.setattr(kernels_shared, "prefers_onednn", lambda: True)
    for value, expected in (("auto", True), ("0", False), ("1", True)):
        monkeypatch.setenv("RECNMT_FAST_PATHS", value)
        assert kernels_shared.takes_wide(states, weight) is expected
    monkeypatch.setattr(kernels_shared, "prefers_onednn", lambda: False)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "auto")
    assert not kernels_shared.takes_wide(states, weight)
    monkeypatch.undo()
    kernels_shared.prefers_onednn.cache_clear()
    for amd, capability, expected in ((True, "AVX512", True), (True, "AVX2", False), (False, "AVX512", False)):
        monkeypatch.setattr(kernels_shared, "is_amd", lambda amd=amd: amd)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        kernels_shared.prefers_onednn.cache_clear()
        assert kernels_shared.prefers_onednn() is expected
        for is_output in (False, True):  # AMD without AVX512 gains for output layers
            found = kernels_shared.suits_wide(states, torch.randn(1000, 9), 1, is_output)
            assert found is (expected or (amd and is_output))
    monkeypatch.undo()
    kernels_shared.prefers_onednn.cache_clear()


@pytest.mark.parametrize("prefix", ["NMTTransformer", "BiARNTransformer", "GRET", "ONLSTMTransformer", "RNMT"])
def test_a_model_trains_alike_with_wide_matmuls(prefix, wide, monkeypatch):
    """The loss and every gradient, in all places that multiply."""
    import recnmt_hf

    torch.manual_seed(2)
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=60)
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config).eval()
    monkeypatch.setattr(kernels_recurrent_layers, "FEWEST_PACKED_CALLS", 4)
    mask = (torch.arange(7) < torch.tensor([7, 7, 7, 6, 5, 5, 3, 2, 1])[:, None]).long()
    labels = torch.randint(4, 60, (9, 6))
    batch = {"input_ids": torch.randint(4, 60, (9, 7)), "attention_mask": mask, "labels": labels}
    found = []
    for chosen in (True, False):
        monkeypatch.setattr(kernels_shared, "has_wide_matmul", lambda chosen=chosen: chosen)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(each.grad.clone() for each in model.parameters())])
        assert bool(wide) is True
        made = len(wide)
    assert made == len(wide) and made > 20
    for own, plain in zip(*found, strict=True):
        torch.testing.assert_close(own, plain, atol=2e-5, rtol=2e-3)


# -- matmuls of a decoding step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 16, 64])
@pytest.mark.parametrize("shape", [(32, 32), (32, 100), (8, 1000)])
@pytest.mark.parametrize("bias", [True, False])
def test_projection_of_few_rows(rows, shape, bias, monkeypatch):
    monkeypatch.setattr(kernels_shared, "SMALLEST_WEIGHT", 1)
    monkeypatch.setattr(kernels_shared, "SMALLEST_WIDTH", 1)
    linear = nn.Linear(*shape, bias=bias)
    states = torch.randn(rows, shape[0], 2)[..., 0]
    for setting in ("0", "1"):
        monkeypatch.setenv("RECNMT_FAST_PATHS", setting)
        with torch.no_grad():
            taken = kernels_shared.enabled() and kernels_shared.suits_weight_first(states, linear.weight)
            assert taken is (setting == "1" and rows in (2, 5))
            found = kernels_shared.project(linear, states[:, None])
            torch.testing.assert_close(found[:, 0], linear(states), atol=1e-5, rtol=1e-5)
    states.requires_grad_()
    assert kernels_shared.project(linear, states).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_where_the_weight_comes_first(monkeypatch):
    """On AMD processors, without gradients; not in graphs, on other devices, or while operations are watched."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, states):
            return kernels_shared.project(self.linear, states)

    calls, weight_first = [], kernels_shared.weight_first
    monkeypatch.setattr(kernels_shared, "weight_first", lambda *args: calls.append(args) or weight_first(*args))
    monkeypatch.setattr(kernels_shared, "is_amd", lambda: True)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "auto")
    module, states = Projection(), torch.randn(4, 512)
    with torch.no_grad():
        torch.testing.assert_close(module(states), module.linear(states), atol=1e-5, rtol=1e-5)
        assert len(calls) == 1
        monkeypatch.setattr(kernels_shared, "is_amd", lambda: False)
        assert torch.equal(module(states), module.linear(states))
    monkeypatch.setattr(kernels_shared, "is_amd", lambda: True)
    assert module(states).requires_grad
    with torch.no_grad():
        assert module.to("meta")(states.to("meta")).shape == (4, 512)
        module = Projection()
        with FakeTensorMode() as mode:
            assert Projection()(mode.from_tensor(states)).shape == (4, 512)
        with FlopCounterMode(display=False) as counter:
            module(states)
        assert counter.get_total_flops() == 2 * 4 * 512 * 512
        torch.testing.assert_close(torch.export.export(module, (states,)).module()(states), module.linear(states))
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(states), module.linear(states))
        torch.testing.assert_close(torch.jit.trace(module, states, check_trace=False)(states), module.linear(states))
        with torch.autocast("cpu", torch.bfloat16):
            assert module(states).dtype == torch.bfloat16
        module.double()(states.double())
    assert len(calls) == 1


def test_projection_calls_what_is_not_a_plain_linear():
    class Adapter(nn.Linear):
        def forward(self, states):
            return super().forward(states) + 1

    linear, adapter = nn.Linear(8, 8), Adapter(8, 8)
    states = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(kernels_shared.project(adapter, states), adapter(states))
        seen = []
        linear.register_forward_hook(lambda *args: seen.append(args))
        kernels_shared.project(linear, states)
    assert len(seen) == 1
    plain = nn.Linear(8, 8)
    assert kernels_shared.is_plain(plain, nn.Linear) and not kernels_shared.is_plain(plain, nn.Bilinear)
    for observe in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_forward_pre_hook"):
        hook = getattr(plain, observe)(lambda *args: None)
        assert not kernels_shared.is_plain(plain, nn.Linear), observe
        hook.remove()


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
    gradients = [
        torch.autograd.grad((output * downstream).sum(), (query, key, value))
        for output in (found.transpose(1, 2), expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("amd", [False, True])
def test_choice_of_plain_matmuls(amd, monkeypatch):
    """A rule of processor, type and size: with dropout in float32 where it has won; in bfloat16 everywhere."""
    monkeypatch.setattr(kernels_shared, "is_amd", lambda: amd)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "auto")
    query, key = torch.randn(4, 4, 32, 8, requires_grad=True), torch.randn(4, 4, 32, 8)
    assert kernels_shared.prefers_plain_matmuls(query, key, 0.1) is amd
    assert kernels_shared.prefers_plain_matmuls(query.bfloat16(), key.bfloat16(), 0.1)
    assert not kernels_shared.prefers_plain_matmuls(query.bfloat16()[:1], key.bfloat16()[:1], 0.1)
    assert not kernels_shared.prefers_plain_matmuls(query, key, 0.0)
    assert kernels_shared.prefers_plain_matmuls(query.bfloat16(), key.bfloat16(), 0.0)
    assert not kernels_shared.prefers_plain_matmuls(query.detach().bfloat16(), key.bfloat16(), 0.0)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
    assert kernels_shared.prefers_plain_matmuls(query, key, 0.1)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert not kernels_shared.prefers_plain_matmuls(query, key, 0.1)


@pytest.mark.parametrize("amd", [False, True])
@torch.no_grad()
def test_choice_of_plain_matmuls_in_decoding(amd, monkeypatch):
    """For few queries of many rows, and a number of keys that depends on the type."""
    monkeypatch.setattr(kernels_shared, "is_amd", lambda: amd)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "auto")

    def chosen(rows, queries, keys, dtype=torch.float32):
        query, key = torch.empty(rows, 4, queries, 8, dtype=dtype), torch.empty(rows, 4, keys, 8, dtype=dtype)
        return kernels_shared.prefers_plain_matmuls(query, key, 0.0)

    assert chosen(40, 1, 7) is chosen(10, 4, 24) is chosen(40, 1, 300, torch.bfloat16) is amd
    for rows, queries, keys in ((39, 1, 7), (40, 1, 6), (40, 1, 25), (40, 9, 12)):
        assert not chosen(rows, queries, keys)
    assert not chosen(40, 1, 385, torch.bfloat16)
    with torch.enable_grad():
        assert not chosen(40, 1, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 7, 15, 16])
@torch.no_grad()
def test_attention_of_a_decoding_step(keys, dtype, monkeypatch):
    """Few queries attend as sdpa does, also where a row has padding; torch's softmax is used for long rows alone."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
    query, key, value = (torch.randn(60, 4, length, 16, dtype=dtype) for length in (3, keys, keys))
    mask = torch.ones(60, 1, 1, keys, dtype=torch.bool)
    mask[::2, ..., keys // 2 + 1 :] = False
    scores = query @ key.transpose(2, 3)
    assert kernels_shared.has_short_rows(scores) is (1 < keys < 16)  # fewer than 2,048 scores are too few
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
        chunked_cross_entropy(states, weight, labels, bias, 0.1, chunk_size=5),
        chunked_cross_entropy_of_layer(lambda rows: rows @ weight.T, states, labels, bias, 0.1),
    ):
        torch.testing.assert_close(loss, expected)
        for inputs in (states, weight):
            wanted, found = (torch.autograd.grad(each, inputs, retain_graph=True)[0] for each in (expected, loss))
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_of_a_called_layer(smoothing, bias):
    """An output layer with an adapter or a hook: called for each chunk, with the loss and gradients of all logits."""
    layer, calls = nn.Linear(8, 11).double(), []
    layer.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    states = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    fixed = torch.randn(11, dtype=torch.float64) if bias else None
    labels = torch.randint(0, 11, (3, 5))
    labels[0, 3:] = -100
    logits = layer(states) if fixed is None else layer(states) + fixed
    with torch.no_grad():
        loss = chunked_cross_entropy_of_layer(layer, states, labels, fixed, smoothing)
        assert calls.pop() == 15, "a small batch is one chunk"
        torch.testing.assert_close(loss, smoothed_cross_entropy(logits, labels, smoothing))
    calls.clear()
    for count in (None, 7, torch.tensor(7), 0):
        loss = chunked_cross_entropy_of_layer(layer, states, labels, fixed, smoothing, count, chunk_size=6)
        expected = smoothed_cross_entropy(logits, labels, smoothing, count)
        torch.testing.assert_close(loss, expected)
        wanted = (states, layer.weight, layer.bias)
        grads = [torch.autograd.grad(each, wanted, retain_graph=True) for each in (loss, expected)]
        torch.testing.assert_close(*grads)
    assert calls[:3] == [6, 6, 3]
    labels[1, 1] = 11
    with rejects("model.wrong_label", "labels"):
        chunked_cross_entropy_of_layer(layer, states, labels, fixed, smoothing)


def test_the_divisor_of_a_loss():
    """Real labels, or the number that the Trainer gives for all batches of a step."""
    states, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    labels = torch.tensor([[1, 2, -100], [6, -100, -100]])
    total = nn.functional.cross_entropy((states @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    for count, divisor in ((None, 3), (12, 12), (torch.tensor(12), 12), (0, 1), (torch.tensor(0), 1), (1, 1)):
        for loss in (
            smoothed_cross_entropy(states @ weight.T, labels, num_items_in_batch=count),
            chunked_cross_entropy(states, weight, labels, num_items_in_batch=count),
            chunked_cross_entropy_of_layer(lambda rows: rows @ weight.T, states, labels, num_items_in_batch=count),
        ):
            torch.testing.assert_close(loss, total / divisor)
    one = labels.masked_fill(labels != 6, -100)
    expected = nn.functional.cross_entropy((states @ weight.T)[1, :1], torch.tensor([6]))
    torch.testing.assert_close(chunked_cross_entropy(states, weight, one), expected)
    exact = states.double().requires_grad_()
    losses = (
        smoothed_cross_entropy(exact @ weight.double().T, labels, num_items_in_batch=7),
        chunked_cross_entropy(exact, weight.double(), labels, num_items_in_batch=7),
    )
    torch.testing.assert_close(*(torch.autograd.grad(loss, exact)[0] for loss in losses), atol=1e-14, rtol=1e-12)


def test_small_gradients_of_float16_are_scaled_before_they_are_rounded():
    torch.manual_seed(6)
    states, weight, labels = torch.randn(40, 8), torch.randn(30, 8), torch.randint(0, 30, (40,))
    found = []
    for loss_of in (
        lambda x: smoothed_cross_entropy(x @ weight.T, labels, 0.0, 10**6),
        lambda x: chunked_cross_entropy(x, weight, labels, None, 0.0, 10**6),
    ):
        given = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=bool(found)):
            loss = loss_of(given)
        (loss * 2.0**20).backward()
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0], atol=0.01 * found[0].abs().max().item(), rtol=0.02)


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


def test_labels_at_the_ends_of_the_vocabulary():
    check_labels(torch.tensor([0, 6, -100]), 7)
    for wrong in (7, -1, -101):
        with rejects("model.wrong_label", "labels"):
            check_labels(torch.tensor([1, wrong]), 7)


def test_chunked_loss_gradcheck():
    states = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -100, 4, 0])

    def loss(states, weight):
        return ChunkedCrossEntropy.apply(states, weight, None, labels, 3, 0.2, 2, torch.float64, True)[0]

    check_gradients(loss, (states, weight))


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
