"""The pipeline with transformers' steps preprocess, forward and postprocess returns the Translator's results."""

import pytest
import transformers
from user_errors import rejects

from recnmt_hf.inference import Translator, translation_warnings
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


def test_samples_of_several_batches_differ(pipe, translator, sentences):
    sampling = {"do_sample": True, "beams": 1, "max_length_extra": 5, "seed": 1}
    found = texts(pipe([sentences[0]] * 4, batch_size=1, **sampling))
    assert found == [each.text for each in translator([sentences[0]] * 4, buffer=1, **sampling)]
    assert len(set(found)) > 1


def test_model_and_tokenizer_by_position(translator, sentences):
    pipe = TranslationPipeline(translator.model, translator.tokenizer, device="cpu")
    expected = [each.text for each in translator(sentences[:2], beams=1)]
    assert texts(pipe(sentences[:2], beams=1)) == expected


def test_all_types_of_inputs(pipe, sentences):
    expected = texts(pipe(sentences[:3], beams=1))
    assert texts(pipe(tuple(sentences[:3]), beams=1)) == expected
    assert texts(pipe((each for each in sentences[:3]), beams=1)) == expected
    assert texts([pipe(each, beams=1) for each in sentences[:3]]) == expected
    assert pipe([]) == []


def test_names_of_transformers(pipe, translator, sentences):
    own = pipe(sentences[0], beams=3, num_hypotheses=2, max_length_factor=0, max_length_extra=4)
    assert pipe(sentences[0], num_beams=3, num_return_sequences=2, max_new_tokens=4) == own
    assert len(own) == 2 and own[0]["score"] >= own[1]["score"]
    blocked = pipe(sentences[0], num_beams=1, max_new_tokens=12, no_repeat_ngram_size=1)[0]["translation_text"]
    (expected,) = translator([sentences[0]], beams=1, max_new_tokens=12, generate={"no_repeat_ngram_size": 1})
    assert blocked == expected.text


def test_options_of_the_pipeline_apply_to_its_calls(tiny_folder, sentences):
    made = transformers.pipeline(
        "recnmt-translation", model=str(tiny_folder), device="cpu", num_beams=2, max_new_tokens=4, batch_size=2
    )
    assert made(sentences[:3]) == made(sentences[:3], beams=2, max_length_factor=0, max_length_extra=4)
    assert len(made(sentences[0], num_return_sequences=2)) == 2
    sampling = transformers.pipeline("recnmt-translation", model=str(tiny_folder), device="cpu", do_sample=True)
    assert sampling(sentences[0], seed=1, num_beams=1) == sampling(sentences[0], seed=1, num_beams=1)


def test_settings_of_a_call_are_added_to_those_of_the_pipeline(tiny_folder, translator, sentences):
    made = transformers.pipeline(
        *("recnmt-translation", str(tiny_folder)), device="cpu", no_repeat_ngram_size=1, num_beams=1, max_new_tokens=12
    )
    (free,) = translator([sentences[0]], beams=1, max_new_tokens=12)
    settings = {"no_repeat_ngram_size": 1}, {"suppress_tokens": free.hypotheses[0].tokens[:1]}
    found = made(sentences[0], generate=settings[1])[0]["translation_text"]
    texts_of = [
        translator([sentences[0]], beams=1, max_new_tokens=12, generate=each)[0].text
        for each in (*settings, settings[0] | settings[1])
    ]
    assert found == texts_of[2] and len(set(texts_of)) == 3, "either alone would have been another translation"


def test_long_sentences_are_split_or_truncated(pipe, translator, sentences):
    text = " ".join(sentences[:3])
    options = {"beams": 1, "max_source_length": 12, "max_length_factor": 0, "max_length_extra": 5}
    options["split_sentences"] = "never"
    found = {}
    for choice in ("split", "truncate"):
        found[choice] = pipe(text, on_long=choice, **options)[0]["translation_text"]
        assert found[choice] == translator([text], on_long=choice, **options)[0].text
    assert len(found["split"]) > len(found["truncate"]) > 0


def test_the_target_tokenizer_is_of_the_models_own_revision(translator, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "recnmt_hf.inference.pipeline.load_target_tokenizer",
        lambda path, **settings: asked.append((path, settings)) or translator.tokenizer,
    )
    config = translator.model.config
    monkeypatch.setattr(translator.model, "name_or_path", "someone/pair")
    monkeypatch.setattr(config, "share_encoder_decoder_embeddings", False)
    for commit, settings in (("a" * 40, {"revision": "a" * 40}), (None, {})):
        monkeypatch.setattr(config, "_commit_hash", commit, raising=False)
        made = TranslationPipeline(translator.model, translator.tokenizer, device="cpu")
        assert asked.pop() == ("someone/pair", settings) and made.translator.target_tokenizer is translator.tokenizer
    monkeypatch.setattr(config, "share_encoder_decoder_embeddings", True)
    TranslationPipeline(translator.model, translator.tokenizer, device="cpu")
    config = transformers.T5Config(
        vocab_size=len(translator.tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, eos_token_id=2
    )
    other = transformers.T5ForConditionalGeneration(config)  # does not say, and has one
    other.name_or_path = "someone/other"
    TranslationPipeline(other, translator.tokenizer, device="cpu")
    assert not asked


def test_unknown_tokens_are_reported(pipe, monkeypatch):
    said = []
    monkeypatch.setattr(translation_warnings.logger, "warning_once", said.append)
    pipe("Ж Ж", num_beams=1, max_new_tokens=1)
    assert [message.partition("% ")[2][:43] for message in said] == ["of the source tokens are unknown to the tok"]


def test_prefixes(pipe, sentences):
    found = pipe([{"text": sentences[0], "prefix": "Der Hund"}, sentences[1], {"text": sentences[2]}], beams=2)
    assert found[0][0]["translation_text"].startswith("Der Hund")
    for (one,), (alone,) in zip(found[1:], pipe(sentences[1:3], beams=2), strict=True):
        assert one["translation_text"] == alone["translation_text"]
        assert one["score"] == pytest.approx(alone["score"])  # the number of rows decides the order of sums


@pytest.mark.parametrize(
    ("inputs", "options", "field"),
    [
        ("a", {"num_beam": 2}, "num_beam"),
        ("a", {"num_beams": 2, "beams": 3}, "num_beams"),
        ("a", {"num_beams": 0}, "beams"),
        ("a", {"top_k": 3}, "generate"),
        (5, {}, "The sentence"),
        ({"source": "a"}, {}, None),
        ({"text": "a", "lang": "en"}, {}, None),
        ("a b c", {"max_source_length": 2}, "The sentence"),
    ],
)
def test_wrong_inputs_are_rejected(pipe, inputs, options, field):
    with rejects(field=field):
        pipe(inputs, **options)
