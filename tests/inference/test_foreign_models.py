"""
Encoder-decoders of transformers: the translations of `generate` itself, with source and target languages by each kind
of tokenizer, and everything that works for this package's own models.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import foreign_models as foreign
import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM
from user_errors import rejects

import recnmt_hf
from recnmt_hf.data.prepared import ShardSettings
from recnmt_hf.data.sharded import ShardedDataset
from recnmt_hf.data.sharding import prepare_shards
from recnmt_hf.data.tokenizer_pair import TokenizerPair
from recnmt_hf.inference import DecodingOptions, Translator, search
from recnmt_hf.inference.model_settings import start_id
from recnmt_hf.inference.options import decoding_options
from recnmt_hf.training.building import Architecture, stage_configs
from recnmt_hf.training.trainer import TranslationTrainer


# Name of a checkpoint -> languages of its source and target as options name them, and another target.
LANGUAGES = {
    "marian": (None, "deu", "fra"),
    "marian_separate": (None, None, None),
    "m2m100": ("en", "de", "fr"),
    "nllb": ("eng_Latn", "deu_Latn", "fra_Latn"),
    "nllb_legacy": ("eng_Latn", "deu_Latn", "fra_Latn"),
    "mbart50": ("en_XX", "de_DE", "fr_XX"),
    "mbart": ("en_XX", "de_DE", "fr_XX"),
    "t5": ("en", "de", "fr"),
    "madlad": (None, "de", "zh_Hant"),
    "mt5": (None, None, None),
    "umt5": (None, None, None),
    "bart": (None, None, None),
    "own": (None, None, None),
}
WITH_TOKENS = ["m2m100", "nllb", "nllb_legacy", "mbart50", "mbart"]
# Settings with which the search is that of `generate`.
PLAIN = {"max_new_tokens": 8, "length_penalty_type": "hf", "length_penalty": 1.0, "split_sentences": "never"}


class Zoo:
    """Checkpoints by name, made when first asked for."""

    def __init__(self, folder, corpus, own):
        self.folder, self.own = folder, own
        self.texts = [text for pair in corpus["train"][:300] for text in pair[:2]]
        self.pieces = {"file": folder / "pieces.spm"}
        self.pieces["pieces"] = foreign.train_pieces(self.pieces["file"], self.texts)
        self.translators = {}

    def make(self, name):
        folder = self.folder / name
        if folder.exists() or name == "own":
            return self.own if name == "own" else folder
        torch.manual_seed(3)
        function, settings = {
            "marian_separate": (foreign.marian, {"tags": (), "separate": True}),
            "nllb_legacy": (foreign.nllb, {"legacy": True}),
            "mbart50": (foreign.mbart, {"kind": "MBart50"}),
            "t5": (foreign.t5, {"task_specific_params": foreign.T5_TASKS}),
            "madlad": (foreign.t5, {"tags": ("<2de>", "<2fr>", "<2zh_Hant>")}),
            "mt5": (foreign.t5, {"kind": "MT5"}),
            "umt5": (foreign.t5, {"kind": "UMT5"}),
        }.get(name) or (getattr(foreign, name), {})
        return function(folder, self.texts if function in (foreign.nllb, foreign.bart) else self.pieces, **settings)

    def __getitem__(self, name):
        if name not in self.translators:
            self.translators[name] = Translator.from_pretrained(self.make(name), device="cpu")
        return self.translators[name]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory, corpus, tiny_folder):
    return Zoo(tmp_path_factory.mktemp("zoo"), corpus, tiny_folder)


def named(name, second=False):
    """The languages of a checkpoint, by the names of transformers; with `second` the other target."""
    source, *targets = LANGUAGES[name]
    return {option: code for option, code in (("src_lang", source), ("tgt_lang", targets[second])) if code is not None}


def generate(zoo, name, sentence, target, **settings):
    """What a user of transformers writes for one sentence: tokens after the first, and text."""
    tokenizer, model, source = zoo[name].tokenizer, zoo[name].model, LANGUAGES[name][0]
    if name in WITH_TOKENS:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path, src_lang=source)
        id = tokenizer.get_lang_id(target) if name == "m2m100" else tokenizer.convert_tokens_to_ids(target)
        settings["decoder_start_token_id" if name == "mbart" else "forced_bos_token_id"] = id
    text = {
        "marian": f">>{target}<< {sentence}",
        "madlad": f"<2{target}> {sentence}",
        "t5": f"translate English to {'German' if target == 'de' else 'French'}: {sentence}",
    }.get(name, sentence)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    settings |= {"max_length": None, "max_new_tokens": 8, "length_penalty": 1.0, "early_stopping": False}
    (found,) = model.generate(**inputs, **settings)
    return found[1:].tolist(), tokenizer.decode(found, skip_special_tokens=True).strip()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", LANGUAGES)
def test_tokens_are_those_of_generate(zoo, sentences, name, beams):
    """Also after those of another target."""
    for second in (False, True, False) if LANGUAGES[name][2] else (False,):
        found = zoo[name](sentences, beams=beams, **PLAIN, **named(name, second))
        for sentence, translation in zip(sentences, found, strict=True):
            expected, text = generate(zoo, name, sentence, LANGUAGES[name][1 + second], num_beams=beams)
            tokens = translation.hypotheses[0].tokens
            assert expected[: len(tokens)] == tokens and len(set(expected[len(tokens) :])) <= 1, "generate pads"
            assert name == "nllb_legacy" or translation.text == text


@pytest.mark.parametrize("name", LANGUAGES)
def test_scores_are_those_of_the_hypotheses(zoo, sentences, name):
    translator, options = zoo[name], {"beams": 3, "num_hypotheses": 3, "max_new_tokens": 8, **named(name)}
    for translation in translator(sentences[:3], **options):
        for hypothesis in translation.hypotheses:
            (scored,) = translator.score([translation.source], [hypothesis.tokens], **named(name))
            assert scored.log_prob == pytest.approx(hypothesis.log_prob, abs=1e-4)
            assert scored.score == pytest.approx(hypothesis.score, abs=1e-4)
        if name != "t5":  # with random weights it generates its padding symbol, which is not scored
            (alone,) = translator([translation.source], **{**options, "num_hypotheses": 1})
            assert translation.hypotheses[0].tokens == alone.hypotheses[0].tokens


@pytest.mark.parametrize("name", LANGUAGES)
def test_texts_are_scored_as_labels_of_the_model(zoo, sentences, name):
    """The loss of the class itself, with the labels of its tokenizer."""
    source, target, _ = LANGUAGES[name]
    if name in ("nllb_legacy", "mbart"):  # their labels end in the language
        target = None
    translator = zoo[name]
    model, tokenizer = translator.model, translator.tokenizer
    if name in WITH_TOKENS:
        codes = {"src_lang": source, "tgt_lang": LANGUAGES[name][1]}
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path, **codes)
    text = {"marian": f">>{target}<< ", "madlad": f"<2{target}> ", "t5": "translate English to German: "}.get(name, "")
    labels = tokenizer(text_target=sentences[1])["input_ids"]
    start = None
    if name in ("nllb_legacy", "mbart"):
        language = labels.pop()
        labels = [language, *labels] if name == "nllb_legacy" else labels
        start = language if name == "mbart" else None
    inputs = tokenizer(text + sentences[0], return_tensors="pt")
    begin = start_id(model) if start is None else start
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=torch.tensor([[begin, *labels[:-1]]])).logits
    expected = logits.log_softmax(-1)[0, range(len(labels)), labels].tolist()
    (scored,) = translator.score(sentences[:1], sentences[1:2], **named(name))
    given = 1 if name in ("m2m100", "nllb", "nllb_legacy", "mbart50", "bart") else 0
    assert scored.token_log_probs[:given] == [0.0] * given
    assert scored.token_log_probs[given:] == pytest.approx(expected[given:], abs=1e-4)


@pytest.mark.parametrize("name", LANGUAGES)
def test_prefixes_splitting_and_batches(zoo, sentences, name):
    translator, options = zoo[name], {"beams": 2, "max_new_tokens": 20, **named(name)}
    prefix = "The dog"
    (one,) = translator(sentences[:1], [prefix], **options)
    assert one.text.startswith(prefix)
    (scored,) = translator.score([sentences[0]], [one.hypotheses[0].tokens], **named(name))
    assert scored.score == pytest.approx(one.score, abs=1e-4)
    alone = [translator(sentence, **options)[0] for sentence in sentences]
    together = translator(sentences, max_tokens=10000, **options)
    assert [one.text for one in together] == [one.text for one in alone]
    (whole,) = translator(" ".join(sentences[:2]), **options)
    assert whole.hypotheses[0].tokens == [*alone[0].hypotheses[0].tokens, *alone[1].hypotheses[0].tokens]
    assert whole.score <= 0
    assert [each.text for each in translator(["", "\u200b", " \t"], **options)] == ["", "", ""]
    assert translator([], **options) == []


@pytest.mark.parametrize("name", LANGUAGES)
def test_sentences_of_several_batches_go_on_together(zoo, corpus, monkeypatch, name):
    joined = []
    own = search.join_searches
    monkeypatch.setattr(search, "join_searches", lambda *searches: joined.append(own(*searches)) or joined[-1])
    monkeypatch.setattr(search, "FEW_ROWS", 4)
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    monkeypatch.setattr("recnmt_hf.inference.translator.batches_by_tokens", lambda *_: batches)
    sentences = [pair.en for pair in corpus["test"][:10]]
    options = {"beams": 2, "max_length_factor": 0.5, "max_length_extra": 2, **named(name)}
    together = zoo[name](sentences, max_tokens=10000, **options)
    assert joined
    monkeypatch.setattr("recnmt_hf.inference.translator.batches_by_tokens", lambda *_: [[0]])
    alone = [zoo[name](sentence, **options)[0] for sentence in sentences]
    assert [one.text for one in together] == [one.text for one in alone]


@pytest.mark.parametrize("name", LANGUAGES)
def test_alignments(zoo, sentences, name):
    translator, options = zoo[name], {"beams": 2, "max_new_tokens": 6, **named(name)}
    (one,) = translator(sentences[:1], alignments=True, **options)
    languages = decoding_options(None, named(name))
    source = translator.encode_source(sentences[0], translator.codec.direction(languages)).ids
    controls = translator.codec.control_ids[0]
    best = one.hypotheses[0]
    assert best.alignment is not None
    for i, j in best.alignment:
        assert source[i] not in controls and j < len(best.tokens)
    pairs = recnmt_hf.align_pairs(translator, sentences[:2], sentences[1:3], options=languages)
    for pair, text, target in zip(pairs, sentences, sentences[1:3], strict=False):
        assert pair.source == text.split() and pair.target == target.split()
        assert pair.weights.sum(axis=1) == pytest.approx(1.0, abs=0.02) or name == "t5", "of words and control tokens"


@pytest.mark.parametrize("name", LANGUAGES)
def test_ensembles_and_int8(zoo, sentences, name):
    folder, options = zoo.make(name), {"beams": 2, **PLAIN, **named(name)}
    single = zoo[name](sentences[:3], **options)
    ensemble = Translator.from_pretrained([folder, folder], device="cpu")
    found = ensemble(sentences[:3], **options)
    assert [one.hypotheses[0].tokens for one in found] == [one.hypotheses[0].tokens for one in single]
    assert [one.score for one in found] == pytest.approx([one.score for one in single], abs=1e-4)
    quantized = Translator.from_pretrained(folder, quantization="int8")
    assert all(one.hypotheses[0].tokens for one in quantized(sentences[:3], **options))


@pytest.mark.parametrize("name", LANGUAGES)
def test_pipeline(zoo, sentences, name):
    folder, options = str(zoo.make(name)), {"num_beams": 2, "max_new_tokens": 8}
    expected = [one.text for one in zoo[name](sentences, **options, **named(name))]
    pipe = transformers.pipeline("recnmt-translation", model=folder, device="cpu", **named(name))
    assert [found[0]["translation_text"] for found in pipe(sentences, **options)] == expected
    stream = pipe((sentence for sentence in sentences), batch_size=2, **options)
    assert [found[0]["translation_text"] for found in stream] == expected
    if LANGUAGES[name][2]:
        other = zoo[name](sentences[:1], **options, **named(name, second=True))[0].text
        mixed = [sentences[1], {"text": sentences[0], "tgt_lang": LANGUAGES[name][2]}, {"text": sentences[2]}]
        texts = [found[0]["translation_text"] for found in pipe(mixed, **options)]
        assert texts == [expected[1], other, expected[2]], "one batch of two languages"
        assert pipe(sentences[0], tgt_lang=LANGUAGES[name][2], **options)[0]["translation_text"] == other


def test_old_names_of_tasks(zoo, sentences):
    folder, options = str(zoo.make("m2m100")), {"num_beams": 1, "max_length": 9}
    expected = zoo["m2m100"](sentences[:1], beams=1, max_new_tokens=8, **named("m2m100"))[0].text
    pipe = recnmt_hf.pipeline("translation_en_to_de", folder, device="cpu")
    assert type(pipe) is recnmt_hf.TranslationPipeline
    assert pipe(sentences[0], **options)[0]["translation_text"] == expected
    with rejects("is not a language of this model"):
        recnmt_hf.pipeline("translation_en_to_tlh", folder, device="cpu")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tgt_lang": "de", "src_lang": "xx"}, "source_lang"),
        ({"src_lang": "en"}, "target_lang"),
        ({"tgt_lang": "de", "target_lang": "de"}, "tgt_lang"),
        ({"tgt_lang": "de", "forced_bos_token_id": 5}, "target_lang"),
    ],
)
def test_wrong_languages(zoo, options, field):
    for call in (zoo["m2m100"], lambda text, **options: list(zoo["m2m100"].score([text], ["a"], **options))):
        with rejects(field=field):
            call("We sleep.", **options)


def test_a_model_of_one_direction(zoo, sentences):
    translator = Translator(zoo["own"].model, zoo["own"].tokenizer)
    assert translator.source_langs == zoo["marian"].source_langs == [] and "fr" in zoo["m2m100"].source_langs
    with rejects(field="target_lang"):
        translator(sentences[:1], tgt_lang="de")
    translator.task = type(translator.task)("en", False, "de")
    assert translator(sentences[:1], src_lang="en", tgt_lang="de-AT") == zoo["own"](sentences[:1])
    for model, source, target, field in (
        (translator, "fr", "de", "source_lang"),
        (translator, "en", "fr", "target_lang"),
        (zoo["marian"], "fr", "deu", "source_lang"),
        (zoo["marian"], "en", "de", "target_lang"),
    ):
        with rejects(field=field):
            model(sentences[:1], src_lang=source, tgt_lang=target)
    assert zoo["marian"](sentences[:1], tgt_lang="gmw", max_new_tokens=4), "the group of languages in its files"


@pytest.mark.parametrize("name", ["marian", "madlad", "t5"])
def test_a_language_in_the_sentence(zoo, sentences, name):
    _, first, second = LANGUAGES[name]
    begin = {"marian": f">>{first}<<", "madlad": f"<2{first}>", "t5": "translate English to German:"}[name]
    translator, options = zoo[name], {"beams": 2, "max_new_tokens": 8}
    expected = translator(" ".join(sentences[:2]), **named(name), **options)[0].hypotheses
    for languages in ({}, {"tgt_lang": first}):
        (found,) = translator(f"{begin} {' '.join(sentences[:2])}", **languages, **options)
        assert found.hypotheses == expected, "for every sentence of the text"
        assert found.source.startswith(begin)
    with rejects(field="Sentence 1"):
        translator([f"{begin} {sentences[0]}"], tgt_lang=second, **options)
    if name != "t5":
        unknown = begin.replace(first, "tlh")
        with rejects(field="target_lang"):
            translator([f"{unknown} {sentences[0]}"], **options)
        assert translator([f"{unknown} {sentences[0]}"], tgt_lang=first, **options), "text, if there is another one"
    (empty,) = translator([f"{begin} "], **options)
    assert empty.text == ""
    scored = translator.score([f"{begin} {sentences[0]}"], ["The dog."])
    assert scored == translator.score(sentences[:1], ["The dog."], **named(name))
    if name != "t5":
        (pair,) = recnmt_hf.align_pairs(translator, [f"{begin} {sentences[0]}"], ["The dog."])
        assert pair.source == [begin, *sentences[0].split()] and not pair.weights[:, 0].any()


def test_an_instruction_of_ones_own(zoo, sentences):
    instruction = foreign.T5_TASKS["translation_en_to_de"]["prefix"]
    (expected,) = zoo["t5"](sentences[:1], tgt_lang="de", max_new_tokens=4)
    for name in ("t5", "mt5"):
        translator = zoo[name]
        (found,) = translator(sentences[:1], source_prefix=instruction, max_new_tokens=4)
        plain = Translator(translator.model, translator.tokenizer)([instruction + sentences[0]], max_new_tokens=4)[0]
        assert name == "t5" or found.hypotheses[0].tokens == plain.hypotheses[0].tokens
        assert name == "mt5" or found.hypotheses == expected.hypotheses
    with rejects(field="source_prefix"):
        zoo["t5"](sentences[:1], source_prefix=instruction, tgt_lang="de")
    with rejects(field="source_lang to target_lang"):
        zoo["t5"](sentences[:1], src_lang="fr", tgt_lang="de")


def test_languages_of_files_and_tokenizers(zoo, sentences):
    model = zoo["nllb"].model
    expected = zoo["nllb"](sentences[:1], src_lang="fra_Latn", tgt_lang="deu_Latn", max_new_tokens=4)
    codes = {"src_lang": "fra_Latn", "tgt_lang": "deu_Latn"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path, **codes)
    assert Translator(model, tokenizer)(sentences[:1], max_new_tokens=4) == expected
    assert Translator.from_pretrained(model.name_or_path, **codes)(sentences[:1], max_new_tokens=4) == expected
    with rejects(field="target_lang"):
        Translator.from_pretrained(model.name_or_path, target_lang="de")
    with rejects("set the same option"):
        Translator.from_pretrained(model.name_or_path, tgt_lang="deu_Latn", target_lang="deu_Latn")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path, src_lang="fra_Latn")
    forced = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("deu_Latn")}
    assert Translator(model, tokenizer)(sentences[:1], max_new_tokens=4, **forced) == expected
    tokenizer(text_target="a")  # takes on the source's language
    assert tokenizer.tgt_lang == "fra_Latn"
    with rejects(field="target_lang"):
        Translator(model, tokenizer)(sentences[:1])
    config = model.generation_config
    try:
        config.forced_bos_token_id = forced["forced_bos_token_id"]
        assert Translator(model, tokenizer)(sentences[:1], max_new_tokens=4) == expected
        french = zoo["nllb"](sentences[:1], src_lang="fra_Latn", tgt_lang="fra_Latn", max_new_tokens=4)
        found = Translator(model, tokenizer)(sentences[:1], max_new_tokens=4, tgt_lang="fra_Latn")
        assert found == french != expected, "over what the model's files force"
    finally:
        config.forced_bos_token_id = None


@pytest.mark.parametrize("name", ["marian", "m2m100", "nllb", "mbart"])
def test_threads_with_different_languages(zoo, sentences, name):
    translator, (source, first, second) = zoo[name], LANGUAGES[name]
    state = {key: getattr(translator.tokenizer, key, None) for key in ("src_lang", "tgt_lang")}
    jobs = [(target, sentence) for target in (first, second) for sentence in sentences[:3]] * 2
    languages = {} if source is None else {"src_lang": source}

    def run(target, sentence):
        (found,) = translator(sentence, ["The"], tgt_lang=target, beams=1, max_new_tokens=4, **languages)
        return found, translator.score([sentence], ["We sleep."], tgt_lang=target, **languages)

    expected = [run(*job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(run, *zip(*jobs, strict=True))) == expected
    assert state == {key: getattr(translator.tokenizer, key, None) for key in state}


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_training_data_have_the_languages_of_their_corpora(zoo, sentences, name, tmp_path):
    """Those of the arguments and of the corpora themselves, in memory and in shards, as the tokenizer encodes them."""
    source, target, other = LANGUAGES[name]
    texts = "".join(f"{one}\t{two}\n" for one, two in pairwise(sentences[:4]))
    (tmp_path / "a.tsv").write_text(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo.make(name))
    codes = [{}, {"source_lang": target, "target_lang": source}, {"target_lang": other}]
    directions = [(source, target), (target, source), (source, other)]
    corpora = [recnmt_hf.data.Corpus(tsv=tmp_path / "a.tsv", **code) for code in codes]
    before = tokenizer.src_lang, tokenizer.tgt_lang
    data = recnmt_hf.data.prepare_dataset(corpora, source, target, tokenizer, tokenizer, tmp_path / "data")
    settings = ShardSettings(source, target, shard_size=2)
    prepare_shards(corpora, TokenizerPair(tokenizer), tmp_path / "shards", settings)
    shards = ShardedDataset(tmp_path / "shards")
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == before
    expected = []
    for tokenizer.src_lang, tokenizer.tgt_lang in directions:
        for one, two in pairwise(sentences[:4]):
            expected.append((tokenizer(one)["input_ids"], tokenizer(text_target=two)["input_ids"]))
    for found in (data, shards):
        assert [(row["input_ids"], row["labels"]) for row in (found[i] for i in range(len(found)))] == expected
    with rejects(field="target_lang"):
        recnmt_hf.data.prepare_dataset(corpora[:1], source, "xx", tokenizer, tokenizer, tmp_path / "data")


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("name", WITH_TOKENS)
def test_training_begins_with_the_tokens_of_translations(zoo, sentences, name, is_own, tmp_path):
    """Wherever the tokenizer puts the language of labels, and whatever the decoder of the model reads first."""
    source, target, _ = LANGUAGES[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo.make(name))
    model = zoo[name].model
    if is_own:
        tokenizers = TokenizerPair(tokenizer)
        model = AutoModelForSeq2SeqLM.from_config(stage_configs(Architecture(preset="tiny"), tokenizers)[0])
    (tmp_path / "a.tsv").write_text(f"{sentences[0]}\t{sentences[1]}\n")
    data = recnmt_hf.data.prepare_dataset(
        {"tsv": tmp_path / "a.tsv"}, source, target, tokenizer, tokenizer, tmp_path / "data"
    )
    arguments = recnmt_hf.TranslationTrainingArguments(str(tmp_path / "run"), max_steps=1, use_cpu=True)
    trainer = TranslationTrainer(model, arguments, tokenizer=tokenizer, train_dataset=data, eval_dataset=data)
    batch = next(iter(trainer.get_eval_dataloader()))
    translator = Translator(model, tokenizer)
    direction = translator.codec.direction(DecodingOptions(source_lang=source, target_lang=target))
    assert batch["input_ids"][0].tolist() == translator.encode_source(sentences[0], direction).ids
    ids = translator.encode_target(sentences[1], direction).ids
    assert batch["labels"][0, : len(ids)].tolist() == ids
    if not is_own:
        start = start_id(model) if direction.start is None else direction.start
        assert batch["decoder_input_ids"][0, : len(ids)].tolist() == [start, *ids[:-1]]


def test_configurations_of_encoder_and_decoder(tokenizer, sentences):
    """Both limits, and the vocabulary, are those of the parts."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    encoder = transformers.BertConfig(max_position_embeddings=40, **sizes)
    decoder = transformers.BertConfig(max_position_embeddings=30, is_decoder=True, add_cross_attention=True, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id, config.eos_token_id = 0, 2
    model = transformers.EncoderDecoderModel(config=config).eval()
    model.generation_config.update(decoder_start_token_id=1, pad_token_id=0, eos_token_id=2)
    translator = Translator(model, tokenizer)
    assert translator.backend.limits == (40, 29)
    with rejects("--on-long"):
        translator(["the dog " * 40])
    (found,) = translator(sentences[:1], beams=2, max_new_tokens=5)
    (scored,) = translator.score(sentences[:1], [found.hypotheses[0].tokens])
    assert scored.score == pytest.approx(found.score, abs=1e-4)
    with rejects("has token ids beyond 0 to"):
        translator.score(["a"], [[len(tokenizer)]])
