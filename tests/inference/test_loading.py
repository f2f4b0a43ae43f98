"""Loading models: errors about devices and folders name usable ones."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from user_errors import rejects

import recnmt_hf
from recnmt_hf import Translator
from recnmt_hf._loading_errors import folder_of_model
from recnmt_hf.errors import MissingFileError, UserError
from recnmt_hf.inference.devices import resolve_device
from recnmt_hf.inference.loading import load_model, missing_model_error


@pytest.mark.parametrize("device", ["tpu", "meta", torch.device("meta"), "cpu:x"], ids=str)
def test_unavailable_devices_are_rejected(device):
    with rejects(device, field="device"):
        resolve_device(device)


def test_available_devices(monkeypatch):
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    for there, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert resolve_device() == torch.device(expected)


def test_errors_name_a_model_nearby(tmp_path):
    def near(path):
        error = missing_model_error(str(path))
        assert isinstance(error, FileNotFoundError) and error.field == str(path)
        return next(iter(re.findall(r"is not a model's folder, but (.*) is\.", str(error))), None)

    (tmp_path / "first" / "checkpoint-9").mkdir(parents=True)
    (tmp_path / "first" / "checkpoint-9" / "config.json").write_text("{}")
    assert near(tmp_path / "first") == str(tmp_path / "first" / "checkpoint-9")
    assert near(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "checkpoint-11"):
        (tmp_path / name).mkdir()
        if name != "checkpoint-11":
            (tmp_path / name / "config.json").write_text("{}")
    assert near(tmp_path) == str(tmp_path / "checkpoint-10")
    with rejects(field="", kind=MissingFileError):
        load_model("")


def test_the_folder_of_a_run_is_that_of_its_model(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "run/model")
    run, model = str(tmp_path / "run"), str(tmp_path / "run/model")
    assert folder_of_model(run) == folder_of_model(model) == model
    assert [folder_of_model(name) for name in ("", "user/name", "missing")] == ["", "user/name", "missing"]
    found = [Translator.from_pretrained(path, device="cpu")("a b")[0].text for path in (run, model)]
    pipe = recnmt_hf.pipeline("translation", run, device="cpu")
    assert found[0] == found[1] == pipe("a b")[0]["translation_text"]
    recipe = recnmt_hf.Recipe(model={"init_from": run})
    assert recipe.model.init_from == model and recnmt_hf.Recipe(tokenizer={"source": run}).tokenizer.source == model


def test_token_ids_that_generation_settings_lack_are_those_of_the_configuration(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "model")
    expected = Translator.from_pretrained(tiny_folder)("The dog sleeps.")
    (tmp_path / "model/generation_config.json").write_text('{"num_beams": 4}')
    assert Translator.from_pretrained(tmp_path / "model")("The dog sleeps.") == expected


def test_arguments_of_loading(tiny_folder, tmp_path):
    assert {each.dtype for each in load_model(tiny_folder, "cpu").parameters()} == {torch.float32}
    model = load_model(str(tiny_folder), "cpu", torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16} and not model.training
    model.save_pretrained(tmp_path)
    assert {each.dtype for each in load_model(tmp_path, "cpu").parameters()} == {torch.bfloat16}, "as saved"
    for device in ("tpu", "cuda:999"):
        with rejects(field="device"):
            load_model(tiny_folder, device)
    eager = load_model(tiny_folder, "cpu", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager", "what else is given goes to from_pretrained"


def test_files_are_checked_by_default(tiny_folder, tmp_path):
    """Pickled weights are never loaded; a truncated file is reported with its folder."""
    folder = shutil.copytree(tiny_folder, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    del weights["model.encoder.layers.0.fc1.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with rejects("do not match its config.json"):
        load_model(folder, "cpu")
    assert load_model(folder, "cpu", check=False).model.encoder.layers[0].fc1.weight.isfinite().all()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with rejects(field=str(folder)):
        load_model(folder, "cpu")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with rejects(field=str(folder)):
        load_model(folder, "cpu")


NAMES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "special_tokens_map.json")


@pytest.mark.parametrize("name", [*NAMES, "evidence.json"])
def test_files_without_an_end_are_not_read(tiny_folder, tmp_path, name):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=re.escape(str(folder))):
        Translator.from_pretrained(folder)


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": False}])
def test_code_of_a_folder_is_not_run_and_there_is_no_prompt(tmp_path, monkeypatch, trust):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    (tmp_path / "config.json").write_text('{"model_type": "foreign", "auto_map": {"AutoConfig": "own_code.Own"}}')
    (tmp_path / "own_code.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w').close()\n")
    with rejects(field=str(tmp_path)):
        load_model(tmp_path, "cpu", **trust)
    assert not asked and not (tmp_path / "has_run").exists()


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_the_fastest_type(has_bfloat16, tiny_folder, monkeypatch):
    """Bfloat16, if the processor has it and the model is wide enough."""
    loading = recnmt_hf.inference.loading
    monkeypatch.setattr(loading, "has_bfloat16", lambda: has_bfloat16)
    model = load_model(tiny_folder, "cpu", "fastest")
    assert model.dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)
    monkeypatch.setattr(loading, "LEAST_WIDTH", model.config.d_model + 1)
    assert load_model(tiny_folder, "cpu", "fastest").dtype == torch.float32
