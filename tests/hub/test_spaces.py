"""Spaces with the page of `recnmt demo`: what they hold, that they run without this package, and uploading them."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import yaml
from loopback_hub import loopback_hub
from other_processes import other_process
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.hub.publishing import check_contents, files_of
from recnmt_hf.hub.spaces import LONGEST_DESCRIPTION, prepare_space


gradio = pytest.importorskip("gradio")

UPLOAD = """
    from pathlib import Path
    from recnmt_hf.hub.publishing import Destination, upload
    from recnmt_hf.hub.spaces import prepare_space
    from recnmt_hf.models.user_errors import UserError
    try:
        folder = Path({folder!r})
        if not folder.exists():
            prepare_space({models!r}, folder, "tester/page")
        found = upload(folder, Destination(**{to!r}, kind="space"))
    except UserError as error:
        found = f"{{error.code}}: {{error}}"
"""
# Runs the page with the copy of this package in the Space.
RUNS = """
    import json, os, runpy, sys, urllib.request
    sys.path.insert(0, os.getcwd())
    page = runpy.run_path("app.py", run_name="page")
    import recnmt_hf
    from recnmt_hf.demo.serving import serving
    with serving(page["models"]) as blocks:
        answer = urllib.request.urlopen(blocks.local_url).status
    print(json.dumps([os.path.dirname(recnmt_hf.__file__), page["models"], answer]))
"""


@pytest.fixture(scope="module")
def space(tiny_folder, tmp_path_factory):
    return prepare_space([str(tiny_folder)], tmp_path_factory.mktemp("spaces") / "space", "tester/page", "mit")


def test_what_a_space_holds(space, tiny_folder):
    names = {name for name, _ in files_of(space)}
    own = space_model(tiny_folder)
    for name in ("app.py", "requirements.txt", "README.md", "recnmt_hf/__init__.py", "recnmt_hf/demo/page.css"):
        assert name in names
    assert f"models/{own}/model.safetensors" in names and "recnmt_hf/data/generated_lexicon.yaml" in names
    assert not any(name.startswith("models/") and name.endswith(".py") for name in names)
    settings = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert (settings["sdk"], settings["app_file"], settings["license"]) == ("gradio", "app.py", "mit")
    assert settings["sdk_version"] == gradio.__version__ and len(settings["short_description"]) <= LONGEST_DESCRIPTION
    pins = (space / "requirements.txt").read_text().splitlines()[1:]
    assert f"gradio=={gradio.__version__}" in pins and all("==" in pin and "+" not in pin for pin in pins)
    (space / "models" / own / "secret.bin").write_text("x")
    with rejects("publish.file"):
        check_contents(space, "space")
    (space / "models" / own / "secret.bin").unlink()


def space_model(folder):
    return folder.parent.name if folder.name == "model" else folder.name


def test_a_space_runs_without_this_package(space, tmp_path):
    environment = {**os.environ, "PYTHONPATH": "", "HF_HOME": str(tmp_path)}
    code = textwrap.dedent(RUNS)
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=space, env=environment, capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    package, models, status = json.loads(answer.stdout.splitlines()[-1])
    assert package == str(space / "recnmt_hf") and status == 200
    assert models == [str(path) for path in sorted((space / "models").iterdir())]


@pytest.mark.slow
def test_uploading_a_space(space, tiny_folder, tmp_path):
    """A second upload sends what changed; a model of the Hub keeps its commit; a Space of somebody else stays."""
    online = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_fake", "HF_HUB_OFFLINE": "0"}
    with (
        loopback_hub() as (hub, address),
        other_process("publisher", tmp_path, HF_ENDPOINT=address, **online) as publisher,
    ):

        def send(folder, models=(), **to):
            before = len(hub.uploaded)
            to = {"name": "tester/page", **to}
            said = publisher(UPLOAD.format(folder=str(folder), models=list(models), to=to), tmp_path)
            return said, hub.uploaded[before:]

        said, sent = send(space, private=True, tag="v1")
        assert f"{address}/" in said and set(sent) == {name for name, _ in files_of(space)}
        assert hub.repositories["tester/page"].private and send(space)[1] == []
        (space / "models" / space_model(tiny_folder) / "README.md").write_text("A card.\n")
        assert send(space)[1] == [f"models/{space_model(tiny_folder)}/README.md"]

        code = f"""
            from recnmt_hf import NMTTransformerForConditionalGeneration
            NMTTransformerForConditionalGeneration.from_pretrained({str(tiny_folder)!r}).push_to_hub("tester/small")
            found = True
        """
        assert publisher(code, tmp_path)
        said, _ = send(tmp_path / "second", ["tester/small"])
        assert f"{address}/" in said, said
        repository = hub.repositories["tester/page"]
        files = repository.commits[repository.at("main")]
        assert not any(name.startswith("models/") for name in files)  # that of the first upload is gone
        app, card = files["app.py"].decode(), yaml.safe_load(files["README.md"].decode().split("---")[1])
        small = hub.repositories["tester/small"]
        assert f'"small": ["tester/small", "{small.at("main")}"]' in app and card["models"] == ["tester/small"]
        assert "hub.not_found" in send(tmp_path / "third", ["tester/unknown"])[0]
        assert send(space, name="tester/small")[0].startswith("publish.other_space")


def test_wrong_words(tiny_folder, tmp_path, capsys):
    out = tmp_path / "out"
    for words, code in (
        (["--space", "me/x", str(tiny_folder), str(tiny_folder)], "publish.same_name"),
        (["--space", "me/x", str(tmp_path)], "model.no_config"),
        (["--space", "no/such/name", str(tiny_folder)], "hub.name"),
        (["--space", "me/x", str(tiny_folder), "--notes", "a.md"], "usage.excludes"),
        ([str(tiny_folder), str(tiny_folder), "me/x"], "publish.arguments"),
        ([str(tiny_folder)], "publish.arguments"),
    ):
        assert main(["publish", *words, "--dry-run", "--output", str(out)]) == 2
        assert f"[{code}]" in capsys.readouterr().err and not out.exists()
