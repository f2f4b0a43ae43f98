"""Wrong command lines, files and models: exit status and message; nothing is lost or written."""

import contextlib
import errno
import io
import json
import math
import os
import re
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError
from user_errors import rejects

from recnmt_hf.commands.main import COMMANDS, build_parser, main
from recnmt_hf.inference.results import Hypothesis, Translation


# Placeholders of a line feed, an escape sequence, a name that is too long, and half a character.
PLACEHOLDERS = {"{NL}": "\n", "{ESC}": "\x1b", "{LONG}": "x" * 300, "{BYTE}": "\udcff"}


def cases():
    """Yield exit status, standard input, words and a part of standard error of each line."""
    lines = Path(__file__).with_name("hostile_cases.tsv").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if not line.startswith("#"):
            status, stdin, command, part = line.split("\t")
            words = shlex.split(command)
            for name, text in PLACEHOLDERS.items():
                words = [word.replace(name, text) for word in words]
            label = command if stdin == "-" else f"{command} < {stdin}"
            yield pytest.param(int(status), stdin, words, part.replace("{NL}", "\\n"), id=label or "nothing")


def snapshot(folder):
    """Return all files and folders, with the values that change when a file is written."""
    found = {}
    for base, folders, files in os.walk(folder):
        found.update({os.path.join(base, name): None for name in folders})
        for name in files:
            status = os.lstat(os.path.join(base, name))
            found[os.path.join(base, name)] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found


@pytest.mark.parametrize("status, stdin, words, part", list(cases()))
def test_case(world, tmp_path, monkeypatch, capfd, status, stdin, words, part):
    if "ct2" in words:
        pytest.importorskip("ctranslate2", reason="the package ctranslate2 is not installed")
    monkeypatch.chdir(world)
    while words and re.match("[A-Z_]+=", words[0]):  # environment variables, as in a shell
        monkeypatch.setenv(*words[0].split("=", 1))
        words = words[1:]
    before = snapshot(world)
    if status == 0:  # valid commands write outside of the shared folder
        words = [str(tmp_path / word) if word.startswith("out") else word for word in words]
    with open(os.devnull if stdin == "-" else stdin, encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        try:
            result = main(words)
        except SystemExit as stop:
            result = stop.code
    out, err = capfd.readouterr()
    assert result == status, err
    assert "Traceback" not in err and part in err
    assert snapshot(world) == before
    if status:
        assert out == ""
        last = err.rstrip("\n").split("\n")[-1]
        command = words[0] if words and words[0] in err.split(":")[0] else None
        assert last.startswith(f"recnmt {command}: " if command else "recnmt: ")
        assert last.isprintable()


# Command -> a valid command line, to which an option is added.
VALID = {
    "corpus": "-o out",
    "prepare": "recipe.yaml -o out",
    "tokenizer": "one.en -o out",
    "train": "recipe.yaml -o out",
    "average": "run -o out",
    "translate": "model -i one.en",
    "score": "model -s one.en -t one.de",
    "align": "model -s one.en -t one.de",
    "demo": "model",
    "test": "model --set a one.en one.de",
    "evaluate": "one.de -r one.de",
    "publish": "--card-only model",
    "convert": "model -o out --to onnx",
    "inspect": "biarn A",
    "env": "",
}
# Files that are written, and the port, which `recnmt demo` opens.
OUTPUTS = {"output", "json", "plot", "trace"}


def options():
    """Yield each command with its options that take a value."""
    for command in COMMANDS:
        (subparsers,) = (action for action in build_parser(command)._actions if action.dest == "command")
        parser = subparsers.choices[command]
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                metavar = action.metavar or parser._get_formatter()._get_default_metavar_for_optional(action)
                yield command, action, metavar


def refused(command, *words):
    """Return the last line on standard error of a command line with exit status 2."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            status = main([command, *VALID[command].split(), *words])
        except SystemExit as stop:
            status = stop.code
    lines = err.getvalue().splitlines()
    assert status == 2 and out.getvalue() == "", (command, words, lines)
    assert len(lines) == 1 and lines[0].startswith(f"recnmt {command}: ") and lines[0].isprintable(), lines
    return lines[0]


def test_numbers_and_choices_are_checked():
    """A value of every option is either refused, in one line that names the option, or a finite number."""
    checked = 0
    for command, action, metavar in options():
        if metavar != "N" and not action.choices:
            continue
        for value in ("x", "", "nan", "-1", "1e99"):
            flag = max(action.option_strings, key=len)
            words = [command, *VALID[command].split(), f"{flag}={value}"]
            with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
                found = getattr(build_parser(command).parse_args(words), action.dest)
                found = found[0] if isinstance(found, list) else found
                assert isinstance(found, (int, float)) and math.isfinite(found) and value == "-1", words
                continue
            assert flag in refused(command, f"{flag}={value}")
            checked += 1
    assert checked > 300


@pytest.mark.parametrize("command", VALID)
def test_missing_files_and_folders_are_named(world, monkeypatch, command):
    """A file that an option names is missing, or a folder."""
    monkeypatch.chdir(world)
    before = snapshot(world)
    for name, action, metavar in options():
        if name != command or metavar != "FILE":
            continue
        for value in ("missing", "folder"):
            is_output = action.dest in OUTPUTS or (command, action.dest) in OUTPUTS
            if not (is_output and value == "missing"):
                line = refused(command, action.option_strings[0], value)
                assert value in line or "Pass" in line or "require" in line or "no effect" in line
    assert snapshot(world) == before


@pytest.mark.parametrize("name", ["bom.en", "crlf.en", "cr.en", "nul.en", "separators.en", "good.gz", "empty.txt"])
def test_standard_input_equals_a_file(world, monkeypatch, capfd, name):
    """So do a FIFO and process substitution, a pipe under /dev/fd."""
    monkeypatch.chdir(world)
    seen = []

    def translate(sentences, *args, **settings):
        for sentence in sentences:
            seen.append(sentence)
            yield Translation(sentence, [Hypothesis(repr(sentence), 0.0, 0.0)])

    echo = SimpleNamespace(translate=translate)
    monkeypatch.setattr("recnmt_hf.commands.arguments.load_translator", lambda args: echo)
    content = (world / name).read_bytes()

    def translated(*words):
        assert main(["translate", "model", *words]) == 0
        return capfd.readouterr().out

    expected = translated("-i", name)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))
    assert translated() == expected
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        assert translated("-i", f"/dev/fd/{reader}") == expected
    finally:
        os.close(reader)
    assert not any("\ufeff" in sentence or sentence != sentence.strip() for sentence in seen)


@pytest.mark.parametrize("name", ["code", "code-tokenizer"])
def test_foreign_code_runs_only_when_trusted(world, tmp_path, monkeypatch, capfd, name):
    """There is no prompt: text that begins with "y" on standard input is not an answer."""
    import recnmt_hf
    from recnmt_hf.data.tokenization import load_tokenizer
    from recnmt_hf.data.tokenizer_pair import load_target_tokenizer

    monkeypatch.chdir(world)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    marker = world / "code-was-run"
    loaders = [recnmt_hf.Translator.from_pretrained]
    if name == "code-tokenizer":
        (tmp_path / "both").mkdir()
        (tmp_path / "both" / "target_tokenizer").symlink_to(world / name)
        loaders += [load_tokenizer, lambda path: load_target_tokenizer(str(tmp_path / "both"))]
    for load in loaders:
        with rejects("If you trust it, pass"):
            load(name)
    assert not marker.exists()
    main(["translate", name, "-i", "one.en", "--trust-remote-code"])
    marker.unlink()


@pytest.mark.parametrize(
    "error, code, sentence",
    [
        (KeyError("ours"), 1, "'ours' (KeyError in"),
        (RuntimeError("two\nlines"), 1, "two lines (RuntimeError in"),
        (AssertionError(), 1, "no reason is given (AssertionError in"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device."),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 2, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "some/file"), 2, "some/file: Permission denied."),
        (MemoryError(), 2, "Use smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "Use smaller batches"),
        (json.JSONDecodeError("Expecting value", "", 0), 2, "Expecting value"),
    ],
)
def test_every_error_is_one_sentence(monkeypatch, capfd, error, code, sentence):
    """Exit status 2 for errors of inputs and of the machine, 1 for bugs; the traceback only with --debug."""

    def fail(*_):
        raise error

    monkeypatch.setattr("recnmt_hf.commands.data.run_corpus", fail)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # pending output is discarded; pytest needs its own
    assert main(["corpus", "out"]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("recnmt corpus: ") and sentence in line
    assert ("This is a bug in recnmt_hf. Please report it" in line) == (code == 1)
    assert main(["corpus", "out", "--debug"]) == code
    err = capfd.readouterr().err
    assert "Traceback" in err and "in fail" in err and err.splitlines()[-1] == line


def test_interrupts_that_libraries_turn_into_other_errors(monkeypatch, capfd, default_handlers):
    def fail(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("maximum recursion depth exceeded") from None

    monkeypatch.setattr("recnmt_hf.commands.data.run_corpus", fail)
    assert main(["corpus", "out"]) == 130
    assert capfd.readouterr().err.strip() == "recnmt corpus: interrupted."
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_a_calling_program_stay(monkeypatch, capfd, default_handlers):
    def own(*_):
        raise KeyboardInterrupt

    seen = []
    monkeypatch.setattr("recnmt_hf.commands.data.run_corpus", lambda *_: seen.append(signal.getsignal(2)) or 1 / 0)
    signal.signal(signal.SIGINT, own)
    assert main(["corpus", "out"]) == 1
    assert seen == [own] and signal.getsignal(signal.SIGINT) is own
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["corpus", "out"]).result() == 1


def test_full_and_closed_streams(monkeypatch, capfd):
    """Writing to a full or closed standard output is an error; a reader may close a pipe, and standard error."""
    monkeypatch.setattr("recnmt_hf.commands.data.run_corpus", lambda args: print("pairs"))
    reader, writer = os.pipe()
    os.close(reader)
    for file, code, words in (("/dev/full", 2, "No space left on device"), (writer, 0, "")):
        with open(file, "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert main(["corpus", "out"]) == code
        err = capfd.readouterr().err
        assert words in err and bool(err) == bool(code)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["corpus", "out"]) == 2
    assert "Standard output is closed, so results" in capfd.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["translate", "nowhere"]) == 2


def test_bars_only_on_terminals(world, monkeypatch, capfd):
    from recnmt_hf.commands.arguments import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress(range(3), "pairs", 3)) == [0, 1, 2] and "3/3" in terminal.getvalue()
    terminal.truncate(0)
    list(progress(range(3), "pairs", 3, out=Terminal()))  # results are printed there too
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    list(progress(range(3), "pairs", 3))
    assert terminal.getvalue() == "" and sys.stderr.getvalue() == ""
