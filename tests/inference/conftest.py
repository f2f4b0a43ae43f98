"""Random models for tests of translating."""

import pytest
import torch

import recnmt_hf
from recnmt_hf.families import FAMILIES


@pytest.fixture(scope="session")
def enlarged(tiny_folder):
    """Return a function that loads the tiny model with large random parameters, so that hypotheses differ and end."""

    def load(std=0.25, ends=3):
        translator = recnmt_hf.Translator.from_pretrained(tiny_folder, device="cpu")
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in translator.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            translator.model.lm_head.weight[2] *= ends
        translator.model.double()
        return translator

    return load


@pytest.fixture(scope="session")
def sentences(corpus):
    return [pair.en for pair in corpus["test"]][:6]


@pytest.fixture(scope="session")
def random_translator(tokenizer):
    """Return a function that makes a model of a family whose translations have various lengths."""

    def make(family, tokenizer=tokenizer, **fields):
        torch.manual_seed(11)
        fields = {"vocab_size": len(tokenizer), "d_model": 32, **fields}
        config = FAMILIES[family].load_class("Config").from_preset("tiny", **fields)
        model = FAMILIES[family].load_class("ForConditionalGeneration")(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
        with torch.no_grad():  # some translations end early
            model.lm_head.weight[tokenizer.eos_token_id] *= 2.5
        return recnmt_hf.Translator(model, tokenizer, check=False)

    return make


@pytest.fixture(scope="module", params=FAMILIES)
def any_family(request, random_translator):
    return random_translator(request.param)
