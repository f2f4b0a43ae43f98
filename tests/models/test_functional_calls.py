"""Models as functions of their parameters: `torch.func.functional_call`, for all families."""

import pytest
import torch
from model_contract import TINY, VOCABULARY, ragged_batch, scatter_parameters
from torch.func import functional_call

import recnmt_hf
from recnmt_hf._registration import FAMILIES


TIES = [(True, True), (True, False), (False, True), (False, False)]
FIELDS = {"gret": {"num_capsules": 4}, "rnmt": {"decoder_layers": 1}}


def tiny_model(model_type, **fields):
    """A tiny model in float64 with large random parameters."""
    prefix = FAMILIES[model_type][0]
    config = getattr(recnmt_hf, f"{prefix}Config")(**TINY | FIELDS.get(model_type, {}) | fields)
    return scatter_parameters(getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config).double().eval())


@pytest.mark.parametrize("share, tie", TIES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_other_parameters_leave_a_model_as_it_is(model_type, share, tie):
    model = tiny_model(model_type, share_encoder_decoder_embeddings=share, tie_word_embeddings=tie)
    if share:
        model.resize_token_embeddings(VOCABULARY + 3)
    batch = ragged_batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    owners = dict(model.named_parameters(remove_duplicate=False))
    expected = model(**batch).logits
    other = {name: parameter.detach() / 2 for name, parameter in model.named_parameters()}
    found = functional_call(model, other, kwargs=batch).logits
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is owners[name], name
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(**batch).logits, expected)
    model.load_state_dict(other, strict=False)
    torch.testing.assert_close(found, model(**batch).logits, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(found, expected)


def test_sharding_finds_the_shared_embedding_in_one_module():
    """accelerate puts the module of the input embedding into a group of its own; torch wants all its owners there."""
    model = tiny_model("nmt_transformer")
    model.model.encoder.layers[0].unshard = None  # as of a layer that FSDP has sharded
    embeddings = model.get_input_embeddings()
    assert embeddings is model.model.shared is model.model.encoder.embed_tokens is model.model.decoder.embed_tokens
