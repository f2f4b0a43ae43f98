"""Options of decoding: stated once, passed on to generate, sampling with a seed, prefixes."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from recnmt_hf import UserError
from recnmt_hf._values import option_table
from recnmt_hf.inference import DecodingOptions, PrefixPerSentence, Translator
from recnmt_hf.inference.options import decoding_options, names_of_generate, own_names, reason


@pytest.fixture(scope="module")
def translator(tiny_folder):
    """A random model with large parameters, so that hypotheses differ."""
    translator = Translator.from_pretrained(tiny_folder, device="cpu")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in translator.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return translator


@pytest.fixture(scope="module")
def sentences(corpus):
    return [pair.en for pair in corpus["test"]][:6]


def test_the_readme_shows_the_options(repository):
    assert option_table(DecodingOptions) in (repository / "src/recnmt_hf/inference/README.md").read_text()


# -- what is passed on to generate ---


def test_blocked_ngrams_and_penalties(translator, sentences):
    """The settings reach generate, and the scores stay the model's own."""
    plain = translator(sentences, beams=1, max_length_extra=20)
    blocked = translator(sentences, beams=1, max_length_extra=20, generate={"no_repeat_ngram_size": 2})
    pairs = [list(zip(each.hypotheses[0].tokens, each.hypotheses[0].tokens[1:], strict=False)) for each in blocked]
    assert all(len(each) == len(set(each)) for each in pairs)
    assert [each.text for each in plain] != [each.text for each in blocked]
    penalised = translator(sentences, beams=1, max_length_extra=20, generate={"repetition_penalty": 5.0})
    assert [each.text for each in penalised] != [each.text for each in plain]
    for found in (blocked, penalised):
        scores = translator.score(sentences, [each.hypotheses[0].tokens for each in found])
        assert [each.log_prob for each in scores] == pytest.approx(
            [each.hypotheses[0].log_prob for each in found], 1e-5
        )


def test_allowed_tokens_of_python(translator, sentences):
    allowed = translator.encode_target("Der Hund schläft .")
    found = translator(sentences, beams=2, generate={"prefix_allowed_tokens_fn": lambda row, ids: allowed})
    assert {token for each in found for token in each.hypotheses[0].tokens} <= set(allowed)


def test_stop_strings_and_shortest_translations(translator, sentences):
    assert all(
        len(each.hypotheses[0].tokens) > 9
        for each in translator(sentences, beams=1, generate={"min_new_tokens": 9}, max_length_extra=9)
    )
    stopped = translator(sentences[:1], beams=1, generate={"stop_strings": ["e"]}, max_length_extra=30)
    assert stopped[0].text.count("e") <= 1


# -- sampling ---


def test_samples_follow_their_seed(translator, sentences):
    options = {"beams": 1, "num_hypotheses": 3, "generate": {"do_sample": True, "top_k": 0}, "max_length_extra": 3}
    first, second = translator(sentences, seed=1, **options), translator(sentences, seed=1, **options)
    assert first == second != translator(sentences, seed=2, **options)
    assert len({each.text for each in first[0].hypotheses}) == 3
    scores = [each.score for each in first[0].hypotheses]
    assert scores == sorted(scores, reverse=True)


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
def test_a_seed_leaves_global_random_numbers_alone(translator, sentences, options):
    """It draws what the same seed of torch draws."""
    options = {"do_sample": True, "max_new_tokens": 4, **options}
    torch.manual_seed(7)
    expected = translator(sentences[:2], **options)
    before = global_states()
    assert translator(sentences[:2], seed=7, **options) == expected
    assert global_states() == before


def test_threads_with_seeds_of_their_own_do_not_meet(translator, sentences):
    """Two threads that take every step together sample what each samples alone."""
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


def test_sampling_under_a_temperature_near_zero_is_greedy(translator, sentences):
    options = {"generate": {"do_sample": True, "temperature": 1e-4}, "beams": 1, "max_length_extra": 5}
    assert [each.text for each in translator(sentences, **options)] == [
        each.text for each in translator(sentences, beams=1, max_length_extra=5)
    ]


# -- prefixes ---


@pytest.mark.parametrize("options", [{"beams": 1}, {"beams": 3}, {"beams": 1, "generate": {"do_sample": True}}])
def test_translations_begin_with_their_prefix(translator, sentences, options):
    """Whatever the batches are; sentences without one are translated as ever."""
    prefixes = ["Der Hund", "", "Die alte Katze sieht", "Ja", "", "Der"]
    found = translator(sentences, prefixes, max_length_extra=8, seed=1 if "generate" in options else None, **options)
    for each, prefix in zip(found, prefixes, strict=True):
        assert each.text.startswith(prefix)
        tokens = translator.encode_target(prefix)[:-1]
        assert each.hypotheses[0].tokens[: len(tokens)] == tokens
    if "generate" not in options:
        alone = [
            translator([s], [p], max_length_extra=8, **options)[0] for s, p in zip(sentences, prefixes, strict=True)
        ]
        assert [each.text for each in alone] == [each.text for each in found]
        assert [each.score for each in alone] == pytest.approx([each.score for each in found], abs=1e-4)
        free = translator([sentences[1], sentences[4]], max_length_extra=8, **options)
        assert [each.text for each in free] == [found[1].text, found[4].text]


def test_the_rest_is_the_best_after_the_prefix(translator, sentences):
    """Greedy search goes on as it does from its own translation's beginning."""
    (free,) = translator(sentences[:1], beams=1, max_length_extra=10)
    tokens = free.hypotheses[0].tokens
    prefix = translator.target_tokenizer.decode(tokens[:4])
    if translator.encode_target(prefix)[:-1] == tokens[:4]:
        assert translator(sentences[0], prefix, beams=1, max_length_extra=10)[0].text == free.text
    processor = PrefixPerSentence([[7, 8], []])
    scores = torch.randn(4, 10)
    forced = processor(torch.zeros(4, 2, dtype=torch.long), scores)
    assert torch.equal(forced[2:], scores[2:]) and torch.equal(forced[:2, 8], scores[:2, 8])
    assert forced[:2].isneginf().sum() == 18
    assert processor(torch.zeros(4, 3, dtype=torch.long), scores) is scores


def test_prefixes_count_as_new_tokens(translator, sentences):
    """A limit leaves room for the prefix and a token more."""
    (found,) = translator(sentences[:1], ["Der Hund sieht die Katze"], beams=1, max_new_tokens=1)
    assert found.text.startswith("Der Hund sieht die Katze")


def test_a_prefix_of_a_split_sentence_begins_its_first_part(translator, sentences):
    long = " ".join(sentences)
    limit = max(len(translator.encode_source(each)) for each in sentences)
    settings = {"max_source_length": limit, "on_long": "split", "beams": 1, "max_length_extra": 3}
    settings["split_sentences"] = "never"
    (free,), (found,) = translator([long], **settings), translator([long], ["Der Hund"], **settings)
    assert found.text.startswith("Der Hund") and found.text.count("Der Hund") == 1 + free.text.count("Der Hund")


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        (["Der"], "There are more sentences than prefixes, which end after 1"),
        (["Der", "", "Die"], "There are more prefixes than sentences, which end after 2"),
        (["Der", 5], "Sentence 2: the prefix is no text but 5"),
        (["Der " * 200, ""], r"Sentence 1: the prefix has \d+ tokens, the model can generate 127"),
    ],
)
def test_prefixes_that_cannot_be(translator, sentences, prefixes, message):
    with pytest.raises(UserError, match=message):
        translator(sentences[:2], prefixes)


def test_what_is_no_list_of_sentences_or_prefixes_is_named(translator):
    with pytest.raises(UserError, match=r"^prefixes takes several sentences, not one text"):
        list(translator.translate(["a"], prefixes="Der"))
    with pytest.raises(UserError, match=r"^translate takes several sentences, not 5"):
        list(translator.translate(5))
    with pytest.raises(UserError, match="Sentence 2 is no text but None"):
        translator(["a", None], ["", ""], beams=1, max_length_extra=1)


def test_samples_of_one_seed_differ_from_buffer_to_buffer(translator, sentences):
    found = translator(sentences[:1] * 4, beams=1, do_sample=True, seed=1, buffer=1, max_length_extra=3)
    assert len({each.text for each in found}) > 1


def test_a_prefix_of_an_empty_sentence(translator):
    with pytest.raises(UserError, match="Sentence 1 is empty, and its translation cannot begin with 'Der'"):
        translator([" "], ["Der"])
    assert translator([" "], [" "])[0].text == ""
    with pytest.raises(UserError, match="prefixes takes several sentences, not one text"):
        list(translator.translate([" "], prefixes="Der"))


# -- mistakes ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_repeat_ngram_sise": 3}, "generate has no setting 'no_repeat_ngram_sise'; did you mean no_repeat_ngram_s"),
        ({"input_ids": 3}, "generate has no setting 'input_ids'"),
        ({"num_beams": 3}, r"generate.num_beams is stated elsewhere. Remedy: set beams \(--beams\)"),
        ({"max_new_tokens": 3}, "generate.max_new_tokens is stated elsewhere"),
        ({"length_penalty": 3}, "generate.length_penalty is stated elsewhere"),
        ({"eos_token_id": 3}, "generate.eos_token_id is stated elsewhere. Remedy: leave it out"),
        ({"output_scores": True}, "generate.output_scores is stated elsewhere"),
        ({"temperature": 0.5}, r"generate={'temperature': 0.5} is not allowed .*do_sample"),
        ({"cache_implementation": "none"}, "generate={'cache_implementation': 'none'} is not allowed"),
        ({"do_sample": "maybe"}, "generate.do_sample='maybe' is not allowed; it must be true or false"),
        ({"early_stopping": "always"}, "generate.early_stopping='always' is not allowed"),
        ({"use_cache": 1}, "generate.use_cache=1 is not allowed"),
        ({"no_repeat_ngram_size": "x"}, "generate.no_repeat_ngram_size='x' is not allowed; it must be a whole number"),
        ({"min_length": -3}, "generate.min_length=-3 is not allowed; it must be a whole number of at least 0"),
        ({"min_new_tokens": 1.5}, "generate.min_new_tokens=1.5 is not allowed"),
        ({"prefill_chunk_size": 0}, "generate.prefill_chunk_size=0 is not allowed"),
        ({"repetition_penalty": -1.0}, "generate.repetition_penalty=-1.0 is not allowed; it must be a number above 0"),
        ({"do_sample": True, "temperature": 0}, "generate.temperature=0 is not allowed; it must be a number above 0"),
        ({"do_sample": True, "top_k": -1}, "generate.top_k=-1 is not allowed"),
        ({"do_sample": True, "top_p": 2}, "generate.top_p=2 is not allowed; it must be a number of at least 0 and at"),
    ],
)
def test_settings_of_generate_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        DecodingOptions(generate=options)


def test_whole_numbers_of_generate_may_be_written_as_floats():
    found = DecodingOptions(generate={"no_repeat_ngram_size": 1e1, "min_new_tokens": None}).generate
    assert found == {"no_repeat_ngram_size": 10, "min_new_tokens": None}
    assert isinstance(found["no_repeat_ngram_size"], int)


@pytest.mark.parametrize("options", [{"bad_words_ids": [[10**6]]}, {"encoder_no_repeat_ngram_size": "x"}])
def test_what_generate_finds_wrong_later(translator, options):
    with pytest.raises(UserError, match=r"generate=.* was rejected by transformers .* Remedy"):
        translator(["a b c"], generate=options)


def test_contradictions():
    with pytest.raises(UserError, match="seed=1 has no effect without do_sample=true"):
        DecodingOptions(seed=1)
    with pytest.raises(UserError, match="num_hypotheses=5 is more than beams=4"):
        DecodingOptions(num_hypotheses=5, generate={"do_sample": True})
    assert DecodingOptions(num_hypotheses=5, beams=1, generate={"do_sample": True}).num_hypotheses == 5
    assert DecodingOptions(beams=2, generate={"early_stopping": True}).beams == 2
    with pytest.raises(UserError, match=r"generate={'early_stopping': True} is not allowed"):
        DecodingOptions(beams=1, generate={"early_stopping": True})
    assert {"do_sample", "no_repeat_ngram_size", "repetition_penalty", "bad_words_ids"} <= names_of_generate()


def test_names_of_transformers_stand_for_options():
    given = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 7, "alignments": True}
    passed = {"do_sample": True, "top_k": 5, "logits_processor": [], "generate": {"top_p": 0.5}}
    assert own_names({**given, **passed}) == {
        **{"beams": 3, "num_hypotheses": 2, "max_length_factor": 0.0, "max_length_extra": 7, "alignments": True},
        "generate": {"top_p": 0.5, "do_sample": True, "top_k": 5, "logits_processor": []},
    }
    assert own_names({"top_k": 5}) == {"generate": {"top_k": 5}}
    options = decoding_options(DecodingOptions(beams=3, buffer=9), {"num_return_sequences": 2})
    assert options == DecodingOptions(beams=3, buffer=9, num_hypotheses=2)
    assert decoding_options(None, {"num_beams": 2}) == DecodingOptions(beams=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beams": 2, "num_beams": 2}, "num_beams and beams state the same. Remedy: give one of them."),
        ({"max_length_extra": 2, "max_new_tokens": 2}, "max_new_tokens and max_length_extra state the same. Remedy: "),
        ({"buffe": 2}, "There is no option 'buffe' of decoding; did you mean buffer?"),
        ({"num_beam": 2}, "There is no option 'num_beam' of decoding; did you mean num_beams?"),
        ({"top_kk": 2}, "There is no option 'top_kk' of decoding; did you mean top_k?"),
        ({"qqqq": 2}, "There is no option 'qqqq' of decoding; there are alignment_layer, alignments, beams, buffer, g"),
        (
            {"beams": 2, "num_hypotheses": 3},
            "num_hypotheses=3 is more than beams=2. Remedy: use as many beams as hypotheses, or more.",
        ),
        (
            {"max_length_factor": 0, "max_length_extra": 0},
            "max_length_factor=0 and max_length_extra=0 are not allowed: they leave no token. Remedy: set one above 0.",
        ),
        ({"alignments": True, "on_long": "split"}, 'alignments=True and on_long="split" exclude each other: the parts'),
        ({"generate": {"zzzz": 1}}, "generate has no setting 'zzzz'; they are the fields of its GenerationConfig."),
    ],
)
def test_wrong_names_and_contradictions_are_named(changes, message):
    with pytest.raises(UserError) as error:
        decoding_options(None, changes)
    assert str(error.value).startswith(message)


def test_a_complaint_of_transformers_is_cut_to_its_reason():
    for complaint, expected in (
        ("GenerationConfig is invalid:\n- `top_k` is wrong\n- `top_p` too", "`top_k` is wrong"),
        ("\n- `top_k` is wrong\nsee there", "`top_k` is wrong"),
        ("something:", "something:"),
        ("", "no reason is given"),
    ):
        assert reason(ValueError(complaint)) == expected


def test_recipes_take_them_too(tmp_path):
    from recnmt_hf import Recipe

    file = tmp_path / "recipe.yaml"
    file.write_text("decoding: {beams: 2, generate: {no_repeat_ngram_size: 3}}\n")
    recipe = Recipe.from_file(file, ["decoding.generate.repetition_penalty=1.5"])
    expected = {"no_repeat_ngram_size": 3, "repetition_penalty": 1.5}
    assert recipe.decoding == DecodingOptions(beams=2, generate=expected)
    with pytest.raises(UserError, match=r"decoding\.generate has no setting 'top'"):
        Recipe.from_file(file, ["decoding.generate.top=3"])
