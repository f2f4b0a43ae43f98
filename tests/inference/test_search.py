"""Search that drops finished sentences: it equals transformers' own search for every family."""

import copy

import pytest
import torch
from named_models import build_model
from transformers import GenerationConfig

import recnmt_hf
from recnmt_hf.families import FAMILIES
from recnmt_hf.inference import DecodingOptions
from recnmt_hf.inference import search as search_module
from recnmt_hf.inference.backends import torch_model
from recnmt_hf.inference.devices import WIDE_LAYER, Int8Linear, Int8RecurrentLayer, has_wide_product, quantize_model
from recnmt_hf.inference.search import ModelRows, best_continuations


@pytest.fixture(scope="module")
def translator(any_family):
    return any_family


def with_and_without(translator, monkeypatch, sentences, *prefixes, **options):
    """Return the results with and without transformers' own search, and the rows of each step of ours."""
    rows = []
    own = ModelRows.next_logits

    def counted(self, tokens):
        rows.append(tokens.shape[0])
        return own(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRows, "next_logits", counted)
        found = translator(sentences, *prefixes, **options)
    assert rows
    with monkeypatch.context() as patch:
        patch.setattr(torch_model, "can_drop_finished", lambda *_: False)
        patch.setattr(ModelRows, "next_logits", None)
        return found, translator(sentences, *prefixes, **options), rows


SETTINGS = {
    "beams": {"beams": 4, "num_hypotheses": 4},
    "greedy": {"beams": 1},
    "hf": {"beams": 3, "length_penalty_type": "hf", "length_penalty": 1.0, "num_hypotheses": 2},
    "negative": {"beams": 3, "length_penalty_type": "hf", "length_penalty": -1.0},
    "early": {"beams": 3, "early_stopping": True, "num_hypotheses": 3},
    "never": {"beams": 3, "early_stopping": "never", "length_penalty_type": "hf", "num_hypotheses": 3},
    "ngrams": {"beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "least": {"beams": 2, "min_new_tokens": 6, "num_hypotheses": 2},
}


def families_and_settings(names):
    """Each family with the first of these settings, and a Transformer and a recurrent decoder with the others."""
    first, *others = names
    pairs = [(family, first) for family in FAMILIES]
    pairs += [(family, name) for family in ("nmt_transformer", "vrnmt") for name in others]
    return pytest.mark.parametrize(("any_family", "name"), pairs, indirect=["any_family"])


@families_and_settings(SETTINGS)
def test_dropping_finished_sentences_does_not_change_results(translator, corpus, monkeypatch, name):
    sentences = [pair.en for pair in corpus["test"][:14]] + ["A.", "The dog sleeps."]
    options = {"max_length_factor": 0.6, "max_length_extra": 6, "max_tokens": 100_000, **SETTINGS[name]}
    found, expected, rows = with_and_without(translator, monkeypatch, sentences, **options)
    for one, other in zip(found, expected, strict=True):
        assert [each.tokens for each in one.hypotheses] == [each.tokens for each in other.hypotheses]
        scores = [[each.score for each in every.hypotheses] for every in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    # One beam of each sentence in the first step, then all, then fewer sentences.
    assert rows[0] == 16 and max(rows) == 16 * options["beams"] and rows[-1] < max(rows)


@pytest.mark.parametrize("vocabulary", [63, 64, 130, 300, 3000])
@pytest.mark.parametrize(("beams", "count"), [(1, 2), (3, 8)])
def test_best_continuations_are_those_of_a_sorted_vocabulary(vocabulary, beams, count):
    """Also with forbidden tokens, and where the vocabulary is no multiple of the columns compared first."""
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(5, beams, vocabulary, generator=generator).log_softmax(-1)
    scores[:, :, ::3] = -torch.inf
    before = torch.randn(5, beams, generator=generator)
    found, source, tokens = best_continuations(scores, before, count)
    values, places = (scores + before[:, :, None]).flatten(1).topk(count, dim=1)
    assert torch.equal(found, values) and torch.equal(source * vocabulary + tokens, places)


def test_reference_paths_drop_sentences_too(translator, sentences, monkeypatch):
    """Without precomputed projections, the encoder memories shrink with the batch."""
    monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
    options = {"beams": 2, "max_length_factor": 0.6, "max_length_extra": 3, "max_tokens": 100_000}
    found, expected, rows = with_and_without(translator, monkeypatch, sentences, **options)
    assert [each.text for each in found] == [each.text for each in expected] and rows[-1] < rows[1]


@families_and_settings(["beams", "greedy", "early", "ngrams"])
def test_searches_of_several_batches_go_on_together(translator, corpus, monkeypatch, name):
    """Also with limits of length, sources and beginnings of different lengths, and results are in order."""
    joined = []
    own = search_module.join_searches

    def counted(first, second):
        search = own(first, second)
        joined.append(len(search.numbers))
        assert search_module.tokens_of(search) <= options["max_tokens"]
        return search

    sentences = [pair.en for pair in corpus["test"][:16]] + ["A.", "", "The dog sleeps."]
    prefixes = ["Der Hund", "", "Die"] + [""] * 16
    options = {"max_length_factor": 0.6, "max_length_extra": 3, "max_tokens": 10_000, **SETTINGS[name]}
    monkeypatch.setattr(search_module, "join_searches", counted)
    monkeypatch.setattr(search_module, "FEW_ROWS", 5 * options["beams"])
    # Batches of sentences of different lengths, which therefore end at different steps.
    batches = [list(range(first, min(first + 6, 18))) for first in range(0, 18, 6)]
    monkeypatch.setattr("recnmt_hf.inference.translator.batches_by_tokens", lambda *_: batches)
    found, expected, _ = with_and_without(translator, monkeypatch, sentences, prefixes, **options)
    for one, other in zip(found, expected, strict=True):
        scores = [[each.score for each in every.hypotheses] for every in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        assert one.text == other.text or scores[1][0] == pytest.approx(scores[1][1], abs=1e-5)  # a tie
    assert max(joined) > 6  # sentences of two batches


def test_few_sentences_may_wait(translator, corpus, monkeypatch):
    """Waiting sentences take a limited share of the memory of a batch."""
    shares = []
    own = search_module.is_small

    def counted(search, waiting, max_tokens):
        answer = own(search, waiting, max_tokens)
        if answer:
            shares.append(search_module.tokens_of(search, *waiting.values()) / max_tokens)
        return answer

    monkeypatch.setattr(search_module, "is_small", counted)
    translator([pair.en for pair in corpus["test"][:60]], beams=1, max_length_extra=4, max_tokens=250)
    assert shares and max(shares) <= 0.5


@pytest.mark.parametrize("options", [{"do_sample": True, "beams": 1}, {"beams": 2, "cache_implementation": "static"},
                                     {"beams": 2, "logits_processor": [lambda ids, scores: scores]}])  # fmt: skip
def test_other_settings_use_the_search_of_transformers(translator, monkeypatch, options):
    """Those of a call, and those of the model."""
    monkeypatch.setattr(ModelRows, "next_logits", None)
    assert translator("The dog sleeps.", max_length_extra=3, **options)[0].hypotheses
    monkeypatch.undo()
    for own in ({"cache_implementation": "static"}, {"guidance_scale": 2.0}, {"use_cache": False}):
        assert not torch_model.can_drop_finished({"do_sample": False}, DecodingOptions(), GenerationConfig(**own))


def test_int8_weights(tiny_folder, corpus, translator):
    """
    Log-probabilities are nearly equal for every family; the original model does not change, and the fast paths of the
    copy find the layers that they read.
    """
    sources, targets = zip(*[(pair.en, pair.de) for pair in corpus["test"][:4]], strict=True)
    before = [each.log_prob for each in translator.score(sources, targets)]
    other = recnmt_hf.Translator(translator.model, translator.tokenizer, check=False)
    other.backend.model = quantize_model(translator.model)
    read = [one.get_submodule(name) for one in other.model.modules() for name in getattr(one, "read_layers", ())]
    assert all(type(one) in (torch.nn.Linear, torch.nn.ModuleList) for one in read)
    assert type(other.model.lm_head) is not torch.nn.Linear and type(translator.model.lm_head) is torch.nn.Linear
    after = [each.log_prob for each in other.score(sources, targets)]
    assert after == pytest.approx(before, rel=0.15) and after != before
    assert [each.log_prob for each in translator.score(sources, targets)] == before
    assert len(other(list(sources), beams=2, max_length_extra=2)) == 4
    loaded = recnmt_hf.Translator.from_pretrained(tiny_folder, quantization="int8")
    assert type(loaded.model.lm_head) is not torch.nn.Linear


@pytest.mark.parametrize("family", ["rnmt", "vrnmt", "gcn_rnmt"])
@pytest.mark.parametrize("decoder_type", ["conditional_gru", "rnnsearch"])
def test_int8_steps_of_recurrent_decoders(tokenizer, corpus, family, decoder_type):
    torch.manual_seed(3)
    model = build_model(family, "tiny", len(tokenizer), {"d_model": 32, "decoder_type": decoder_type})
    quantized = quantize_model(model)
    encoder = [module for module in quantized.model.encoder.modules() if isinstance(module, Int8RecurrentLayer)]
    assert encoder and {type(module.inputs) for module in encoder} == {Int8Linear}
    assert all(module.layer.weight_hh_l0.dtype == torch.float32 for module in encoder)
    recurrence = quantized.model.decoder.recurrence
    assert recurrence.is_fast() and {type(layer) for layer in recurrence.step_layers.values()} == {Int8Linear}
    assert ("state" in recurrence.step_layers) == (decoder_type == "conditional_gru")
    assert not any("step_layers" in name for name in model.state_dict())
    sources, targets = zip(*[(pair.en, pair.de) for pair in corpus["test"][:4]], strict=True)
    translators = [recnmt_hf.Translator(one, tokenizer, check=False) for one in (model, quantized)]
    expected, found = ([one.log_prob for one in each.score(sources, targets)] for each in translators)
    assert expected == pytest.approx(found, rel=0.02) and expected != found


def test_int8_layers_do_not_overflow():
    """The largest sums that 8-bit numbers can have are exact within the rounding of inputs and weights."""
    layer = torch.nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.5)[::2].neg_()
    states = torch.ones(3, 64).index_fill(1, torch.tensor([0]), -1e-3)
    quantized = quantize_model(torch.nn.Sequential(layer))
    torch.testing.assert_close(quantized(states), layer(states), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("bias", [False, True])
def test_wide_int8_layers(monkeypatch, bias):
    """oneDNN's matmul of many rows equals that of torch's dynamic layers."""
    if not has_wide_product():
        pytest.skip("needs oneDNN and a processor with sums of 8-bit numbers in 32 bits")
    torch.manual_seed(0)
    quantized = quantize_model(torch.nn.Sequential(torch.nn.Linear(64, WIDE_LAYER, bias=bias)))
    for states in (torch.randn(40, 1, 64), torch.randn(5, 8, 64) * 3 + 1):
        monkeypatch.setenv("RECNMT_FAST_PATHS", "0")
        expected = quantized(states)
        assert quantized[0].packed_weight.wide is None
        monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
        found = quantized(states)
        assert quantized[0].packed_weight.wide is not None
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
        assert torch.equal(copy.deepcopy(quantized)(states), found)
        quantized = copy.deepcopy(quantized)
