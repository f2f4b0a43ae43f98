"""
`torch.compile` beside MarianMT: as many graphs for twelve lengths, none of them broken, and the numbers of eager mode.
The contract of every model asks the same of all variants in training.
"""

import importlib.util
import shutil
import sys

import pytest
import torch
import torch._dynamo.testing
from compiled_graphs import (
    ALL_LENGTHS,
    FEW_LENGTHS,
    GraphCounter,
    batches,
    count_generation,
    gradients_of,
    graphs_of_marian,
    needs_compiler,
)
from model_contract import TINY, family_model, scatter_parameters
from user_errors import rejects

import recnmt_hf
from recnmt_hf.families import FAMILIES
from recnmt_hf.models import kernels_shared
from recnmt_hf.models.modeling_biarn_transformer import AttentiveRecurrence
from recnmt_hf.models.modeling_onlstm_transformer import ONLSTM, ONLSTMLayer
from recnmt_hf.models.modeling_rpe_transformer import ProjectedRecurrentLayer, SimpleRecurrentUnit
from recnmt_hf.models.recurrent_layers import MaskedRNN, RecurrentLayer


pytestmark = needs_compiler


def build(model_type, **fields):
    sizes = {"encoder_layers": 1, **FAMILIES[model_type].small}
    return family_model(model_type, **sizes, **fields).double()


# With a static cache and with dynamic shapes, or not: two ways for every family, and the others for one.
WAYS = [(False, True), (True, None), (False, None), (True, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "static", "dynamic"),
    [(name, *way) for name in FAMILIES for way in WAYS[: 4 if name == "rpe_transformer" else 2]],
)
def test_generation(model_type, static, dynamic):
    # Four lengths are enough for what others add to the base Transformer.
    settings = {"dynamic": dynamic, "lengths": ALL_LENGTHS if model_type == "nmt_transformer" else FEW_LENGTHS}
    expected = graphs_of_marian(count_generation, static, **settings)
    graphs, breaks = count_generation(scatter_parameters(build(model_type)).eval(), static, **settings)
    assert breaks == 0 and graphs <= expected


@pytest.mark.slow
def test_kernels_of_the_default_backend():
    """Three lengths in training by kernels that torch makes of the graph."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("there is no C++ compiler")
    model = build("rnmt", relation_layers=0, encoder_rnn_layout="concat").float().train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for batch in batches(lengths=[(7, 5), (9, 4), (4, 8)]):
        found, expected = (gradients_of(model, run, **batch) for run in (compiled, model))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


RECURRENCES = {
    "rnn": lambda: RecurrentLayer("rnn", 8, 6),
    "gru": lambda: MaskedRNN("gru", 8, 6, bidirectional=True),
    "lstm": lambda: RecurrentLayer("lstm", 8, 6),
    "sru": lambda: SimpleRecurrentUnit(8, 6),
    "projected lstm": lambda: ProjectedRecurrentLayer("lstm", 8, 6),
    "on-lstm": lambda: ONLSTM(2, 8, 6, bidirectional=True),
    "plain on-lstm": lambda: ONLSTMLayer(2, 8, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_one_graph_for_any_number_of_steps(name, autocast):
    """States and all gradients, also behind the graph transformations that kernels are made from."""
    torch.manual_seed(3)
    layer = scatter_parameters(RECURRENCES[name]().to(torch.float32 if autocast else torch.float64))
    dtype = next(layer.parameters()).dtype
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for rows, length in ((3, 5), (3, 7), (4, 2)):
        found = []
        for run in (compiled, layer):
            torch.manual_seed(length)
            inputs = torch.randn(rows, length, 8, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                states = run(inputs)
            states = states[0] if isinstance(states, tuple) else states
            layer.zero_grad()
            (states.to(dtype) * torch.randn(states.shape, dtype=dtype)).sum().backward()
            found.append([states.detach().to(dtype), inputs.grad, *(each.grad for each in layer.parameters())])
        tolerance = {"atol": 0.1, "rtol": 0.1} if autocast else {"atol": 1e-12, "rtol": 1e-9}
        torch.testing.assert_close(*found, **tolerance)
    assert counter.frame_count == 1


def test_all_that_an_lstm_carries():
    layer = RecurrentLayer("lstm", 3, 4).double()
    counter = GraphCounter.start()
    compiled = torch.compile(lambda *given: layer(*given, with_all=True), backend=counter, fullgraph=True, dynamic=True)
    for length in (5, 7):
        inputs, start = torch.randn(2, length, 3).double(), torch.randn(2, 4).double()
        torch.testing.assert_close(compiled(inputs, start), layer(inputs, start, with_all=True), atol=1e-12, rtol=0)
    assert counter.graphs == 1


def test_dropout_of_an_attentive_recurrence_with_a_step_for_each_word():
    """It is drawn outside of the steps, which the backward pass takes again."""
    config = recnmt_hf.BiARNTransformerConfig(**{**TINY, "d_model": 8, "recurrence_steps": None})
    config._attn_implementation = "sdpa"
    layer = scatter_parameters(AttentiveRecurrence(config)).double().train()
    for direction in layer.directions:
        direction.attn.dropout = 0.5
    counter = GraphCounter.start()
    compiled = torch.compile(lambda inputs: layer(inputs, None)[0], backend=counter, fullgraph=True, dynamic=True)
    for length in (4, 6):
        inputs = torch.randn(2, length, 8).double().requires_grad_()
        states = compiled(inputs)
        (gradient,) = torch.autograd.grad(states.sum(), inputs)
        torch.manual_seed(1)
        direction = torch.randn_like(inputs)
        outcomes = []
        for sign in (1, -1):
            torch.manual_seed(2)
            outcomes.append(compiled(inputs + sign * 1e-6 * direction).sum())
        torch.manual_seed(2)
        (gradient,) = torch.autograd.grad(compiled(inputs).sum(), inputs)
        expected = (outcomes[0] - outcomes[1]) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), expected, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(states, compiled(inputs))
    assert counter.graphs == 1


def test_recurrences_of_compiled_graphs_are_not_differentiated_twice():
    layer, inputs = RecurrentLayer("gru", 8, 6), torch.randn(2, 3, 8, requires_grad=True)
    compiled = torch.compile(layer, backend=GraphCounter.start(), fullgraph=True)
    with rejects("Set the environment variable"):
        torch.autograd.grad(compiled(inputs).sum(), inputs, create_graph=True)


def test_another_copy_of_the_code_has_operators_of_its_own(monkeypatch):
    """Code from the Hub is a copy under another name, and may be loaded again under the same one."""
    spaces = []
    for name in ("recnmt_hf.models.copy_of_operators",) * 2:
        spec = importlib.util.spec_from_file_location(name, kernels_shared.__file__)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)

        @module.graph_operator(lambda given, *, factor: [(given.shape, given.dtype)])
        def scaled(given: torch.Tensor, *, factor: float) -> list[torch.Tensor]:
            return [given * factor]

        compiled = torch.compile(lambda given: scaled(given, factor=3.0)[0], backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
        spaces.append(module.libraries[0].ns)
    assert spaces == ["recnmt_hf_models_copy_of_operators", "recnmt_hf_models_copy_of_operators_"]
