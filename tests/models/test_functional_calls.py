"""Models as functions of their parameters: `torch.func.functional_call`, `grad` and `vmap`, for all families."""

import pytest
import torch
from model_contract import VOCABULARY, family_model, gradients_of, ragged_batch, scatter_parameters
from torch.func import functional_call, grad, vmap
from user_errors import rejects

from recnmt_hf.families import FAMILIES


TIES = [(True, True), (True, False), (False, True), (False, False)]


def tiny_model(model_type, **fields):
    """A tiny model in float64 with large random parameters."""
    return scatter_parameters(family_model(model_type, **fields).double().eval())


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


def loss_of(model, return_logits):
    def loss(parameters, batch):
        return functional_call(model, parameters, kwargs={**batch, "return_logits": return_logits}).loss

    return loss


def backward(model, batch, return_logits):
    model.zero_grad()
    model(**batch, return_logits=return_logits).loss.backward()
    return gradients_of(model)


def assert_all_close(found, expected, tolerance):
    for name, gradient in expected.items():
        largest = max(float(gradient.abs().max()), 1e-3)
        torch.testing.assert_close(found[name] / largest, gradient / largest, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("return_logits", [True, False], ids=["logits", "no-logits"])
@pytest.mark.parametrize("fast", ["0", "1"], ids=["references", "fast"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_grad_equals_backward(model_type, fast, return_logits, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
    model, batch = tiny_model(model_type), ragged_batch()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = grad(loss_of(model, return_logits))(parameters, batch)
    assert_all_close(found, backward(model, batch, return_logits), 1e-10)


@pytest.mark.parametrize("return_logits", [True, False], ids=["logits", "no-logits"])
@pytest.mark.parametrize("fast", ["0", "1"], ids=["references", "fast"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_vmap_gives_the_gradients_of_each_sentence(model_type, fast, return_logits, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", fast)
    model, batch = tiny_model(model_type), ragged_batch()
    if model_type != "rnmt":
        del batch["attention_mask"]  # transformers looks at the values of a mask, which `vmap` forbids
    rows = {name: tensor[:, None] for name, tensor in batch.items()}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = vmap(grad(loss_of(model, return_logits)), in_dims=(None, 0))(parameters, rows)
    for index in range(3):
        row = {name: tensor[index] for name, tensor in rows.items()}
        own = {name: gradient[index] for name, gradient in found.items()}
        assert_all_close(own, backward(model, row, return_logits), 1e-9)


@pytest.mark.parametrize(
    "model_type, return_logits", [("nmt_transformer", False), ("rnmt", True), ("biarn_transformer", True)]
)
def test_second_derivatives_of_fast_paths_are_refused(model_type, return_logits, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", "1")
    model, batch = tiny_model(model_type), ragged_batch()
    model.set_attn_implementation("eager")  # torch's own fused attention has no second derivative either
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def norm(parameters):
        return sum(each.square().sum() for each in grad(loss_of(model, return_logits))(parameters, batch).values())

    with rejects("Set the environment variable"):
        grad(norm)(parameters)
