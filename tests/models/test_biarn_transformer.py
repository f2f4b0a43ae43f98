"""The Transformer with a recurrence encoder: the contract, and every mechanism against a slow reference."""

import pytest
import torch
from model_contract import ModelContract, gradients_of, ragged_batch, source_of
from packaging import version
from slow_transformer import (
    SlowTransformer,
    compare,
    multiply_instead_of_dropping,
    name_fields,
    recurrent_step,
    softmax_rows,
)

from recnmt_hf import BiARNTransformerConfig, BiARNTransformerForConditionalGeneration
from recnmt_hf.models import kernels_biarn_transformer
from recnmt_hf.models import modeling_biarn_transformer as modeling
from recnmt_hf.models.seq2seq_outputs import CACHE


class TestBiARNTransformer(ModelContract):
    config_class = BiARNTransformerConfig
    model_class = BiARNTransformerForConditionalGeneration
    plain = {"recurrence_encoder_type": None}
    growth = [("base", {}, 9_456_640), ("big", {}, 69_259_264)]  # the paper: 9.4M and 69.4M
    one_layer = {**ModelContract.one_layer, "recurrence_steps": 3}
    variants = {
        "default": {},
        "gated-all-length-relative": {
            "self_attention_type": "relative",
            "fusion_type": "gated_sum",
            "fusion_layers": "all",
            "recurrence_steps": None,
            "recurrence_encoder_layers": 2,
        },
        "recurrence-memory": {"decoder_memory": "recurrence", "recurrence_steps": 5},
        "birnn-multi-column-directional-pre-norm": {
            "self_attention_type": "directional",
            "recurrence_encoder_type": "birnn",
            "recurrence_encoder_layers": 2,
            "normalize_before": True,
            "encoder_type": "multi_column",
            "multi_column_rnn_layers": 2,
        },
    }


class SlowBiARN(SlowTransformer):
    """Section 1 of Hao et al. (2019) for one sentence at a time, one step, head and word after the other."""

    def encode(self, source):
        config = self.config
        self.evidence = []
        prefix = "model.encoder"
        words = self.embed("encoder", source) * self.factor("dropout")
        if config.recurrence_position_embeddings:
            words = self.input("encoder", source)
        encoded = None
        if config.decoder_memory == "both" or config.recurrence_source == "encoder":
            encoded = super().encode(source)
        if config.encoder_type == "multi_column":
            column = words
            for i in range(config.multi_column_rnn_layers):
                name = f"{prefix}.multi_column.layers.{i}"
                column = self.sublayer(f"{name}.rnn_layer_norm", column, lambda x, n=name: self.column(n, x))
            if config.normalize_before:
                column = self.norm(f"{prefix}.multi_column.layer_norm", column)
            if config.multi_column_merge == "sum":
                encoded = encoded + column
            else:
                encoded = self.linear(f"{prefix}.multi_column.merge", torch.cat([encoded, column], -1))
        self.recurrence = None
        if config.recurrence_encoder_type is None:
            return encoded
        states = words if config.recurrence_source == "embeddings" else encoded
        for i in range(config.recurrence_encoder_layers):
            name = f"{prefix}.recurrence_encoder.layers.{i}"
            norm = f"{name}.recurrence_layer_norm"
            x = self.norm(norm, states) if config.normalize_before else states
            found = self.rec(f"{name}.recurrence", x, len(source))
            found = found * self.factor("dropout")
            found = found + states if i else found
            found = found if config.normalize_before else self.norm(norm, found)
            states = self.feed_forward_sublayer(name, found)
        if config.normalize_before:
            states = self.norm(f"{prefix}.recurrence_encoder.layer_norm", states)
        self.recurrence = states
        return encoded if config.decoder_memory == "both" else states

    def column(self, name, x):
        zeros = torch.zeros(x.shape[1], dtype=torch.float64)
        both = [
            self.over_words(f"{name}.rnn.{way}_rnn", x, zeros, way == "backward") for way in ("forward", "backward")
        ]
        return self.linear(f"{name}.out_proj", torch.cat(both, -1))

    def rec(self, name, x, length):
        """REC: both directions and their combination."""
        config = self.config
        kind = config.recurrence_encoder_type
        attentive, both = kind in ("arn", "biarn"), kind in ("biarn", "birnn")
        mean = sum(x[j] for j in range(len(x))) / len(x)
        ways = []
        for way in range(2 if both else 1):
            first = {
                "mean_linear": lambda w=way: torch.tanh(self.linear(f"{name}.initial_states.{w}.linear", mean)),
                "mean": lambda: mean,
                "zeros": lambda: torch.zeros(config.recurrence_hidden_size, dtype=torch.float64),
            }[config.recurrence_initial_state]()
            if attentive:
                steps = config.recurrence_steps or length
                ways.append(self.attentive(f"{name}.directions.{way}", x, first, steps, way == 1))
            else:
                rnn = f"{name}.rnn.{'backward' if way else 'forward'}_rnn"
                ways.append(self.over_words(rnn, x, first, way == 1))
        together = torch.cat(ways, -1)
        return self.linear(f"{name}.out_proj", together) if f"{name}.out_proj.weight" in self.weights else together

    def attentive(self, name, x, state, steps, backward):
        heads, cell = self.config.encoder_attention_heads, self.config.recurrence_cell
        states, carry = {}, torch.zeros_like(state)
        numbers = range(steps, 0, -1) if backward else range(1, steps + 1)
        for t in numbers:
            context = self.attention(f"{name}.attn", state[None], x, [[True] * len(x)], heads)[0]
            state, carry = recurrent_step(self.weights, f"{name}.cell", cell, context, state, carry, suffix="")
            states[t] = state
        return torch.stack([states[t] for t in range(1, steps + 1)])

    def over_words(self, name, x, state, backward):
        carry, states = torch.zeros_like(state), {}
        for j in reversed(range(len(x))) if backward else range(len(x)):
            state, carry = recurrent_step(self.weights, name, self.config.recurrence_cell, x[j], state, carry)
            states[j] = state
        return torch.stack([states[j] for j in range(len(x))])

    def fuse(self, layer, own, attended):
        config = self.config
        name = f"model.decoder.layers.{layer}"
        here = config.fusion_layers == "all" or layer == config.decoder_layers - 1
        if self.recurrence is None or config.decoder_memory == "recurrence" or not here:
            return attended
        everything = [[True] * len(self.recurrence)] * len(own)

        def attend(x):
            return self.attention(
                f"{name}.recurrence_attn", x, self.recurrence, everything, config.decoder_attention_heads
            )

        norm = f"{name}.recurrence_attn_layer_norm"
        if config.fusion_type == "stack":
            return self.sublayer(norm, attended, attend)
        recurrent = self.sublayer(norm, own, attend)
        gate = torch.sigmoid(self.linear(f"{name}.fusion_gate.linear", torch.cat([attended, recurrent], -1)))
        return gate * attended + (1 - gate) * recurrent


EQUATIONS = [
    {},
    {"recurrence_encoder_layers": 3},
    {"recurrence_steps": 1},
    {"recurrence_steps": 12},  # more steps than any sentence has words
    {"recurrence_steps": None},
    {"recurrence_steps": None, "recurrence_encoder_layers": 2},
    {"recurrence_steps": None, "recurrence_encoder_type": "arn"},
    {"recurrence_encoder_type": "arn"},
    {"recurrence_encoder_type": "arn", "recurrence_hidden_size": 24, "recurrence_cell": "lstm"},
    {"recurrence_encoder_type": "birnn"},
    {"recurrence_encoder_type": "birnn", "recurrence_encoder_layers": 3, "recurrence_cell": "lstm"},
    {"recurrence_encoder_type": "rnn", "recurrence_encoder_layers": 2},
    {"recurrence_cell": "lstm", "recurrence_hidden_size": 48},
    {"recurrence_hidden_size": 64},
    {"recurrence_initial_state": "mean"},
    {"recurrence_initial_state": "zeros"},
    {"recurrence_encoder_type": "birnn", "recurrence_initial_state": "mean"},
    {"recurrence_position_embeddings": True},
    {"recurrence_direction_combination": "concat"},
    {"recurrence_encoder_type": "birnn", "recurrence_direction_combination": "concat"},
    {"recurrence_source": "encoder"},
    {"decoder_memory": "recurrence"},
    {"decoder_memory": "recurrence", "recurrence_source": "encoder"},
    {"decoder_memory": "recurrence", "recurrence_encoder_type": "birnn"},
    {"decoder_memory": "recurrence", "recurrence_steps": None},
    {"fusion_layers": "all"},
    {"fusion_type": "gated_sum"},
    {"fusion_type": "gated_sum", "fusion_layers": "all", "fusion_gate": "scalar"},
    {"normalize_before": True, "recurrence_encoder_layers": 2},
    {"normalize_before": True, "fusion_type": "gated_sum", "recurrence_encoder_type": "birnn"},
    {"encoder_type": "multi_column", "recurrence_encoder_type": None, "multi_column_rnn_layers": 2},
    {"encoder_type": "multi_column", "recurrence_encoder_type": None, "multi_column_merge": "sum"},
    {"encoder_type": "multi_column", "multi_column_rnn_layers": 2, "normalize_before": True},
    {"self_attention_type": "relative", "max_relative_positions": 2},
    {"recurrence_encoder_type": None},
]


# Of those, what has dropout in places of its own.
DROPPED = [
    {"normalize_before": True, "recurrence_encoder_layers": 2, "fusion_type": "gated_sum"},
    {"encoder_type": "multi_column", "recurrence_encoder_type": "arn", "recurrence_position_embeddings": True},
]


def choose_path(path, monkeypatch):
    monkeypatch.setattr(kernels_biarn_transformer, "few_steps", lambda *sizes: path == "fast")
    monkeypatch.setattr(kernels_biarn_transformer, "few_positions", lambda *sizes: path == "fast")
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0" if path == "reference" else "1")


@pytest.mark.parametrize("path", ["fast", "projected", "reference"])
@pytest.mark.parametrize("fields", EQUATIONS, ids=name_fields)
def test_equations(fields, path, monkeypatch):
    """Every sentence of a padded batch, one of a single word among them, against the equations, to 1e-10."""
    if path != "fast" and fields.get("recurrence_encoder_type", "biarn") not in ("arn", "biarn"):
        pytest.skip("only an ARN has several paths")
    choose_path(path, monkeypatch)
    check_equations(TestBiARNTransformer().model({"layer_norm_eps": 0.1, **fields}))


@pytest.mark.parametrize(
    "path, fields",
    [("fast", {}), ("projected", {}), ("reference", DROPPED[0]), ("fast", DROPPED[1])],
    ids=["fast", "projected", "reference", "multi-column"],
)
def test_dropout_stands_where_the_equations_have_it(path, fields, monkeypatch):
    multiply_instead_of_dropping(monkeypatch)
    choose_path(path, monkeypatch)
    fields = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.5, **fields}
    model = TestBiARNTransformer().model(fields).train()
    model.set_attn_implementation("eager")
    check_equations(model)


def check_equations(model):
    slow = SlowBiARN(model)
    for outputs, row, _, _ in compare(model, slow):
        if slow.recurrence is not None:
            own = outputs.recurrence_hidden_state[row, : len(slow.recurrence)]
            torch.testing.assert_close(own, slow.recurrence, atol=1e-10, rtol=0)


@pytest.mark.parametrize("frozen", [(), (".weight",), (".bias",), ("directions.1.",)], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("kind", ["arn", "biarn"])
@pytest.mark.parametrize("steps", [5, None])
@pytest.mark.parametrize("few", [True, False], ids=["few-steps", "many-steps"])
def test_fast_steps_equal_reference(few, kind, cell, steps, stacked, frozen, monkeypatch):
    """Outputs, attentions and the gradients of inputs and parameters, in both forms of matmuls and of reading."""
    monkeypatch.setattr(kernels_biarn_transformer, "on_cpu", lambda tensor: not stacked)
    monkeypatch.setattr(kernels_biarn_transformer, "few_steps", lambda *sizes: few)
    config = TestBiARNTransformer().config(
        recurrence_encoder_type=kind, recurrence_cell=cell, recurrence_steps=steps, recurrence_hidden_size=24
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(3)
    recurrence = modeling.AttentiveRecurrence(config).double().eval()
    for name, parameter in recurrence.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    results, calls, original = [], [], modeling.attentive_steps
    monkeypatch.setattr(modeling, "attentive_steps", lambda *args: (calls.append(1), original(*args))[1])
    for setting in ("1", "0"):
        monkeypatch.setenv("RECNMT_FAST_PATHS", setting)
        calls.clear()
        torch.manual_seed(4)
        inputs = torch.randn(3, 4, 32, dtype=torch.float64, requires_grad=True)
        recurrence.zero_grad()
        states, own_mask, attentions = recurrence(inputs, mask, output_attentions=True)
        assert bool(calls) == (setting == "1")
        (states * torch.randn_like(states)).sum().backward()
        gradients = [inputs.grad, *(p.grad.clone() for p in recurrence.parameters() if p.requires_grad)]
        results.append([states.detach(), attentions.detach(), *gradients])
        assert (own_mask is None) == (steps is not None)
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("fields", [{"fusion_layers": "all"}, {"fusion_type": "gated_sum"}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_dropout_leaves_the_recurrence_out_for_whole_sentences(fields, checkpointing):
    """In training a sentence has H_r in all layers, or in none; in evaluation every one has it."""
    silent = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, **fields}
    model = TestBiARNTransformer().model({**silent, "recurrence_memory_dropout": 0.5})
    batch = ragged_batch()
    with_recurrence = model(**batch).logits
    without = TestBiARNTransformer().model(silent)
    without.load_state_dict(model.state_dict())
    for layer in without.model.decoder.layers:
        if hasattr(layer, "recurrence_attn"):
            if layer.fusion_gate is None:
                layer.recurrence_attn.register_forward_hook(lambda module, inputs, output: (0 * output[0], output[1]))
            else:
                layer.fusion_gate.register_forward_hook(lambda module, inputs, output: torch.ones_like(output))
    without_recurrence = without(**batch).logits
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    seen = set()
    for seed in range(6):
        torch.manual_seed(seed)
        outputs = model(**batch)
        outputs.loss.backward()
        for row in range(3):
            has = torch.allclose(outputs.logits[row], with_recurrence[row], atol=1e-10)
            lacks = torch.allclose(outputs.logits[row], without_recurrence[row], atol=1e-10)
            assert has != lacks
            seen.add(has)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "fields", [{}, {"recurrence_steps": None}, {"fusion_type": "gated_sum", "fusion_layers": "all"}], ids=str
)
def test_absorbed_projections_equal_plain_ones(fields, monkeypatch):
    """Logits, attention weights, gradients of all parameters."""
    model = TestBiARNTransformer().model(fields)
    results = []
    for absorbed in (True, False):
        monkeypatch.setattr(kernels_biarn_transformer, "few_positions", lambda *sizes, absorbed=absorbed: absorbed)
        model.zero_grad()
        outputs = model(**ragged_batch(), output_attentions=True)
        outputs.loss.backward()
        results.append((outputs.logits, outputs.recurrence_cross_attentions, gradients_of(model)))
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"do_sample": True}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("fields", [{}, {"recurrence_steps": None}], ids=str)
def test_generation_with_absorbed_projections(fields, way, monkeypatch):
    """The same tokens and scores; the memory is projected once, however many steps and beams there are."""
    model = TestBiARNTransformer().model(fields)
    batch = ragged_batch()
    projected, results = [], []
    attn = model.model.decoder.layers[-1].recurrence_attn
    absorb = attn.absorb_memory
    monkeypatch.setattr(attn, "absorb_memory", lambda states: projected.append(states.shape[0]) or absorb(states))
    for absorbed in (True, False):
        monkeypatch.setattr(kernels_biarn_transformer, "few_positions", lambda *sizes, absorbed=absorbed: absorbed)
        torch.manual_seed(2)
        settings = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True, **way}
        results.append(model.generate(**source_of(batch), **settings))
    assert torch.equal(results[0].sequences, results[1].sequences)
    torch.testing.assert_close(results[0].scores, results[1].scores, atol=1e-10, rtol=1e-9)
    assert projected == ([] if "cache_implementation" in way else [3])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [8, None])
def test_evidence(layers, steps):
    """States, step attentions, cross-attentions and gates, with shapes, sums and zeros where nothing is real."""
    gated = {"fusion_type": "gated_sum", "fusion_layers": "all"}
    model = TestBiARNTransformer().model({"recurrence_encoder_layers": layers, "recurrence_steps": steps, **gated})
    batch = ragged_batch()
    plain = model(**batch)
    assert plain.recurrence_attentions is plain.fusion_gates is plain.recurrence_cross_attentions is None
    assert plain.recurrence_hidden_states is None
    outputs = model(**batch, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(outputs.logits, plain.logits, atol=1e-10, rtol=0)
    count = steps or 7
    assert outputs.recurrence_hidden_state.shape == (3, count, 32)
    assert len(outputs.recurrence_hidden_states) == len(outputs.recurrence_attentions) == layers
    assert torch.equal(outputs.recurrence_hidden_states[-1], outputs.recurrence_hidden_state)
    first = outputs.recurrence_attentions[0]
    assert first.shape == (3, 2, 4, count, 7)
    torch.testing.assert_close(first[0].sum(-1), torch.ones(2, 4, count, dtype=torch.float64))
    assert (first[1, ..., 4:] == 0).all() and (first[2, ..., 1:] == 0).all()
    if layers == 2:
        assert outputs.recurrence_attentions[1].shape == (3, 2, 4, count, count)
    assert [gate.shape for gate in outputs.fusion_gates] == [(3, 5, 32)] * 2
    assert all(((gate > 0) & (gate < 1)).all() for gate in outputs.fusion_gates)
    assert [weights.shape for weights in outputs.recurrence_cross_attentions] == [(3, 4, 5, count)] * 2
    if steps is None:
        assert outputs.recurrence_attention_mask.tolist() == batch["attention_mask"].tolist()
        assert (outputs.recurrence_cross_attentions[0][1, ..., 4:] == 0).all()
    else:
        assert outputs.recurrence_attention_mask is None


def test_step_attentions_are_those_of_the_equations():
    """The evidence of a step, against one query made by hand from the state before it."""
    model = TestBiARNTransformer().model({"recurrence_steps": 3})
    slow, source = SlowBiARN(model), [5, 9, 11, 6]
    outputs = model.get_encoder()(torch.tensor([source]), output_attentions=True)
    words = slow.weights["model.encoder.embed_tokens.weight"][source] * 32**0.5
    name = "model.encoder.recurrence_encoder.layers.0.recurrence"
    for way in range(2):
        state = torch.tanh(slow.linear(f"{name}.initial_states.{way}.linear", words.mean(0)))
        for made in range(3):
            direction = f"{name}.directions.{way}"
            q = slow.linear(f"{direction}.attn.q_proj", state[None])
            k = slow.linear(f"{direction}.attn.k_proj", words)
            number = made if way == 0 else 2 - made
            for head, part in enumerate(torch.arange(32).split(8)):
                expected = softmax_rows(q[:, part] @ k[:, part].T / 8**0.5, [[True] * 4])[0]
                found = outputs.recurrence_attentions[0][0, way, head, number]
                torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
            context = slow.attention(f"{direction}.attn", state[None], words, [[True] * 4], 4)[0]
            state, _ = recurrent_step(slow.weights, f"{direction}.cell", "gru", context, state, suffix="")


def test_words_are_not_aligned_by_attention_to_steps():
    """A decoder that reads the recurrence alone has no cross-attentions to words; its weights have their own name."""
    model = TestBiARNTransformer().model({"decoder_memory": "recurrence"})
    outputs = model(**ragged_batch(), output_attentions=True)
    assert outputs.cross_attentions == ()
    assert [weights.shape for weights in outputs.recurrence_cross_attentions] == [(3, 4, 5, 8)] * 2


@pytest.mark.slow
def test_compiled_and_plain_steps_share_a_cache():
    """Few states of the recurrence are kept in another layout by plain steps than by compiled ones."""
    if version.parse(torch.__version__) < version.parse("2.8"):
        pytest.skip("torch 2.6 and 2.7 cannot follow transformers' own wrappers, not MarianMT's either")
    model = TestBiARNTransformer().model({"recurrence_steps": 2, "decoder_attention_heads": 2})
    source = source_of(ragged_batch())
    target = torch.randint(4, 30, (3, 6))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        encoded, cache, steps = model.get_encoder()(**source), None, []
        for t in range(6):
            given = {"encoder_outputs": encoded, "attention_mask": source["attention_mask"], "use_cache": True}
            words = target[:, t : t + 1]
            outputs = (compiled if t % 2 else model)(**given, decoder_input_ids=words, cache=cache)
            cache = outputs[CACHE]
            steps.append(outputs.logits)
        expected = model(**source, decoder_input_ids=target).logits
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-9, rtol=0)
