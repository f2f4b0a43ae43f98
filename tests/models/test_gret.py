"""The Transformer with a global representation: the contract, and every mechanism against a slow reference."""

import pytest
import torch
from model_contract import ModelContract
from slow_transformer import SlowTransformer, compare, multiply_instead_of_dropping, name_fields, recurrent_step

from recnmt_hf import GRETConfig, GRETForConditionalGeneration, GRETModel
from recnmt_hf.models import kernels_gret
from recnmt_hf.models import modeling_gret as modeling


class TestGRET(ModelContract):
    config_class = GRETConfig
    model_class = GRETForConditionalGeneration
    plain = {"use_global_state": False}
    variants = {
        "default": {"num_capsules": 4},
        "capsules-pre-norm": {"num_capsules": 3, "routing_softmax_axis": "capsules", "normalize_before": True},
        "top-mean-scalar-directional": {
            "global_capsule": False,
            "global_aggregation": False,
            "global_gate_type": "scalar",
            "self_attention_type": "directional",
        },
        "relative-sum": {"num_capsules": 4, "self_attention_type": "relative", "global_gate_type": "sum"},
    }

    def test_the_global_vector_is_made_once_per_source(self, variant):
        """Five beams of two sentences: two rows of capsules, two vectors, two gate halves, whatever the steps."""
        model = self.model(variant, torch.float32)
        rows = []
        gate = model.model.decoder.global_gate
        model.model.encoder.global_encoder.register_forward_hook(
            lambda module, args, output: rows.append(output[0].shape[0])
        )
        gate.project_source = lambda vector, own=gate.project_source: rows.append(vector.shape[0]) or own(vector)
        model.generate(torch.randint(4, 30, (2, 6)), num_beams=5, max_new_tokens=6)
        assert rows == [2, 2]


class SlowGRET(SlowTransformer):
    """Section 3 of Weng et al. (2020) for one sentence at a time, one capsule, word and layer after the other."""

    def encode(self, source):
        memory = super().encode(source)
        config = self.config
        self.vector, self.all_capsules, self.all_couplings, self.all_weights = None, [], [], []
        if not config.use_global_state:
            return memory
        prefix, state = "model.encoder.global_encoder", torch.zeros(config.d_model, dtype=torch.float64)
        layers = self.layer_states if config.global_aggregation else self.layer_states[-1:]
        for number, states in enumerate(layers):
            name = f"{prefix}.summaries.{number}"
            if config.global_capsule:
                vector = self.pool(name, self.capsules(f"{prefix}.capsules.capsule_proj.weight", states))
            else:
                vector = sum(states) / len(states)
                vector = self.feed_forward(name, vector) if config.global_aggregation else vector
            if config.global_aggregation:
                vector, _ = recurrent_step(self.weights, f"{prefix}.aggregation", "gru", vector, state)
            state = vector
        self.vector = state
        return memory

    def capsules(self, name, states):
        config, axis = self.config, self.config.routing_softmax_axis
        count, size = config.num_capsules, config.capsule_dim
        matrix = self.weights[name]
        votes = []
        for k in range(count):
            own = 0 if config.capsule_projection == "shared" else k
            votes.append([matrix[own * size : (own + 1) * size] @ word for word in states])
        logits = [[torch.zeros((), dtype=torch.float64) for _ in states] for _ in range(count)]
        for _ in range(config.routing_iterations):
            exponentials = [[logit.exp() for logit in row] for row in logits]
            if axis == "positions":
                coupling = [[each / sum(row) for each in row] for row in exponentials]
            else:
                sums = [sum(row[i] for row in exponentials) for i in range(len(states))]
                coupling = [[each / sums[i] for i, each in enumerate(row)] for row in exponentials]
            capsules = []
            for k in range(count):
                total = sum(c * vote for c, vote in zip(coupling[k], votes[k], strict=True))
                square = total @ total
                capsules.append(square / (1 + square) * total / square.sqrt())
            logits = [[logits[k][i] + votes[k][i] @ capsules[k] for i in range(len(states))] for k in range(count)]
        self.all_capsules.append(torch.stack(capsules))
        self.all_couplings.append(torch.stack([torch.stack(row) for row in coupling]))
        return capsules

    def pool(self, name, capsules):
        kind = self.config.capsule_pooling
        if kind == "concat":
            return self.feed_forward(f"{name}.output", torch.cat(capsules))
        mean = sum(capsules) / len(capsules)
        if kind == "mean":
            return self.feed_forward(f"{name}.output", mean)
        query = self.feed_forward(f"{name}.query", mean)
        exponentials = [(query @ each).exp() for each in capsules]
        weights = [each / sum(exponentials) for each in exponentials]
        self.all_weights.append(torch.stack(weights))
        return self.feed_forward(f"{name}.output", sum(a * u for a, u in zip(weights, capsules, strict=True)))

    def finish(self, states):
        config, w, name = self.config, self.weights, "model.decoder.global_gate"
        if self.vector is None:
            return states
        rows = []
        for state in states:
            gate = 1.0
            if config.global_gate:
                matrix = w[f"{name}.state_proj.weight"]
                if config.global_gate_type == "sum":
                    gate = torch.sigmoid(matrix @ (state + self.vector) + w[f"{name}.state_proj.bias"])
                else:
                    whole = torch.cat([matrix, w[f"{name}.source_proj.weight"]], dim=1)
                    gate = torch.sigmoid(whole @ torch.cat([state, self.vector]) + w[f"{name}.source_proj.bias"])
            rows.append(state + gate * self.vector)
        return torch.stack(rows)


def switches(capsule, aggregation, gate):
    return {"global_capsule": capsule, "global_aggregation": aggregation, "global_gate": gate}


# The rows of table 3, by fields alone; then figure 4, footnote 2, and the open readings.
TABLE_3 = [
    {"use_global_state": False},
    switches(False, False, False),
    switches(True, False, False),
    switches(True, True, False),
    switches(True, False, True),
    switches(False, True, False),
    switches(False, True, True),
    switches(False, False, True),
    {},
]
# Table 3 of the paper prints 0, 1.7, 6.2, 1.7, 4.7, 4.9, 0.2 and 6.4 million more parameters.
ADDED = [0, 1_410_624, 4_796_800, 1_935_424, 4_727_808, 5_252_608, 524_800, 5_321_600]
TestGRET.growth = [
    *(("base", fields, number) for fields, number in zip(TABLE_3[1:], ADDED, strict=True)),
    ("base", {"global_gate_type": "sum"}, 5_059_456),
    ("big", {}, 17_982_848),
]
EQUATIONS = [
    *TABLE_3,
    *({"num_capsules": count} for count in (1, 8)),
    *({"routing_iterations": count} for count in (1, 2, 5)),
    {"routing_softmax_axis": "capsules"},
    {"routing_softmax_axis": "capsules", "routing_iterations": 1},
    {"capsule_projection": "shared"},
    {"capsule_dim": 32},
    {"capsule_dim": 5},
    {"capsule_pooling": "mean"},
    {"capsule_pooling": "concat"},
    {"global_ffn_dim": 20},
    {"global_gate_type": "scalar"},
    {"global_gate_type": "sum"},
    {"normalize_before": True},
    {"self_attention_type": "relative", "max_relative_positions": 2},
    {"self_attention_type": "directional", "encoder_layers": 3},
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("path", ["fast", "reference"])
@pytest.mark.parametrize("fields", EQUATIONS, ids=name_fields)
def test_equations(fields, path, side, monkeypatch):
    """Every sentence of a padded batch, one of a single word among them, against the equations, to 1e-10."""
    monkeypatch.setattr(modeling, "saves_votes", lambda *sizes: True)
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1" if path == "fast" else "0")
    check_equations(TestGRET().model({"num_capsules": 4, "layer_norm_eps": 0.1, **fields}), side)


def test_dropout_stands_where_the_equations_have_it(monkeypatch):
    multiply_instead_of_dropping(monkeypatch)
    fields = {"num_capsules": 4, "dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.5}
    model = TestGRET().model(fields).train()
    model.set_attn_implementation("eager")
    check_equations(model, "right")


def check_equations(model, side):
    slow = SlowGRET(model)
    for outputs, row, words, _ in compare(model, slow, side, output_attentions=True):
        if slow.vector is None:
            assert outputs.global_hidden_state is None
            continue
        torch.testing.assert_close(outputs.global_hidden_state[row], slow.vector, atol=1e-10, rtol=0)
        for found, capsules in zip(outputs.capsules or (), slow.all_capsules, strict=True):
            torch.testing.assert_close(found[row], capsules, atol=1e-10, rtol=0)
        for found, coupling in zip(outputs.routing_weights or (), slow.all_couplings, strict=True):
            torch.testing.assert_close(found[row, :, words], coupling, atol=1e-10, rtol=0)
            assert found[row].count_nonzero() == coupling.count_nonzero()  # padding gets nothing
        for found, weights in zip(outputs.pooling_weights or (), slow.all_weights, strict=True):
            torch.testing.assert_close(found[row], weights, atol=1e-10, rtol=0)


def test_a_family_of_ones_own_names_its_outputs():
    """Classes made of an encoder and a decoder declare what both of these put out, by name and in order."""

    class OwnModel(GRETModel):
        encoder_class, decoder_class = modeling.GRETEncoder, modeling.GRETDecoder

    class OwnForConditionalGeneration(GRETForConditionalGeneration):
        model_class = OwnModel

    class Derived(OwnForConditionalGeneration):
        pass

    assert OwnModel.extra_outputs == GRETModel.extra_outputs
    assert (OwnModel.output_class.__name__, OwnModel.output_class.__module__) == ("OwnModelOutput", __name__)
    output_class = OwnForConditionalGeneration.output_class
    assert (output_class.__name__, output_class.__module__) == ("OwnLMOutput", __name__)
    assert Derived.output_class is output_class is not GRETForConditionalGeneration.output_class
    source = torch.full((2, 3), 5)
    model = Derived(TestGRET().config(num_capsules=2)).eval()
    for made, kind in ((model, output_class), (model.model, OwnModel.output_class)):
        outputs = made(source, decoder_input_ids=source, output_attentions=True)
        assert type(outputs) is kind
        assert outputs.global_hidden_state.shape == (2, 32) and len(outputs.global_gates) == 1


@pytest.mark.parametrize("axis", ["positions", "capsules"])
@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("matrices", [1, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_routing_without_votes_equals_routing(masked, matrices, iterations, axis):
    """Capsules, couplings, and the gradients of words and weights."""
    torch.manual_seed(3)
    weight = torch.randn(matrices, 5, 16, dtype=torch.float64, requires_grad=True)
    states = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [0] * 6 + [1]]) if masked else None
    upstream = torch.randn(3, 6, 5, dtype=torch.float64)

    def outcome(with_votes):
        own = weight.expand(6, -1, -1)
        if with_votes:
            votes = torch.einsum("bid,kcd->bkic", states, own)
            capsules, coupling = modeling.route_reference(votes, mask, iterations, axis)
        else:
            capsules, coupling = kernels_gret.route(states, own, mask, iterations, axis)
        return capsules, coupling, *torch.autograd.grad(capsules, (states, weight), upstream)

    torch.testing.assert_close(outcome(False), outcome(True), atol=1e-11, rtol=1e-9)


def test_squash_of_zero():
    """Nothing in, nothing out, and a gradient that is a number."""
    vectors = torch.zeros(2, 3, requires_grad=True)
    kernels_gret.squash(vectors).sum().backward()
    assert torch.equal(vectors.grad, torch.zeros(2, 3))
    long = kernels_gret.squash(torch.tensor([[30.0, 40.0]]))
    torch.testing.assert_close(long, torch.tensor([[0.6, 0.8]]) * 2500 / 2501)


def test_routing_counts_in_float32():
    """In half precision the softmax and the squash are float32's."""
    states, weight = torch.randn(2, 9, 16), torch.randn(4, 8, 16)
    capsules, coupling = kernels_gret.route(states.bfloat16(), weight.bfloat16(), None, 3, "positions")
    assert capsules.dtype == coupling.dtype == torch.float32
    exact, _ = kernels_gret.route(states.bfloat16().float(), weight.bfloat16().float(), None, 3, "positions")
    torch.testing.assert_close(capsules, exact, atol=0.05, rtol=0.05)
    _, first = kernels_gret.route(states.bfloat16(), weight.bfloat16(), None, 1, "positions")
    assert torch.equal(first, torch.full((2, 4, 9), 1 / 9))
