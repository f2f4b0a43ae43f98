"""The bag-of-words probe: its loss and precision by their definitions, and that it finds what a vector holds."""

import json
import math

import pytest
import torch
from bag_of_words import WordProbe, main, precision_at, scaled_tops, word_loss
from named_models import build_model
from sentence_states import states_of, vectors_by_name

from recnmt_hf import Translator
from recnmt_hf.data.text import SentencePair
from recnmt_hf.data.tokenization import train_tokenizer


def test_loss_and_precision_by_their_definitions():
    torch.manual_seed(0)
    logits = torch.randn(3, 9, dtype=torch.float64)
    words = torch.tensor([[0, 4, 8], [2, -1, -1], [1, 3, -1]])
    for row, ids in enumerate([[0, 4, 8], [2], [1, 3]]):
        probabilities = [math.exp(x) for x in logits[row].tolist()]
        expected = -sum(math.log(probabilities[i] / sum(probabilities)) for i in ids) / len(ids)
        assert word_loss(logits, words)[row].item() == pytest.approx(expected, abs=1e-12)
        ranked = sorted(range(9), key=lambda i: -logits[row, i])
        for column, top in enumerate((1, 4, 20)):
            share = len(set(ids) & set(ranked[:top])) / len(ids)
            assert precision_at(logits, words, [1, 4, 20])[row, column].item() == pytest.approx(share)


def test_the_probe_is_one_hidden_layer_to_the_embeddings():
    torch.manual_seed(0)
    probe, states = WordProbe(torch.randn(7, 4), 3), torch.randn(2, 3)
    expected = torch.tanh(states @ probe.hidden.weight.T + probe.hidden.bias) @ probe.embeddings.T
    assert torch.allclose(probe(states), expected)
    assert {name for name, _ in probe.named_parameters()} == {"hidden.weight", "hidden.bias"}  # E stays as it was
    assert scaled_tops([200, 500, 1000], 32000) == [200, 500, 1000]
    assert scaled_tops([200, 500, 1000], 8000) == [50, 125, 250] and scaled_tops([200], 40) == [1]


@pytest.fixture(scope="module")
def gret(corpus):
    """A GRET that was not trained, and pairs of which the target repeats the source's words."""
    sentences = [pair.en for pair in corpus["train"][:200]]
    tokenizer = train_tokenizer(sentences, "word", 200)
    torch.manual_seed(0)
    fields = {"d_model": 32, "num_capsules": 4, "encoder_layers": 1, "decoder_layers": 1}
    model = build_model("gret", "tiny", len(tokenizer), fields).eval()
    model.get_input_embeddings().weight.data *= 5  # those of a trained model are longer than fresh ones
    return Translator(model, tokenizer, check=False), [SentencePair(each, each) for each in sentences]


def read_states(output, input_ids, attention_mask):
    return states_of(output, attention_mask)


def test_vectors_of_sentences(gret):
    translator, pairs = gret
    sentences = [*(pair.source for pair in pairs[:5]), "The dog."]
    sources = [translator.encode_source(sentence).ids for sentence in sentences]
    found = vectors_by_name(translator, sentences, read_states, max_tokens=30)
    assert list(found) == ["last", "average", "global"]
    model = translator.model
    for row, ids in enumerate(sources):  # one at a time: no padding
        with torch.no_grad():
            output = model.get_encoder()(torch.tensor([ids]))
        states = output.last_hidden_state[0]
        vectors = {"last": states[-1], "average": states.mean(0), "global": output.global_hidden_state}
        for name, expected in vectors.items():
            assert torch.allclose(found[name][row], expected, atol=1e-5)
    output = model.get_encoder()(torch.tensor([sources[0]]))
    output.last_hidden_state = torch.arange(12.0).view(1, 4, 3)
    left_padded = dict(states_of(output, torch.tensor([[0, 1, 1, 0]])))
    assert left_padded["last"].tolist() == [[6, 7, 8]] and left_padded["average"].tolist() == [[4.5, 5.5, 6.5]]


def test_the_program(tmp_path, capsys, corpus, tiny_folder, tokenizer):
    (tmp_path / "a").write_text("".join(f"{pair.en}\n" for pair in corpus["train"][:30]))
    words = [str(tiny_folder)]
    for split in ("train", "validation", "test"):
        words += [f"--{split}", str(tmp_path / "a"), str(tmp_path / "a")]
    results = tmp_path / "out.json"
    main([*words, "--epochs", "2", "--sentences", "20", "--json", str(results)])
    table = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert table[0][:2] == ["state", "dim"] and table[0][2] == f"top-{scaled_tops([200], len(tokenizer))[0]}"
    assert [row[0] for row in table[1:]] == ["frequency", "last", "average"]
    record = json.loads(results.read_text())
    assert [f"{100 * each['precision'][table[0][2][4:]]:.2f}" for each in record] == [row[2] for row in table[1:]]
