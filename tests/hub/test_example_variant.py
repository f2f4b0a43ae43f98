"""The variant outside of the package, `scripts/examples/mean_transformer.py`: from its class to the Hub."""

import importlib
import json

import pytest
import torch
from loopback_hub import ONLINE, loopback_hub
from other_processes import other_process
from transformers import AutoModelForSeq2SeqLM
from user_errors import rejects

from recnmt_hf.hub.card import write_card
from recnmt_hf.inference import Translator
from recnmt_hf.training.building import Architecture, build_config
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


NAME = "mean_transformer:MeanTransformerForConditionalGeneration"
FIELDS = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
PLAN = {
    "model": {"type": NAME, "preset": "tiny", "fields": {**FIELDS, "mean_bias": False}},
    "data": {"train": [{"generated": "train", "size": 60}], "validation": [{"generated": "validation", "size": 6}]},
    "tokenizer": {"kind": "word", "vocab_size": 300},
    "training": {"use_cpu": True, "max_steps": 1, "max_tokens": 400, "bleu_samples": 2, "disable_tqdm": True},
    "average": {"count": 1},
}


@pytest.fixture(scope="module")
def examples(repository):
    """The folder of examples, on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder := str(repository / "scripts/examples"))
        yield folder


@pytest.fixture(scope="module")
def folder(examples, tmp_path_factory):
    """The model of a short run."""
    return train(Recipe(**PLAN), tmp_path_factory.mktemp("mean") / "run")


def test_a_recipe_trains_the_class_that_it_names(folder):
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["model_type"], saved["mean_bias"]) == ("mean_transformer", False)
    kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForSeq2SeqLM": "ForConditionalGeneration"}
    assert saved["auto_map"] == {name: f"mean_transformer.MeanTransformer{kind}" for name, kind in kinds.items()}
    assert (folder / "mean_transformer.py").is_file() and f"type: {NAME}" in (folder.parent / "recipe.yaml").read_text()
    own = importlib.import_module("mean_transformer").MeanTransformerForConditionalGeneration
    assert type(AutoModelForSeq2SeqLM.from_pretrained(folder)) is own
    assert type(Translator.from_pretrained(folder).model) is own
    # Once it is registered, its model_type names it too.
    assert type(build_config(Architecture("mean_transformer"))) is own.config_class
    assert type(build_config(Architecture(NAME.replace(":", ".")))) is own.config_class


OWN_CLASSES = """
import recnmt_hf
class OwnConfig(recnmt_hf.NMTTransformerConfig):
    model_type = "own_transformer"
class OwnForConditionalGeneration(recnmt_hf.NMTTransformerForConditionalGeneration):
    config: OwnConfig
"""


def test_a_class_without_an_own_bare_model(tmp_path, monkeypatch):
    """The class of CONTRIBUTING's example trains, and its card is left to the user."""
    (tmp_path / "own_classes.py").write_text(OWN_CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    model = {"type": "own_classes:OwnForConditionalGeneration", "preset": "tiny", "fields": FIELDS}
    folder = train(Recipe(**{**PLAN, "model": model}), tmp_path / "run")
    own = importlib.import_module("own_classes").OwnForConditionalGeneration
    assert type(AutoModelForSeq2SeqLM.from_pretrained(folder)) is own
    with rejects(field=str(folder)):
        write_card(folder)


def test_it_changes_what_the_encoder_returns(folder):
    """By the mean of the real words, so that padding changes nothing."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).double()
    source = torch.tensor([[5, 6, 7]])
    expected = model.get_encoder()(source).last_hidden_state
    padded = model.get_encoder()(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]])).last_hidden_state
    torch.testing.assert_close(padded[:, :3], expected, atol=1e-10, rtol=0)
    with torch.no_grad():
        model.get_encoder().mean_proj.weight.zero_()
    assert not torch.allclose(model.get_encoder()(source).last_hidden_state, expected)


CODE = """
    import torch
    from transformers import AutoModel, AutoModelForSeq2SeqLM
    model = AutoModelForSeq2SeqLM.from_pretrained({name!r}, trust_remote_code=True)
    base = AutoModel.from_pretrained({name!r}, trust_remote_code=True)
    tokens = model.generate(torch.tensor([[5, 6, 7, 2]]), max_new_tokens=5)
    found = [type(model).__name__, type(base).__name__, tokens.tolist()]
"""


@pytest.mark.slow
def test_it_goes_to_the_hub_and_loads_from_there(folder, examples, tmp_path):
    """Where recnmt_hf is installed and the user's file is absent; unasked, no code of it runs."""
    ids = torch.tensor([[5, 6, 7, 2]])
    tokens = AutoModelForSeq2SeqLM.from_pretrained(folder).generate(ids, max_new_tokens=5).tolist()
    expected = ["MeanTransformerForConditionalGeneration", "MeanTransformerModel", tokens]
    (tmp_path / "home").mkdir()
    with (
        loopback_hub() as (hub, address),
        other_process("other", tmp_path / "home", HF_ENDPOINT=address, **ONLINE) as run,
    ):
        assert run(CODE.format(name=str(folder)), tmp_path) == expected
        publish = f"""
            import sys
            sys.path.insert(0, {examples!r})
            from mean_transformer import MeanTransformerForConditionalGeneration as Model
            found = str(Model.from_pretrained({str(folder)!r}).push_to_hub("tester/mean"))
            sys.path.remove({examples!r})
            del sys.modules["mean_transformer"]
        """
        assert run(publish, tmp_path)
        repository = hub.repositories["tester/mean"]
        assert "mean_transformer.py" in repository.commits[repository.at("main")]
        assert run(CODE.format(name="tester/mean"), tmp_path) == expected


def test_a_command_runs_its_code_only_when_asked(folder, tmp_path, other_python):
    (tmp_path / "input.txt").write_text("the dog sleeps .\n")
    words = ["translate", str(folder), "--input", "input.txt", "--output", "output.txt", "--device", "cpu"]
    code = """
        from recnmt_hf.commands.main import main
        found = main({words!r})
    """
    assert other_python(code.format(words=words), tmp_path) == 2
    assert other_python(code.format(words=[*words, "--trust-remote-code"]), tmp_path) == 0
    assert len((tmp_path / "output.txt").read_text().splitlines()) == 1


def test_a_recipe_is_read_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe(model={"type": "explosive:Model"})
    with pytest.raises(SystemExit, match="imported"):
        build_config(recipe.model)
