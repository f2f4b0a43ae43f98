"""Every family through a recipe, a card and a probe; a new family needs only its own files and a manifest."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from model_contract import TINY, scatter_parameters
from probing import sentence_vectors

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.families import FAMILIES


STEPS = ["max_steps=2", "save_steps=2", "eval_steps=2", "warmup_steps=1", "max_tokens=256", "bleu_samples=0"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_recipe_a_card_and_a_probe(model_type, repository, cards_of_one_process, tmp_path):
    family, run = FAMILIES[model_type], tmp_path / "run"
    fields = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, **family.small}
    words = [
        "train",
        str(repository / "scripts/recipes/quickstart.yaml"),
        "--output",
        str(run),
        f"model.type={model_type}",
    ]
    words += [f"model.fields.{name}={json.dumps(value)}" for name, value in fields.items()]
    words += ["data.train=[{generated: train, size: 60}]", "data.validation=[{generated: validation, size: 8}]"]
    words += ["test={test: {generated: test, size: 4}}", *(f"training.{step}" for step in STEPS)]
    assert main(words) == 0
    assert family.paper in (run / "model/README.md").read_text()
    translator = recnmt_hf.Translator.from_pretrained(run / "model")
    assert type(translator.model).__name__ == f"{family.prefix}ForConditionalGeneration"
    assert sentence_vectors(translator, ["the dog sleeps .", "we see ."])["final"].shape == (2, 32)


@pytest.mark.parametrize(
    ("model_type", "name"), [(kind, name) for kind, family in FAMILIES.items() for name in family.combinations]
)
def test_mechanisms_that_combine(model_type, name):
    """Every part is trained, and a cached search gives the tokens of one without a cache."""
    family, ids = FAMILIES[model_type], torch.randint(4, 30, (2, 6), generator=torch.Generator().manual_seed(1))
    fields = {**TINY, **family.small, **family.combinations[name]}
    model = family.load_class("ForConditionalGeneration")(family.load_class("Config")(**fields))
    plain = family.load_class("Config")(**{**TINY, **family.small})
    assert model.config.to_diff_dict() != plain.to_diff_dict()
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    scatter_parameters(model.eval().double(), 0.2)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    cached, whole = (torch.stack(model.generate(ids, **options, use_cache=use).logits) for use in (True, False))
    torch.testing.assert_close(cached, whole, atol=1e-10, rtol=0)
    assert cached.std(dim=0).mean() > 1e-4  # the steps differ


MANIFEST = """
prefix: GateToy
paper: Nobody, 2000, *A Gate*
citation: "@misc{nobody}"
"""
CONTRACT = """
from model_contract import ModelContract
from recnmt_hf.families import FAMILIES

FAMILY = FAMILIES["gate_toy"]


class TestGateToy(ModelContract):
    config_class, model_class = FAMILY.load_class("Config"), FAMILY.load_class("ForConditionalGeneration")
    test_learns_short_sequences = test_compiled_graphs_serve_all_lengths = None  # slow
    test_an_exported_graph_is_free_of_batch_and_lengths = test_compiled_by_transformations_of_the_graph = None
"""


@pytest.mark.slow
def test_a_new_family_needs_its_own_files_and_a_manifest(repository, tmp_path):
    """
    The contract, ONNX, transformers' Trainer, recipes, cards, the Hub and probes read the manifest. With recipe, card
    and change log these are seven files, and no shared line.
    """
    for name in ("src", "tests", "scripts"):
        shutil.copytree(repository / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for name in ("configuration", "modeling"):
        shutil.copy(repository / f"tests/models/toys/{name}_gate_toy.py", tmp_path / "src/recnmt_hf/models")
    (tmp_path / "src/recnmt_hf/families/gate_toy.yaml").write_text(MANIFEST)
    (tmp_path / "tests/models/test_gate_toy.py").write_text(CONTRACT)
    files = ["models/test_gate_toy.py", "test_families.py", "hub/test_onnx.py", "hub/test_publishing.py"]
    files.append("training/test_stock_trainer.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "gate_toy or GateToy"]
    result = subprocess.run(
        [*command, *(f"tests/{file}" for file in files)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
