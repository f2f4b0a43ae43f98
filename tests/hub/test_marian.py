"""MarianMT models taken over: the same logits, translations and scores."""

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

import recnmt_hf


BASE = {
    "d_model": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 41,
    "pad_token_id": 40,
    "eos_token_id": 0,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 40,
    "max_position_embeddings": 64,
}
SEPARATE = {
    "decoder_vocab_size": 37,
    "share_encoder_decoder_embeddings": False,
    "pad_token_id": 36,
    "decoder_start_token_id": 36,
}
CONFIGS = {
    "shared": {"scale_embedding": True},
    "unscaled": {"scale_embedding": False},
    "deep-encoder": {"encoder_layers": 3, "decoder_layers": 1, "activation_function": "swish"},
    "relu": {"activation_function": "relu", "decoder_ffn_dim": 64, "decoder_attention_heads": 2},
    "separate": SEPARATE,
    "separate-untied": {**SEPARATE, "tie_word_embeddings": False},
}


@pytest.fixture(params=CONFIGS)
def marian(request):
    torch.manual_seed(3)
    model = MarianMTModel(MarianConfig(**{**BASE, **CONFIGS[request.param]})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.25)
        model.final_logits_bias.normal_(std=0.5)
    return model


def batch():
    source = torch.randint(1, 36, (3, 7))
    mask = (torch.arange(7)[None, :] < torch.tensor([[7], [4], [2]])).long()
    return {"input_ids": source, "attention_mask": mask}


def test_logits_agree(marian):
    model = recnmt_hf.from_marian(marian)
    target = torch.randint(1, 36, (3, 5))
    expected = marian(**batch(), decoder_input_ids=target).logits
    torch.manual_seed(0)
    torch.testing.assert_close(model(**batch(), decoder_input_ids=target).logits.shape, expected.shape)
    inputs = batch()
    torch.testing.assert_close(
        model(**inputs, decoder_input_ids=target).logits,
        marian(**inputs, decoder_input_ids=target).logits,
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("settings", [{}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7}])
def test_translations_and_scores_are_equal(marian, settings):
    model = recnmt_hf.from_marian(marian)
    inputs = batch()
    if settings and marian.config.vocab_size != marian.config.decoder_vocab_size:
        try:
            marian.generate(**inputs, max_new_tokens=2, num_beams=2)
        except RuntimeError:
            pytest.skip("this transformers release sizes MarianMT's beam search by the source vocabulary")
    found = [
        each.generate(
            **inputs, max_new_tokens=9, do_sample=False, output_scores=True, return_dict_in_generate=True, **settings
        )
        for each in (marian, model)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    if settings:
        torch.testing.assert_close(found[0].sequences_scores, found[1].sequences_scores, atol=1e-5, rtol=0)


def test_from_a_folder_and_saved_again(marian, tmp_path):
    marian.save_pretrained(tmp_path / "marian")
    model = recnmt_hf.from_marian(tmp_path / "marian")
    model.save_pretrained(tmp_path / "own")
    loaded = recnmt_hf.NMTTransformerForConditionalGeneration.from_pretrained(tmp_path / "own").eval()
    inputs, target = batch(), torch.randint(1, 36, (3, 5))
    assert torch.equal(
        loaded(**inputs, decoder_input_ids=target).logits, model(**inputs, decoder_input_ids=target).logits
    )
    assert loaded.final_logits_bias.abs().sum() > 0


def test_a_model_with_other_parts_is_refused(marian):
    marian.model.encoder.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"model\.encoder\.extra\.bias.* has no place"):
        recnmt_hf.from_marian(marian)


def test_damaged_weights_are_refused(tmp_path):
    """transformers would fill them up with random numbers, and only report it."""
    from safetensors.torch import load_file, save_file

    MarianMTModel(MarianConfig(**BASE)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for change, message in (
        ({"model.encoder.layers.0.fc1.weight": None}, "is missing"),
        ({"model.encoder.layers.0.fc1.weight": torch.zeros(3, 3)}, "another shape"),
        ({"model.encoder.gate.weight": torch.zeros(3, 3)}, "no place in the model"),
    ):
        changed = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"{message}.*Remedy"):
            recnmt_hf.from_marian(tmp_path)


def test_marian_translates_control_tokens_as_text(tmp_path):
    """A tokenizer of another model, which takes them for its own; Python tokenizers too."""
    from transformers import ByT5Tokenizer

    config = {**BASE, "vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    tokenizer = ByT5Tokenizer()
    translator = recnmt_hf.Translator(recnmt_hf.from_marian(MarianMTModel(MarianConfig(**config))), tokenizer)
    assert tokenizer("a</s>b")["input_ids"].count(1) == 2
    assert translator.encode_source("a</s>b").count(1) == translator.encode_target("<pad></s>").count(1) == 1
    assert 0 not in translator.encode_target("<pad></s>")
    assert translator.score(["a</s>"], ["<pad>"])[0].log_prob < 0
