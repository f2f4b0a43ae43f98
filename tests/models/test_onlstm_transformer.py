"""Stacks of recurrent and self-attention layers: the contract, the ON-LSTM's equations, and its fast steps."""

import pytest
import torch
from gradients import check_gradients
from model_contract import ModelContract
from slow_transformer import SlowTransformer, compare, multiply_instead_of_dropping, name_fields, recurrent_step

from recnmt_hf import ONLSTMTransformerConfig, ONLSTMTransformerForConditionalGeneration
from recnmt_hf.models import kernels_onlstm_transformer
from recnmt_hf.models.configuration_onlstm_transformer import ENCODERS
from recnmt_hf.models.kernels_onlstm_transformer import ONLSTMSteps
from recnmt_hf.models.modeling_onlstm_transformer import ONLSTM, ONLSTMLayer, on_lstm_reference


class TestONLSTMTransformer(ModelContract):
    config_class = ONLSTMTransformerConfig
    model_class = ONLSTMTransformerForConditionalGeneration
    plain = {"encoder_layer_types": ["attention", "attention"]}
    growth = [  # the paper: 11M and 44M
        ("base", {}, 11_013_120),
        ("base_lstm", {}, 9_455_616),
        ("base_onlstm", {}, 22_026_240),
        ("big", {}, 44_046_336),
    ]
    variants = {
        "default": {"encoder_shortcut": True},
        "lstm-ffn-directional-pre-norm": {
            "encoder_layer_types": ["lstm", "attention", "lstm"],
            "self_attention_type": "directional",
            "rnn_ffn": True,
            "normalize_before": True,
        },
        "one-direction-chunks-relative": {
            "self_attention_type": "relative",
            "encoder_layer_types": ["attention", "onlstm"],
            "rnn_bidirectional": False,
            "rnn_hidden_size": 24,
            "onlstm_chunk_size": 4,
        },
    }

    one_layer = {"decoder_layers": 1}

    def config(self, **fields):
        layers = len(fields["encoder_layer_types"]) if "encoder_layer_types" in fields else 2
        return super().config(**{"encoder_layers": layers, **fields})


class SlowHybrid(SlowTransformer):
    """Sections 2 and 3 of Hao et al. (2019) for one sentence, word by word, channel by channel of the master gates."""

    def input(self, side, ids):
        config = self.config
        if side == "decoder" or config.encoder_layer_types[0] == "attention" or config.rnn_input_position_embeddings:
            return super().input(side, ids)
        return self.embed(side, ids) * self.factor("dropout")

    def encode(self, source):
        config, n = self.config, len(source)
        everything = [[True] * n for _ in range(n)]
        relative = config.max_relative_positions if config.self_attention_type == "relative" else None
        x = self.input("encoder", source)
        self.recurrent, self.distances = None, []
        kinds = config.encoder_layer_types
        for index, kind in enumerate(kinds):
            if index == len(kinds) // 2:
                half_way = x
            name, heads = f"model.encoder.layers.{index}", config.encoder_attention_heads
            if kind == "attention":
                x = self.sublayer(
                    f"{name}.self_attn_layer_norm",
                    x,
                    lambda y, m=name, h=heads: self.attention(f"{m}.self_attn", y, y, everything, h, relative),
                )
                x = self.feed_forward_sublayer(name, x)
                continue
            x = self.sublayer(f"{name}.rnn_layer_norm", x, lambda y, m=name, k=kind: self.rnn(m, k, list(y)))
            if config.rnn_ffn:
                x = self.feed_forward_sublayer(f"{name}.feed_forward", x)
            self.recurrent = x
        self.attention_top = x
        if config.encoder_shortcut:
            x = x + (half_way if self.recurrent is None else self.recurrent)
        return self.norm("model.encoder.layer_norm", x) if config.normalize_before else x

    def rnn(self, name, kind, words):
        step = self.on_lstm_step if kind == "onlstm" else self.lstm_step
        onward, distances = self.run(step, f"{name}.rnn.forward_rnn", words)
        columns, states = [distances], onward
        if self.config.rnn_bidirectional:
            backward, distances = self.run(step, f"{name}.rnn.backward_rnn", words[::-1])
            states = [torch.cat(pair) for pair in zip(onward, backward[::-1], strict=True)]
            columns.append(distances[::-1])
        if kind == "onlstm":
            self.distances.append(torch.tensor(columns, dtype=torch.float64).T)
        return self.linear(f"{name}.out_proj", torch.stack(states))

    def run(self, step, name, words):
        size = self.config.rnn_hidden_size
        state, cell = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        states, distances = [], []
        for word in words:
            state, cell, distance = step(name, word, state, cell)
            states.append(state)
            distances.append(distance)
        return states, distances

    def lstm_step(self, name, x, state, cell):
        return *recurrent_step(self.weights, name, "lstm", x, state, cell), 0.0

    def on_lstm_step(self, name, x, state, cell):
        w, size, chunk = self.weights, len(state), self.config.onlstm_chunk_size
        units = size // chunk
        each = w[f"{name}.weight_ih"] @ x + w[f"{name}.weight_hh"] @ state + w[f"{name}.bias"]
        f, i, o, c = (each[k * size : (k + 1) * size] for k in range(4))
        f, i, o, c = torch.sigmoid(f), torch.sigmoid(i), torch.sigmoid(o), torch.tanh(c)
        scores = each[4 * size :].exp()
        master_forget = [scores[: k + 1].sum() / scores[:units].sum() for k in range(units)]
        master_input = [1 - scores[units : units + k + 1].sum() / scores[units:].sum() for k in range(units)]
        new_cell, new_state = torch.zeros_like(cell), torch.zeros_like(state)
        for channel in range(size):
            upper, lower = master_forget[channel // chunk], master_input[channel // chunk]
            w_ = upper * lower
            forget, into = f[channel] * w_ + (upper - w_), i[channel] * w_ + (lower - w_)
            new_cell[channel] = forget * cell[channel] + into * c[channel]
            new_state[channel] = o[channel] * torch.tanh(new_cell[channel])
        return new_state, new_cell, float(1 - sum(master_forget) / units)


def stack(*kinds):
    return {"encoder_layer_types": [each for kind, count in kinds for each in [kind] * count]}


# Tables 1 and 2 at a third of their size, by fields alone; then the open readings and the base model's own options.
EQUATIONS = [
    stack(("attention", 2)),
    stack(("lstm", 2)),
    stack(("onlstm", 2)),
    stack(("lstm", 2), ("attention", 1)),
    stack(("onlstm", 2), ("attention", 1)),
    stack(("onlstm", 1), ("attention", 1)),
    {**stack(("onlstm", 1), ("attention", 1)), "encoder_shortcut": True},
    {**stack(("attention", 2)), "encoder_shortcut": True},
    {**stack(("attention", 3)), "encoder_shortcut": True},
    stack(("attention", 1), ("onlstm", 1)),
    {"onlstm_chunk_size": 2},
    {"onlstm_chunk_size": 16},
    {"rnn_hidden_size": 12, "onlstm_chunk_size": 3},
    {"rnn_bidirectional": False, "encoder_shortcut": True},
    {**stack(("lstm", 1), ("onlstm", 1)), "rnn_bidirectional": False, "rnn_ffn": True},
    {"rnn_input_position_embeddings": True},
    {"normalize_before": True, "encoder_shortcut": True, "rnn_ffn": True},
    {"self_attention_type": "relative", "max_relative_positions": 2, **stack(("attention", 1), ("onlstm", 1))},
    {"scale_embedding": False},
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("path", ["fast", "reference"])
@pytest.mark.parametrize("fields", EQUATIONS, ids=name_fields)
def test_equations(fields, path, side, monkeypatch):
    """Every sentence of a padded batch, one of a single word among them, against the equations, to 1e-10."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1" if path == "fast" else "0")
    check_equations(TestONLSTMTransformer().model({"layer_norm_eps": 0.1, **fields}), side)


def test_dropout_stands_where_the_equations_have_it(monkeypatch):
    multiply_instead_of_dropping(monkeypatch)
    fields = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.5, "rnn_ffn": True}
    model = TestONLSTMTransformer().model(fields).train()
    model.set_attn_implementation("eager")
    check_equations(model, "right")


def check_equations(model, side):
    slow, kinds = SlowHybrid(model), model.config.encoder_layer_types
    for outputs, row, words, _ in compare(model, slow, side, output_attentions=True):
        assert len(outputs.master_gate_distances or ()) == kinds.count("onlstm")
        for found, distances in zip(outputs.master_gate_distances or (), slow.distances, strict=True):
            torch.testing.assert_close(found[row, words], distances, atol=1e-10, rtol=0)
            assert found[row].count_nonzero() == distances.count_nonzero()  # padding has none
        is_below = kinds[-1] == "attention" and any(kind != "attention" for kind in kinds)
        assert (outputs.recurrent_hidden_state is not None) == is_below
        assert (outputs.attention_hidden_state is not None) == model.config.encoder_shortcut
        if is_below:
            found = outputs.recurrent_hidden_state[row, words]
            torch.testing.assert_close(found, slow.recurrent, atol=1e-10, rtol=0)
        if model.config.encoder_shortcut:
            found = outputs.attention_hidden_state[row, words]
            torch.testing.assert_close(found, slow.attention_top, atol=1e-10, rtol=0)


def inputs_and_weights(counts, size, chunk, directions=2, std=1.0, width=5):
    """For each direction inputs, their weight and bias, and the recurrent weight."""
    torch.manual_seed(4)
    rows = 4 * size + 2 * (size // chunk)
    shapes = ((sum(counts), width), (rows, width), (rows,), (rows, size))
    scales = (1.0, width**-0.5, 0.3, std)
    return [
        (torch.randn(shape, dtype=torch.float64) * scale).requires_grad_()
        for _ in range(directions)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


@pytest.mark.parametrize("counts", [[2, 2, 2], [3, 2, 2, 1], [2]], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("directions", [1, 2])
def test_steps_pass_gradcheck(chunk, directions, counts):
    tensors = inputs_and_weights(counts, 6, chunk, directions)
    check_gradients(lambda *each: ONLSTMSteps.apply(counts, chunk, *each)[0], tensors)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4), (torch.bfloat16, 0.1)], ids=str
)
@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (63, 1), (100, 8)])
def test_fast_steps_equal_the_reference(length, chunk, dtype, tolerance):
    """States and gradients; those of half precision beside the same numbers in float32."""
    size, rows = 16, 3
    tensors = inputs_and_weights([rows] * length, size, chunk, std=size**-0.5)
    tensors = [each.detach().to(dtype).requires_grad_() for each in tensors]
    upstream = torch.randn(2, length * rows, size, dtype=torch.float64)

    def outcome(run, tensors):
        states = run(*tensors)
        found = torch.autograd.grad(states, tensors, upstream.to(states.dtype))
        return [each.double() for each in (states.detach(), *found)]

    def reference(*each):
        steps = [torch.nn.functional.linear(*each[start : start + 3]) for start in (0, 4)]
        steps = [gate.unflatten(0, (length, rows)) for gate in steps]
        pairs = zip(steps, each[3::4], strict=True)
        columns = [on_lstm_reference(gate, weight, chunk_size=chunk)[0] for gate, weight in pairs]
        return torch.stack(columns).flatten(1, 2)

    wide = torch.promote_types(dtype, torch.float32)
    expected = outcome(reference, [each.detach().to(wide).requires_grad_() for each in tensors])
    found = outcome(lambda *each: ONLSTMSteps.apply([rows] * length, chunk, *each)[0], tensors)
    for fast, slow in zip(found, expected, strict=True):
        largest = max(float(slow.abs().max()), 1e-3)
        torch.testing.assert_close(fast / largest, slow / largest, atol=tolerance, rtol=0)


def test_fast_layer_equals_the_reference(monkeypatch):
    """Ragged and full batches, in both directions, autocast too: states, their ends, and all gradients."""
    torch.manual_seed(1)
    calls, steps = [], ONLSTMSteps.apply
    monkeypatch.setattr(ONLSTMSteps, "apply", lambda *args: calls.append(len(args)) or steps(*args))
    rnn = ONLSTM(2, 16, 16, bidirectional=True)
    for parameter in rnn.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = torch.randn(6, 11, 16, requires_grad=True)
    ragged = (torch.arange(11) < torch.tensor([[11], [3], [11], [7], [1], [6]])).long()
    for mask in (ragged, torch.ones_like(ragged), None):
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for setting in ("1", "0"):
                monkeypatch.setenv("RECNMT_FAST_PATHS", setting)
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    states, ends = rnn(inputs, mask)
                results = (states * torch.arange(32.0)).sum() + ends.square().sum()
                gradients = torch.autograd.grad(results, [inputs, *rnn.parameters()])
                found.append([states.detach(), ends.detach(), *gradients])
            for own, plain in zip(*found, strict=True):
                tolerance = 2e-5 if dtype == torch.float32 else 0.05
                largest = float(plain.abs().max())
                torch.testing.assert_close(own.float() / largest, plain.float() / largest, atol=tolerance, rtol=0)
    assert calls == [10] * 6, "both directions in one call, with fast paths alone"


@pytest.mark.parametrize("directions", [1, 2])
def test_gradients_are_taken_again_where_the_graph_is_kept(directions, monkeypatch):
    """Only the last backward pass overwrites the saved tensors."""
    monkeypatch.setattr(kernels_onlstm_transformer, "ROWS", 4)
    counts = [3, 3, 2, 1]
    tensors = inputs_and_weights(counts, 6, 2, directions)
    states = ONLSTMSteps.apply(counts, 2, *tensors)[0]
    first = torch.autograd.grad(states.sum(), tensors, retain_graph=True)
    again = torch.autograd.grad(states.sum(), tensors)
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(states.sum(), tensors)


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_what_padding_holds_changes_nothing(path, monkeypatch):
    """Ragged rows in both directions: states and gradients are those of each sentence alone."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1" if path == "fast" else "0")
    torch.manual_seed(1)
    rnn = ONLSTM(2, 5, 6, bidirectional=True).double()
    for parameter in rnn.parameters():
        torch.nn.init.normal_(parameter)
    inputs = torch.randn(3, 7, 5, dtype=torch.float64)
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 0, 0], [0] * 6 + [1]])
    filled = torch.where(mask[:, :, None] == 1, inputs, torch.tensor(1e30, dtype=torch.float64)).requires_grad_()
    states, last = rnn(filled, mask)
    for row in range(3):
        words = mask[row] == 1
        alone, end = rnn(inputs[row : row + 1, words])
        torch.testing.assert_close(states[row, words], alone[0], atol=1e-10, rtol=0)
        torch.testing.assert_close(last[row], end[0], atol=1e-10, rtol=0)
        assert states[row, ~words].eq(0).all()
    assert torch.equal(rnn(inputs, torch.zeros_like(mask))[0], torch.zeros(3, 7, 12, dtype=torch.float64))
    states.sum().backward()
    assert filled.grad[mask == 0].eq(0).all() and filled.grad.isfinite().all()


def test_cumulative_sums_are_float32_whatever_the_type_outside():
    """512 shares of a 512th each, summed in bfloat16, would stop counting halfway."""
    layer = ONLSTMLayer(1, 4, 512).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    inputs = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    distance = layer(inputs, measured=torch.zeros(1, 1, 512, dtype=torch.bfloat16))
    assert distance.dtype == torch.float32
    torch.testing.assert_close(distance, torch.tensor([[1 - 513 / 1024]]))


def test_presets_of_every_size():
    for size in ("tiny", "small", "base", "big"):
        proposed = ONLSTMTransformerConfig.from_preset(size, vocab_size=100)
        assert proposed.encoder_shortcut and set(proposed.encoder_layer_types) == {"onlstm", "attention"}
        for name in ENCODERS:
            config = ONLSTMTransformerConfig.from_preset(f"{size}_{name}", vocab_size=100)
            assert config.d_model == proposed.d_model and config.encoder_layers == len(config.encoder_layer_types)
    assert ONLSTMTransformerConfig(encoder_layers=3).encoder_layer_types == ["onlstm", "onlstm", "attention"]
    fewer = ONLSTMTransformerConfig.from_preset("base", vocab_size=100, encoder_layers=2)
    assert fewer.encoder_layer_types == ["onlstm", "attention"]
    assert ONLSTMTransformerConfig(**stack(("lstm", 8))).encoder_layers == 8


def test_recurrent_weights_start_orthogonal_gate_by_gate():
    torch.manual_seed(0)
    layer = TestONLSTMTransformer().model({"onlstm_chunk_size": 4}, scattered=False).model.encoder.layers[0].rnn
    gates = layer.forward_rnn.weight_hh.split([32] * 4 + [8] * 2)
    for gate in gates:
        torch.testing.assert_close(gate @ gate.T, torch.eye(len(gate), dtype=gate.dtype), atol=1e-5, rtol=0)
    assert layer.backward_rnn.bias[:32].eq(1).all() and layer.backward_rnn.bias[32:].eq(0).all()
