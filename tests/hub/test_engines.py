"""Base Transformers in CTranslate2: the same probabilities and beams, and the same commands."""

import json

import pytest
import torch

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.inference.backends.ctranslate2_model import CTranslate2Backend


ctranslate2 = pytest.importorskip("ctranslate2", reason="the package ctranslate2 is not installed")

VARIANTS = {
    "post-norm": {},
    "pre-norm": {"normalize_before": True, "activation_function": "gelu", "encoder_layers": 3},
    "marian": {"position_embedding_type": "marian", "final_logits_bias": True, "scale_embedding": False},
    "learned": {"position_embedding_type": "learned", "decoder_attention_heads": 8, "activation_function": "silu"},
    "no-positions": {"encoder_position_embeddings": False, "tie_word_embeddings": False},
    "relative": {"self_attention_type": "relative", "relative_per_head": False, "max_relative_positions": 3},
    "separate": {"share_encoder_decoder_embeddings": False},
}


def saved(folder, corpus, tokenizer, prefix="NMTTransformer", **fields):
    """A folder with a random model that is sure of what it says."""
    torch.manual_seed(7)
    is_joint = fields.get("share_encoder_decoder_embeddings", True)
    target = None if is_joint else train_tokenizer((pair.de for pair in corpus["train"]), "bpe", 300)
    tokenizers = recnmt_hf.TokenizerPair(tokenizer, target)
    sizes = {"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target)}
    sizes |= {"d_model": 32, "max_position_embeddings": 64}
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", **sizes, **fields)
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "layer_norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    if model.final_logits_bias is not None:
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    tokenizers.save(folder)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_probabilities_and_beams(variant, corpus, tokenizer, tmp_path):
    folder = saved(tmp_path / "model", corpus, tokenizer, **VARIANTS[variant])
    assert main(["convert", str(folder), "-o", str(tmp_path / "engine"), "--to", "ctranslate2"]) == 0
    own, engine = (recnmt_hf.Translator.from_pretrained(tmp_path / name) for name in ("model", "engine"))
    assert type(engine.backend) is CTranslate2Backend and engine.model.config.model_type == own.model.config.model_type
    pairs = corpus["test"][:12]
    sources, targets = [pair.en for pair in pairs], [pair.de for pair in pairs]
    for one, other in zip(own.score(sources, targets), engine.score(sources, targets), strict=True):
        found = torch.tensor([one.token_log_probs, other.token_log_probs])
        # Of tokens that a random model finds very unlikely, float32 keeps as many digits.
        torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=5e-6)
    plain = {"length_penalty_type": "hf", "length_penalty": 1.0, "max_length_factor": 0.0, "max_length_extra": 12}
    for beams, settings in ((1, plain), (3, plain), (3, {**plain, "length_penalty": 0.0})):
        stop = {"early_stopping": True} if beams > 1 else {}
        expected = own(sources, beams=beams, num_hypotheses=beams, **settings, generate=stop)
        found = engine(sources, beams=beams, num_hypotheses=beams, **settings)
        for pair in zip(expected, found, strict=True):
            one, other = ([(each.tokens, each.text) for each in translation.hypotheses] for translation in pair)
            assert one == other
            scores = [torch.tensor([each.score for each in translation.hypotheses]) for translation in pair]
            torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-5)


def test_the_command_takes_an_engine_as_a_model(corpus, tokenizer, tmp_path, capsys):
    folder = saved(tmp_path / "model", corpus, tokenizer)
    for kind in ("float32", "int8"):
        place = tmp_path / kind
        assert main(["convert", str(folder), "-o", str(place), "--to", "ctranslate2", "--quantization", kind]) == 0
    (tmp_path / "a.en").write_text("\n".join(pair.en for pair in corpus["test"][:6]) + "\n\n")
    (tmp_path / "a.de").write_text("\n".join(pair.de for pair in corpus["test"][:6]) + "\n\n")
    (tmp_path / "prefix").write_text("Der\n" * 6 + "\n")
    outputs = {}
    for name in ("model", "float32", "int8"):
        words = ["translate", str(tmp_path / name), "-i", str(tmp_path / "a.en"), "--max-length-extra", "3"]
        words += ["--prefix", str(tmp_path / "prefix"), "-o", str(tmp_path / f"{name}.out")]
        assert main([*words, "--beams", "1", "--generate", "no_repeat_ngram_size=2"]) == 0
        outputs[name] = (tmp_path / f"{name}.out").read_text().splitlines()
    assert [line[:3] for line in outputs["int8"]] == ["Der"] * 6 + [""]
    assert outputs["model"] == outputs["float32"]
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("float32", "int8")]
    assert sizes[1] < 0.45 * sizes[0]
    assert json.loads((tmp_path / "int8/recnmt_engine.json").read_text())["quantization"] == "int8"


def test_settings_of_the_model(corpus, tokenizer, tmp_path):
    """The engine follows generation_config.json, as `generate` does."""
    folder = saved(tmp_path / "model", corpus, tokenizer)
    plain = {"length_penalty_type": "hf", "length_penalty": 1.0, "max_length_factor": 0.0, "max_length_extra": 12}
    sources = [pair.en for pair in corpus["test"][:4]]
    usual = recnmt_hf.Translator.from_pretrained(folder)(sources, beams=1, **plain)
    first, second, third = usual[0].hypotheses[0].tokens[:3]
    before = json.loads((folder / "generation_config.json").read_text())
    of_model = [{"suppress_tokens": [first], "no_repeat_ngram_size": 2}, {"suppress_tokens": [2, first]}]
    of_model += [{"bad_words_ids": [[second, third], [first], [2]]}, {"min_length": 7, "repetition_penalty": 1.2}]
    for number, settings in enumerate(of_model):
        (folder / "generation_config.json").write_text(json.dumps(before | settings))
        assert main(["convert", str(folder), "-o", str(tmp_path / f"{number}"), "--to", "ctranslate2"]) == 0
        own, engine = (recnmt_hf.Translator.from_pretrained(path) for path in (folder, tmp_path / f"{number}"))
        expected, found = (
            [each.hypotheses[0].tokens for each in translator(sources, beams=1, **plain)]
            for translator in (own, engine)
        )
        assert found == expected != [each.hypotheses[0].tokens for each in usual]
    settings = json.loads((tmp_path / "0/recnmt_engine.json").read_text())
    settings["generation_config"]["begin_suppress_tokens"] = [first]
    (tmp_path / "0/recnmt_engine.json").write_text(json.dumps(settings))
    engine = recnmt_hf.Translator.from_pretrained(tmp_path / "0")
    with pytest.raises(recnmt_hf.UserError, match="begin_suppress_tokens"):
        engine(sources)


def test_what_the_engine_cannot_do(corpus, tokenizer, tmp_path, capsys):
    wrong = {"self_attention_type": "relative"}  # each head has its own positions
    for number, (prefix, fields) in enumerate((("GRET", {}), ("NMTTransformer", wrong))):
        folder = saved(tmp_path / f"{number}", corpus, tokenizer, prefix, **fields)
        assert main(["convert", str(folder), "-o", str(tmp_path / "out"), "--to", "ctranslate2"]) == 2
        assert "CTranslate2 does not support" in capsys.readouterr().err and not (tmp_path / "out").exists()
    folder = saved(tmp_path / "model", corpus, tokenizer)
    assert main(["convert", str(folder), "-o", str(tmp_path / "engine"), "--to", "ctranslate2"]) == 0
    engine = recnmt_hf.Translator.from_pretrained(tmp_path / "engine")
    for name, value in {"alignments": True, "sequence_bias": [[[5], 1.0]]}.items():
        with pytest.raises(recnmt_hf.UserError, match=name):
            engine("The dog sleeps.", **{name: value})
    with pytest.raises(recnmt_hf.UserError, match="beams"):
        engine("The dog sleeps.", do_sample=True, beams=2)
    other = train_tokenizer((pair.de for pair in corpus["train"]), "word", 50)
    other.save_pretrained(tmp_path / "engine")
    with pytest.raises(recnmt_hf.UserError):
        recnmt_hf.Translator.from_pretrained(tmp_path / "engine")
