"""Ensembles of any families, greedy and with beams, compared with a slow reference."""

import itertools

import pytest
import torch
from ensembles import ensemble_of
from transformers import MarianConfig, MarianMTModel
from user_errors import rejects

import recnmt_hf
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.families import FAMILIES
from recnmt_hf.inference.model_settings import end_ids


@pytest.fixture(scope="module")
def members(random_translator, tokenizer):
    """Return one model of each family, and one of transformers."""
    members = list(map(random_translator, FAMILIES))
    ids = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
    fields = {name: getattr(members[0].model.config, name) for name in ids}
    fields |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(9)
    config = MarianConfig(vocab_size=len(tokenizer), d_model=16, forced_eos_token_id=None, **fields)
    marian = MarianMTModel(config).eval()
    for parameter in marian.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return [*members, recnmt_hf.Translator(marian, tokenizer, check=False)]


@torch.no_grad()
def mean_log_probs(members, source, target):
    """Return the mean log-probabilities of every next token after a target, without a cache."""
    total = 0
    for member in members:
        start = member.model.config.decoder_start_token_id
        logits = member.model(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[start, *target]]), use_cache=False
        ).logits
        total = total + logits[0, -1].log_softmax(-1)
    return total / len(members)


def slow_beam_search(members, source, beams, most, end):
    """Return the best finished hypothesis by mean log-probability per token (transformers' penalty 1)."""
    running, finished = [(0.0, [])], []
    for length in itertools.count(1):
        candidates = []
        for score, tokens in running:
            scores = score + mean_log_probs(members, source, tokens)
            best = scores.topk(2 * beams)
            values = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            candidates += [(value, [*tokens, token]) for value, token in values]
        candidates = sorted(candidates, key=lambda each: -each[0])[: 2 * beams]
        ended = [tokens[-1] == end or length == most for _, tokens in candidates]
        best = zip(candidates[:beams], ended, strict=False)
        finished += [(score / length, tokens) for (score, tokens), last in best if last]
        finished = sorted(finished, key=lambda each: -each[0])[:beams]
        running = [each for each, last in zip(candidates, ended, strict=True) if not last][:beams]
        if not running or (len(finished) == beams and running[0][0] / length <= finished[-1][0]):
            return finished[0][1]


@pytest.mark.parametrize("chosen", [(0, 1), (2, 3, 4), (5, 6), (7, 8), range(9)])
def test_equal_to_the_slow_reference(members, chosen, corpus):
    members = [members[number] for number in chosen]
    ensemble = ensemble_of(members)
    sentences = [pair.en for pair in corpus["test"][:2]]
    sources = [ensemble.encode_source(sentence).ids for sentence in sentences]
    most = 7
    plain = {"length_penalty_type": "hf", "length_penalty": 1.0, "max_new_tokens": most}
    (end,) = end_ids(ensemble.model)
    for source, found in zip(sources, ensemble(sentences, beams=1, **plain), strict=True):
        target = []
        while len(target) < most and target[-1:] != [end]:
            target.append(int(mean_log_probs(members, source, target).argmax()))
        assert found.hypotheses[0].tokens == target
        expected = [mean_log_probs(members, source, target[:i])[token].item() for i, token in enumerate(target)]
        assert found.hypotheses[0].log_prob == pytest.approx(sum(expected), abs=1e-3)
    for source, found in zip(sources, ensemble(sentences, beams=3, num_hypotheses=2, **plain), strict=True):
        assert found.hypotheses[0].tokens == slow_beam_search(members, source, 3, most, end)
    (score,) = ensemble.score(sentences[:1], [corpus["test"][0].de])
    alone = [member.score(sentences[:1], [corpus["test"][0].de])[0].log_prob for member in members]
    assert score.log_prob == pytest.approx(sum(alone) / len(alone), abs=1e-4)


def test_beams_of_samples_are_refused(members, random_translator):
    sampling = random_translator("vrnmt", latent_inference="sample")
    for chosen in ([sampling, members[0]], [members[0], sampling]):
        ensemble = ensemble_of(chosen)
        with rejects(field="beams"):
            ensemble("The dog sleeps.", beams=2)
        assert ensemble("The dog sleeps.", beams=1, max_new_tokens=2)


def test_settings_of_the_model_apply_or_are_rejected(members, sentences, monkeypatch):
    ensemble, settings = ensemble_of([members[0]] * 2), members[0].model.generation_config
    monkeypatch.setattr(settings, "min_length", 9)
    expected, found = (each(sentences, beams=2, max_new_tokens=9) for each in (members[0], ensemble))
    assert [one.hypotheses[0].tokens for one in found] == [one.hypotheses[0].tokens for one in expected]
    assert all(len(one.hypotheses[0].tokens) >= 9 for one in found)
    monkeypatch.setattr(settings, "encoder_no_repeat_ngram_size", 2)
    with rejects(field="generate"):
        ensemble(sentences)


def test_models_with_other_tokens_are_rejected(members, random_translator, corpus):
    other = train_tokenizer((pair.de for pair in corpus["train"]), "bpe", 400)
    for changes, difference in (
        ({"tokenizer": other}, "the source tokenizer"),
        ({"vocab_size": 408}, "the rows of the output matrix"),
    ):
        with rejects("cannot be an ensemble", difference):
            ensemble_of([members[0], random_translator("nmt_transformer", **changes)])
    ensemble = ensemble_of(members[:2])
    with rejects("which gives no alignments or attention"):
        ensemble("The dog sleeps.", alignments=True)
    with rejects(field="generate"):
        ensemble("The dog sleeps.", beams=1, do_sample=True)
