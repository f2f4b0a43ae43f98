"""Loading models: devices, folders, and what is checked: weights, tokenizers, control tokens."""

import json
import re
import shutil

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from user_errors import rejects

import recnmt_hf
from recnmt_hf import Translator
from recnmt_hf._loading_errors import folder_of_model
from recnmt_hf.data import TokenizerPair
from recnmt_hf.data.tokenizer_pair import stamp, stamp_tokenizers
from recnmt_hf.errors import MissingFileError, UserError
from recnmt_hf.inference.backends.torch_model import check_weights
from recnmt_hf.inference.devices import resolve_device
from recnmt_hf.inference.loading import load_model


WEIGHT = "model.encoder.layers.0.fc1.weight"
NOT_FINITE = "These weights are NaN or infinite"


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def damage(folder, change):
    """Change the weights of a model."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def random_model(rows, **fields):
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=rows, **fields)
    return recnmt_hf.NMTTransformerForConditionalGeneration(config)


def test_devices(tiny_folder, monkeypatch):
    for device in ("tpu", torch.device("meta"), "cuda:999"):
        with rejects(device, field="device"):
            load_model(tiny_folder, device)
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    for there, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert resolve_device() == torch.device(expected)


def test_the_folder_of_a_run_is_that_of_its_model(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "run/model")
    run, model = str(tmp_path / "run"), str(tmp_path / "run/model")
    assert folder_of_model(run) == folder_of_model(model) == model
    assert [folder_of_model(name) for name in ("", "user/name", "missing")] == ["", "user/name", "missing"]
    found = [Translator.from_pretrained(path, device="cpu")("a b")[0].text for path in (run, model)]
    pipe = recnmt_hf.pipeline("translation", run, device="cpu")
    assert found[0] == found[1] == pipe("a b")[0]["translation_text"]
    for path in ("", str(tmp_path)):
        with rejects(field=path, kind=MissingFileError):
            load_model(path)


def test_token_ids_that_generation_settings_lack_are_those_of_the_configuration(tiny_folder, folder):
    expected = Translator.from_pretrained(tiny_folder)("The dog sleeps.")
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    assert Translator.from_pretrained(folder)("The dog sleeps.") == expected


def test_arguments_of_loading(tiny_folder, tmp_path):
    assert load_model(tiny_folder, "cpu").dtype == torch.float32
    model = load_model(str(tiny_folder), "cpu", torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, "cpu").dtype == torch.bfloat16, "as saved"
    eager = load_model(tiny_folder, "cpu", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager", "what else is given goes to from_pretrained"


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_the_fastest_type(has_bfloat16, tiny_folder, monkeypatch):
    """Bfloat16, if the processor has it and the model is wide enough."""
    loading = recnmt_hf.inference.loading
    monkeypatch.setattr(loading, "has_bfloat16", lambda: has_bfloat16)
    model = load_model(tiny_folder, "cpu", "fastest")
    assert model.dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)
    monkeypatch.setattr(loading, "LEAST_WIDTH", model.config.d_model + 1)
    assert load_model(tiny_folder, "cpu", "fastest").dtype == torch.float32


def test_pickled_weights_are_never_loaded(folder):
    damage(folder, lambda weights: weights.pop(WEIGHT))
    assert load_model(folder, "cpu", check=False).model.encoder.layers[0].fc1.weight.isfinite().all()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with rejects(field=str(folder)):
        load_model(folder, "cpu")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "evidence.json"])
def test_files_without_an_end_are_not_read(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=re.escape(str(folder))):
        Translator.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (lambda weights: weights.pop(WEIGHT), f"missing: {WEIGHT}"),
        (lambda weights: weights.update({WEIGHT: weights[WEIGHT][:-1].contiguous()}), f"of another shape: {WEIGHT}"),
        (lambda weights: weights.update({"model.gate.weight": torch.zeros(2)}), "unexpected: model.gate.weight"),
        (lambda weights: weights[WEIGHT].fill_(float("nan")), NOT_FINITE),
    ],
    ids=["missing", "misshapen", "foreign", "nan"],
)
def test_wrong_weights_are_rejected(folder, change, faults):
    damage(folder, change)
    with rejects(faults):
        Translator.from_pretrained(folder, device="cpu")
    with pytest.raises(ValueError, match=re.escape(faults)):
        transformers.pipeline("recnmt-translation", model=str(folder), device="cpu")


def test_computed_tables_and_infinite_biases_are_accepted(folder):
    """MarianMT's sinusoids in a file are ignored; an infinite bias forbids a token."""
    damage(folder, lambda weights: weights.update({"model.encoder.embed_positions.weight": torch.zeros(4, 4)}))
    translator = Translator.from_pretrained(folder, device="cpu")
    translator.model.register_buffer("bias", torch.tensor([0.0, -torch.inf]))
    check_weights(translator.model)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        translator.model.to(dtype).bias[0] = torch.nan
        with rejects(NOT_FINITE):
            check_weights(translator.model)
    assert Translator(translator.model, translator.tokenizer, check=False)


def changed_tokenizer(tokenizer, folder, **parts):
    """Return a tokenizer with the same symbols and other processing steps."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **parts}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def trained(corpus, kind="bpe", size=400, change=lambda text: text):
    return recnmt_hf.train_tokenizer((change(text) for pair in corpus["train"] for text in pair[:2]), kind, size)


def test_sizes_without_a_stamp(tokenizer):
    """Embeddings may be padded; other differences need a stamp."""
    for rows in (400, 402, 416, 512):
        Translator(random_model(rows), tokenizer)
    for rows in (424, 1024):
        model = random_model(rows)
        with rejects(field="source tokenizer"):
            Translator(model, tokenizer)
        stamp_tokenizers(model.config, tokenizer)
        Translator(model, tokenizer)


def test_a_trained_model_knows_its_tokenizers(corpus, tokenizer, tmp_path):
    """Tokenizers of the same size are rejected too; symbols that are added later are accepted."""
    smaller, other = trained(corpus, size=300), trained(corpus, change=lambda text: text[::-1])
    assert len(other) == len(tokenizer)
    model = random_model(len(tokenizer))
    Translator(model, other)  # without a stamp
    stamp_tokenizers(model.config, tokenizer)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    for foreign in (other, smaller):
        for side, pair in (("source", (foreign,)), ("target", (tokenizer, foreign))):
            with rejects(field=f"{side} tokenizer"):
                Translator(model, *pair)
    assert Translator(model, smaller, check=False)(["The dog."], beams=1)
    longer = changed_tokenizer(tokenizer, tmp_path / "tokenizer")
    longer.add_tokens(["<speaker>", "<pause>"])
    model.resize_token_embeddings(len(longer))
    Translator(model, longer)


@pytest.mark.parametrize("kind", ["bpe", "word", "character"])
def test_a_tokenizer_that_encodes_differently(corpus, tmp_path, kind):
    """The model's own tokenizer is accepted after saving and loading; with stamps of older releases, any is."""
    tokenizer = trained(corpus, kind)
    model = random_model(len(tokenizer))
    stamp_tokenizers(model.config, tokenizer)
    Translator(model, changed_tokenizer(tokenizer, tmp_path))
    for change in ({"normalizer": {"type": "Lowercase"}}, {"post_processor": None}):
        other = changed_tokenizer(tokenizer, tmp_path, **change)
        with rejects(field="source tokenizer"):
            Translator(model, other)
    for side in model.config.tokenizer_stamps.values():
        del side["behaviour"]
    Translator(model, other)


def test_random_tokenizers_have_no_checksum_of_their_encoding(tokenizer, tmp_path):
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    sampled = changed_tokenizer(tokenizer, tmp_path, model={**content["model"], "dropout": 0.5})
    assert "behaviour" in stamp(tokenizer) and "behaviour" not in stamp(sampled)
    # Without an unknown token some text cannot be encoded at all.
    vocabulary = {token: id for token, id in content["model"]["vocab"].items() if token != "<unk>"}
    closed = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    assert "behaviour" not in stamp(transformers.PreTrainedTokenizerFast(tokenizer_object=closed))


@pytest.mark.parametrize("name", ["decoder_start_token_id", "eos_token_id", "pad_token_id"])
def test_settings_of_generate_that_contradict_the_model(folder, name):
    fields = json.loads((folder / "generation_config.json").read_text())
    for value in (9, "2"):
        (folder / "generation_config.json").write_text(json.dumps({**fields, name: value}))
        with pytest.raises(UserError) as refused:
            Translator.from_pretrained(folder, device="cpu")
        assert refused.value.field in (name, str(folder))
    if name == "eos_token_id":  # several end tokens are allowed
        (folder / "generation_config.json").write_text(json.dumps({**fields, name: [9, fields[name]]}))
        Translator.from_pretrained(folder, device="cpu")


def test_control_tokens_must_agree(corpus, tokenizer):
    """The padding row is zero in both embeddings, so a word with that id would not be trained."""
    source, smaller = trained(corpus, size=300), trained(corpus, size=300)
    source.pad_token = "<s>"
    fields = {"decoder_vocab_size": len(smaller), "share_encoder_decoder_embeddings": False}
    for pair in ((source, smaller), (source,)):
        with rejects("Use tokenizers with the same padding"):
            Translator(random_model(len(source), **fields), *pair)
    with rejects(field="target tokenizer"):
        TokenizerPair(tokenizer).check(random_model(len(tokenizer), eos_token_id=7))
    smaller.pad_token = None
    with rejects(field="source tokenizer"):
        TokenizerPair(smaller, tokenizer).check(random_model(len(tokenizer)), strict=False)
