"""The pipeline with transformers' steps preprocess, forward and postprocess returns the Translator's results."""

import pytest
import transformers
from user_errors import rejects

from recnmt_hf.inference import Translator
from recnmt_hf.inference.pipeline import TranslationPipeline


@pytest.fixture(scope="module")
def pipe(tiny_folder):
    return transformers.pipeline("recnmt-translation", model=str(tiny_folder), device="cpu")


@pytest.fixture(scope="module")
def translator(tiny_folder):
    return Translator.from_pretrained(tiny_folder, device="cpu")


@pytest.fixture(scope="module")
def sentences(corpus):
    return [*[pair.en for pair in corpus["test"]][:5], "", "\u200b"]


def texts(found):
    return [each[0]["translation_text"] for each in found]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_equals_the_translator(pipe, translator, sentences, batch_size):
    expected = translator(sentences, beams=2, max_length_extra=5)
    found = pipe(sentences, beams=2, max_length_extra=5, **({"batch_size": batch_size} if batch_size else {}))
    assert texts(found) == [each.text for each in expected]
    assert [each[0]["score"] for each in found] == pytest.approx([each.score for each in expected], abs=1e-5)
    made = TranslationPipeline(translator.model, translator.tokenizer, device="cpu")
    for kind in (list, tuple, lambda texts: (each for each in texts)):
        assert texts(made(kind(sentences[:3]), beams=2, max_length_extra=5)) == texts(found[:3])
    assert pipe([]) == []


def test_samples_of_several_batches_differ(pipe, translator, sentences):
    sampling = {"do_sample": True, "beams": 1, "max_length_extra": 5, "seed": 1}
    found = texts(pipe([sentences[0]] * 4, batch_size=1, **sampling))
    assert found == [each.text for each in translator([sentences[0]] * 4, buffer=1, **sampling)]
    assert len(set(found)) > 1


def test_options_of_the_pipeline_and_of_a_call(tiny_folder, translator, sentences):
    """Under the names of transformers or ours; those of a call replace those of the pipeline one by one."""
    made = transformers.pipeline(
        *("recnmt-translation", str(tiny_folder)), device="cpu", no_repeat_ngram_size=1, num_beams=1, max_new_tokens=12
    )
    own = made(sentences[0], beams=3, num_hypotheses=2, max_length_factor=0, max_length_extra=4)
    assert made(sentences[0], num_beams=3, num_return_sequences=2, max_new_tokens=4) == own
    assert len(own) == 2 and own[0]["score"] >= own[1]["score"]
    (free,) = translator([sentences[0]], beams=1, max_new_tokens=12)
    settings = {"no_repeat_ngram_size": 1}, {"suppress_tokens": free.hypotheses[0].tokens[:1]}
    found = made(sentences[0], generate=settings[1])[0]["translation_text"]
    texts_of = [
        translator([sentences[0]], beams=1, max_new_tokens=12, generate=each)[0].text
        for each in (*settings, settings[0] | settings[1])
    ]
    assert found == texts_of[2] and len(set(texts_of)) == 3, "either alone would have been another translation"


def test_long_sentences_and_prefixes(pipe, translator, sentences):
    text = " ".join(sentences[:3])
    options = {"beams": 1, "max_source_length": 12, "max_new_tokens": 5, "split_sentences": "never"}
    for choice in ("split", "truncate"):
        found = pipe(text, on_long=choice, **options)[0]["translation_text"]
        assert found == translator([text], on_long=choice, **options)[0].text
    found = pipe([{"text": sentences[0], "prefix": "Der Hund"}, sentences[1]], beams=2)
    assert found[0][0]["translation_text"].startswith("Der Hund")
    assert texts(found[1:]) == texts(pipe(sentences[1:2], beams=2))


def test_the_target_tokenizer_is_of_the_models_own_revision(translator, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "recnmt_hf.inference.pipeline.load_target_tokenizer",
        lambda path, **settings: asked.append((path, settings)) or translator.tokenizer,
    )
    config = translator.model.config
    monkeypatch.setattr(translator.model, "name_or_path", "someone/pair")
    monkeypatch.setattr(config, "_commit_hash", "a" * 40, raising=False)
    TranslationPipeline(translator.model, translator.tokenizer, device="cpu")
    assert not asked, "one tokenizer for both sides"
    monkeypatch.setattr(config, "share_encoder_decoder_embeddings", False)
    TranslationPipeline(translator.model, translator.tokenizer, device="cpu")
    assert asked == [("someone/pair", {"revision": "a" * 40})]


def test_wrong_inputs_are_rejected(pipe):
    for inputs, options, field in (
        ("a", {"num_beam": 2}, "num_beam"),
        (5, {}, "The sentence"),
        ({"source": "a"}, {}, None),
        ("a b c", {"max_source_length": 2}, "The sentence"),
    ):
        with rejects(field=field):
            pipe(inputs, **options)
