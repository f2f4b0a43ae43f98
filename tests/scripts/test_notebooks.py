"""The notebooks: stored with their outputs, and running."""

import os
import re
import socket

import pytest


nbformat = pytest.importorskip("nbformat", reason="the extra notebooks is not installed")
pytest.importorskip("nbclient", reason="the extra notebooks is not installed")
pytest.importorskip("ipykernel", reason="the extra notebooks is not installed")
pytest.importorskip("sentencepiece", reason="the extra notebooks is not installed")
from execute import execute, make_marian  # noqa: E402


NAMES = ("fine_tune", "look_inside", "own_variant")
PICTURES = {"look_inside": 5}
# Of a machine or a moment: paths, times, dates.
LOCAL = re.compile(r"(?:^|[\s'\"(=])(?:/\w|[A-Z]:\\)|\b\d\d:\d\d\b|\b20\d\d-\d\d-\d\d\b|\d it/s|\dit/s")


@pytest.fixture(scope="module")
def folder(repository):
    return repository / "scripts/notebooks"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(notebook, name):
    """Assert that all cells ran, in order, and that nothing failed, warned, or tells of the machine."""
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == [*range(1, len(code_cells(notebook)) + 1)]
    pictures = 0
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type in ("stream", "execute_result", "display_data"), output
            assert output.get("name") != "stderr", output
            pictures += "image/png" in output.get("data", {})
            text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
            assert not LOCAL.search(text) and socket.gethostname() not in text, text
    assert pictures == PICTURES.get(name, 0)


def test_no_notebook_is_forgotten(folder):
    assert sorted(path.stem for path in folder.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs(folder, name):
    path = folder / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    check_outputs(notebook, name)
    assert path.stat().st_size < 300_000
    assert sum(bool(cell.outputs) for cell in code_cells(notebook)) >= 4
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for target in re.findall(r"\]\(([^)#]+)", "".join(cell.source for cell in notebook.cells)):
        assert target.startswith("http") or (folder / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run(folder, tmp_path, monkeypatch, name):
    """With trainings of two steps and test sets of two sentences."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    settings = {"steps": 2, "sentences": 2}
    if name == "fine_tune":
        settings["model"] = os.path.relpath(make_marian(tmp_path / "marian", 1), tmp_path)
    notebook = execute(folder / f"{name}.ipynb", tmp_path, **settings)
    check_outputs(notebook, name)
    printed = "".join(output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs)
    expected = {
        "fine_tune": "GRETForConditionalGeneration",
        "look_inside": "positions.png: 12 source tokens",
        "own_variant": "GatedMeanForConditionalGeneration of gated_mean.py:",
    }
    assert expected[name] in printed
