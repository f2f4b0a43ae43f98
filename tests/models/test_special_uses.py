"""Models with other tools: compiled adapters, frozen parts, offloaded weights, wrapped modules, caches of one's own."""

import pytest
import torch
from accelerate import cpu_offload
from model_contract import family_model, scatter_parameters
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from recnmt_hf.families import FAMILIES


SOURCE, TARGET = torch.tensor([[5, 6, 7, 8, 2], [9, 5, 2, 0, 0]]), torch.tensor([[1, 5, 6, 7], [1, 8, 9, 5]])
MASK = (SOURCE != 0).long()
RECURRENT = ["rnmt", "vrnmt", "gcn_rnmt"]


def build(model_type, **settings):
    return scatter_parameters(family_model(model_type, **settings).eval())


def inputs_of(model_type):
    trees = {"dependency_heads": torch.tensor([[1, 2, -1, 2, 3], [1, -1, 1, -1, -1]])}
    inputs = {"input_ids": SOURCE, "attention_mask": MASK, "decoder_input_ids": TARGET}
    return inputs | (trees if model_type == "gcn_rnmt" else {})


LAYERS = {"nmt_transformer": "v_proj", "rnmt": "pair_layers.0", "biarn_transformer": "q_proj", "gret": "capsule_proj"}


@pytest.mark.parametrize(("model_type", "layer"), LAYERS.items())
def test_compiled_models_have_their_adapters(model_type, layer):
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    model = peft.get_peft_model(build(model_type), peft.LoraConfig(target_modules=[layer], r=2, lora_alpha=32))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter.data, std=0.3)
    inputs = inputs_of(model_type)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        compiled = torch.compile(model, backend="eager")(**inputs).logits
        with model.disable_adapter():
            plain = model(**inputs).logits
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_gradients_pass_frozen_layers(model_type, monkeypatch):
    """Only the embeddings are trained: fast kernels pass the gradient on as the reference does."""
    sizes = {} if model_type == "gret" else {"d_model": 128}
    model, gradients = family_model(model_type, **sizes).eval(), []
    model.requires_grad_(False)
    embeddings = model.get_input_embeddings().weight.requires_grad_(True)
    inputs = {name: value.repeat(8, 1) for name, value in inputs_of(model_type).items()}  # batches for wide kernels
    for paths in ("1", "0"):
        monkeypatch.setenv("RECNMT_FAST_PATHS", paths)
        torch.manual_seed(1)  # VRNMT draws
        loss = model(**inputs, labels=TARGET.repeat(8, 1)).loss
        gradients.append(torch.autograd.grad(loss, embeddings)[0])
    fast, slow = gradients
    assert (fast - slow).norm() < 1e-3 * slow.norm()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_offloaded_weights(model_type):
    """accelerate loads the weights of a module for its `forward` alone."""
    model, inputs = build(model_type), inputs_of(model_type)
    outputs = []
    for offloads in (False, True):
        if offloads:
            cpu_offload(model, torch.device("cpu"))
        torch.manual_seed(1)
        with torch.no_grad():
            outputs.append(model(**inputs, output_attentions=True).logits)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)


def test_a_tied_output_is_saved_whatever_the_configuration_says(tmp_path):
    """Merging an adapter sets `tie_word_embeddings` to False where source and target have separate vocabularies."""
    sizes = {"vocab_size": 20, "decoder_vocab_size": 24, "share_encoder_decoder_embeddings": False}
    model = build("nmt_transformer", **sizes)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    inputs = inputs_of("nmt_transformer")
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_states_by_index(model_type):
    model, inputs = build(model_type), inputs_of(model_type)
    with torch.no_grad():
        every, first = (model(**inputs, output_hidden_states=choice) for choice in (True, 0))
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        states, chosen = getattr(every, name), getattr(first, name)
        assert len(chosen) == len(states) and all(state is None for state in chosen[1:])
        torch.testing.assert_close(chosen[0], states[0], atol=0, rtol=0)


@pytest.mark.parametrize("model_type", ["nmt_transformer", "rpe_transformer", *RECURRENT])
def test_assisted_decoding_with_a_cache_of_ones_own(model_type):
    model, assistant = build(model_type), build(model_type, seed=6)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": 1, "no_repeat_ngram_size": 1}
    expected = model.generate(SOURCE[:1], **settings)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    found = model.generate(SOURCE[:1], assistant_model=assistant, past_key_values=cache, **settings)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "nmt_transformer"])
def test_init_std_is_for_recurrent_matrices_too(model_type):
    family = FAMILIES[model_type]
    fields = {"vocab_size": 60, "init_std": 0.002, **({"init_uniform": None} if model_type in RECURRENT else {})}
    config = family.load_class("Config").from_preset("tiny", **fields)
    model = family.load_class("ForConditionalGeneration")(config)
    spread = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1 and "messages" not in name}
    assert {name: value for name, value in spread.items() if not 0.0015 < value < 0.0025} == {}
