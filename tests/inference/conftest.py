"""Random models for tests of translating."""

import pytest
import torch

import recnmt_hf
from recnmt_hf.families import FAMILIES


@pytest.fixture(scope="session")
def sentences(corpus):
    return [pair.en for pair in corpus["test"]][:6]


@pytest.fixture(scope="session")
def random_translator(tokenizer):
    """Return a function that makes a model of a family with large parameters: its hypotheses differ and end."""

    def make(family, tokenizer=tokenizer, std=0.25, ends=2.5, dtype=torch.float32, **fields):
        torch.manual_seed(11)
        fields = {"vocab_size": len(tokenizer), "d_model": 32, **fields}
        config = FAMILIES[family].load_class("Config").from_preset("tiny", **fields)
        model = FAMILIES[family].load_class("ForConditionalGeneration")(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=std)
        with torch.no_grad():  # some translations end early
            model.lm_head.weight[tokenizer.eos_token_id] *= ends
        return recnmt_hf.Translator(model.to(dtype), tokenizer, check=False)

    return make


@pytest.fixture
def translator(random_translator):
    """A Transformer in double precision."""
    return random_translator("nmt_transformer", max_position_embeddings=128, dtype=torch.float64)


@pytest.fixture(scope="module", params=FAMILIES)
def any_family(request, random_translator):
    return random_translator(request.param)
