"""SSRU and average attention in place of the decoder's self-attention: contract, equations, states, refusals."""

import pytest
import torch
from compiled_graphs import FEW_LENGTHS
from gradients import check_gradients
from model_contract import ModelContract, scatter_parameters
from slow_transformer import SlowTransformer, compare, multiply_instead_of_dropping
from transformers.cache_utils import DynamicCache

import recnmt_hf
from recnmt_hf import NMTTransformerConfig, NMTTransformerForConditionalGeneration, RPETransformerConfig
from recnmt_hf.models.light_decoders import (
    AverageAttention,
    LinearScan,
    SimplerSimpleRecurrentUnit,
    linear_scan_reference,
)
from recnmt_hf.models.seq2seq_loading import Initialization
from recnmt_hf.models.seq2seq_outputs import CACHE


SSRU = {"decoder_autoregression": "ssru"}
AVERAGE = {"decoder_autoregression": "average_attention"}


class TestLightDecoders(ModelContract):
    config_class = NMTTransformerConfig
    model_class = NMTTransformerForConditionalGeneration
    compiled = {"lengths": FEW_LENGTHS}
    growth = [
        ("base", SSRU, -6 * (4 * (512**2 + 512) - 2 * 512**2 - 512)),
        ("base", AVERAGE, -6144),
        ("base", {**AVERAGE, "aan_ffn": True}, 6 * (2 * 512 * 2048 + 2048 + 512) - 6144),
        ("base", {**AVERAGE, "aan_gate": "separate"}, 6 * (2 * (512**2 + 512) - 4 * (512**2 + 512))),
    ]
    variants = {
        "default": {**SSRU, "decoder_recurrence_projection": True, "position_embedding_type": "tensor2tensor"},
        "average": {**AVERAGE, "aan_ffn": True, "normalize_before": True},
    }
    # The same for all decoders of this class (test_nmt_transformer.py).
    test_hub_code_loads_without_the_package = test_compiled_by_transformations_of_the_graph = None
    test_learned_prefix = test_a_subclass_is_saved_with_code_that_loads = None
    test_tied_embeddings = test_the_bare_model_resizes = test_learns_short_sequences = None


class SlowLightDecoder(SlowTransformer):
    """The decoders of Marian and Zhang et al. (2018), word by word."""

    def matrix(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def decoder_self(self, name, x, causal, heads, relative):
        function = self.ssru if self.config.decoder_autoregression == "ssru" else self.average
        return torch.stack(list(function(name, x)))

    def ssru(self, name, x):
        width = x.shape[1]
        weight, weight_forget = self.weights[f"{name}.in_proj.weight"].split(width)
        memory = torch.zeros(width, dtype=torch.float64)
        for word in x * self.factor("decoder_recurrence_dropout"):
            forget = 1 / (1 + torch.exp(-(weight_forget @ word + self.weights[f"{name}.forget_bias"])))
            memory = forget * memory + (1 - forget) * (weight @ word)
            output = memory.clamp(min=0)
            yield self.linear(f"{name}.out_proj", output) if self.config.decoder_recurrence_projection else output

    def average(self, name, x):
        config = self.config
        for j, word in enumerate(x):
            mean = sum(x[k] for k in range(j + 1)) / (j + 1)
            if config.aan_ffn:
                mean = self.linear(f"{name}.fc1", mean)
                mean = torch.relu(mean) if config.aan_activation == "relu" else mean * torch.sigmoid(mean)
                mean = mean * self.factor("activation_dropout")
                mean = self.linear(f"{name}.fc2", mean) if config.aan_ffn_layers == 2 else mean
            if config.aan_gate == "joint":
                both = torch.sigmoid(self.linear(f"{name}.gate", torch.cat([word, mean])))
                yield both[: len(word)] * word + both[len(word) :] * mean
            elif config.aan_gate == "separate":
                of_word = torch.sigmoid(self.linear(f"{name}.input_gate", word))
                yield of_word * word + torch.sigmoid(self.linear(f"{name}.forget_gate", mean)) * mean
            else:
                yield mean


GATES = [{"aan_gate": gate, "aan_ffn": ffn} for gate in ("joint", "separate", "none") for ffn in (True, False)]
ROWS = [
    SSRU,
    {**SSRU, "decoder_recurrence_projection": True},
    *({**AVERAGE, **gate} for gate in GATES),
    {**AVERAGE, "aan_ffn": True, "aan_ffn_layers": 1, "aan_activation": "silu"},
]


@pytest.mark.parametrize("normalize_before", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("fields", ROWS, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_equations(fields, normalize_before, training, monkeypatch):
    fields = {**fields, "normalize_before": normalize_before}
    if training:
        multiply_instead_of_dropping(monkeypatch)
        fields |= {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.5}
        fields |= {"decoder_recurrence_dropout": 0.4}
    model = TestLightDecoders().model(fields).train(training)
    model.set_attn_implementation("eager")
    assert len(list(compare(model, SlowLightDecoder(model)))) == 3


def test_recurrence_dropout_drops_the_same_channels_of_all_words():
    config = TestLightDecoders().config(**SSRU, decoder_recurrence_dropout=0.5)
    unit = SimplerSimpleRecurrentUnit(config, 0).train()
    with torch.no_grad():
        unit.in_proj.weight.copy_(torch.eye(32).repeat(2, 1))  # a channel depends on itself alone
    outputs = unit(torch.rand(4, 6, 32) + 1)[0]
    is_dropped = outputs == 0
    assert torch.equal(is_dropped.all(dim=1), is_dropped.any(dim=1))
    assert 0.3 < is_dropped.float().mean() < 0.7


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_the_scan_equals_the_reference(length):
    decay = torch.rand(3, length, 5, dtype=torch.float64)
    decay[0] *= 1e-30  # products of many small decays underflow to 0, without NaN
    values, initial = torch.randn_like(decay), torch.randn(3, 5, dtype=torch.float64)
    expected = linear_scan_reference(decay, values, initial)
    torch.testing.assert_close(LinearScan.apply(decay, values, initial), expected, atol=1e-12, rtol=0)


def test_gradients_of_the_scan():
    decay = torch.rand(2, 6, 3, dtype=torch.float64)
    inputs = [decay, torch.randn_like(decay), torch.randn(2, 3, dtype=torch.float64)]
    for tensor in inputs:
        tensor.requires_grad_()
    check_gradients(LinearScan.apply, inputs)
    assert torch.autograd.gradgradcheck(LinearScan.apply, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kind", [SimplerSimpleRecurrentUnit, AverageAttention])
def test_states_of_many_half_precision_steps_are_exact(kind, dtype):
    """The states stay in float32: their error does not grow with the number of words (1,000 here)."""
    fields = SSRU if kind is SimplerSimpleRecurrentUnit else {**AVERAGE, "aan_gate": "none"}
    config = TestLightDecoders().config(**fields)
    torch.manual_seed(2)
    module = kind(config, 0).to(dtype)
    module.apply(lambda part: part.initialize(Initialization(32)) if hasattr(part, "initialize") else None)
    words = (2 + 2 * torch.rand(1, 1000, 32) - 1).to(dtype)
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    with torch.no_grad():
        steps = torch.cat([module(words[:, t : t + 1], cache=cache)[0] for t in range(1000)], 1)
        exact = module.double()(words.double())[0]
    assert all(state.dtype == torch.float32 for state in cache.layers[0].states.values())
    coarse = torch.finfo(dtype).eps * exact.abs().max() * 4
    assert (steps.double() - exact).abs().max() < coarse
    assert (steps[:, -10:].double() - exact[:, -10:]).abs().max() < coarse


@pytest.mark.parametrize(
    ("preset", "millions"), [("student_tiny", 16.91), ("student_base", 42.69), ("student_base_memory", 31.25)]
)
def test_parameters_of_the_students(preset, millions):
    """With the bias of the logits, which Marian trains."""
    with torch.device("meta"):
        model = NMTTransformerForConditionalGeneration(NMTTransformerConfig.from_preset(preset))
    assert (model.num_parameters() + 32000) / 1e6 == pytest.approx(millions, abs=0.005)


def test_each_matrix_of_the_unit_is_initialized_alone():
    torch.manual_seed(1)
    model = TestLightDecoders().model(SSRU, torch.float32, scattered=False)
    unit = model.get_decoder().layers[0].self_attn
    bound = (6 / 64) ** 0.5  # Xavier, 32 to 32
    for matrix in unit.in_proj.weight.chunk(2):
        assert 0.95 * bound < matrix.abs().max() <= bound
    assert not unit.forget_bias.any()


def test_a_recurrent_input_and_a_recurrent_decoder_count_the_same_words():
    """RPE's recurrence and an SSRU store their states in one cache layer."""
    config = RPETransformerConfig.from_preset("tiny", vocab_size=30, rpe_cell="lstm", **SSRU)
    assert config.cache_layer_types() == ["recnmt_recurrent"] * 2
    model = scatter_parameters(recnmt_hf.RPETransformerForConditionalGeneration(config).double().eval(), 0.2)
    source = torch.randint(4, 30, (2, 5))
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 2, "return_dict_in_generate": True}
    cached, whole = (model.generate(source, **settings, output_logits=True, use_cache=use) for use in (True, False))
    torch.testing.assert_close(cached.logits, whole.logits, atol=1e-10, rtol=0)
    assert cached[CACHE].get_seq_length() == 6
    assert set(cached[CACHE].self_attention_cache.layers[0].states) == {"state", "memory", "ssru_memory"}
    assistant = model.generate(source[:1], max_new_tokens=6, assistant_model=model)
    assert torch.equal(assistant, model.generate(source[:1], max_new_tokens=6))
