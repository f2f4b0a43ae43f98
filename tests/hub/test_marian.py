"""MarianMT models taken over: the same logits, translations and scores."""

import itertools

import foreign_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel

import recnmt_hf
import recnmt_hf.models.seq2seq_loading
from recnmt_hf import NMTTransformerConfig
from recnmt_hf.commands.main import main
from recnmt_hf.errors import UserError
from recnmt_hf.hub.marian import to_marian


BASE = {
    **{"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 41},
    **{"pad_token_id": 40, "decoder_start_token_id": 40, "eos_token_id": 0, "forced_eos_token_id": None},
}
SEPARATE = {"decoder_vocab_size": 37, "share_encoder_decoder_embeddings": False}
SEPARATE |= {"pad_token_id": 36, "decoder_start_token_id": 36}
CONFIGS = {
    "shared": {"scale_embedding": True},
    "deep-encoder": {"encoder_layers": 3, "decoder_layers": 1, "activation_function": "swish"},
    "relu": {"activation_function": "relu", "decoder_ffn_dim": 64, "decoder_attention_heads": 2},
    "untied": {"tie_word_embeddings": False},
    "separate": SEPARATE,
    "separate-untied": {**SEPARATE, "tie_word_embeddings": False},
}


def batch():
    source = torch.randint(1, 36, (3, 7))
    mask = (torch.arange(7)[None, :] < torch.tensor([[7], [4], [2]])).long()
    return {"input_ids": source, "attention_mask": mask}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_translations_and_scores_are_equal(name):
    torch.manual_seed(3)
    marian = MarianMTModel(MarianConfig(**{**BASE, **CONFIGS[name]})).eval()
    with torch.no_grad():
        for parameter in marian.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.25)
        marian.final_logits_bias.normal_(std=0.5)
    model, inputs = recnmt_hf.from_marian(marian), batch()
    target = torch.randint(1, 36, (3, 5))
    logits = [each(**inputs, decoder_input_ids=target).logits for each in (marian, model)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    options = {"max_new_tokens": 9, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    found = [each.generate(**inputs, **options).sequences for each in (marian, model)]
    assert torch.equal(*found)
    if marian.config.vocab_size != marian.config.decoder_vocab_size:
        return  # some releases of transformers size MarianMT's beam search by the source vocabulary
    options |= {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7}
    found = [each.generate(**inputs, **options) for each in (marian, model)]
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].sequences_scores, found[1].sequences_scores, atol=1e-5, rtol=0)


TABLES = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")


@pytest.mark.parametrize("own", [own for size in range(4) for own in itertools.combinations(TABLES[1:], size)])
def test_the_weights_of_a_folder_decide_what_is_tied(own, tmp_path):
    """Files may have values of their own for any table beside a tied configuration; transformers then unties it."""
    original = MarianMTModel(MarianConfig(**BASE))
    original.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    table = weights["model.shared.weight"]
    weights |= {f"{name}.weight": torch.randn_like(table) for name in own}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    marian, inputs = MarianMTModel.from_pretrained(tmp_path).eval(), batch()
    inputs["decoder_input_ids"] = torch.randint(1, 36, (3, 5))
    expected = marian(**inputs).logits
    assert bool(own) == (not torch.equal(expected, original.eval()(**inputs).logits))
    model = recnmt_hf.from_marian(tmp_path)
    model.save_pretrained(tmp_path / "own")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "own").eval()
    for each in (recnmt_hf.from_marian(marian), model, again):
        torch.testing.assert_close(each(**inputs).logits, expected, atol=1e-5, rtol=0)


def test_damaged_weights_are_refused(tmp_path):
    """transformers would fill them up with random numbers, and only report it."""
    MarianMTModel(MarianConfig(**BASE)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.encoder.layers.0.fc1.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.encoder\.layers\.0\.fc1\.weight"):
        recnmt_hf.from_marian(tmp_path)


def opus_folder(folder, corpus, **fields):
    """A folder as OPUS-MT publishes it, and its model."""
    file = folder.with_suffix(".spm")
    pieces = foreign_models.train_pieces(file, [text for pair in corpus["train"] for text in pair[:2]])
    torch.manual_seed(5)
    foreign_models.marian(folder, {"pieces": pieces, "file": file}, tags=(), **fields)
    return MarianMTModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("fields", [{}, {"separate": True}, {"tie_word_embeddings": False}], ids=str)
def test_imported_folder_translates_as_the_original(fields, corpus, tmp_path):
    """Equal tokens by its own settings, and by beams of the Translator."""
    marian, folder = opus_folder(tmp_path / "opus", corpus, **fields), tmp_path / "own"
    assert main(["convert", str(tmp_path / "opus"), "-o", str(folder)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "opus")
    texts = [pair.en for pair in corpus["test"][:6]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    own = AutoTokenizer.from_pretrained(folder)
    found = own(texts, return_tensors="pt", padding=True)
    assert torch.equal(found["input_ids"], inputs["input_ids"])
    expected = marian.generate(**inputs, max_new_tokens=39)
    assert torch.equal(model.generate(**found, max_new_tokens=39), expected)
    assert model.generation_config.num_beams == 2
    target = tokenizer(text_target=[pair.de for pair in corpus["test"][:6]], return_tensors="pt", padding=True)
    logits = [each(**inputs, decoder_input_ids=target["input_ids"]).logits for each in (marian, model)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)

    translator = recnmt_hf.Translator.from_pretrained(folder)
    settings = {"num_beams": 2, "length_penalty": 1.0, "length_penalty_type": "hf", "max_new_tokens": 39}
    settings |= {"bad_words_ids": [[marian.config.pad_token_id]]}
    translations = translator(texts, **settings)
    decoded = tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert [each.text for each in translations] == [text.strip() for text in decoded]
    # The card loads the target's tokenizer where embeddings or vocabularies are separate.
    assert (folder / "target_tokenizer").is_dir() != model.config.share_encoder_decoder_embeddings


RETURNED = [{"position_embedding_type": "sinusoidal"}, {"position_embedding_type": "marian"}]
RETURNED += [{"activation_function": "gelu", "encoder_layers": 1}, {"tie_word_embeddings": False}]


@pytest.mark.parametrize("fields", RETURNED)
def test_given_back_to_marian(fields, tokenizer, tmp_path):
    """The paper's sinusoids too, by an order of channels."""
    shape = {"d_model": 32, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", **shape, **fields)
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    assert main(["convert", str(tmp_path / "own"), "-o", str(tmp_path / "marian"), "--to", "marianmt"]) == 0
    marian = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "marian").eval()
    assert type(marian) is MarianMTModel
    own, target = AutoTokenizer.from_pretrained(tmp_path / "marian"), torch.randint(4, 36, (2, 9))
    inputs = own(["the dog sleeps .", "we see ."], return_tensors="pt", padding=True)
    settings = {"num_beams": 3, "max_length": 12}
    assert torch.equal(marian.generate(**inputs, **settings), model.generate(**inputs, **settings))
    expected = model(**inputs, decoder_input_ids=target).logits
    for each in (marian, recnmt_hf.from_marian(tmp_path / "marian")):  # and back again
        torch.testing.assert_close(each(**inputs, decoder_input_ids=target).logits, expected, atol=2e-5, rtol=1e-5)


def test_every_field_is_given_back_or_refused():
    """An export that ignored a field would translate differently without a word."""
    inputs, target, refused = batch(), torch.randint(1, 36, (3, 5)), set()
    for name, default in NMTTransformerConfig().fields_of(NMTTransformerConfig).items():
        if not isinstance(default, (bool, float)):
            continue
        try:
            config = NMTTransformerConfig(**{**BASE, name: not default if isinstance(default, bool) else 0.5})
        except UserError:
            continue  # it needs another field
        model = recnmt_hf.NMTTransformerForConditionalGeneration(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
        try:
            marian = to_marian(model)
        except UserError as error:
            refused.add(error.field)
            continue
        logits = [each(**inputs, decoder_input_ids=target).logits for each in (marian.eval(), model)]
        torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-5, msg=name)
    assert refused >= {"normalize_before", "layer_norm_eps"}


def test_what_marian_cannot_say(tokenizer, tmp_path, capsys):
    """A model of another family, or with other attention, is refused, and nothing is written."""
    for prefix, fields in (("GRET", {}), ("NMTTransformer", {"self_attention_type": "relative"})):
        config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=len(tokenizer), **fields)
        getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config).save_pretrained(tmp_path / prefix)
        tokenizer.save_pretrained(tmp_path / prefix)
        assert main(["convert", str(tmp_path / prefix), "-o", str(tmp_path / "out"), "--to", "marianmt"]) == 2
        assert "does not support" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_folders_that_are_no_marian_models(corpus, tiny_folder, tmp_path, capsys):
    """Pickled weights, which may run code, are not read; a MarianMT model is only imported."""
    opus_folder(tmp_path / "opus", corpus)
    assert main(["convert", str(tmp_path / "opus"), "-o", str(tmp_path / "out"), "--to", "onnx"]) == 2
    assert "import it without --to" in capsys.readouterr().err
    (tmp_path / "opus/model.safetensors").rename(tmp_path / "opus/pytorch_model.bin")
    for folder in (tmp_path / "opus", tmp_path / "nowhere", tiny_folder):
        assert main(["convert", str(folder), "-o", str(tmp_path / "out")]) == 2
        assert str(folder) in capsys.readouterr().err and not (tmp_path / "out").exists()
