"""VRNMT and VNMT: the contract, the equations, the loss in training, and the start from RNNsearch*."""

import copy

import pytest
import torch
from gradients import check_gradients
from model_contract import ModelContract, gradients_of, pad, ragged_batch
from test_rnmt import SlowRNMT
from transformers import GenerationConfig
from user_errors import rejects

from recnmt_hf import RNMTForConditionalGeneration, VRNMTConfig, VRNMTForConditionalGeneration
from recnmt_hf.models import kernels_vrnmt, modeling_vrnmt
from recnmt_hf.models.kernels_attentional_steps import AttentionalSteps, SavedSteps
from recnmt_hf.training.plan import Plan, model_on_meta
from recnmt_hf.training.recipe import Recipe


RNNSEARCH = {"decoder_type": "rnnsearch", "encoder_layers": 1}
OWN_SIZES = {"latent_size": 6, "latent_hidden_size": 10}
LENGTHS, TARGETS = (7, 4, 1), (5, 3, 2)


class TestVRNMT(ModelContract):
    config_class = VRNMTConfig
    model_class = VRNMTForConditionalGeneration
    called_in_training = ("posterior",)
    growth = [
        ("zh_en", {}, 3_935_744),
        ("zh_en", {"decoder_type": "rnnsearch"}, 4_460_032),
        ("zh_en", {"latent_prior": "standard"}, 2_623_488),
        ("zh_en", {"latent_readout": True}, 4_460_032),
    ]
    variants = {
        "default": {},
        "rnnsearch": {**RNNSEARCH, **OWN_SIZES, "latent_prior": "standard", "latent_readout": True},
        "sentence": {"latent_level": "sentence", "latent_readout": True},
    }

    def config(self, **fields):
        small = {"decoder_layers": 1, "readout_dropout": 0.0, "init_uniform": None}
        small |= {"relation_conv_channels": [6], "relation_hidden_size": 8, "relation_batch_norm": False}
        return super().config(**{**small, **fields})


class SlowVRNMT(SlowRNMT):
    """
    One sentence pair after the equations (SPEC_RIVALS 1.1), a step at a time. It shares nothing with the model but the
    parameters. `noise` has a row for each step; without it the model is not training.
    """

    def network(self, name, *parts):
        hidden = torch.tanh(self.linear(f"{name}.hidden", torch.cat(parts)))
        return self.linear(f"{name}.mean", hidden), self.linear(f"{name}.log_variance", hidden).clamp(-10, 10)

    def divergence(self, posterior, prior):
        normal = torch.distributions.Normal
        posterior, prior = (normal(mean, (log_variance / 2).exp()) for mean, log_variance in (posterior, prior))
        return torch.distributions.kl_divergence(posterior, prior).sum()

    def draw(self, posterior, noise):
        return posterior[0] + (posterior[1] / 2).exp() * noise

    def sentence_latent(self, annotations, labels, noise):
        """z and its KL divergence of VNMT: prior from the mean annotation, posterior also from the target."""
        name = "model.decoder.sentence_latent"
        mean = sum(annotations) / len(annotations)
        prior = self.prior_of(f"{name}.prior", mean)
        if noise is None:
            return prior[0], None
        ys = [self.p["model.decoder.embed_tokens.weight"][token] for token in labels]
        forward = self.run_gru(f"{name}.target_rnn.forward_rnn", ys, False)
        backward = self.run_gru(f"{name}.target_rnn.backward_rnn", ys, True)
        target = torch.cat([sum(forward), sum(backward)]) / len(ys)
        posterior = self.network(f"{name}.posterior", mean, target)
        return self.draw(posterior, noise[0]), self.divergence(posterior, prior)

    def prior_of(self, name, *parts):
        if self.config.latent_prior == "standard":
            zeros = torch.zeros(self.config.latent_size, dtype=torch.float64)
            return zeros, zeros
        return self.network(name, *parts)

    def gru_with_latent(self, name, x, u, h):
        """The GRU whose input matrix has further columns for u."""
        weight = torch.cat([self.p[f"{name}.weight_ih"], self.p["model.decoder.recurrence.latent_gates.weight"]], 1)
        self.p["both.weight_ih"] = weight
        for part in ("weight_hh", "bias_ih", "bias_hh"):
            self.p[f"both.{part}"] = self.p[f"{name}.{part}"]
        return self.gru("both", torch.cat([x, u]), h)

    def run(self, source, target, labels=None, noise=None):
        """Logits, and in training the KL divergence of each latent variable."""
        config, decoder, rec = self.config, "model.decoder", "model.decoder.recurrence"
        h = self.encode(source)
        s = torch.tanh(self.linear(f"{decoder}.initial_state", sum(h) / len(h)))
        logits, divergences = [], []
        if config.latent_level == "sentence":
            z, kl = self.sentence_latent(h, labels, noise)
            divergences = [kl]
        table = self.p[f"{decoder}.embed_tokens.weight"]
        for j, token in enumerate(target):
            y = table[token]
            conditional = config.decoder_type == "conditional_gru"
            q = self.gru(f"{rec}.word_cell", y, s) if conditional else s
            _, a = self.attend(q, h)
            if config.latent_level == "word":
                prior = self.prior_of(f"{rec}.prior", q, y, a)
                z = prior[0]
                if noise is not None:
                    posterior = self.network(f"{rec}.posterior", q, y, a, table[labels[j]])
                    z = self.draw(posterior, noise[j])
                    divergences.append(self.divergence(posterior, prior))
            latent = torch.tanh(self.linear(f"{rec}.latent", z))
            s = self.gru_with_latent(f"{rec}.context_cell", a if conditional else torch.cat([y, a]), latent, q)
            t = self.linear(f"{rec}.readout.state_proj", s) + self.linear(f"{rec}.readout.word_proj", y)
            t = t + self.linear(f"{rec}.readout.context_proj", a)
            if config.latent_readout:
                t = t + self.linear(f"{rec}.latent_readout", latent)
            t = t.view(-1, 2).max(dim=1).values if config.readout == "maxout" else torch.tanh(t)
            logits.append(self.p["lm_head.weight"] @ t)
        return torch.stack(logits), divergences


EQUATIONS = {
    "vrnmt": {},
    "rnnsearch": {**RNNSEARCH, **OWN_SIZES},
    "readout": {"latent_readout": True, "readout": "tanh", **OWN_SIZES},
    "standard-prior": {"latent_prior": "standard"},
    "standard-prior-rnnsearch": {**RNNSEARCH, "latent_prior": "standard", "latent_readout": True},
    "sentence": {"latent_level": "sentence", **OWN_SIZES},
    "sentence-rnnsearch": {**RNNSEARCH, "latent_level": "sentence", "latent_readout": True},
    "sentence-standard-prior": {"latent_level": "sentence", "latent_prior": "standard"},
    "relations": {"relation_layers": 2},
}


def scattered(fields, training=False):
    return TestVRNMT().model(fields).train(training)


def fix_noise(monkeypatch, model, batch, left=0):
    """Let the model draw this noise, `(batch_size, steps, l)`, after `left` more steps at the start."""
    steps = batch["labels"].shape[1] if model.config.latent_level == "word" else 1
    generator = torch.Generator().manual_seed(9)
    noise = torch.randn(3, steps, model.config.latent_size, dtype=torch.float64, generator=generator)
    draw = modeling_vrnmt.VRNMTDecoder.draw_noise

    def fixed(self, words, has_targets):
        drawn = draw(self, words, has_targets)
        if drawn is not None:
            start = left if model.config.latent_level == "word" else 0
            drawn[:, start : start + steps] = noise
        return drawn

    monkeypatch.setattr(modeling_vrnmt.VRNMTDecoder, "draw_noise", fixed)
    return noise


@pytest.mark.parametrize("fast", ["1", "0"], ids=["fast", "plain"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name, fast, monkeypatch):
    """Logits of a padded batch outside of training; loss and KL divergences of a training step with given noise."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
    batch = ragged_batch(LENGTHS, TARGETS)
    for training in (False, True):
        model = scattered(EQUATIONS[name], training)
        noise = fix_noise(monkeypatch, model, batch)
        slow, losses, divergences = SlowVRNMT(model), [], []
        outputs = model(**batch)
        target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        for row, (length, steps) in enumerate(zip(LENGTHS, TARGETS, strict=True)):
            labels = batch["labels"][row, :steps]
            words = batch["input_ids"][row, :length].tolist(), target[row, :steps].tolist(), labels.tolist()
            expected, kl = slow.run(*words, noise[row] if training else None)
            torch.testing.assert_close(outputs.logits[row, :steps], expected, atol=1e-10, rtol=0)
            losses.append(torch.nn.functional.cross_entropy(expected, labels, reduction="sum"))
            divergences += kl if training else []
            if training:
                found = outputs.kl_terms[row, : len(kl)]
                torch.testing.assert_close(found, torch.stack(kl), atol=1e-10, rtol=1e-10)
                assert (outputs.kl_terms[row, len(kl) :] == 0).all()
        count = sum(TARGETS)
        torch.testing.assert_close(outputs.loss, (sum(losses) + sum(divergences)) / count, atol=1e-10, rtol=1e-10)
        if training:
            torch.testing.assert_close(outputs.kl, sum(divergences) / count, atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(outputs.auxiliary_loss, outputs.kl, atol=1e-10, rtol=1e-10)
        else:
            assert outputs.kl is None and outputs.kl_terms is None and outputs.auxiliary_loss is None


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", [*EQUATIONS, "sampled", "sampled-standard-prior"])
def test_fast_paths_equal_plain_ones(name, training, monkeypatch):
    """Loss and every gradient, with a target mask (states carried over padding) and without."""
    sampled = {
        "sampled": {"latent_inference": "sample"},
        "sampled-standard-prior": {"latent_inference": "sample", "latent_prior": "standard"},
    }
    model = scattered({**EQUATIONS, **sampled}[name], training)
    with torch.no_grad():  # some log-variances outside of their range
        for parameter in model.parameters():
            parameter.mul_(1.5)
    batch = ragged_batch(LENGTHS, TARGETS)
    for mask in (None, torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]])):
        results = []
        for fast in ("1", "0"):
            monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
            assert model.model.decoder.recurrence.is_fast() == (fast == "1")
            model.zero_grad()
            torch.manual_seed(4)
            loss = model(**batch, decoder_attention_mask=mask, return_logits=False).loss
            loss.backward()
            results.append((loss.detach(), gradients_of(model)))
        torch.testing.assert_close(results[0][0], results[1][0], atol=1e-11, rtol=1e-12)
        torch.testing.assert_close(results[0][1], results[1][1], atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("kind", ["drawn", "mean", "given"])
def test_steps_pass_gradcheck(conditional, kind):
    """The written backward pass of the steps, rows that share a source, masks and held states included."""
    torch.manual_seed(2)
    width, hidden, size, steps, sources, length, rows = 2, 3, 2, 2, 2, 4, 4

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    visible = torch.tensor([[[True] * 4], [[True, True, False, False]]])
    kept = torch.rand(steps, rows, 1) > 0.3
    noise = random(steps, rows, size).detach() if kind == "drawn" else None
    word = (random(3 * width, width), random(3 * width)) if conditional else (None, None)
    weights = (*word, random(width, width), random(width))
    weights = (*weights, random(3 * width, width), random(3 * width), random(3 * width))
    moments = 2 * size if kind == "drawn" else size
    latent = (random(hidden, width), random(moments, hidden), random(moments))
    latent = (*latent, random(width, size), random(width), random(3 * width, width))
    reads, inputs = (3 * width + hidden, hidden) if kind != "given" else (3 * width, 3 * width)
    tensors = (random(steps, rows, 3 * width), random(steps, rows, inputs), random(sources, length, width))
    tensors = (*tensors, random(sources, length, reads), random(rows, width))
    for held in (None, kept):

        def run(gates, given, keys, values, state, *parameters, held=held):
            parameters = (*parameters, *[None] * (13 - len(parameters)))
            inputs = (gates, keys, values, visible, state, held, *parameters[:7], given, noise, *parameters[7:])
            return AttentionalSteps.apply(SavedSteps(kernels_vrnmt.LatentPart), *inputs)

        check_gradients(run, (*tensors, *weights, *(() if kind == "given" else latent)))


def test_weight_rises_with_the_training_step(monkeypatch):
    """A model that is not told the step has the full weight; label smoothing changes the first term only."""
    model, batch = scattered({"kl_weight": 0.5, "kl_annealing_steps": 10}, training=True), ragged_batch()
    fix_noise(monkeypatch, model, batch)
    full = model(**batch)
    torch.testing.assert_close(full.auxiliary_loss, 0.5 * full.kl)
    for step, share in ((0, 0.0), (1, 0.1), (5, 0.5), (10, 1.0), (5000, 1.0)):
        model.set_training_step(step)
        outputs = model(**batch, smoothing=0.1)
        torch.testing.assert_close(outputs.auxiliary_loss, share * full.auxiliary_loss)
        torch.testing.assert_close(outputs.kl, full.kl)
    assert "training_step" not in model.state_dict()
    model.config.kl_annealing_steps = 0
    model.set_training_step(0)
    torch.testing.assert_close(model(**batch).auxiliary_loss, full.auxiliary_loss)


@pytest.mark.parametrize("level", ["word", "sentence"])
def test_free_bits_bound_the_divergence_of_each_variable(level, monkeypatch):
    model, batch = scattered({"latent_level": level}, training=True), ragged_batch(LENGTHS, TARGETS)
    fix_noise(monkeypatch, model, batch)
    terms = model(**batch).kl_terms
    bound = terms[terms > 0].median().item()
    model.config.latent_free_bits = bound
    outputs = model(**batch)
    torch.testing.assert_close(outputs.auxiliary_loss, terms[terms > 0].clamp(min=bound).sum() / sum(TARGETS))
    torch.testing.assert_close(outputs.kl_terms, terms)


def test_labels_change_nothing_outside_of_training():
    model, batch = scattered({}), ragged_batch()
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    other = {**batch, "labels": batch["labels"].flip(0)}
    logits = [model(**each, decoder_input_ids=target).logits for each in (batch, other)]
    assert torch.equal(*logits)
    model.train()
    torch.manual_seed(1)
    without = model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=target).logits
    torch.testing.assert_close(without, logits[0], atol=1e-12, rtol=0)  # without labels: the prior


@pytest.mark.parametrize("name", ["vrnmt", "rnnsearch", "sentence"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_term_of_the_training_loss(name, side, monkeypatch):
    """More padding on a side of source and target, filled with anything."""
    batch, results = ragged_batch(LENGTHS, TARGETS), []
    target_mask = (batch["labels"] != -100).long()
    for amount in (0, 3):
        model = scattered(EQUATIONS[name], training=True)
        target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        fix_noise(monkeypatch, model, batch, left=amount if side == "left" else 0)

        outputs = model(
            pad(batch["input_ids"], side, amount, 9),
            pad(batch["attention_mask"], side, amount, 0),
            labels=pad(batch["labels"], side, amount, -100),
            decoder_input_ids=pad(target, side, amount, 9),
            decoder_attention_mask=pad(target_mask, side, amount, 0),
        )
        outputs.loss.backward()
        gradients = {name: each for name, each in gradients_of(model).items() if "embed_tokens" not in name}
        results.append((outputs.loss.detach(), outputs.kl.detach(), gradients))
        monkeypatch.undo()
    torch.testing.assert_close(*(each[:2] for each in results), atol=1e-12, rtol=0)
    torch.testing.assert_close(*(each[2] for each in results), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"return_logits": False}], ids=["logits", "chunked"])
def test_accumulated_training_loss_equals_one_batch(settings, monkeypatch):
    model, batch = scattered({}, training=True), ragged_batch(LENGTHS, TARGETS)
    noise = fix_noise(monkeypatch, model, batch)
    model(**batch, **settings).loss.backward()
    expected = gradients_of(model)
    model.zero_grad()
    count = (batch["labels"] != -100).sum()
    for i in range(3):
        monkeypatch.setattr(modeling_vrnmt.VRNMTDecoder, "draw_noise", lambda *args, i=i: noise[i : i + 1])
        part = {name: tensor[i : i + 1] for name, tensor in batch.items()}
        model(**part, num_items_in_batch=count, **settings).loss.backward()
    torch.testing.assert_close(gradients_of(model), expected, atol=1e-10, rtol=1e-8)


def test_dropped_words_are_zeros():
    """A share of the input words, in training only."""
    model, ids = scattered({"latent_word_dropout": 0.4, "dropout": 0.0}, training=True), torch.full((50, 40), 5)
    words = model(ids, decoder_input_ids=ids, labels=ids, output_hidden_states=True).decoder_hidden_states[0]
    zeros = (words == 0).all(-1)
    assert (words[~zeros] != 0).all() and 0.37 < zeros.float().mean() < 0.43
    model.eval()
    batch = ragged_batch()
    assert torch.equal(model(**batch).logits, scattered({})(**batch).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extreme_log_variances_stay_finite_in_half_precision(dtype):
    """Networks that are sure of themselves: divergence and gradients are finite."""
    model = TestVRNMT().model({}, torch.float32, scattered=False).to(dtype).train()
    recurrence = model.model.decoder.recurrence
    with torch.no_grad():
        recurrence.prior.log_variance.bias.fill_(-30.0)
        recurrence.posterior.log_variance.bias.fill_(30.0)
    outputs = model(**ragged_batch(), return_logits=False)
    outputs.loss.backward()
    assert outputs.kl.dtype == torch.float32 and outputs.kl > 1e6 and torch.isfinite(outputs.loss)
    # Larger gradients than float16 can hold are the scaler's business.
    assert dtype == torch.float16 or all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_unused_latent_variables_are_reported_after_annealing():
    model = scattered({"kl_annealing_steps": 10})
    assert "0.0050 nats" in model.training_warning({"kl": 0.005})  # not annealed
    model.set_training_step(9)
    assert model.training_warning({"kl": 0.005}) is None
    model.set_training_step(10)
    assert model.training_warning({"kl": 0.01}) is None
    assert model.training_warning({"kl": 0.009}) is not None


@pytest.mark.parametrize(
    "fields", [{}, RNNSEARCH, {"latent_level": "sentence"}, {"latent_readout": True}, {"relation_layers": 1}], ids=str
)
def test_a_model_starts_as_its_baseline(fields):
    """Exactly: the matrices that read the latent variables are zero, all others are copied."""
    model = TestVRNMT().model(fields, torch.float32)
    torch.manual_seed(6)
    baseline = RNMTForConditionalGeneration(model.config.baseline()).eval()
    report = model.init_from_baseline(baseline)
    own = ("latent", "prior", "posterior")
    assert report.unused == [] and all(any(part in name for part in own) for name in report.fresh)
    batch = ragged_batch()
    torch.testing.assert_close(model(**batch).logits, baseline(**batch).logits, atol=1e-6, rtol=0)
    tokens = [each.generate(batch["input_ids"], num_beams=3, max_new_tokens=6) for each in (model, baseline)]
    assert torch.equal(*tokens)
    again = TestVRNMT().model(fields, torch.float32)
    trained = copy.deepcopy(model)
    torch.nn.init.ones_(trained.model.decoder.recurrence.latent_gates.weight)
    assert again.init_from_baseline(trained).fresh == []
    assert (again.model.decoder.recurrence.latent_gates.weight == 1).all()


def test_samples_are_drawn_for_each_step():
    model = scattered({"latent_inference": "sample"})
    source = ragged_batch()["input_ids"]
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(torch.stack(model.generate(source, num_beams=1, **settings).logits))
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2])
    mean = scattered({})
    with torch.no_grad():
        recurrence = model.model.decoder.recurrence
        recurrence.prior.log_variance.weight.zero_()
        recurrence.prior.log_variance.bias.fill_(-10.0)
        recurrence.prior.mean.weight.mul_(100), recurrence.prior.mean.bias.mul_(100)
    mean.load_state_dict(model.state_dict())
    expected = torch.stack(mean.generate(source, **settings).logits)
    torch.testing.assert_close(torch.stack(model.generate(source, **settings).logits), expected, atol=0.2, rtol=0)


def test_beams_of_samples_are_refused():
    """By `generate`, and in a recipe before training."""
    model = scattered({"latent_inference": "sample"})
    model.generation_config.num_beams = 3
    for settings in ({}, {"num_beams": 3}, {"generation_config": GenerationConfig(num_beams=3, max_new_tokens=2)}):
        with rejects(field="num_beams"):
            model.generate(ragged_batch()["input_ids"], **settings)
    model = {"type": "vrnmt", "preset": "tiny", "fields": {"latent_inference": "sample"}}
    with rejects(field="decoding.beams"):
        model_on_meta(Plan.of(Recipe(model=model, decoding={"beams": 2})))
    with rejects(field="training.bleu_beams"):
        model_on_meta(Plan.of(Recipe(model=model, decoding={"beams": 1}, training={"bleu_beams": 2})))
    model_on_meta(Plan.of(Recipe(model=model, decoding={"beams": 1})))


@pytest.mark.parametrize(
    "name", ["attention", "prior", "posterior", "posterior.hidden", "posterior.mean", "posterior.log_variance"]
)
def test_modules_with_hooks_are_called(name):
    """As adapters and quantization need it: the fast path would read their parameters only."""
    model, calls = scattered({}, training=True), []
    batch = ragged_batch()
    torch.manual_seed(4)
    expected = model(**batch).loss
    model.model.decoder.recurrence.get_submodule(name).register_forward_hook(lambda *args: calls.append(args))
    torch.manual_seed(4)
    torch.testing.assert_close(model(**batch).loss, expected, atol=1e-11, rtol=0)
    assert len(calls) == 5  # steps
