"""RNNsearch, RNNsearch* and RNMT: the contract, the equations, the fast paths, and what padding and memory may do."""

import pytest
import torch
from compiled_graphs import MOST_LENGTHS
from gradients import LargestTensor, check_gradients
from model_contract import VOCABULARY, ModelContract, gradients_of, pad, ragged_batch, scatter_parameters, source_of
from slow_transformer import multiply_instead_of_dropping, recurrent_step

from recnmt_hf import RNMTConfig, RNMTForConditionalGeneration
from recnmt_hf.models import kernels_attentional_steps, kernels_rnmt, modeling_rnmt
from recnmt_hf.models.additive_attention import FEW_VALUES, tanh_
from recnmt_hf.models.kernels_rnmt import all_pairs, pair_tiles
from recnmt_hf.models.modeling_rnmt import MaskedBatchNorm, RelationPropagation, all_pairs_reference
from recnmt_hf.models.seq2seq_outputs import CACHE


RNNSEARCH = {"decoder_type": "rnnsearch", "relation_layers": 0, "encoder_layers": 1}
RNNSEARCH_STAR = {"relation_layers": 0}
WITHOUT_RELATIONS = {**RNNSEARCH_STAR, "connections_without_relations": True}
TWO_CONVOLUTIONS = {"relation_conv_kernels": [1, 3], "relation_conv_channels": [5, 7]}
LENGTHS, TARGETS = (7, 4, 1), (5, 3, 2)


class TestRNMT(ModelContract):
    config_class = RNMTConfig
    model_class = RNMTForConditionalGeneration
    growth = [  # the paper: 4.1M
        ("en_de", {}, 4_281_152),
        ("en_de", {"relation_dense_include_embeddings": False}, 3_232_576),
    ]
    compiled = {"lengths": MOST_LENGTHS}
    compiled_variants = {"lengths": MOST_LENGTHS, "dynamic": True}
    variants = {
        "default": {},
        "rnnsearch": RNNSEARCH,
        "rnnsearch-star": {**RNNSEARCH_STAR, "readout": "tanh"},
        "zh-en": {**TWO_CONVOLUTIONS, "relation_dense_include_embeddings": False},
        "parallel": {**TWO_CONVOLUTIONS, "relation_conv_mode": "parallel", "relation_dense_connection": False},
    }

    def config(self, **fields):
        relations = {"relation_conv_channels": [6], "relation_hidden_size": 8}
        small = {"decoder_layers": 1, "readout_dropout": 0.0, "init_uniform": None, **relations}
        return super().config(**{**small, **fields})


def leaky(x):
    return torch.where(x > 0, x, 0.1 * x)


class SlowRNMT:
    """
    One sentence pair after the equations (SPEC: Zhang et al., 2018; Bahdanau et al., 2015), a word, a pair and a step
    at a time. It shares nothing with the model but the parameters.
    """

    def __init__(self, model):
        self.config = model.config
        self.factor = 1 + model.config.dropout if model.training else 1
        self.p = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def linear(self, name, x):
        bias = self.p.get(f"{name}.bias")
        product = self.p[f"{name}.weight"] @ x
        return product if bias is None else product + bias

    def gru(self, name, x, h, suffix=""):
        return recurrent_step(self.p, name, "gru", x, h, suffix=suffix)[0]

    def run_gru(self, name, xs, backward):
        h, states = torch.zeros(self.config.d_model, dtype=torch.float64), {}
        for i in reversed(range(len(xs))) if backward else range(len(xs)):
            h = states[i] = self.gru(name, xs[i], h, "_l0")
        return [states[i] for i in range(len(xs))]

    def relation(self, name, xs):
        config, length = self.config, len(xs)
        outputs, read = [], xs
        for k, kernel in enumerate(config.relation_conv_kernels):
            weight = self.p[f"{name}.convolutions.convolutions.{k}.weight"]
            half, made = (kernel - 1) // 2, []
            for i in range(length):
                c = self.p[f"{name}.convolutions.convolutions.{k}.bias"].clone()
                for o in range(-half, half + 1):
                    if 0 <= i + o < length:
                        c = c + weight[:, :, o + half] @ read[i + o]
                norm = f"{name}.convolutions.norms.{k}"
                if config.relation_batch_norm:
                    scale = (self.p[f"{norm}.running_var"] + 1e-5).sqrt()
                    c = self.p[f"{norm}.weight"] * (c - self.p[f"{norm}.running_mean"]) / scale + self.p[f"{norm}.bias"]
                made.append(leaky(c))
            outputs.append(made)
            read = xs if config.relation_conv_mode == "parallel" else made
        if config.relation_conv_mode == "parallel":
            read = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
        results = []
        for i in range(length):
            total = 0
            for j in range(length):
                r = torch.cat([read[i], read[j]])
                for k in range(config.relation_gp_layers):
                    r = leaky(self.linear(f"{name}.propagation.pair_layers.{k}", r))
                total = total + r
            o = total / length
            for k in range(config.relation_mlp_layers):
                o = leaky(self.linear(f"{name}.propagation.layers.{k}", o))
            results.append(o)
        return results

    def encode(self, ids):
        config, encoder = self.config, "model.encoder"
        e = [self.factor * self.p[f"{encoder}.embed_tokens.weight"][i] for i in ids]
        if config.encoder_rnn_layout == "concat":
            xs = e
            for k in range(config.encoder_layers):
                f = self.run_gru(f"{encoder}.layers.{k}.rnn.forward_rnn", xs, False)
                b = self.run_gru(f"{encoder}.layers.{k}.rnn.backward_rnn", xs, True)
                xs = [self.factor * torch.cat(pair) for pair in zip(f, b, strict=True)]
            return xs
        layers, dropped = [], []
        for k in range(config.encoder_layers):
            layers.append(
                lambda xs, k=k: self.run_gru(f"{encoder}.layers.{k}.rnn.forward_rnn", xs, backward=k % 2 == 1)
            )
            if k < config.relation_layers:
                layers.append(lambda xs, k=k: self.relation(f"{encoder}.relation_layers.{k}", xs))
            dropped.append(len(layers) - 1)
        connected = config.relation_layers > 0 or config.connections_without_relations
        below, h_in = ([e] if config.relation_dense_include_embeddings else []), e
        for number, layer in enumerate(layers):
            h = layer(h_in)
            if connected and config.relation_residual:
                h = [a + b for a, b in zip(h_in, h, strict=True)]
            if connected and config.relation_dense_connection:
                below.append(h)
                h = [
                    self.linear(f"{encoder}.dense_maps.{number}", torch.cat(parts))
                    for parts in zip(*below, strict=True)
                ]
            h_in = [self.factor * a for a in h] if number in dropped else h
        return h_in

    def attend(self, query, h):
        v, w, u = (self.p[f"model.decoder.recurrence.attention.{n}.weight"] for n in ("score", "q_proj", "k_proj"))
        b = self.p["model.decoder.recurrence.attention.k_proj.bias"]
        e = torch.stack([v[0] @ torch.tanh(w @ query + u @ hi + b) for hi in h])
        alpha = torch.exp(e - e.max())
        alpha = alpha / alpha.sum()
        return alpha, sum(weight * hi for weight, hi in zip(alpha, h, strict=True))

    def logits(self, source, target):
        config, decoder = self.config, "model.decoder"
        h = self.encode(source)
        s = torch.tanh(self.linear(f"{decoder}.initial_state", sum(h) / len(h)))
        logits, attentions = [], []
        rec = f"{decoder}.recurrence"
        for token in target:
            y = self.factor * self.p[f"{decoder}.embed_tokens.weight"][token]
            conditional = config.decoder_type == "conditional_gru"
            query = self.gru(f"{rec}.word_cell", y, s) if conditional else s
            alpha, a = self.attend(query, h)
            x = a if conditional else torch.cat([y, a])
            s = self.gru(f"{rec}.context_cell", x, query)
            t = self.linear(f"{rec}.readout.state_proj", s)
            t = t + self.linear(f"{rec}.readout.word_proj", y) + self.linear(f"{rec}.readout.context_proj", a)
            t = t.view(-1, 2).max(dim=1).values if config.readout == "maxout" else torch.tanh(t)
            t = t * (1 + config.readout_dropout) if self.factor > 1 else t
            logits.append(self.p["lm_head.weight"] @ t)
            attentions.append(alpha)
        return torch.stack(logits), torch.stack(attentions)


EQUATIONS = {
    "rnmt": {},
    "rnnsearch": RNNSEARCH,
    "rnnsearch-deep": {**RNNSEARCH, "encoder_layers": 2},
    "rnnsearch-star": RNNSEARCH_STAR,
    "rnnsearch-star-concat": {**RNNSEARCH_STAR, "encoder_rnn_layout": "concat", "encoder_layers": 1},
    "rnnsearch-with-relations": {"decoder_type": "rnnsearch"},
    "tanh": {**RNNSEARCH_STAR, "readout": "tanh"},
    "connections-without-relations": WITHOUT_RELATIONS,
    "residuals-without-relations": {**WITHOUT_RELATIONS, "relation_dense_connection": False},
    "one-relation-layer": {"relation_layers": 1},
    "four-layers": {"encoder_layers": 4, "relation_layers": 3},
    "stacked-convolutions": TWO_CONVOLUTIONS,
    "parallel-convolutions": {**TWO_CONVOLUTIONS, "relation_conv_mode": "parallel"},
    "wide-convolution": {"relation_conv_kernels": [5]},
    "no-batch-norm": {"relation_batch_norm": False},
    "no-residual": {"relation_residual": False},
    "no-dense": {"relation_dense_connection": False},
    "no-residual-no-dense": {"relation_residual": False, "relation_dense_connection": False},
    "dense-without-embeddings": {"relation_dense_include_embeddings": False},
    "shallow-perceptrons": {"relation_gp_layers": 1, "relation_mlp_layers": 1},
}


def scattered(fields, training=False):
    model = TestRNMT().model(fields)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MaskedBatchNorm):
                module.running_mean.copy_(torch.linspace(-1, 1, len(module.running_mean)))
                module.running_var.copy_(torch.linspace(0.5, 2, len(module.running_var)))
    return model.train(training)


@pytest.mark.parametrize("fast", ["1", "0"], ids=["fast", "plain"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name, fast, monkeypatch):
    """Every sentence of a padded batch, one of a single word among them, against the equations, to 1e-10."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
    check_equations(scattered(EQUATIONS[name]))


@pytest.mark.parametrize("fields", [{"relation_batch_norm": False}, RNNSEARCH, EQUATIONS["rnnsearch-star-concat"]])
def test_dropout_stands_behind_inputs_layers_and_readout(fields, monkeypatch):
    multiply_instead_of_dropping(monkeypatch)
    check_equations(scattered({"dropout": 0.2, "readout_dropout": 0.5, **fields}, training=True))


def check_equations(model):
    slow = SlowRNMT(model)
    batch = ragged_batch(LENGTHS, TARGETS)
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    outputs = model(**batch, output_attentions=True)
    logits = model(**batch).logits
    torch.testing.assert_close(outputs.logits, logits, atol=1e-12, rtol=0)
    alone = model(batch["input_ids"][:1], decoder_input_ids=target[:1]).logits
    torch.testing.assert_close(alone, logits[:1], atol=1e-10, rtol=0)
    for row, (length, steps) in enumerate(zip(LENGTHS, TARGETS, strict=True)):
        expected, attention = slow.logits(batch["input_ids"][row, :length].tolist(), target[row, :steps].tolist())
        torch.testing.assert_close(logits[row, :steps], expected, atol=1e-10, rtol=0)
        found = outputs.cross_attentions[0][row, 0, :steps, :length]
        torch.testing.assert_close(found, attention, atol=1e-10, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_norm_in_training_sees_real_tokens_only(side):
    """Statistics, output and running averages equal torch's own batch norm on the real tokens laid end to end."""
    torch.manual_seed(1)
    lengths, channels = (5, 3, 1), 4
    norm = scatter_parameters(MaskedBatchNorm(channels).double())
    reference = torch.nn.BatchNorm1d(channels).double()
    reference.load_state_dict(norm.state_dict(), strict=False)
    for _ in range(2):
        states = torch.randn(3, 5, channels, dtype=torch.float64, requires_grad=True)
        mask = (torch.arange(5)[None] < torch.tensor(lengths)[:, None]).long()
        mask = mask.flip(1) if side == "left" else mask
        found = norm(states, mask)[mask == 1]
        expected = reference(states[mask == 1])
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        seed = torch.randn_like(found)
        ours, theirs = (torch.autograd.grad((x * seed).sum(), states, retain_graph=True)[0] for x in (found, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
        assert (ours[mask == 0] == 0).all()
    torch.testing.assert_close(norm.running_mean, reference.running_mean)
    torch.testing.assert_close(norm.running_var, reference.running_var)
    plain = torch.randn(2, 3, channels, dtype=torch.float64)
    torch.testing.assert_close(norm(plain, None), reference(plain.transpose(1, 2)).transpose(1, 2))
    norm.eval(), reference.eval()
    torch.testing.assert_close(norm(plain, None), reference(plain.transpose(1, 2)).transpose(1, 2))


def test_renormalized_batches_are_normalized_by_the_running_averages():
    """Ioffe (2017): in training too, within limits, while gradients flow through the statistics of the batch."""
    torch.manual_seed(1)
    norm = scatter_parameters(MaskedBatchNorm(4, renormalizes=True).double())
    plain = scatter_parameters(MaskedBatchNorm(4).double())
    mask = (torch.arange(6)[None] < torch.tensor([[6], [2], [3]])).long()
    states = (0.2 + 1.5 * torch.randn(3, 6, 4, dtype=torch.float64)).requires_grad_()
    plain.load_state_dict(norm.state_dict())
    expected = norm.eval()(states, mask)
    deviation = (norm.running_var + norm.eps).sqrt()
    of_batch = states.detach()[mask == 1].var(0, correction=0)
    ratio = (of_batch + norm.eps).sqrt() / deviation
    found = norm.train()(states, mask)
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], atol=1e-12, rtol=0)
    seed = torch.randn_like(found) * mask[:, :, None]
    ours, theirs = (torch.autograd.grad((out * seed).sum(), states)[0] for out in (found / ratio, plain(states, mask)))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    torch.testing.assert_close(norm.running_mean, plain.running_mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(norm.running_var, plain.running_var, atol=1e-12, rtol=0)

    # Far from the averages the corrections end at 3, 1/3 and 5.
    norm.running_mean.zero_(), norm.running_var.fill_(1)
    for factor, ratio in ((100, 3), (0.01, 1 / 3)):
        far = factor * torch.randn(3, 6, 4, dtype=torch.float64) + 1000
        norm.running_mean.zero_(), norm.running_var.fill_(1)
        normalized = (far - far.mean((0, 1))) / (far.var((0, 1), correction=0) + norm.eps).sqrt()
        expected = norm.weight * (normalized * ratio + 5) + norm.bias
        torch.testing.assert_close(norm(far), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_half_precision_is_computed_in_float32(dtype, training):
    """And given in the type of its states, as float32 weights under autocast find them."""
    torch.manual_seed(1)
    states = (torch.randn(8, 64, 3) * 0.1 + 30).to(dtype)
    norm = scatter_parameters(MaskedBatchNorm(3)).train(training)
    expected = norm(states.float())
    found = norm(states)
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))


def test_padding_changes_nothing_in_training():
    """With batch statistics too: the loss, the gradients and the running averages of a batch padded further."""
    batch = ragged_batch(LENGTHS, TARGETS)
    results = []
    for amount in (0, 4):
        model = scattered({}, training=True)
        more = torch.full((3, amount), 9)
        ids = torch.cat([more, batch["input_ids"], more], 1)
        mask = torch.cat([0 * more, batch["attention_mask"], 0 * more], 1)
        loss = model(ids, mask, labels=batch["labels"]).loss
        loss.backward()
        gradients = {name: each for name, each in gradients_of(model).items() if "embed_tokens" not in name}
        results.append((loss.detach(), dict(model.named_buffers()), gradients))
    torch.testing.assert_close(*(each[:2] for each in results), atol=1e-12, rtol=0)
    torch.testing.assert_close(*(each[2] for each in results), atol=1e-11, rtol=0)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ["rnmt", "rnnsearch", "rnnsearch-star", "stacked-convolutions", "shallow-perceptrons"])
def test_fast_paths_equal_plain_ones(name, training, monkeypatch):
    """Loss and every gradient, with a target mask (states carried over padding) and without."""
    model = scattered(EQUATIONS[name], training)
    batch = ragged_batch(LENGTHS, TARGETS)
    decoder_mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]])
    calls = []
    for function in ("run_steps", "run_steps_reference", "all_pairs", "all_pairs_reference"):
        original = getattr(modeling_rnmt, function)
        monkeypatch.setattr(
            modeling_rnmt,
            function,
            lambda *args, function=function, original=original: (calls.append(function), original(*args))[1],
        )
    for mask in (None, decoder_mask):
        results = []
        for fast in ("1", "0"):
            monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
            model.zero_grad()
            calls.clear()
            loss = model(**batch, decoder_attention_mask=mask).loss
            loss.backward()
            assert {name.endswith("_reference") for name in calls} == {fast == "0"}
            results.append((loss.detach(), gradients_of(model)))
        torch.testing.assert_close(results[0][0], results[1][0], atol=1e-12, rtol=0)
        torch.testing.assert_close(results[0][1], results[1][1], atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("fast", ["1", "0"], ids=["fast", "plain"])
@pytest.mark.parametrize("name", ["rnmt", "rnnsearch"])
def test_padding_of_a_target_leaves_the_state(name, fast, monkeypatch):
    """Before the words, between them, and after a first part that is in the cache."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
    model = scattered(EQUATIONS[name])
    source, words = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8, 9, 10]])
    expected = model(source, decoder_input_ids=words).logits
    padded, mask = torch.tensor([[0, 1, 8, 0, 9, 10]]), torch.tensor([[0, 1, 1, 0, 1, 1]])
    logits = model(source, decoder_input_ids=padded, decoder_attention_mask=mask).logits
    torch.testing.assert_close(logits[mask == 1], expected[0], atol=1e-12, rtol=0)
    first = model(source, decoder_input_ids=padded[:, :3], decoder_attention_mask=mask[:, :3], use_cache=True)
    rest = model(
        source,
        decoder_input_ids=padded[:, 3:],
        decoder_attention_mask=mask,
        encoder_outputs=(first.encoder_last_hidden_state,),
        cache=first[CACHE],
    )
    torch.testing.assert_close(rest.logits[:, 1:], expected[:, 2:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_tanh_of_the_steps_is_torchs(dtype):
    """Also far from 0, for numbers that are not finite, and where a gradient is needed."""
    values = torch.cat(
        [torch.linspace(-20, 20, FEW_VALUES), torch.tensor([0.0, 200.0, -200.0, torch.inf, -torch.inf, torch.nan])]
    )
    values = values.to(dtype)
    torch.testing.assert_close(tanh_(values.clone()), values.tanh(), rtol=0.0, atol=2.5e-7, equal_nan=True)
    leaf = values[:-3].clone().requires_grad_()
    gradients = [torch.autograd.grad(squashed.sum(), leaf)[0] for squashed in (tanh_(leaf * 1), leaf.tanh())]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("group", [1, 2])
def test_steps_pass_gradcheck(conditional, group):
    """The written backward pass of the decoder's steps, rows that share a source, masks and held states included."""
    torch.manual_seed(2)
    width, steps, sources, length = 3, 3, 2, 4

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    rows = sources * group
    visible = torch.tensor([[[True] * 4], [[True, True, False, False]]])
    kept = torch.rand(steps, rows, 1) > 0.3
    word = (random(3 * width, width), random(3 * width)) if conditional else (None, None)
    weights = (*word, random(width, width), random(width), random(3 * width, width), random(3 * width), random(9))
    gates, state = random(steps, rows, 3 * width), random(rows, width)
    keys, values = random(sources, length, width), random(sources, length, 3 * width)
    for held in (None, kept):
        check_gradients(
            lambda *args, held=held: kernels_attentional_steps.AttentionalSteps.apply(
                kernels_attentional_steps.SavedSteps(), *args[:3], visible, args[3], held, *args[4:]
            ),
            (gates, keys, values, state, *weights),
        )


@pytest.mark.parametrize("kept", [0, 2**28], ids=["made-anew", "kept"])
@pytest.mark.parametrize("masked", [True, False])
def test_pairs_pass_gradcheck_in_any_tiles(masked, kept, monkeypatch):
    torch.manual_seed(3)
    monkeypatch.setattr(kernels_rnmt, "STORED_PAIR_BYTES", kept)
    config = TestRNMT().config(relation_gp_layers=3, relation_hidden_size=4, relation_conv_channels=[3])
    layers = scatter_parameters(RelationPropagation(config).pair_layers.double())
    features = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]) if masked else None
    expected = all_pairs_reference(layers, features, mask)[0]
    if masked:
        expected = expected.masked_fill(mask[:, :, None] == 0, 0.0)
    whole = list(pair_tiles(torch.zeros(4, 5, 4, dtype=torch.float64)))
    assert len(whole) == 1, "a small batch is one tile"
    cuts = {
        "words": [kernels_rnmt.Tile(slice(b, b + 1), slice(i, min(i + 2, 5)), 5) for b in range(4) for i in (0, 2, 4)],
        "sentences": [kernels_rnmt.Tile(slice(b, b + 3), slice(0, 5), 5) for b in (0, 3)],
        "whole": whole,
        "real words": None,
    }
    original = pair_tiles
    for tiles in cuts.values():
        monkeypatch.setattr(
            kernels_rnmt,
            "pair_tiles",
            lambda states, lengths, tiles=tiles: original(states, lengths) if tiles is None else tiles,
        )
        torch.testing.assert_close(all_pairs(layers, features, mask), expected, atol=1e-12, rtol=0)
        check_gradients(
            lambda x, *parameters: torch.func.functional_call(
                Pairs(layers), dict(zip(Pairs(layers).names(), parameters, strict=True)), (x, mask)
            ),
            (features, *(p for p in layers.parameters())),
        )


class Pairs(torch.nn.Module):
    """[`all_pairs`] as a module, so that its parameters can be varied."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def names(self):
        return [name for name, _ in self.named_parameters()]

    def forward(self, features, mask):
        return all_pairs(self.layers, features, mask)


def test_gradients_of_many_tiles_are_summed_in_float32(monkeypatch):
    """In bfloat16 one tile for each of 300 words gives the gradients of one tile for all of them."""
    config = TestRNMT().config(relation_gp_layers=2, relation_hidden_size=4, relation_conv_channels=[3])
    layers = RelationPropagation(config).pair_layers.bfloat16()
    features = torch.rand(1, 300, 3).bfloat16()
    gradients = []
    for words in (300, 1):
        tiles = [kernels_rnmt.Tile(slice(0, 1), slice(i, i + words), 300) for i in range(0, 300, words)]
        monkeypatch.setattr(kernels_rnmt, "pair_tiles", lambda states, lengths, tiles=tiles: tiles)
        read = features.clone().requires_grad_()
        made = torch.autograd.grad(all_pairs(layers, read, None).sum(), (read, *layers.parameters()))
        assert all(one.dtype == torch.bfloat16 for one in made)
        gradients.append(made)
    for whole, cut in zip(*gradients, strict=True):
        torch.testing.assert_close(cut, whole, atol=0.02 * float(whole.abs().max()), rtol=0)


def test_gradients_do_not_depend_on_where_autocast_ends():
    batch = ragged_batch(LENGTHS, TARGETS)
    gradients = []
    for inside in (False, True):
        model = TestRNMT().model({}, torch.float32, scattered=False).train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append(dict(model.named_parameters()))
    for name in ("decoder.recurrence.word_cell.weight_hh", "decoder.recurrence.attention.q_proj.weight"):
        one, other = (model[f"model.{name}"].grad for model in gradients)
        torch.testing.assert_close(one, other, atol=1e-3 * float(one.abs().max()), rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_all_pairs_or_all_steps_is_made_at_once(training, monkeypatch):
    """Forward and backward, no tensor of the fast paths is as large as one layer's pairs or one batch's energies."""
    monkeypatch.setattr(kernels_rnmt, "STORED_PAIR_BYTES", 0)
    length, batch_size, steps, width = 96, 8, 40, 32
    model = TestRNMT().model({"relation_hidden_size": 32}, torch.float32).train(training)
    source = torch.randint(4, VOCABULARY, (batch_size, length))
    labels = torch.randint(4, VOCABULARY, (batch_size, steps))
    with LargestTensor() as largest, torch.set_grad_enabled(training):
        loss = model(source, labels=labels, return_logits=False).loss
        if training:
            loss.backward()
    pairs = batch_size * length * length * 32 * 4
    energies = batch_size * steps * length * width * 4
    assert largest.nbytes < min(pairs, energies) / 2, (largest.nbytes, pairs, energies)


def test_hidden_states_are_what_they_are_called():
    """Encoder: e, the layers' inputs and the annotations, in the order of the words; decoder: y, s and t."""
    model = scattered({})
    batch = ragged_batch(LENGTHS, TARGETS)
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    inputs = source_of(batch)
    outputs = model.model(**inputs, decoder_input_ids=target, output_hidden_states=True, use_cache=True)
    words, states, readout = outputs.decoder_hidden_states
    assert torch.equal(words, model.model.decoder.embed_tokens(target))
    assert torch.equal(readout, outputs.last_hidden_state)
    assert torch.equal(outputs[CACHE].self_attention_cache.layers[0].states.get("state"), states[:, -1])
    encoded = outputs.encoder_hidden_states
    assert len(encoded) == 5 and torch.equal(encoded[-1], outputs.encoder_last_hidden_state)
    real = batch["attention_mask"] == 1
    assert torch.equal(encoded[0][real], model.model.encoder.embed_tokens(batch["input_ids"])[real])
    ids, mask = pad(batch["input_ids"], "left", 2, 9), pad(batch["attention_mask"], "left", 2, 0)
    shifted = model.get_encoder()(ids, mask, output_hidden_states=True).hidden_states
    torch.testing.assert_close(encoded, tuple(other[:, 2:] for other in shifted), atol=1e-12, rtol=0)
    assert model.get_encoder()(**inputs).hidden_states is None


def test_relation_scores_are_lengths_of_relations():
    model = scattered({})
    batch = ragged_batch(LENGTHS, TARGETS)
    encoder = model.get_encoder()
    scores = encoder(batch["input_ids"], batch["attention_mask"], output_attentions=True).relation_scores
    assert [tuple(score.shape) for score in scores] == [(3, 7, 7)] * 2
    assert (scores[0][1, 4:] == 0).all() and (scores[0][1, :, 4:] == 0).all() and (scores[0][1, :4, :4] > 0).all()
    left, mask = pad(batch["input_ids"], "left", 2, 0), pad(batch["attention_mask"], "left", 2, 0)
    shifted = encoder(left, mask, output_attentions=True).relation_scores
    torch.testing.assert_close(shifted[1][:, 2:, 2:], scores[1])
    assert encoder(batch["input_ids"]).relation_scores is None
    outputs = model(**batch, output_attentions=True)
    torch.testing.assert_close(outputs.relation_scores[1], scores[1])


def test_initialization_of_the_paper():
    model = RNMTForConditionalGeneration(RNMTConfig.from_preset("tiny", vocab_size=500))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert parameter.abs().max() <= 0.1, name
            real = parameter[1:] if "embed_tokens" in name else parameter  # without padding
            assert 0.05 < real.std() < 0.065, name
        else:
            assert (parameter == ("norms" in name and name.endswith("weight"))).all(), name


def test_checkpointing_counts_a_batch_once_in_the_norms():
    batch = ragged_batch(LENGTHS, TARGETS)
    averages = []
    for checkpointing in (False, True):
        model = scattered({}, training=True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**batch).loss.backward()
        averages.append({name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name})
    assert averages[0]
    torch.testing.assert_close(*averages, atol=0, rtol=0)
