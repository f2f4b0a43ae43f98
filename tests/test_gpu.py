"""
What only a GPU can show: every family computes there what it computes on the CPU, trains in bfloat16, is compiled, and
waits for the GPU no more often than MarianMT. Run with `pytest -m gpu`; without a GPU these tests are skipped.
"""

import json
import warnings

import pytest
import torch
from model_contract import TINY, family_model, ragged_batch, scatter_parameters
from transformers import MarianConfig, MarianMTModel
from triton_examples import WITH_KERNELS

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.families import FAMILIES
from recnmt_hf.models import kernels_triton


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

# Kinds of encoders and decoders beside each family's default.
VARIANTS = {
    "nmt_transformer": [{}, {"self_attention_type": "relative"}, {"decoder_autoregression": "ssru"}],
    "biarn_transformer": [{}, {"recurrence_encoder_type": "birnn"}],
    "rpe_transformer": [{"rpe_type": "rpehead"}, {"rpe_type": "mprhead"}],
    "onlstm_transformer": [
        {"encoder_layer_types": ["onlstm", "attention"]},
        {"encoder_layer_types": ["lstm", "lstm"], "encoder_shortcut": False},
    ],
    "rnmt": [{}, {"relation_layers": 0}],
}
CASES = [(name, fields) for name in FAMILIES for fields in VARIANTS.get(name, [{}])]
each_model = pytest.mark.parametrize(
    ("model_type", "fields"), CASES, ids=[" ".join([name, *map(str, fields.values())]) for name, fields in CASES]
)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """cuDNN's recurrent layers round their operands to 11 bits by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def build(model_type, fields, scattered=True):
    """Return a tiny model on the CPU without dropout, with large random parameters or the usual initial ones."""
    small = {"decoder_layers": 2, **FAMILIES[model_type].small}
    small |= {"gcn_edge_dropout": 0.0} if model_type == "gcn_rnmt" else {}
    model = family_model(model_type, **small | fields).eval()
    return scatter_parameters(model) if scattered else model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", WITH_KERNELS, ids=lambda family: family.__name__.rpartition(".")[2])
def test_triton_kernels_agree(family, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = family.example(torch.device("cuda", 0), dtype)[0]
    agreed = [agrees for (_, _, kind), agrees in kernels_triton.agreements.items() if kind == dtype]
    assert tensor.is_cuda and agreed and all(agreed)


def to_gpu(model):
    """Return a copy on the GPU."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.cuda().train(model.training)


def inputs(model, device="cuda", **lengths):
    """Return a batch with all inputs of the model; in a dependency tree, each word depends on the word before."""
    batch = ragged_batch(**lengths)
    for name in getattr(model.get_encoder(), "source_inputs", ()):
        heads = torch.arange(-1, batch["input_ids"].shape[1] - 1).expand_as(batch["input_ids"])
        batch[name] = heads.clamp(min=0) % model.config.num_relations if "relations" in name else heads
    return {name: tensor.to(device) for name, tensor in batch.items()}


def gradients(model, batch, **settings):
    """Return loss and gradients of all parameters, as one vector on the CPU in float64."""
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**batch, **settings).loss
    loss.backward()
    parts = [loss.detach().reshape(1), *(one.grad.flatten() for one in model.parameters() if one.grad is not None)]
    return torch.cat([part.double().cpu() for part in parts])


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


@each_model
@pytest.mark.parametrize("return_logits", [True, False], ids=["logits", "loss only"])
def test_loss_and_gradients_are_those_of_the_cpu(model_type, fields, return_logits):
    model = build(model_type, fields).train(model_type != "vrnmt")  # which draws numbers in training
    settings = {"return_logits": return_logits, "label_smoothing": 0.1}
    expected = gradients(model.double(), inputs(model, "cpu"), **settings)
    found = gradients(to_gpu(model.float()), inputs(model), **settings)
    assert relative_error(found, expected) < 1e-4


@each_model
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def test_translations_are_those_of_the_cpu(model_type, fields, cache):
    model = build(model_type, fields).double()
    settings = {"num_beams": 4, "max_new_tokens": 8, "output_scores": True, "return_dict_in_generate": True}
    batches = {device: inputs(model, device) for device in ("cpu", "cuda")}
    for batch in batches.values():
        del batch["labels"]
    expected = model.generate(**batches["cpu"], **settings)
    found = to_gpu(model).double().generate(**batches["cuda"], **settings, **cache, disable_compile=True)
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    # Scores are summed in float32.
    torch.testing.assert_close(found.sequences_scores.cpu(), expected.sequences_scores, atol=1e-6, rtol=1e-6)


@each_model
def test_training_in_bfloat16_learns_a_batch(model_type, fields):
    model = build(model_type, fields, scattered=False).cuda().train()
    batch, losses = inputs(model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(60):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch, return_logits=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]


@each_model
def test_compiled_training_computes_the_same(model_type, fields):
    model = build(model_type, fields).cuda().train()
    batch = inputs(model)
    expected = gradients(model, batch)
    torch._dynamo.reset()
    assert relative_error(gradients(torch.compile(model), batch), expected) < 1e-4


@each_model
def test_compiled_generation_with_a_static_cache_computes_the_same(model_type, fields):
    """As transformers compiles it, with CUDA graphs; two sources of different lengths."""
    model = build(model_type, fields).cuda()
    torch._dynamo.reset()
    for lengths in ((7, 4, 1), (5, 5, 2)):
        batch = inputs(model, lengths=lengths)
        del batch["labels"]
        settings = {"max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
        expected = model.generate(**batch, **settings)
        found = model.generate(**batch, **settings, cache_implementation="static")
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-3, rtol=1e-3)


def waits_per_step(model, beams):
    """Return the number of times that a step of generation waits for the GPU, counted by torch."""
    batch, counts = inputs(model), []
    del batch["labels"]
    for steps in (10, 20):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model.generate(**batch, num_beams=beams, min_new_tokens=steps, max_new_tokens=steps)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(warning.message) for warning in caught))
    return (counts[1] - counts[0]) / 10


@each_model
@pytest.mark.parametrize("beams", [1, 4])
def test_a_step_waits_for_the_gpu_no_more_often_than_marian(model_type, fields, beams):
    marian = MarianMTModel(
        MarianConfig(**TINY, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, forced_eos_token_id=None)
    )
    assert waits_per_step(build(model_type, fields).cuda(), beams) <= waits_per_step(marian.cuda().eval(), beams)


def test_own_search_finds_what_it_finds_on_the_cpu(tiny_folder, corpus):
    sources = [source for source, *_ in corpus["test"]]
    options = recnmt_hf.DecodingOptions(beams=4, max_tokens=256)
    on_cpu, on_gpu = (
        list(recnmt_hf.Translator.from_pretrained(tiny_folder, device=device, check=False).translate(sources, options))
        for device in ("cpu", "cuda")
    )
    same = [found.text == expected.text for found, expected in zip(on_gpu, on_cpu, strict=True)]
    assert sum(same) >= 0.9 * len(same)  # the rest are ties within rounding
    for found, expected, equal in zip(on_gpu, on_cpu, same, strict=True):
        assert not equal or abs(found.score - expected.score) < 1e-3


def test_any_number_of_sentences_may_end_in_the_same_step(tiny_folder, corpus):
    """A GPU's mean of ones is not always one, so that the search must count."""
    translator = recnmt_hf.Translator.from_pretrained(tiny_folder, device="cuda", check=False)
    bias = torch.zeros(1, translator.model.config.vocab_size, device="cuda")
    bias[:, translator.model.config.eos_token_id] = 1e4
    translator.model.final_logits_bias = bias
    sources = [source for source, *_ in corpus["train"]]
    for count in range(1, 100):
        for beams in (1, 4):
            options = recnmt_hf.DecodingOptions(beams=beams, max_tokens=100_000)
            found = list(translator.translate(sources[:count], options, scores=False, warn_short=False))
            assert [one.text for one in found] == [""] * count


def test_a_run_on_the_gpu_is_resumed_and_translates(tmp_path, repository, monkeypatch):
    """The quickstart's recipe, stopped and resumed; its evidence names the GPU."""
    monkeypatch.chdir(tmp_path)
    recipe, output = str(repository / "scripts/recipes/quickstart.yaml"), tmp_path / "run"
    short = ["training.bf16=true", "training.eval_steps=20", "training.save_steps=20"]
    main(["train", recipe, *short, "training.max_steps=20", "-o", str(output)])
    main(["train", recipe, *short, "training.max_steps=40", "-o", str(output), "--resume"])
    evidence = json.loads((output / "model" / "evidence.json").read_text())
    assert evidence["training"]["hardware"] == torch.cuda.get_device_name()
    source = tmp_path / "source"
    source.write_text("the dog sleeps\n")
    main(["translate", str(output / "model"), "--input", str(source), "--output", str(tmp_path / "found")])
    assert len((tmp_path / "found").read_text().splitlines()) == 1
