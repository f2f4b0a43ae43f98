"""BiRNN+GCN: the contract with trees, the equations, what padding may do, and a task that needs syntax."""

import inspect
import itertools
import math

import pytest
import reordering
import torch
from compiled_graphs import MOST_LENGTHS
from model_contract import VOCABULARY, ModelContract, gradients_of, scatter_parameters
from slow_transformer import recurrent_step

from recnmt_hf import GCNRNMTConfig, GCNRNMTForConditionalGeneration
from recnmt_hf.models import modeling_gcn_rnmt
from recnmt_hf.models.configuration_gcn_rnmt import DIRECTIONS
from recnmt_hf.models.modeling_gcn_rnmt import Edges, GCNRNMTEncoder, GraphConvolution
from recnmt_hf.models.recurrent_layers import left_aligned


RELATIONS = 6
BOW = {"encoder_type": "bow", "encoder_layers": 1}
CNN = {"encoder_type": "cnn", "cnn_kernel_size": 3}


def chain(states, token_mask):
    """Heads for sentences without trees: the word before and the one before that, whatever the padding."""
    rows, length = states.shape[:2]
    real = torch.ones(rows, length, device=states.device) if token_mask is None else token_mask
    rank, order = (real != 0).cumsum(1) - 1, left_aligned(real)
    heads = [torch.where(rank >= back, order.gather(1, (rank - back).clamp(min=0)), -1) for back in (1, 2)]
    return torch.stack(heads, dim=2), torch.stack([rank % RELATIONS, (rank + 3) % RELATIONS], dim=2).clamp(min=0)


class TestGCNRNMT(ModelContract):
    """Sources without trees get a [`chain`], so that every promise holds for the graph convolutions too."""

    config_class = GCNRNMTConfig
    model_class = GCNRNMTForConditionalGeneration
    plain = {"gcn_layers": 0}
    # A layer of width w with R relations has 3 w^2 + 4 w + 2 R w + 2 R + 1 parameters.
    growth = [
        ("base", {}, 2 * (3 * 1024**2 + 4 * 1024 + 2 * 101 * 1024 + 2 * 101 + 1)),
        ("base", {"gcn_label_biases": False}, 2 * (3 * 1024**2 + 4 * 1024 + 2 * 1024 + 2 + 1)),
        ("base", {"gcn_gates": False}, 2 * (3 * 1024**2 + 1024 + 2 * 101 * 1024)),
    ]
    compiled = {"lengths": MOST_LENGTHS}
    compiled_variants = {"lengths": MOST_LENGTHS, "dynamic": True}
    variants = {
        "default": {},
        "cnn": {**CNN, "gcn_layers": 1, "gcn_residual": "always", "decoder_type": "conditional_gru"},
        "bow": {**BOW, "gcn_gates": False, "gcn_label_biases": False},
    }

    @pytest.fixture(autouse=True)
    def trees(self, request, monkeypatch):
        run = GCNRNMTEncoder.run

        def run_with_chains(encoder, states, token_mask, dependency_heads=None, dependency_relations=None, **kwargs):
            if dependency_heads is None:
                dependency_heads, dependency_relations = chain(states, token_mask)
            return run(encoder, states, token_mask, dependency_heads, dependency_relations, **kwargs)

        if request.function.__name__ != "test_hub_code_loads_without_the_package":  # it has the saved code
            monkeypatch.setattr(GCNRNMTEncoder, "run", run_with_chains)

    def config(self, **fields):
        small = {"decoder_layers": 1, "num_relations": RELATIONS, "init_uniform": None}
        small |= {"readout_dropout": 0.0, "gcn_dropout": 0.0, "gcn_edge_dropout": 0.0}
        return super().config(**{**small, **fields})


def build(seed=5, **fields):
    """A small model in float64 with large random parameters."""
    small = {"vocab_size": VOCABULARY, "d_model": 10, "num_relations": RELATIONS, "init_uniform": None}
    torch.manual_seed(seed)
    return scatter_parameters(GCNRNMTForConditionalGeneration(GCNRNMTConfig(**{**small, **fields})).double().eval())


def random_trees(rows, length, count=None, seed=1):
    """Random edges: cycles, words that head themselves, several edges between two words, positions outside."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, length) if count is None else (rows, length, count)
    heads = torch.randint(-2, length + 2, shape, generator=generator)
    return {"dependency_heads": heads, "dependency_relations": torch.randint(0, RELATIONS, shape, generator=generator)}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


class SlowEncoder:
    """
    The encoder of one sentence after the equations (SPEC_RIVALS section 2), a word and an edge at a time. It shares
    nothing with the model but the parameters.
    """

    def __init__(self, model):
        self.config = model.config
        self.p = {n.removeprefix("model.encoder."): t.detach() for n, t in model.state_dict().items()}

    def gru(self, name, xs, order):
        h, states = torch.zeros(self.config.d_model, dtype=torch.float64), {}
        for i in order:
            h = states[i] = recurrent_step(self.p, name, "gru", xs[i], h)[0]
        return [states[i] for i in range(len(xs))]

    def below(self, ids):
        words = [self.p["embed_tokens.weight"][i] for i in ids]
        count = len(words)
        if self.config.encoder_type == "bow":
            return words
        if self.config.encoder_type == "birnn":
            for k in range(self.config.encoder_layers):
                forward = self.gru(f"layers.{k}.rnn.forward_rnn", words, range(count))
                backward = self.gru(f"layers.{k}.rnn.backward_rnn", words, reversed(range(count)))
                words = [torch.cat(pair) for pair in zip(forward, backward, strict=True)]
            return words
        words = [word + self.p["embed_input.embed_positions.weight"][i] for i, word in enumerate(words)]
        half = self.config.cnn_kernel_size // 2
        for k in range(self.config.encoder_layers):
            weight, bias = (self.p[f"layers.{k}.convolution.{kind}"] for kind in ("weight", "bias"))
            made = []
            for i in range(count):
                near = [o for o in range(-half, half + 1) if 0 <= i + o < count]
                made.append(words[i] + bias + sum(weight[:, :, o + half] @ words[i + o] for o in near))
            words = made
        return words

    def edges(self, heads, relations):
        """All edges (sender, receiver, direction, label) of a sentence, loops included."""
        found = [(v, v, "loop", 0) for v in range(len(heads))]
        for v, (row, labels) in enumerate(zip(heads, relations, strict=True)):
            for head, label in zip(row, labels, strict=True):
                if 0 <= head < len(heads):
                    label = label if self.config.gcn_label_biases else 0
                    found += [(v, head, "in", label), (head, v, "out", label)]
        return [edge for edge in found if edge[2] in self.config.gcn_directions]

    def graph_layer(self, index, words, edges):
        sums = [torch.zeros_like(word) for word in words]
        for sender, receiver, direction, label in edges:
            name, h = f"gcn_layers.{index}.{direction}_messages", words[sender]
            gate = 1.0
            if self.config.gcn_gates:
                logit = self.p[f"{name}.gate_proj.weight"][0] @ h + self.p[f"{name}.gate_bias"][label]
                gate = sigmoid(float(logit))
            message = self.p[f"{name}.proj.weight"] @ h + self.p[f"{name}.bias"][label]
            sums[receiver] = sums[receiver] + gate * message
        always = self.config.gcn_residual == "always"
        is_residual = always or (self.config.gcn_residual is True and self.config.gcn_layers >= 2)
        outputs = [torch.clamp(total, min=0) for total in sums]
        return [o + w for o, w in zip(outputs, words, strict=True)] if is_residual else outputs

    def __call__(self, ids, heads, relations):
        words, edges = self.below(ids.tolist()), self.edges(heads.tolist(), relations.tolist())
        for index in range(self.config.gcn_layers):
            words = self.graph_layer(index, words, edges)
        return torch.stack(words)


SWITCHES = {
    "default": {},
    "one layer": {"gcn_layers": 1},
    "one layer with a residual": {"gcn_layers": 1, "gcn_residual": "always"},
    "without residuals": {"gcn_residual": False},
    "without gates": {"gcn_gates": False},
    "without labels": {"gcn_label_biases": False},
    "neither": {"gcn_gates": False, "gcn_label_biases": False, "gcn_layers": 1},
    "three layers of a CNN": {**CNN, "encoder_layers": 2, "gcn_layers": 3},
    "bag of words": BOW,
    **{
        f"only {'+'.join(names)}": {**BOW, "gcn_directions": list(names)}
        for count in (1, 2)
        for names in itertools.combinations(DIRECTIONS, count)
    },
}


@pytest.mark.parametrize("fast", ["1", "0"], ids=["summed first", "message by message"])
@pytest.mark.parametrize("fields", SWITCHES.values(), ids=SWITCHES.keys())
def test_the_encoder_follows_the_equations(fields, fast, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
    model = build(**fields)
    source = torch.randint(4, VOCABULARY, (2, 6))
    trees = random_trees(2, 6, count=3)
    found = model.get_encoder()(source, **trees).last_hidden_state
    slow = SlowEncoder(model)
    for row in range(2):
        expected = slow(source[row], trees["dependency_heads"][row], trees["dependency_relations"][row])
        torch.testing.assert_close(found[row], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("fields", [{}, {"gcn_gates": False}, {"gcn_label_biases": False}])
def test_both_sums_have_the_same_gradients(fields, monkeypatch):
    model = build(**fields)
    source, trees = torch.randint(4, VOCABULARY, (2, 6)), random_trees(2, 6, count=2)

    def gradients(fast):
        monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
        model.zero_grad()
        model(source, labels=source, **trees).loss.backward()
        return gradients_of(model)

    torch.testing.assert_close(gradients("auto"), gradients("0"), atol=1e-10, rtol=1e-9)


def test_one_edge_per_word_needs_no_third_dimension():
    encoder = build().get_encoder()
    source, trees = torch.randint(4, VOCABULARY, (2, 6)), random_trees(2, 6)
    several = {name: column[:, :, None] for name, column in trees.items()}
    assert torch.equal(encoder(source, **trees)[0], encoder(source, **several)[0])
    # An empty second place adds nothing.
    several["dependency_heads"] = torch.stack([trees["dependency_heads"], torch.full((2, 6), -1)], 2)
    several["dependency_relations"] = torch.stack([trees["dependency_relations"], torch.full((2, 6), 3)], 2)
    torch.testing.assert_close(encoder(source, **several)[0], encoder(source, **trees)[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("fields", [{}, CNN, BOW], ids=["birnn", "cnn", "bow"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_with_any_columns_changes_nothing(fields, side):
    """Garbage as heads and relations of padding, and real words with heads at padding, are ignored."""
    model = build(**fields)
    source, target = torch.randint(4, VOCABULARY, (2, 5)), torch.randint(4, VOCABULARY, (2, 4))
    trees = random_trees(2, 5, count=2)
    trees["dependency_heads"] = trees["dependency_heads"].clamp(-1, 4)
    expected = model(source, decoder_input_ids=target, **trees).logits
    left, right = {"left": (3, 0), "right": (0, 3), "both": (2, 1)}[side]

    def surrounded(column, before, after):
        parts = [torch.full((2, left, *column.shape[2:]), before), column]
        return torch.cat([*parts, torch.full((2, right, *column.shape[2:]), after)], dim=1)

    heads = trees["dependency_heads"]
    heads = torch.where(heads >= 0, heads + left, torch.tensor(0 if left else 7))  # roots point at padding
    for filling in (-1, left, 99):
        columns = {
            "dependency_heads": surrounded(heads, filling, filling),
            "dependency_relations": surrounded(trees["dependency_relations"], 99, -5),
        }
        mask = surrounded(torch.ones_like(source), 0, 0)
        found = model(surrounded(source, 7, 8), mask, decoder_input_ids=target, **columns)
        torch.testing.assert_close(found.logits, expected, atol=1e-10, rtol=0)
        states = found.encoder_last_hidden_state
        assert (states[mask == 0] == 0).all()
        gates = model(surrounded(source, 7, 8), mask, decoder_input_ids=target, output_attentions=True, **columns)
        for gate in gates.edge_gates:
            assert (gate.transpose(1, 2)[mask == 0] == 0).all()


def layer_and_inputs(**fields):
    """A layer in training mode whose sums are all positive, so that the ReLU changes nothing."""
    config = {"d_model": 10, "num_relations": RELATIONS, "gcn_layers": 1, **BOW, **fields}
    torch.manual_seed(2)
    layer = GraphConvolution(GCNRNMTConfig(**config)).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.0, 1.0)
    trees = random_trees(2, 6, count=2)
    edges = Edges.from_columns(trees["dependency_heads"], trees["dependency_relations"], None)
    return layer.train(), torch.rand(2, 6, 10, dtype=torch.float64), edges


def test_edge_dropout_draws_each_direction_and_no_loop():
    layer, states, edges = layer_and_inputs(gcn_edge_dropout=0.2, gcn_gates=False)
    alone = edges._replace(exists=torch.zeros_like(edges.exists))
    alone.exists[0, 2, 0] = True
    head = int(edges.heads[0, 2, 0])
    assert head != 2
    with torch.no_grad():
        loops = layer(states, None, None)[0]
        messages = {
            name: states[0, sender] @ direction.proj.weight.T + direction.bias[edges.relations[0, 2, 0]]
            for name, direction, sender in (("in", layer.in_messages, 2), ("out", layer.out_messages, head))
        }
        kept = {"in": 0, "out": 0, "both": 0}
        for _ in range(400):
            change = layer(states, alone, None)[0] - loops
            found = {"in": change[0, head].clone(), "out": change[0, 2].clone()}
            change[0, [head, 2]] = 0
            assert (change.abs() < 1e-12).all()  # loops are never removed
            is_kept = {name: bool(value.abs().max() > 1e-9) for name, value in found.items()}
            for name, value in found.items():
                if is_kept[name]:
                    torch.testing.assert_close(value, messages[name] / 0.8)
                kept[name] += is_kept[name]
            kept["both"] += all(is_kept.values())
    assert abs(kept["in"] / 400 - 0.8) < 0.06 and abs(kept["out"] / 400 - 0.8) < 0.06
    assert abs(kept["both"] / 400 - 0.64) < 0.07


def test_dropout_acts_on_what_the_decoder_reads():
    """In training `gcn_dropout` replaces the dropout after the last layer below; in eval mode there is none."""
    model = build(gcn_dropout=0.5, dropout=0.0, gcn_edge_dropout=0.0)
    source, trees = torch.randint(4, VOCABULARY, (2, 6)), random_trees(2, 6)
    encoder = model.get_encoder()
    expected = encoder(source, **trees)[0]
    assert torch.equal(encoder(source, **trees)[0], expected)
    dropped = encoder.train()(source, **trees)[0]
    is_kept = dropped != 0
    torch.testing.assert_close(dropped[is_kept], 2 * expected[is_kept])
    assert 0.35 < is_kept.double().mean() < 0.65


def test_many_messages_are_summed_in_float32():
    """A head with 600 dependents under bfloat16 autocast: each further message still counts."""
    count = 600
    torch.manual_seed(3)
    layer = GraphConvolution(GCNRNMTConfig(d_model=10, gcn_layers=1, gcn_directions=["in"], **BOW)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.0, 1.0)
    states = torch.rand(1, count, 10)
    edges = Edges.from_columns(torch.zeros(1, count, dtype=torch.long), None, None)
    exact = layer.double()(states.double(), edges, None)[0][0, 0]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.float()(states, edges, None)[0][0, 0]
    torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=0)


@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}, {"do_sample": True}]
)
def test_generate_reads_trees(mode):
    """Searches of a ragged batch find what single sentences with their trees give; trees change the translation."""
    model = build(d_model=16)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():  # for translations of different words
        model.model.decoder.embed_tokens.weight.mul_(3)
        weight = model.lm_head.weight
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    lengths = (7, 4)
    source, trees = torch.randint(4, VOCABULARY, (2, 7)), random_trees(2, 7)
    trees["dependency_heads"] = torch.stack(
        [torch.where(h < n, h, -1) for h, n in zip(trees["dependency_heads"], lengths, strict=True)]
    )
    mask = (torch.arange(7)[None] < torch.tensor(lengths)[:, None]).long()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, **mode}

    def translations(*inputs, **settings):
        torch.manual_seed(4)
        return model.generate(*inputs, **options, **settings)

    found = translations(source, attention_mask=mask, **trees)
    encoded = model.get_encoder()(source, mask, **trees)
    assert found.equal(translations(encoder_outputs=encoded, attention_mask=mask))
    assert not found.equal(translations(source, attention_mask=mask))
    for cache in ({"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        assert found.equal(translations(source, attention_mask=mask, **trees, **cache))
    if "do_sample" not in mode:
        group = mode.get("num_return_sequences", 1)
        for row, length in enumerate(lengths):
            own = {name: column[row : row + 1, :length] for name, column in trees.items()}
            alone = translations(source[row : row + 1, :length], **own)
            assert found[row * group : (row + 1) * group].equal(alone)


def test_missing_trees_warn_once(monkeypatch):
    warnings, source = [], torch.randint(4, VOCABULARY, (2, 6))
    monkeypatch.setattr(modeling_gcn_rnmt.logger, "warning_once", warnings.append)
    for fields in ({"gcn_layers": 0}, {"gcn_directions": ["loop"]}):
        build(**fields)(source, labels=source)
    model = build()
    model(source, labels=source, **random_trees(2, 6))
    assert not warnings
    model.generate(source, max_new_tokens=2)
    assert len(warnings) == 1 and "dependency_heads" in warnings[0]


def test_further_inputs_are_declared_where_trainers_and_generate_look():
    for forward in (GCNRNMTForConditionalGeneration.forward, GCNRNMTEncoder.forward):
        assert {"dependency_heads", "dependency_relations"} <= set(inspect.signature(forward).parameters)
    model, source, trees = build(), torch.randint(4, VOCABULARY, (2, 6)), random_trees(2, 6)
    expected = model.generate(source, **trees, max_new_tokens=4)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate wraps it
    assert model.generate(source, **trees, max_new_tokens=4).equal(expected)


def test_gates_are_reported():
    """One gate for each edge, direction and layer, 0 without an edge, in the order of the input."""
    model = build()
    source, trees = torch.randint(4, VOCABULARY, (2, 6)), random_trees(2, 6, count=3)
    outputs = model(source, labels=source, output_attentions=True, **trees)
    assert [gates.shape for gates in outputs.edge_gates] == [(2, 2, 6, 3)] * 2
    exists = (trees["dependency_heads"] >= 0) & (trees["dependency_heads"] < 6)
    for gates in outputs.edge_gates:
        assert torch.equal(gates > 0, exists[:, None].expand_as(gates)) and (gates < 1).all()
    for fields in ({"gcn_gates": False}, {"gcn_directions": ["loop"]}, {"gcn_layers": 0}):
        assert build(**fields)(source, labels=source, output_attentions=True, **trees).edge_gates is None


def test_initial_values():
    torch.manual_seed(0)
    for fields in ({}, {"init_uniform": None, "init_std": 0.5}):
        model = GCNRNMTForConditionalGeneration(GCNRNMTConfig(vocab_size=50, d_model=64, **fields))
        for layer in model.get_encoder().gcn_layers:
            for name, parameter in layer.named_parameters():
                if name == "loop_messages.gate_bias":
                    assert parameter.tolist() == [1.0]
                elif parameter.numel() > 500:
                    assert 0.008 < parameter.std() < 0.012 and parameter.mean().abs() < 0.002


@pytest.mark.slow
def test_shuffled_letters_are_put_back_by_their_edges():
    """BLEU above 95, and the gates tell true from fake edges; without edges the task cannot be solved."""
    sizes = {"letters": 8, "longest": 7, "train": 4800, "validation": 200}
    task = reordering.Task(**sizes, batch_size=64, epochs=3, d_model=32, learning_rate=8e-3)
    model = task.build()
    assert list(reordering.train(task, model)) == [1, 2, 3]
    assert reordering.evaluate(task, model) > 95
    true, fake = reordering.gate_biases(model)
    assert true > 0.2 and fake < 0
    assert reordering.evaluate(task, model, has_edges=False) < 40
    task.epochs = 2
    model = task.build()
    assert list(reordering.train(task, model, has_edges=False)) == [1, 2]
    assert reordering.evaluate(task, model, has_edges=False) < 40
