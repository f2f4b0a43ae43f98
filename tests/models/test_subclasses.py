"""Subclasses of the models in a user's program: saved and loaded as what they are."""

import importlib
import json
import shutil
import sys

import pytest
import torch
from model_contract import TINY
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, cache_utils
from transformers import initialization as init

import recnmt_hf
from recnmt_hf.families import FAMILIES
from recnmt_hf.models.modeling_nmt_transformer import NMTTransformerEncoder, NMTTransformerModel


SIZES = {**TINY, "decoder_layers": 1}
FILE = """
from recnmt_hf import {prefix}Config, {prefix}ForConditionalGeneration
from torch import nn


class OwnConfig({prefix}Config):
    model_type = "own_{model_type}"

    own_size: int = 3


class OwnForConditionalGeneration({prefix}ForConditionalGeneration):
    config: OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.own = nn.Linear(getattr(config, "own_size", 3), 2)
        self.post_init()


class PlainOwn(OwnForConditionalGeneration):
    config: {prefix}Config
"""


@pytest.fixture(params=FAMILIES)
def own_file(request, tmp_path, monkeypatch):
    """A module with a subclass of a family, and the family's prefix."""
    prefix, name = FAMILIES[request.param].prefix, f"own_{request.param}"
    (tmp_path / f"{name}.py").write_text(FILE.format(prefix=prefix, model_type=request.param))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name), prefix
    del sys.modules[name]


class OwnEncoder(NMTTransformerEncoder):
    """An encoder with parameters of its own, under names of papers, that it does not use."""

    def __init__(self, config):
        super().__init__(config)
        for name in ("scale", "gate", "alpha", "temperature", "weight", "bias", "mean"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
        self.post_init()

    def initialize(self, start):
        for parameter in self.parameters(recurse=False):
            init.ones_(parameter)


class OwnModel(NMTTransformerModel):
    encoder_class = OwnEncoder


def test_unused_parameters_change_nothing_and_are_initialized(tmp_path):
    config = recnmt_hf.NMTTransformerConfig(**SIZES)
    base = NMTTransformerModel(config).eval()
    base.save_pretrained(tmp_path)
    own = OwnModel.from_pretrained(tmp_path).eval()
    assert [parameter.item() for parameter in own.encoder.parameters(recurse=False)] == [1.0] * 7
    ids = torch.tensor([[5, 6, 7, 2]])
    assert torch.equal(own.encoder(ids)[0], base.encoder(ids)[0])


def about(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same(loaded, model):
    assert type(loaded) is type(model)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys() and "own.weight" in expected
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def sharded(model):
    """The model as FSDP leaves it: of a class made by torch."""
    made = type(f"FSDP{type(model).__name__}", (type(model),), {"__module__": "torch.distributed.fsdp"})
    model.__class__ = made
    return model


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_a_class_with_a_model_type_of_its_own(own_file, is_sharded, tmp_path):
    """Registered in the program that saves and loads it: no code is saved, none of the class below it either."""
    module, prefix = own_file
    kind = module.OwnForConditionalGeneration
    config = module.OwnConfig(**SIZES, own_size=5)
    config.auto_map = {  # as of a configuration that was loaded from a folder of the family
        "AutoConfig": f"configuration_{config.model_type.removeprefix('own_')}.{prefix}Config",
        **getattr(recnmt_hf, f"{prefix}ForConditionalGeneration").auto_map(),
    }
    model = kind(config)
    AutoConfig.register(config.model_type, module.OwnConfig, exist_ok=True)
    AutoModelForSeq2SeqLM.register(module.OwnConfig, kind, exist_ok=True)
    (sharded(model) if is_sharded else model).save_pretrained(tmp_path / "model")
    assert type(model).__name__ == ("FSDP" if is_sharded else "") + "OwnForConditionalGeneration"
    model.__class__ = kind
    saved = about(tmp_path / "model")
    assert (saved["model_type"], saved["own_size"]) == (config.model_type, 5)
    assert saved["architectures"] == ["OwnForConditionalGeneration"] and not saved.get("auto_map")
    assert not list((tmp_path / "model").glob("*.py"))
    for loaded in (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model"), kind.from_pretrained(tmp_path / "model")):
        assert type(loaded.config) is module.OwnConfig
        assert_same(loaded, model)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_code_of_a_registered_class_is_saved(own_file, is_sharded, tmp_path, other_python):
    """It loads as remote code where the package is, and the user's file is not."""
    module, _ = own_file
    module.OwnConfig.register_for_auto_class()
    module.OwnForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
    model = module.OwnForConditionalGeneration(module.OwnConfig(**SIZES, own_size=5))
    (sharded(model) if is_sharded else model).save_pretrained(tmp_path / "model")
    file = module.__name__
    assert about(tmp_path / "model")["auto_map"] == {
        "AutoConfig": f"{file}.OwnConfig",
        "AutoModelForSeq2SeqLM": f"{file}.OwnForConditionalGeneration",
    }
    assert [path.name for path in (tmp_path / "model").glob("*.py")] == [f"{file}.py"]
    code = """
        from transformers import AutoModelForSeq2SeqLM
        model = AutoModelForSeq2SeqLM.from_pretrained("model", trust_remote_code=True)
        model.save_pretrained("again")
        again = AutoModelForSeq2SeqLM.from_pretrained("again", trust_remote_code=True)
        found = [type(model).__name__, model.own.weight.tolist(), again.own.weight.tolist()]
    """
    weight = model.own.weight.tolist()
    assert other_python(code, tmp_path) == ["OwnForConditionalGeneration", weight, weight]
    model.__class__ = module.OwnForConditionalGeneration


def test_a_plain_subclass_is_saved_with_the_code_of_its_family(own_file, tmp_path):
    """Its class loads it whole; the Auto classes load the model of its `model_type`, and report its own weights."""
    module, prefix = own_file
    family = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")
    model = module.PlainOwn(getattr(recnmt_hf, f"{prefix}Config")(**SIZES))
    model.save_pretrained(tmp_path / "model")
    saved = about(tmp_path / "model")
    assert saved["architectures"] == ["PlainOwn"]
    assert saved["auto_map"].items() >= family.auto_map().items()
    assert (tmp_path / "model" / f"{family.__module__.rpartition('.')[2]}.py").is_file()
    assert_same(module.PlainOwn.from_pretrained(tmp_path / "model"), model)
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(loaded) is family and set(report["unexpected_keys"]) == {"own.weight", "own.bias"}
    base = AutoModel.from_pretrained(tmp_path / "model")
    assert type(base) is type(model.model)


def test_relative_imports_travel_where_the_package_is_absent(tmp_path, stranger, monkeypatch):
    """A user's file beside copies of the model files that it imports."""
    package = tmp_path / "own_package"
    shutil.copytree(recnmt_hf.models.__path__[0], package)
    code = FILE.format(prefix="RPETransformer", model_type="rpe_transformer").replace(
        "from recnmt_hf import RPETransformerConfig, RPETransformerForConditionalGeneration",
        "from .configuration_rpe_transformer import RPETransformerConfig\n"
        "from .modeling_rpe_transformer import RPETransformerForConditionalGeneration",
    )
    (package / "modeling_own.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    # The layers of a cache that the copied file registers.
    for name in ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING"):
        monkeypatch.setattr(cache_utils, name, dict(getattr(cache_utils, name)))
    own = importlib.import_module("own_package.modeling_own")
    own.OwnConfig.register_for_auto_class()
    own.OwnForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
    model = own.OwnForConditionalGeneration(own.OwnConfig(**SIZES))
    model.save_pretrained(tmp_path / "model")
    code = """
        from transformers import AutoModelForSeq2SeqLM
        model = AutoModelForSeq2SeqLM.from_pretrained("model", trust_remote_code=True)
        found = [type(model).__name__, model.own.weight.tolist()]
    """
    assert stranger(code, tmp_path) == ["OwnForConditionalGeneration", model.own.weight.tolist()]
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        del sys.modules[name]
