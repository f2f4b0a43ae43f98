"""Spaces with the page of `recnmt demo`: what they hold, that they run, and uploading them."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from loopback_hub import ONLINE, loopback_hub, upload
from other_processes import other_process
from user_errors import rejects

import recnmt_hf
from recnmt_hf.hub.publishing import SPACE_FILES, files_of, is_allowed, prepare_space, requirements


gradio = pytest.importorskip("gradio")


@pytest.fixture(scope="module")
def space(tiny_folder, tmp_path_factory):
    return prepare_space([str(tiny_folder)], tmp_path_factory.mktemp("spaces") / "space", "tester/page", "mit")


def test_what_a_space_holds(space, tiny_folder):
    names = set(files_of(space))
    own = tiny_folder.parent.name
    assert {name for name in names if not name.startswith("models/")} == set(SPACE_FILES)
    assert len((space / "app.py").read_text().splitlines()) <= 20
    assert f"models/{own}/model.safetensors" in names
    assert not any(name.endswith(".py") for name in names - {"app.py"})
    settings = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert (settings["sdk"], settings["app_file"], settings["license"]) == ("gradio", "app.py", "mit")
    assert settings["sdk_version"] == gradio.__version__ and len(settings["short_description"]) <= 60
    pins = (space / "requirements.txt").read_text().splitlines()[1:]
    assert {f"gradio=={gradio.__version__}", f"recnmt-hf=={recnmt_hf.__version__}"} <= set(pins)
    assert all("==" in pin and "+" not in pin for pin in pins)
    for name in (f"models/{own}/secret.bin", "models/README.md", "other.py"):
        assert not is_allowed(name, "space")


@pytest.mark.slow
def test_a_space_runs(space, tmp_path):
    """`python app.py` serves the page."""
    packages = str(Path(recnmt_hf.__file__).parents[1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    own = {"PYTHONPATH": packages, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    settings = {"cwd": space, "env": {**os.environ, **own, "GRADIO_SERVER_PORT": port}, "text": True}
    before = files_of(space)
    with (
        open(tmp_path / "errors.txt", "w+") as errors,
        subprocess.Popen([sys.executable, "-B", "app.py"], stdout=subprocess.PIPE, stderr=errors, **settings) as page,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            assert address in page.stdout.readline(), (tmp_path / "errors.txt").read_text()[-3000:]
            with urllib.request.urlopen(address) as answer:
                assert answer.status == 200 and b"gradio" in answer.read()
        finally:
            page.terminate()
    assert files_of(space) == before


def test_requirements_follow_the_tokenizers():
    pytest.importorskip("sentencepiece")
    further = set(requirements(["models/opus/source.spm"])) - set(requirements(["tokenizer.json"]))
    assert further == {f"{name}=={metadata.version(name)}" for name in ("sacremoses", "sentencepiece")}


@pytest.mark.slow
def test_uploading_a_space(space, tiny_folder, tmp_path):
    """A second upload sends what changed; a model of the Hub keeps its commit; a Space of somebody else stays."""
    with (
        loopback_hub() as (hub, address),
        other_process("publisher", tmp_path, HF_ENDPOINT=address, **ONLINE) as publisher,
    ):

        def send(folder, models=(), **to):
            return upload(publisher, hub, folder, models, **{"name": "tester/page", "kind": "space", **to})

        said, sent = send(space, private=True, tag="v1")
        assert f"{address}/" in said and set(sent) == set(files_of(space))
        assert hub.repositories["tester/page"].private and send(space)[1] == []
        card = f"models/{tiny_folder.parent.name}/README.md"
        (space / card).write_text("A card.\n")
        assert send(space)[1] == [card]

        code = f"""
            from recnmt_hf import NMTTransformerForConditionalGeneration as Model
            found = str(Model.from_pretrained({str(tiny_folder)!r}).push_to_hub("tester/small"))
        """
        assert publisher(code, tmp_path)
        said, _ = send(tmp_path / "second", ["tester/small"])
        assert f"{address}/" in said, said
        repository = hub.repositories["tester/page"]
        files = repository.commits[repository.at("main")]
        assert not any(name.startswith("models/") for name in files)  # that of the first upload is gone
        places = json.loads(files["recnmt_space.json"])
        card = yaml.safe_load(files["README.md"].decode().split("---")[1])
        small = hub.repositories["tester/small"]
        assert places == {"small": ["tester/small", small.at("main")]} and card["models"] == ["tester/small"]
        own = small.commits[small.at("main")]  # a model's own push has its code, and a card with its name
        assert "modeling_nmt_transformer.py" in own and b'"tester/small"' in own["README.md"]
        assert send(tmp_path / "third", ["tester/unknown"])[0].startswith("tester/unknown: ")
        assert not (tmp_path / "third").exists()
        assert "has files that recnmt publish did not" in send(space, name="tester/small")[0]


def test_models_of_one_name(tiny_folder, tmp_path):
    with rejects("another model has the name"):
        prepare_space([str(tiny_folder), str(tiny_folder)], tmp_path / "out", "me/x")
    assert not (tmp_path / "out").exists()
