"""The Translator and the pipeline reject weights and tokenizers that from_pretrained only warns about."""

import json
import shutil

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from user_errors import rejects

import recnmt_hf
from recnmt_hf.data import TokenizerPair
from recnmt_hf.data.tokenizer_pair import stamp, stamp_tokenizers
from recnmt_hf.inference import Translator, align_pairs
from recnmt_hf.inference.model_checks import check_weights
from recnmt_hf.inference.model_settings import end_ids
from recnmt_hf.models.user_errors import UserError


WEIGHT = "model.encoder.layers.0.fc1.weight"


def text(corpus):
    return (text for pair in corpus["train"] for text in pair[:2])


@pytest.fixture(scope="module")
def smaller(corpus):
    """Return a tokenizer of the same kind and special ids with fewer symbols."""
    return recnmt_hf.train_tokenizer(text(corpus), "bpe", 300)


@pytest.fixture(scope="module")
def other(corpus):
    """Return a tokenizer of the same kind, special ids and size with other symbols."""
    return recnmt_hf.train_tokenizer((pair.de[::-1] for pair in corpus["train"]), "bpe", 400)


@pytest.fixture
def damaged(tiny_folder, tmp_path):
    """Return a function that copies the tiny model and changes its weights."""

    def make(change):
        folder = shutil.copytree(tiny_folder, tmp_path / "model")
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def with_value(value):
    def change(weights):
        weights[WEIGHT][0, 0] = value

    return change


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (lambda weights: weights.pop(WEIGHT), f"missing: {WEIGHT}"),
        (lambda weights: weights.pop("model.shared.weight"), "embed_tokens.weight and 1 more"),
        (
            lambda weights: weights.update({WEIGHT: weights[WEIGHT][:-1].contiguous()}),
            f"of another shape: {WEIGHT} (255, 128) for (256, 128)",
        ),
        (lambda weights: weights.update({"model.gate.weight": torch.zeros(2)}), "unexpected: model.gate.weight"),
        (with_value(float("nan")), None),
        (with_value(float("-inf")), None),
    ],
    ids=["missing", "shared-missing", "misshapen", "foreign", "nan", "inf"],
)
def test_wrong_weights_are_rejected(damaged, change, faults):
    import recnmt_hf.inference.pipeline  # noqa: F401 - registers the task

    folder = damaged(change)
    code = "do not match its config.json" if faults else "These weights are NaN or infinite"
    for load in (
        lambda: Translator.from_pretrained(folder, device="cpu"),
        lambda: transformers.pipeline("recnmt-translation", model=str(folder), device="cpu"),
    ):
        with rejects(code) as refused:
            load()
        assert (faults or WEIGHT) in str(refused.value)


def test_checks_can_be_disabled(damaged):
    folder = damaged(with_value(float("nan")))
    translator = Translator.from_pretrained(folder, device="cpu", check=False)
    with rejects("These weights are NaN or infinite"):
        Translator(translator.model, translator.tokenizer)


def test_computed_tables_and_infinite_biases_are_accepted(damaged):
    """MarianMT's sinusoids in a file are ignored; an infinite bias forbids a token."""
    folder = damaged(lambda weights: weights.update({"model.encoder.embed_positions.weight": torch.zeros(4, 4)}))
    translator = Translator.from_pretrained(folder, device="cpu")
    translator.model.register_buffer("bias", torch.tensor([0.0, -torch.inf]))
    check_weights(translator.model)
    translator.model.bias[0] = torch.nan
    with rejects("These weights are NaN or infinite"):
        check_weights(translator.model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_data_type_is_checked(tiny_folder, dtype):
    model = Translator.from_pretrained(tiny_folder, device="cpu", dtype=dtype).model
    assert model.dtype == dtype
    model.get_encoder().layers[0].fc1.bias.data[3] = torch.inf
    with rejects("These weights are NaN or infinite"):
        check_weights(model)


# -- tokenizers --


def test_a_foreign_smaller_tokenizer(tiny_folder, smaller, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    smaller.save_pretrained(folder)
    with rejects(field="source tokenizer"):
        Translator.from_pretrained(folder, device="cpu")
    assert len(Translator.from_pretrained(folder, device="cpu", check=False)(["The dog."], beams=1)) == 1


@pytest.mark.parametrize("rows", [400, 402, 408, 416, 448, 512])
def test_padded_vocabularies_are_accepted(tokenizer, rows):
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=rows)
    Translator(recnmt_hf.NMTTransformerForConditionalGeneration(config), tokenizer)


@pytest.mark.parametrize("rows", [424, 500, 1024])
def test_large_differences_of_size_are_rejected(tokenizer, rows):
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=rows)
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    with rejects(field="source tokenizer"):
        Translator(model, tokenizer)
    stamp_tokenizers(model.config, tokenizer)  # unless its stamp matches
    Translator(model, tokenizer)


def test_a_trained_model_knows_its_tokenizers(tokenizer, smaller, other, tmp_path):
    """Tokenizers of the same size are rejected too; symbols that are added later are accepted."""
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer))
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    assert len(other) == len(tokenizer)
    Translator(model, other)  # without a stamp
    stamp_tokenizers(model.config, tokenizer)
    model.save_pretrained(tmp_path)
    model = recnmt_hf.NMTTransformerForConditionalGeneration.from_pretrained(tmp_path)
    for foreign in (other, smaller):
        with rejects(field="source tokenizer"):
            Translator(model, foreign)
        with rejects(field="target tokenizer"):
            Translator(model, tokenizer, foreign)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    longer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    Translator(model, longer)
    longer.add_tokens(["<speaker>", "<pause>"])
    model.resize_token_embeddings(len(longer))
    Translator(model, longer)


def changed_tokenizer(tokenizer, folder, **parts):
    """Return a tokenizer with the same symbols and other processing steps."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **parts}))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["bpe", "word", "character"])
def test_a_tokenizer_that_encodes_differently(corpus, tmp_path, kind):
    """The model's own tokenizer is accepted after saving and loading; with stamps of older releases, any is."""
    tokenizer = recnmt_hf.train_tokenizer(text(corpus), kind, 400)
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer))
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    stamp_tokenizers(model.config, tokenizer)
    Translator(model, changed_tokenizer(tokenizer, tmp_path))
    others = [
        changed_tokenizer(tokenizer, tmp_path, normalizer={"type": "Lowercase"}),
        changed_tokenizer(tokenizer, tmp_path, post_processor=None),
    ]
    for other in others:
        with rejects(field="source tokenizer"):
            Translator(model, other)
        with rejects(field="target tokenizer"):
            Translator(model, tokenizer, other)
    for side in model.config.tokenizer_stamps.values():
        del side["behaviour"]
    Translator(model, others[0])


def test_random_tokenizers_have_no_checksum_of_their_encoding(tokenizer, tmp_path):
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    sampled = changed_tokenizer(tokenizer, tmp_path, model={**content["model"], "dropout": 0.5})
    assert "behaviour" in stamp(tokenizer) and "behaviour" not in stamp(sampled)
    # Without an unknown token some text cannot be encoded at all.
    vocabulary = {token: id for token, id in content["model"]["vocab"].items() if token != "<unk>"}
    closed = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    assert "behaviour" not in stamp(transformers.PreTrainedTokenizerFast(tokenizer_object=closed))


@pytest.mark.parametrize("name", ["decoder_start_token_id", "eos_token_id", "pad_token_id"])
def test_settings_of_generate_that_contradict_the_model(tiny_folder, tmp_path, name):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    fields = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**fields, name: 9}))
    with rejects(field=name):
        Translator.from_pretrained(folder, device="cpu")
    if name == "eos_token_id":  # several end tokens are allowed
        (folder / "generation_config.json").write_text(json.dumps({**fields, name: [9, fields[name]]}))
        Translator.from_pretrained(folder, device="cpu")


@pytest.mark.parametrize("value", [{}, [], "2", 1.5, True, [{}]], ids=str)
def test_token_ids_in_the_settings_of_generate_are_numbers(tiny_folder, tmp_path, value):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    fields = json.loads((folder / "generation_config.json").read_text())
    for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        (folder / "generation_config.json").write_text(json.dumps({**fields, name: value}))
        with pytest.raises(UserError) as refused:
            Translator.from_pretrained(folder, device="cpu")
        assert refused.value.field in (name, str(folder))


def test_a_model_without_an_end_token(tiny_folder):
    translator = Translator.from_pretrained(tiny_folder, device="cpu")
    translator.model.config.eos_token_id = translator.model.generation_config.eos_token_id = None
    with rejects(field="eos_token_id"):
        Translator(translator.model, translator.tokenizer)
    unchecked = Translator(translator.model, translator.tokenizer, check=False)
    (translation,) = unchecked(["The dog."], max_new_tokens=5)
    tokens = translation.hypotheses[0].tokens
    assert end_ids(unchecked.model) == set() and len(tokens) == 5
    given = unchecked.score(["The dog."], [tokens])[0]
    assert given.log_prob == pytest.approx(translation.hypotheses[0].log_prob, abs=1e-4)
    own = unchecked.tokenizer("Der Hund.")["input_ids"]  # with the tokenizer's end token
    assert len(unchecked.score(["The dog."], ["Der Hund."])[0].token_log_probs) == len(own)
    assert next(align_pairs(unchecked, ["The dog."], ["Der Hund."])).weights.shape == (2, 3)


def test_training_stamps_the_tokenizers(tokenizer, other):
    from recnmt_hf.training.building import stage_configs
    from recnmt_hf.training.recipe import ModelSection

    (config,) = stage_configs(ModelSection(preset="tiny"), TokenizerPair(tokenizer))
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    Translator(model, tokenizer)
    with rejects(field="source tokenizer"):
        Translator(model, other)


def with_padding(corpus, token):
    """Return a tokenizer with another padding token."""
    tokenizer = recnmt_hf.train_tokenizer(text(corpus), "bpe", 300)
    tokenizer.pad_token = token
    return tokenizer


def test_padding_ids_must_agree(corpus, tokenizer, smaller):
    """The padding row is zero in both embeddings, so a word with that id would not be trained."""
    from recnmt_hf.training.arguments import TranslationTrainingArguments
    from recnmt_hf.training.building import stage_configs
    from recnmt_hf.training.recipe import ModelSection
    from recnmt_hf.training.trainer import TranslationTrainer

    source = with_padding(corpus, "<s>")
    with rejects("Use tokenizers with the same padding"):
        stage_configs(ModelSection(preset="tiny"), TokenizerPair(source, smaller))
    config = recnmt_hf.NMTTransformerConfig.from_preset(
        "tiny", vocab_size=len(source), decoder_vocab_size=len(smaller), share_encoder_decoder_embeddings=False
    )
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    with rejects("Use tokenizers with the same padding"):
        Translator(model, source, smaller)
    with rejects("Use tokenizers with the same padding"):
        TranslationTrainer(model, TranslationTrainingArguments("out"), tokenizer=source, target_tokenizer=smaller)
    with rejects("Use tokenizers with the same padding") as refused:
        Translator(model, source)
    assert "source tokenizer 1, target tokenizer 1, model 0" in str(refused.value)
    Translator(model, smaller)


def test_special_tokens_of_another_model(tokenizer, corpus):
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), eos_token_id=7)
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    with rejects(field="target tokenizer"):
        TokenizerPair(tokenizer).check(model)
    without = recnmt_hf.train_tokenizer(text(corpus), "bpe", 300)
    without.pad_token = None
    with rejects(field="source tokenizer"):
        TokenizerPair(without, tokenizer).check(model, strict=False)
