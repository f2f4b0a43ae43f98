"""Matmuls by oneDNN against torch's own: outputs and gradients, and where they are used."""

import copy
import io

import pytest
import torch
from torch import nn

import recnmt_hf
from recnmt_hf.inference.devices import quantize_model
from recnmt_hf.models import kernels_cpu_matmuls, kernels_shared
from recnmt_hf.models.kernels_cpu_matmuls import PackedWeight, fast_linear, fast_product, project, takes_onednn


pytestmark = pytest.mark.skipif(not kernels_cpu_matmuls.has_onednn(), reason="this build of torch has no oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    """Use oneDNN for small matmuls too, and list its calls."""
    monkeypatch.setattr(kernels_cpu_matmuls, "SMALLEST_MATMUL", 1)
    monkeypatch.setattr(kernels_cpu_matmuls, "FEWEST_ROWS", 8)
    calls, multiply = [], kernels_cpu_matmuls.onednn_linear
    monkeypatch.setattr(kernels_cpu_matmuls, "onednn_linear", lambda *args: calls.append(args) or multiply(*args))
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["rows", "columns", "slices"])
def test_matmuls_equal_the_plain_ones(layout, bias, onednn):
    """Outputs and all gradients, for tensors in any memory order."""
    torch.manual_seed(1)
    states, weight, offset = torch.randn(3, 8, 24), torch.randn(40, 24), torch.randn(40) if bias else None
    if layout == "columns":
        states, weight = states.transpose(0, 1), torch.randn(24, 40).t()
    elif layout == "slices":
        states, weight = torch.randn(3, 8, 30)[..., :24], torch.randn(40, 30)[:, 6:]
    found = []
    for run in (fast_linear, nn.functional.linear):
        given = [each.detach().requires_grad_() for each in (states, weight, offset) if each is not None]
        output = run(*given)
        (output * torch.arange(40.0)).sum().backward()
        with torch.no_grad():
            found.append([output, run(*given), *(each.grad for each in given)])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-5)
    assert len(onednn) == 4  # forward, both gradients, and without gradients
    left, right = torch.randn(30, 50).t(), torch.randn(20, 30).t()
    torch.testing.assert_close(fast_product(left, right), left @ right, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("wider", ["left", "right"])
def test_products_of_a_transposed_side(wider, onednn, monkeypatch):
    """As a weight's gradient is made, in whatever order memory suits; by torch's own matmuls where that is wanted."""
    sides = (torch.randn(9, 30), torch.randn(9, 12))
    left, right = sides if wider == "left" else sides[::-1]
    expected = left.t() @ right
    found = kernels_cpu_matmuls.transposed_product(left, right)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert found.is_contiguous() and len(onednn) == 1
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert torch.equal(kernels_cpu_matmuls.transposed_product(left, right), expected) and len(onednn) == 1


def test_matmuls_under_transformations(onednn):
    """Gradients of gradients, of single samples, and none of what asks for none."""
    weight, states = torch.randn(12, 9, requires_grad=True), torch.randn(10, 9, requires_grad=True)

    def penalty(run):
        (gradient,) = torch.autograd.grad(run(states, weight).tanh().sum(), states, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    torch.testing.assert_close(penalty(fast_linear), penalty(nn.functional.linear), atol=1e-4, rtol=1e-4)
    of_one = torch.func.grad(lambda weight, each: fast_linear(each, weight).square().sum())
    batch = torch.randn(4, 10, 9)
    found = torch.func.vmap(of_one, in_dims=(None, 0))(weight.detach(), batch)
    expected = torch.stack([of_one(weight.detach(), each) for each in batch])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    frozen = fast_linear(states.detach(), weight)
    frozen.sum().backward()
    assert weight.grad is not None and states.grad is None


def test_where_torch_multiplies(onednn, monkeypatch):
    """By rule: other types, few rows, watchers, autocast, graphs, and without fast paths."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    weight, states = torch.randn(12, 9), torch.randn(8, 9)
    assert takes_onednn(states, weight) and not takes_onednn(states[:7], weight)
    assert not takes_onednn(states[:, :0], weight[:, :0])
    assert not takes_onednn(states.double(), weight.double())
    with FlopCounterMode(display=False) as counter:
        fast_linear(states, weight)
    assert counter.get_total_flops() == 2 * len(states) * 12 * 9
    with torch.autocast("cpu", torch.bfloat16):
        assert fast_linear(states, weight).dtype == torch.bfloat16
    with FakeTensorMode() as mode:
        assert fast_linear(mode.from_tensor(states), mode.from_tensor(weight)).shape == (8, 12)
    layer = nn.Linear(9, 12)
    compiled = torch.compile(lambda given: project(layer, given), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(states), layer(states))
    assert project(layer.to("meta"), states.to("meta")).shape == (8, 12)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert not takes_onednn(states, weight) and not onednn


@pytest.mark.parametrize("prefix", ["NMTTransformer", "BiARNTransformer", "GRET", "ONLSTMTransformer", "RNMT"])
def test_a_model_trains_alike_with_onednn(prefix, onednn, monkeypatch):
    """The loss and every gradient, in all places that multiply."""
    torch.manual_seed(2)
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=60)
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config).eval()
    mask = (torch.arange(7) < torch.tensor([7, 7, 7, 6, 5, 5, 3, 2, 1])[:, None]).long()
    labels = torch.randint(4, 60, (9, 6))
    batch = {"input_ids": torch.randint(4, 60, (9, 7)), "attention_mask": mask, "labels": labels}
    found = []
    for chosen in (True, False):
        monkeypatch.setattr(kernels_cpu_matmuls, "has_onednn", lambda chosen=chosen: chosen)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(each.grad.clone() for each in model.parameters())])
        assert bool(onednn) is True
        made = len(onednn)
    assert made == len(onednn) and made > 20
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-3)


@pytest.fixture
def small(monkeypatch):
    """Pack small weights too."""
    sizes = dict.fromkeys((torch.float32, torch.bfloat16), 1)
    monkeypatch.setattr(kernels_cpu_matmuls, "SMALLEST_PACKED_MATMUL", sizes)


@pytest.fixture
def layer(small):
    own = nn.Linear(24, 40)
    own.packed_weight = PackedWeight()
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.GELU()])
def test_a_packed_layer_computes_the_same(dtype, rows, bias, activation, small):
    layer = nn.Linear(48, 33, bias=bias).to(dtype)
    states = torch.randn(rows, 2, 48, dtype=dtype)
    layer.packed_weight = PackedWeight()
    with torch.no_grad():
        tolerance = {} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
        expected = layer(states) if activation is None else activation(layer(states))
        torch.testing.assert_close(project(layer, states, activation), expected, **tolerance)
    assert (layer.packed_weight.content[1] is not None) == (dtype == torch.float32 or kernels_shared.has_bfloat16())


@pytest.mark.parametrize("quantized", [False, True])
def test_a_relu_is_part_of_the_matmul_unless_something_observes_it(layer, quantized, monkeypatch):
    model = nn.Sequential(layer, nn.ReLU())
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


def test_a_changed_weight_is_packed_again(layer):
    states = torch.randn(3, 24)
    with torch.no_grad():
        project(layer, states)
        layer.weight.mul_(2)
        layer.bias.add_(1)
        torch.testing.assert_close(project(layer, states), layer(states))
        layer.load_state_dict(nn.Linear(24, 40).state_dict())
        torch.testing.assert_close(project(layer, states), layer(states))
        layer.weight = nn.Parameter(torch.zeros(40, 24))
        torch.testing.assert_close(project(layer, states), layer.bias.expand(3, 40))


def test_training_hooks_and_autocast_use_the_layer_itself(layer):
    states = torch.randn(3, 24)
    project(layer, states).sum().backward()
    assert layer.weight.grad is not None
    seen = []
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert project(layer, states).dtype == torch.bfloat16
        assert project(layer.double(), states.double()).dtype == torch.float64
        layer.float().register_forward_hook(lambda *_: seen.append(True))
        project(layer, states)
    assert seen and layer.packed_weight.content[1] is None


def test_copies_and_files_hold_no_packed_weight(layer):
    with torch.no_grad():
        project(layer, torch.randn(3, 24))
    copied = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert other.packed_weight.content[1] is None and layer.packed_weight.content[1] is not None
    assert set(layer.state_dict()) == {"weight", "bias"}


def packed_layers(model):
    """Return the layers whose weight was packed by a call."""
    layers = [module for module in model.modules() if "packed_weight" in vars(module)]
    return [layer for layer in layers if layer.packed_weight.content[1] is not None]


@pytest.mark.parametrize("prefix", ["NMTTransformer", "RNMT"])
def test_generation_packs_weights_until_they_train_or_move(prefix, small, monkeypatch):
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=60)
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)
    ids = torch.randint(4, 60, (3, 6))
    settings = {"num_beams": 2, "max_new_tokens": 5}

    model.train().generate(ids, **settings)
    assert not packed_layers(model)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    expected = model.eval().generate(ids, **settings)
    assert not packed_layers(model)
    monkeypatch.delenv("RECNMT_FAST_PATHS")
    assert torch.equal(model.generate(ids, **settings), expected) and model.lm_head in packed_layers(model)
    for change in (lambda: model.train().eval(), lambda: model.to(torch.float64).float()):
        change()
        assert not packed_layers(model)
        assert torch.equal(model.generate(ids, **settings), expected) and packed_layers(model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    changed = model.generate(ids, **settings)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    assert torch.equal(copy.deepcopy(model).generate(ids, **settings), changed)
