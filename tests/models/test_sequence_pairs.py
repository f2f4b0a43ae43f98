"""Classification of sentence pairs: against the equations, and what every model promises."""

import json

import pytest
import torch
from model_contract import scatter_parameters
from test_onlstm_transformer import SlowHybrid
from transformers import AutoModelForSequenceClassification
from user_errors import rejects

from recnmt_hf import ONLSTMTransformerConfig, ONLSTMTransformerForSequencePairClassification


VOCABULARY = 29
SMALL = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_ffn_dim": 24, "max_position_embeddings": 32}
VARIANTS = {
    **{name: {"preset": f"logic_{name}"} for name in ("attention", "lstm", "onlstm", "hybrid")},
    "mean of a pre-norm stack": {"preset": "logic_hybrid", "pair_pooling": "mean", "normalize_before": True},
    "last word, both directions": {"preset": "logic_onlstm", "rnn_bidirectional": True, "pair_features": "compared"},
    "four heads": {"preset": "logic_lstm", "pair_pooling": "attention", "pair_pooling_heads": 4},
}


def build(preset, dtype=torch.float64, **fields):
    config = ONLSTMTransformerConfig.from_preset(preset, **{**SMALL, **fields})
    return scatter_parameters(ONLSTMTransformerForSequencePairClassification(config).to(dtype)).eval()


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request):
    return request.param


def batch_of(pairs, side="right"):
    """Padded ids and masks of both sentences; padding holds anything."""
    batch = {}
    for place, prefix in enumerate(("", "pair_")):
        length = max(len(pair[place]) for pair in pairs) + (place == 0)
        rows, masks = [], []
        for pair in pairs:
            ids, padding = pair[place], length - len(pair[place])
            noise = [(7 * i + 3) % VOCABULARY for i in range(padding)]
            rows.append(noise + ids if side == "left" else ids + noise)
            masks.append([0] * padding + [1] * len(ids) if side == "left" else [1] * len(ids) + [0] * padding)
        batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"] = torch.tensor(rows), torch.tensor(masks)
    return batch


PAIRS = [([5, 9, 11, 4, 6, 8], [7]), ([12], [6, 5, 20, 21]), ([8, 8, 3], [28, 4, 9, 9, 10])]


class SlowClassifier(SlowHybrid):
    """One pair of sentences, without padding."""

    def __init__(self, model):
        super().__init__(model)
        encoder = {f"model.{name}": each for name, each in self.weights.items() if name.startswith("encoder.")}
        self.weights.update(encoder)

    def vector(self, ids):
        config, states = self.config, self.encode(torch.tensor(ids))
        if config.pair_pooling == "last":
            return states[-1]
        if config.pair_pooling == "mean":
            return sum(states) / len(ids)
        heads = config.pair_pooling_heads
        width = config.d_model // heads
        keys, values = self.linear("pooling.k_proj", states), self.linear("pooling.v_proj", states)
        parts = []
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            scores = [self.weights["pooling.query"][head] @ key[own] / width**0.5 for key in keys]
            total = sum(score.exp() for score in scores)
            parts.append(sum(score.exp() / total * value[own] for score, value in zip(scores, values, strict=True)))
        return self.linear("pooling.out_proj", torch.cat(parts))

    def logits(self, first, second):
        u, v = self.vector(first), self.vector(second)
        read = [u, v] if self.config.pair_features == "both" else [u, v, u * v, (u - v).abs()]
        hidden = self.linear("classifier.dense", torch.cat(read)).clamp(min=0)
        return self.linear("classifier.out_proj", self.linear("classifier.dense2", hidden).clamp(min=0))


@pytest.mark.parametrize("side", ["right", "left"])
def test_equations(variant, side):
    """Every pair of a padded batch, sentences of one word among them, against the equations, to 1e-10."""
    model = build(**variant)
    slow, logits = SlowClassifier(model), model(**batch_of(PAIRS, side)).logits
    for row, pair in enumerate(PAIRS):
        torch.testing.assert_close(logits[row], slow.logits(*pair), atol=1e-10, rtol=0)


def test_loss_and_gradients(variant):
    """The mean over labelled pairs, or divided by the given number; every parameter is used."""
    model = build(**variant).train()
    batch, labels = batch_of(PAIRS), torch.tensor([2, -100, 6])
    outputs = model(**batch, labels=labels)
    logs = outputs.logits.log_softmax(-1)
    expected = -(logs[0, 2] + logs[2, 6])
    torch.testing.assert_close(outputs.loss, (expected / 2).float(), check_dtype=False)
    torch.testing.assert_close(
        model(**batch, labels=labels, num_items_in_batch=5).loss, (expected / 5).float(), check_dtype=False
    )
    outputs.loss.backward()
    unused = [name for name, each in model.named_parameters() if each.grad is None or not each.grad.abs().sum()]
    # No softmax sees a bias of all keys; of a last word the backward direction has only its first step.
    assert [name for name in unused if not name.endswith(("k_proj.bias", "layers.1.rnn.backward_rnn.weight_hh"))] == []


def test_padding_alone_gives_zeros():
    """An empty sentence has a vector of zeros, not NaN, whatever makes the others'."""
    for name in VARIANTS:
        model = build(**VARIANTS[name], dtype=torch.float32)
        batch = batch_of([([5, 6], [7, 8]), ([5, 6], [7, 8])])
        batch["attention_mask"][1] = 0
        states = model.encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        assert model.pool(states, batch["attention_mask"])[1].abs().sum() == 0
        assert model(**batch).logits.isfinite().all()


def test_saved_and_loaded(variant, tmp_path):
    model = build(**variant, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is ONLSTMTransformerForSequencePairClassification
    assert torch.equal(loaded(**batch_of(PAIRS)).logits, model(**batch_of(PAIRS)).logits)
    half = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    outputs = half(**batch_of(PAIRS), labels=torch.tensor([0, 1, 2]))
    assert outputs.logits.dtype == torch.bfloat16 and outputs.loss.isfinite()


def test_both_sentences_are_asked_for():
    model = build("logic_hybrid")
    with rejects(field="pair_input_ids"):
        model(batch_of(PAIRS)["input_ids"])
    with rejects(field="pair_input_ids"):
        model(batch_of(PAIRS)["input_ids"], pair_input_ids=torch.tensor([[4], [5]]))
    assert model(**model.dummy_inputs).logits.isfinite().all()


@pytest.mark.slow
def test_hub_code_loads_without_the_package(tmp_path, stranger):
    model = build("logic_hybrid", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert set(json.loads((tmp_path / "saved/config.json").read_text())["auto_map"]) == {
        "AutoConfig",
        "AutoModelForSequenceClassification",
    }
    code = """
        import torch
        from transformers import AutoModelForSequenceClassification
        model = AutoModelForSequenceClassification.from_pretrained("saved", trust_remote_code=True).eval()
        found = model(torch.tensor([[5, 6, 7]]), pair_input_ids=torch.tensor([[8, 9]])).logits.tolist()
    """
    expected = model(torch.tensor([[5, 6, 7]]), pair_input_ids=torch.tensor([[8, 9]])).logits
    torch.testing.assert_close(torch.tensor(stranger(code, tmp_path)), expected)
