"""Decoding options: documentation, settings of generate, sampling with a seed, prefixes, wrong values."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from option_tables import option_table
from user_errors import rejects

from recnmt_hf.data.records import Tokens
from recnmt_hf.inference import DecodingOptions
from recnmt_hf.inference.backends.protocol import SearchRequest, SearchResult
from recnmt_hf.inference.options import SET_BY_TRANSLATOR, convert_option_names, decoding_options


@pytest.fixture(scope="module")
def translator(random_translator):
    return random_translator("nmt_transformer", max_position_embeddings=128, std=0.2, ends=1, dtype=torch.float64)


def test_the_readme_shows_the_options(repository):
    assert option_table(DecodingOptions) in (repository / "src/recnmt_hf/inference/README.md").read_text()


def test_functions_get_the_number_of_the_sentence(translator, sentences):
    """Batches are sorted by length, and a text of two sentences is translated in parts."""
    some, every = translator.encode_target("Der Hund").ids, list(range(len(translator.target_tokenizer)))
    texts = ["A dog .", f"{sentences[0]} {sentences[1]}", "A dog that sees the cat sleeps ."]

    def allowed(number, ids):
        return some if number == 1 else every

    for settings in ({"beams": 2}, {"beams": 2, "buffer": 1}):
        options = {**settings, "max_length_extra": 4, "split_sentences": "always"}
        found = translator(texts, **options, generate={"prefix_allowed_tokens_fn": allowed})
        plain = translator(texts, **options)
        assert set(found[1].hypotheses[0].tokens) <= set(some) and plain[1].text != found[1].text
        assert [found[0].text, found[2].text] == [plain[0].text, plain[2].text]


def test_the_best_translation_is_the_one_without_n_best(translator, sentences, monkeypatch):
    monkeypatch.setattr(translator.model.generation_config, "repetition_penalty", 5.0)
    texts = [f"{sentence} {sentence}" for sentence in sentences]
    for split in ("never", "auto"):
        options = {"beams": 4, "max_length_extra": 8, "max_length_factor": 0.3, "split_sentences": split}
        plain = list(translator.translate(texts, **options, scores=False))
        several = translator.translate(texts, **options, num_hypotheses=4)
        assert [one.text for one in plain] == [one.hypotheses[0].text for one in several]
        assert (plain[0].hypotheses[0].parts > 1) == (split == "auto")


def test_scores_do_not_change_which_translation_is_best(translator, sentences, monkeypatch):
    """
    A search counts penalties such as `repetition_penalty`, which the reported log-probabilities leave out. The model's
    own generation_config may have some, too.
    """
    source, ids = translator.encode_source(sentences[0]), [[5, 6, 2], [7, 2], [8, 9, 10, 2]]
    scores = [sum(row) for row in translator.score_tokens([source] * 3, list(map(Tokens, ids)), 1000)]

    def ranked(log_probs=None, **options):
        options = DecodingOptions(length_penalty=0, num_hypotheses=3, **options)
        search = SearchRequest([source], [Tokens()], [9], options)
        return translator.rank(search, SearchResult(ids, log_probs), True)[0]

    for log_probs in ([-1.0, -9.0, -2.0], [-9.0, -1.0, -99.0]):
        order = sorted(range(3), key=lambda i: -log_probs[i])
        assert [row.tokens for row in ranked(log_probs)] == [ids[i] for i in order]
        assert [row.log_prob for row in ranked(log_probs)] == pytest.approx([scores[i] for i in order])
    by_score = [ids[i] for i in sorted(range(3), key=lambda i: -scores[i])]
    assert by_score != ids
    for generate, expected in ({}, by_score), ({"repetition_penalty": 2.0}, ids):
        assert [row.tokens for row in ranked(generate=generate)] == expected
    assert [row.tokens for row in ranked(generate={"do_sample": True}, beams=1)] == by_score
    monkeypatch.setattr(translator.model.generation_config, "repetition_penalty", 2.0)
    assert [row.tokens for row in ranked()] == ids


@pytest.mark.parametrize("where", ["options", "generation_config"])
def test_a_forced_first_word_is_part_of_the_text(translator, sentences, where, monkeypatch):
    word = translator.encode_target("Hund").ids[0]
    settings = {"generate": {"forced_bos_token_id": word}} if where == "options" else {}
    if where == "generation_config":
        monkeypatch.setattr(translator.model.generation_config, "forced_bos_token_id", word)
    (found,) = translator(sentences[:1], beams=2, max_length_extra=4, **settings)
    assert found.hypotheses[0].tokens[0] == word
    assert found.text == translator.target_tokenizer.decode(found.hypotheses[0].tokens, skip_special_tokens=True)
    (found,) = translator(sentences[:1], ["Der Hund"], beams=2, max_length_extra=4, **settings)
    assert found.text.startswith("Der Hund"), "the prefix of a sentence comes first"


def test_long_translations_with_negative_penalties(translator, sentences):
    """Their scores are lower than what transformers gives to missing hypotheses."""
    options = {"beams": 2, "length_penalty_type": "hf", "max_length_factor": 0, "max_length_extra": 120}
    (found,) = translator(sentences[:1], **options, length_penalty=-5, min_new_tokens=110)
    assert len(found.hypotheses[0].tokens) >= 110 and found.score < -1e9
    with rejects(field="length_penalty"):
        translator(sentences[:1], length_penalty=-6)


def global_states():
    return torch.get_rng_state().tolist(), random.getstate(), [str(each) for each in np.random.get_state()]


@pytest.mark.parametrize(
    "options",
    [
        {"beams": 1},
        {"beams": 1, "num_hypotheses": 3, "top_p": 0.9, "temperature": 1.5},
        {"beams": 3, "num_hypotheses": 2},
        {"beams": 1, "prompt_lookup_num_tokens": 2, "max_tokens": 1},  # assisted decoding takes one sentence at a time
    ],
    ids=["sampling", "several", "beams", "assisted"],
)
def test_samples_depend_on_the_seed_alone(translator, sentences, options):
    """The draws equal those after torch.manual_seed, and global generators do not change."""
    options = {"do_sample": True, "max_new_tokens": 4, **options}
    torch.manual_seed(7)
    expected = translator(sentences[:2], **options)
    before = global_states()
    assert translator(sentences[:2], seed=7, **options) == expected != translator(sentences[:2], seed=8, **options)
    assert global_states() == before
    scores = [each.score for each in expected[0].hypotheses]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == options.get("num_hypotheses", 1)


def test_threads_with_different_seeds_are_independent(translator, sentences):
    """Two threads that are synchronized at every step sample as each does alone."""
    options = {"beams": 1, "do_sample": True, "max_new_tokens": 3, "min_new_tokens": 3}
    alone = [translator(sentences, seed=seed, **options) for seed in (1, 2)]
    together = threading.Barrier(2)

    def wait(input_ids, scores):
        together.wait(20)
        return scores

    def sample(seed):
        return translator(sentences, seed=seed, logits_processor=[wait], **options)

    before = global_states()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(sample, (1, 2))) == alone
    assert global_states() == before


@pytest.mark.parametrize("options", [{"beams": 1}, {"beams": 3}, {"beams": 1, "generate": {"do_sample": True}}])
def test_translations_begin_with_their_prefix(translator, sentences, options):
    """In any batch; sentences without a prefix are translated as usual."""
    prefixes = ["Der Hund", "", "Die alte Katze sieht", "Ja", "", "Der"]
    found = translator(sentences, prefixes, max_length_extra=8, seed=1 if "generate" in options else None, **options)
    for each, prefix in zip(found, prefixes, strict=True):
        assert each.text.startswith(prefix)
        tokens = translator.encode_target(prefix).ids[:-1]
        assert each.hypotheses[0].tokens[: len(tokens)] == tokens
    if "generate" not in options:
        pairs = zip(sentences, prefixes, strict=True)
        alone = [translator([s], [p], max_length_extra=8, **options)[0] for s, p in pairs]
        assert [each.text for each in alone] == [each.text for each in found]
        assert [each.score for each in alone] == pytest.approx([each.score for each in found], abs=1e-4)
        free = translator([sentences[1], sentences[4]], max_length_extra=8, **options)
        assert [each.text for each in free] == [found[1].text, found[4].text]


def test_forced_ends_do_not_depend_on_the_batch(translator):
    texts, end = ["a", "a b c d e f g"], translator.model.config.eos_token_id
    options = {"beams": 1, "max_length_extra": 3, "generate": {"forced_eos_token_id": end}}
    together = [one.hypotheses[0] for one in translator(texts, **options)]
    alone = [translator(text, **options)[0].hypotheses[0] for text in texts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert all(one.finished for one in together)


def test_names_of_transformers_are_converted():
    given = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 7, "alignments": True}
    passed = {"do_sample": True, "top_k": 5, "logits_processor": [], "generate": {"top_p": 0.5}}
    assert convert_option_names({**given, **passed}) == {
        **{"beams": 3, "num_hypotheses": 2, "max_length_factor": 0.0, "max_length_extra": 7, "alignments": True},
        "generate": {"top_p": 0.5, "do_sample": True, "top_k": 5, "logits_processor": []},
    }
    assert convert_option_names({"top_k": 5}) == {"generate": {"top_k": 5}}
    options = decoding_options(DecodingOptions(beams=3, buffer=9), {"num_return_sequences": 2})
    assert options == DecodingOptions(beams=3, buffer=9, num_hypotheses=2)
    assert decoding_options(None, {"num_beams": 2}) == DecodingOptions(beams=2)
    options = DecodingOptions(generate={"no_repeat_ngram_size": 3, "repetition_penalty": 1.5})
    changed = decoding_options(options, {"repetition_penalty": 1.2, "beams": 2})
    assert changed.generate == {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2} and changed.beams == 2
    assert decoding_options(options, {"generate": {"min_new_tokens": 2}}).generate == {"min_new_tokens": 2}


def test_wrong_options_are_rejected():
    for name in (*SET_BY_TRANSLATOR, "no_repeat_ngram_sise", "input_ids"):
        with rejects(field=f"generate.{name}"):
            DecodingOptions(generate={name: 3})
    for name in ("do_sample", "forced_bos_token_id", "forced_eos_token_id"):
        for value in ("no", -1, 1.5):  # transformers takes them
            with rejects(field=f"generate.{name}"):
                DecodingOptions(generate={name: value})
    for settings in ({"temperature": 0.5}, {"cache_implementation": "none"}, {"early_stopping": "x"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            DecodingOptions(generate=settings)
    for options in ({"num_hypotheses": 5}, {"num_hypotheses": 5, "generate": {"do_sample": True}}):
        with rejects(field="num_hypotheses"):
            DecodingOptions(**options)
    with rejects(field="alignments"):
        DecodingOptions(alignments=True, on_long="split")
    for changes in ({"num_beams": 2, "beams": 2}, {"max_new_tokens": 2, "max_length_extra": 2}, {"buffe": 2}):
        with rejects(field=next(iter(changes))):
            decoding_options(None, changes)
    assert DecodingOptions(num_hypotheses=5, beams=1, generate={"do_sample": True}).num_hypotheses == 5
    assert repr(DecodingOptions(generate={"repetition_penalty": 2}).generate) == "{'repetition_penalty': 2.0}"


def test_wrong_texts_are_rejected(translator, sentences):
    wrong = {"prefixes": (["Der"], ["Der", "", "Die"], "Der"), "Sentence 2: prefix": (["Der", 5],)}
    for field, several in {**wrong, "Sentence 1: prefix": (["Der " * 200, ""],)}.items():
        for prefixes in several:
            with rejects(field=field):
                list(translator.translate(sentences[:2], prefixes=prefixes))
    with rejects(field="sentences"):
        next(translator.translate("a text"))
    assert translator([" ", " "], ["Der", " "])[0].text == ""
