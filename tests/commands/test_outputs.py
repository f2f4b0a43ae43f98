"""Every command with an output: folders of models do not change, and interrupted commands leave no files."""

import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from recnmt_hf.commands.main import COMMANDS, build_parser, main


# Arguments that name an output, by command, with command lines that pass OUTPUT.
OUTPUTS = {
    ("train", "output"): "recipe.yaml training.max_steps=1 --output OUTPUT; --plot run --output OUTPUT",
    ("prepare", "output"): "recipe.yaml --output OUTPUT --workers 1",
    ("translate", "output"): "model -i one.en --output OUTPUT",
    ("score", "output"): "model -s one.en -t one.de --output OUTPUT",
    ("evaluate", "json"): "one.de -r one.de --json OUTPUT",
    ("align", "output"): "model -s one.en -t one.de --output OUTPUT",
    ("align", "plot"): "model --text A B --plot OUTPUT",
    ("average", "output"): "run --count 3 --output OUTPUT",
    ("tokenizer", "output"): "one.en --output OUTPUT",
    ("inspect", "output"): "biarn A --output OUTPUT",
    ("publish", "output"): "model me/it --dry-run --output OUTPUT",
    ("convert", "output"): "model -o OUTPUT --to ctranslate2; model -o OUTPUT --to marianmt; MARIAN -o OUTPUT",
    ("corpus", "output"): "-o OUTPUT --train 3 --validation 1 --test 1 --test-deep 1",
}
LINES = [(*key, line) for key, lines in OUTPUTS.items() for line in lines.split("; ")]
# Arguments whose help mentions writing but which are not outputs, such as the folder of the model.
NO_OUTPUTS = {
    *(("test", "model"), ("publish", "card_only"), ("publish", "dry_run"), ("train", "plot")),
    *(("translate", "buffer"), ("test", "buffer")),
}


def arguments():
    """Yield each command with its arguments."""
    for command in COMMANDS:
        choices = [action.choices for action in build_parser(command)._actions if action.dest == "command"]
        for action in choices[0][command]._actions:
            yield command, action


def test_the_table_has_every_output():
    """Outputs are found by name and help; a new one needs a line in the table."""
    found = {
        (command, action.dest)
        for command, action in arguments()
        if action.dest in ("output", "json", "plot", "cache")
        or re.search(r"\b(writes?|written|keeps?|kept|gets?|a new folder)\b", action.help or "")
    }
    assert found == OUTPUTS.keys() | NO_OUTPUTS


def contents(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in folder.rglob("*")
    }


@pytest.mark.parametrize("command, name, line", LINES, ids=[f"{command} {line}" for command, _, line in LINES])
def test_a_model_folder_stays_as_it_is(world, tmp_path, monkeypatch, capfd, command, name, line):
    monkeypatch.chdir(world)
    output = shutil.copytree(world / "model", tmp_path / "output")
    before = contents(output)
    words = {"OUTPUT": str(output), "NEW": str(tmp_path / "new"), "MARIAN": str(tmp_path / "marian")}
    if "MARIAN" in line:
        assert main(["convert", "model", "--to", "marianmt", "-o", words["MARIAN"]]) == 0
    try:
        code = main([command, *(words.get(word, word) for word in line.split())])
    except SystemExit as stop:
        code = stop.code
    said = capfd.readouterr().err
    assert code == 2 and "Traceback" not in said and str(output) in said, said
    assert contents(output) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command, name, line", LINES, ids=[f"{command} {line}" for command, _, line in LINES])
def test_no_input_is_overwritten_through_a_missing_folder(world, tmp_path, monkeypatch, capfd, command, name, line):
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
        given = {"OUTPUT": f"new/../{path}", "NEW": "fresh"}
        assert main([command, *(given.get(part, part) for part in words)]) == 2
        assert "Traceback" not in capfd.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


MODELS = {command: line for command, _, line in reversed(LINES) if "model" in line.split()}
MODELS["test"] = "model --set one one.en one.de"
del MODELS["publish"]  # slow


@pytest.mark.parametrize("command", MODELS)
def test_the_folder_of_a_run_is_that_of_its_model(world, tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    for name in ("one.en", "one.de"):
        shutil.copy(world / name, name)
    shutil.copytree(world / "model", "model")
    shutil.copytree(world / "model", "run/model")
    said = []
    for model, output in (("model", "first"), ("run", "second")):
        words = {"model": model, "OUTPUT": f"{output}.png" if "plot" in MODELS[command] else output}
        assert main([command, *(words.get(word, word) for word in MODELS[command].split())]) == 0
        said.append(capfd.readouterr().out.replace("run/model", "model").replace("run", "model"))
    assert said[0].replace("first", "second") == said[1]


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def default_handlers():
    """Install the handlers of a foreground process; tests in the background inherit ignored signals."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield handlers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "number, code, word", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize(
    "words, patched",
    [
        ("publish model me/it", "hub.publishing.card_of_copy"),
        ("publish model me/it --dry-run -o OUT", "hub.publishing.card_of_copy"),
        ("convert model -o OUT --to onnx", "hub.onnx_graphs.graphs_of"),
        ("average run --count 3 -o OUT", "training.checkpoints.save_file"),
        ("tokenizer one.en -o OUT", "data.tokenization.train_tokenizer"),
        ("corpus -o OUT", "data.generated.generate_corpus"),
        ("translate model -i one.en -o OUT/a.txt", "commands.arguments.load_translator"),
    ],
)
def test_signals_leave_nothing_behind(
    world, tmp_path, monkeypatch, capfd, default_handlers, words, patched, number, code, word
):
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
    assert main([each.replace("OUT", str(tmp_path / "out")) for each in words.split()]) == code
    assert capfd.readouterr().err.strip().endswith(f"recnmt {words.split()[0]}: {word}.")
    assert before and [path.name for path in tmp_path.rglob("*")] == ["temporary"]
    assert {each: signal.getsignal(each) for each in default_handlers} == default_handlers
