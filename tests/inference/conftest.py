"""Random models for tests of translating."""

import pytest
import torch

import recnmt_hf
from recnmt_hf.families import FAMILIES


@pytest.fixture(scope="session")
def random_translator(tokenizer):
    """Return a function that makes a model of a family whose translations have various lengths."""

    def make(family):
        torch.manual_seed(11)
        prefix = FAMILIES[family].prefix
        config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=len(tokenizer), d_model=32)
        model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
        with torch.no_grad():  # some translations end early
            model.lm_head.weight[tokenizer.eos_token_id] *= 2.5
        return recnmt_hf.Translator(model, tokenizer, check=False)

    return make


@pytest.fixture(scope="module", params=FAMILIES)
def any_family(request, random_translator):
    return random_translator(request.param)
