"""Every command with an output: folders of models do not change, and interrupted commands leave no files."""

import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from recnmt_hf.commands.main import main


# Command lines with an output, for each argument that names one.
LINES = [
    "train recipe.yaml training.max_steps=1 --output OUTPUT",
    "train --plot run --output OUTPUT",
    "prepare recipe.yaml --output OUTPUT --workers 1",
    "translate model -i one.en --output OUTPUT",
    "score model -s one.en -t one.de --output OUTPUT",
    "evaluate one.de -r one.de --json OUTPUT",
    "align model -s one.en -t one.de --output OUTPUT",
    "align model --text A B --plot OUTPUT",
    "average run --count 3 --output OUTPUT",
    "tokenizer one.en --output OUTPUT",
    "inspect biarn A --output OUTPUT",
    "publish model me/it --dry-run --output OUTPUT",
    "convert model -o OUTPUT --to ctranslate2",
    "convert model -o OUTPUT --to marianmt",
    "convert MARIAN -o OUTPUT",
    "corpus -o OUTPUT --train 3 --validation 1 --test 1 --test-deep 1",
]


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


@pytest.mark.parametrize("line", LINES)
def test_a_model_folder_stays_as_it_is(world, tmp_path, monkeypatch, capfd, line):
    monkeypatch.chdir(world)
    output = shutil.copytree(world / "model", tmp_path / "output")
    before = contents(output)
    words = {"OUTPUT": str(output), "MARIAN": str(tmp_path / "marian")}
    if "MARIAN" in line:
        assert main(["convert", "model", "--to", "marianmt", "-o", words["MARIAN"]]) == 0
    try:
        code = main([words.get(word, word) for word in line.split()])
    except SystemExit as stop:
        code = stop.code
    said = capfd.readouterr().err
    assert code == 2 and "Traceback" not in said and str(output) in said, said
    assert contents(output) == before


@pytest.mark.parametrize("line", LINES)
def test_no_input_is_overwritten_through_a_missing_folder(world, tmp_path, monkeypatch, capfd, line):
    """Writing makes the missing folder of `new/../one.en`, so that the path leads to the input only then."""
    monkeypatch.chdir(tmp_path)
    words = line.split()
    for word in {word for word in words if (world / word).exists()}:
        if (world / word / "config.json").exists() or word == "run":
            Path(word).symlink_to(world / word)
        else:
            (shutil.copytree if (world / word).is_dir() else shutil.copy)(world / word, word)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for path in before:
        given = {"OUTPUT": f"new/../{path}"}
        assert main([given.get(part, part) for part in words]) == 2
        assert "Traceback" not in capfd.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words, patched",
    [
        ("publish model me/it", "hub.publishing.card_of_copy"),
        ("publish model me/it --dry-run -o OUT", "hub.publishing.card_of_copy"),
        ("convert model -o OUT --to onnx", "hub.onnx_graphs.graphs_of"),
        ("average run --count 3 -o OUT", "training.checkpoints.save_file"),
        ("tokenizer one.en -o OUT", "data.tokenization.train_tokenizer"),
        ("corpus -o OUT", "data.generated.generate_corpus"),
        ("translate model -i one.en -o OUT", "commands.arguments.load_translator"),
    ],
)
def test_signals_leave_nothing_behind(world, tmp_path, monkeypatch, capfd, default_handlers, words, patched, number):
    monkeypatch.chdir(world)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = []

    def stop(*arguments, **options):
        before.extend(tmp_path.rglob(".recnmt-*"))
        signal.raise_signal(number)
        signal.raise_signal(number)  # repeated by a launcher
        pytest.fail("the signal was ignored")

    monkeypatch.setattr(f"recnmt_hf.{patched}", stop)
    assert main([each.replace("OUT", str(tmp_path / "out")) for each in words.split()]) == 128 + number
    assert capfd.readouterr().err.strip().endswith(f"recnmt {words.split()[0]}: interrupted.")
    assert before and [path.name for path in tmp_path.rglob("*")] == ["temporary"]
    assert {each: signal.getsignal(each) for each in default_handlers} == default_handlers
