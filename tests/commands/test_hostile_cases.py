"""Wrong command lines, files and models: exit status and message; nothing is lost or written."""

import errno
import io
import os
import re
import shlex
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from user_errors import rejects

from recnmt_hf.commands.convert import FORMATS
from recnmt_hf.commands.main import COMMANDS, build_parser, main


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


def test_there_are_many_cases():
    assert len(list(cases())) >= 300


# Folders that exist only if a package is installed.
EXPORTED = {"ct2": "ctranslate2", "onnx": "onnxruntime"}


@pytest.mark.parametrize("status, stdin, words, part", list(cases()))
def test_case(world, tmp_path, monkeypatch, capfd, status, stdin, words, part):
    for word in {*EXPORTED} & {*words}:
        pytest.importorskip(EXPORTED[word], reason=f"the package {EXPORTED[word]} is not installed")
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


# -- folders without a model, or with a model of another kind ----------------------------------------------------------


# Commands by the argument that takes a folder ({}). With any folder they succeed or report an error.
SHORT = "--beams 1 --max-length-extra 1"
PAIRS = "one.en one.de"
FOLDERS = {
    "translate model": [f"translate {{}} -i one.en {SHORT}", f"translate {{}} model -i one.en {SHORT}"],
    "score model": ["score {} -s one.en -t one.de", "score model {} -s one.en -t one.de"],
    "align model": ["align {} -s one.en -t one.de"],
    "average inputs": ["average {} -o OUT", "average {} model -o OUT", "average model {} -o OUT"],
    "inspect model": ["inspect {} Birds", "inspect {} Birds --subject positions --target Ja"],
    "test model": [f"test {{}} --set a {PAIRS} {SHORT}"],
    "test baseline": [f"test model --set a {PAIRS} --baseline {{}} {SHORT}"],
    "publish model": [
        "publish {} user/name --dry-run -o OUT",
        "publish --space user/name {} --dry-run -o OUT",
        "publish --card-only {}",
    ],
    "demo model": ["demo {} no-weights"],
    "convert model": ["convert {} -o OUT", *(f"convert {{}} -o OUT --to {name}" for name in FORMATS)],
    "train recipe": [
        "train --plot {} -o OUT.svg",
        "train {} -o OUT",
        "train recipe.yaml -o OUT training.use_cpu=true model.init_from={}",
    ],
    "prepare recipe": ["prepare {} -o OUT --workers 1", "prepare recipe.yaml -o {} --workers 1"],
    "tokenizer files": ["tokenizer {} -o OUT"],
    "evaluate hypotheses": ["evaluate {} -r one.de"],
}
# Commands that take no folder.
WITHOUT_FOLDERS = {"corpus", "env"}
KINDS = ("ct2", "onnx", "empty-model", "model/config.json", "no-weights")


@pytest.fixture(scope="module")
def lent(world, tmp_path_factory):
    """Return copies of the folders, into which these commands may write."""
    place = tmp_path_factory.mktemp("lent")
    for name in ("model", "empty-model", "no-weights", "ct2", "onnx"):
        if (world / name).is_dir():
            shutil.copytree(world / name, place / name)
    for name in ("one.en", "one.de", "recipe.yaml"):
        shutil.copy(world / name, place)
    return place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", [pytest.param(line, id=line) for lines in FOLDERS.values() for line in lines])
def test_any_folder(lent, tmp_path, monkeypatch, capfd, line, kind):
    if kind in EXPORTED:
        pytest.importorskip(EXPORTED[kind], reason=f"the package {EXPORTED[kind]} is not installed")
    monkeypatch.chdir(lent)
    code = main(shlex.split(line.replace("{}", kind).replace("OUT", str(tmp_path / "out"))))
    err = capfd.readouterr().err
    assert code in (0, 2) and "Traceback" not in err, err
    assert code == 0 or err.startswith("recnmt")


def test_every_argument_that_takes_a_folder_is_tried():
    """A new argument with the name of another one needs a line in the table above."""
    named, tried = set(), {tuple(place.split()) for place in FOLDERS}
    for command in COMMANDS:
        (subparsers,) = (each for each in build_parser(command)._actions if each.dest == "command")
        named |= {(command, action.dest) for action in subparsers.choices[command]._actions}
    dests = {dest for _, dest in tried} - {"source"}  # other commands use this name for files
    assert {(command, dest) for command, dest in named if dest in dests} <= tried <= named
    assert {command for command, _ in tried} | WITHOUT_FOLDERS == set(COMMANDS)


# -- reading files and standard input --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bom.en", "crlf.en", "cr.en", "nul.en", "separators.en", "good.gz", "empty.txt"])
def test_standard_input_equals_a_file(world, monkeypatch, capfd, name):
    """So do a FIFO and process substitution, a pipe under /dev/fd."""
    monkeypatch.chdir(world)
    seen = []
    monkeypatch.setattr("recnmt_hf.commands.arguments.load_translator", lambda args: Echo(seen))
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


class Echo:
    """Translator that returns every sentence unchanged."""

    def __init__(self, seen):
        self.seen = seen

    def translate(self, sentences, options, prefixes=None, scores=True, first=1, trace=None):
        from recnmt_hf.inference.translator import Hypothesis, Translation

        for sentence in sentences:
            self.seen.append(sentence)
            yield Translation(sentence, [Hypothesis(repr(sentence), 0.0, 0.0)])


def test_lines_end_at_line_feeds_alone(world):
    from recnmt_hf.data.text import read_lines

    assert list(read_lines(world / "separators.en")) == ["The\u2028dog\u2029sleeps\x0b.", "A\x85cat\x1c.", "Birds\x1e."]
    assert len(list(read_lines(world / "cr.en"))) == 1
    assert (
        list(read_lines(world / "bom.en")) == list(read_lines(world / "one.en")) == list(read_lines(world / "crlf.en"))
    )


# -- foreign code ----------------------------------------------------------------------------------------------


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


def test_trusted_code_runs(world, monkeypatch, capfd):
    monkeypatch.chdir(world)
    try:
        main(["translate", "code", "-i", "one.en", "--trust-remote-code"])
        assert (world / "code-was-run").exists()
    finally:
        (world / "code-was-run").unlink(missing_ok=True)


def test_every_call_of_from_pretrained_sets_trust_remote_code(repository):
    """Otherwise transformers asks on standard input."""
    import ast

    for path in (repository / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = getattr(node.func.value, "id", "")
            if node.func.attr == "from_pretrained" and owner.startswith("Auto"):
                call = ast.unparse(node)
                assert "trust_remote_code" in call or "settings" in call, (path, node.lineno)


# -- streams, interrupts and bugs ------------------------------------------------------------------------------


def test_interrupt_loses_nothing(world, tmp_path, monkeypatch, capfd):
    kept = tmp_path / "kept.de"
    kept.write_text("an earlier translation\n")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("recnmt_hf.commands.arguments.load_translator", stop)
    assert main(["translate", "model", "-i", str(world / "one.en"), "-o", str(kept)]) == 130
    assert capfd.readouterr().err.strip() == "recnmt translate: interrupted."
    assert kept.read_text() == "an earlier translation\n" and [path.name for path in tmp_path.iterdir()] == ["kept.de"]


@pytest.mark.parametrize("error", [ValueError("ours"), KeyError("ours"), RuntimeError("ours"), OSError("ours")])
def test_bugs_are_reported_with_their_traceback(monkeypatch, capfd, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("recnmt_hf.commands.corpus.run", fail)
    assert main(["corpus", "out"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err and "in fail" in err
    assert err.rstrip().split("\n")[-1].startswith("recnmt corpus: this is a bug in recnmt_hf.")


def test_a_bug_while_loading_is_not_blamed_on_the_files(world, monkeypatch, capfd):
    """Also if transformers called the code with the bug."""
    from recnmt_hf.models import modeling_nmt_transformer as modeling

    own = {}
    exec(compile("def fail(self, config):\n    return config.no_such_field", modeling.__file__, "exec"), own)
    monkeypatch.setattr(modeling.NMTTransformerModel, "__init__", own["fail"])
    monkeypatch.chdir(world)
    assert main(["translate", "model", "-i", "one.en"]) == 1
    assert "in fail" in capfd.readouterr().err


@pytest.mark.parametrize(
    "number, file, code",
    [
        (errno.ENOSPC, None, 2),
        (errno.EACCES, "some/file", 2),
        (errno.EISDIR, "some/file", 2),
        (errno.EMFILE, "some/file", 2),
        (errno.ENOENT, "Out", 1),
        (errno.ENOENT, "out", 2),  # named on the command line
        (errno.EEXIST, "some/file", 1),
        (errno.ENOTEMPTY, b"some/file", 1),
    ],
)
def test_errors_of_the_system(monkeypatch, capfd, number, file, code):
    """Errors of the machine and of named files are user errors; those of other files are bugs."""

    def fail(*_):
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr("recnmt_hf.commands.corpus.run", fail)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # pending output is discarded; pytest needs its own
    assert main(["corpus", "out"]) == code
    err = capfd.readouterr().err
    assert os.strerror(number) in err and ("Traceback" in err) == (code == 1)
    assert number == errno.EMFILE or code == 1 or file is None or f"{file}:" in err


@pytest.mark.parametrize(
    "words, patched",
    [
        ("average model TWIN -o OUT", "shutil.copy2"),
        ("average model TWIN -o OUT", "recnmt_hf.training.checkpoints.save_file"),
        ("corpus OUT --train 5 --validation 1 --test 1 --test-deep 1", "recnmt_hf.data.files.os.replace"),
    ],
)
def test_a_full_disk_is_reported_with_the_output(world, tmp_path, monkeypatch, capfd, words, patched):
    """The message names neither the file that is copied nor the temporary folder."""
    monkeypatch.chdir(world)
    output, twin = tmp_path / "out", shutil.copytree(world / "model", tmp_path / "twin")

    def fail(source, *_, **__):
        if patched.endswith("save_file"):  # the message of safetensors
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))

    monkeypatch.setattr(patched, fail)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main([{"OUT": str(output), "TWIN": str(twin)}.get(word, word) for word in words.split()]) == 2
    err = capfd.readouterr().err
    assert str(output) in err and "No space left on device" in err
    assert ".recnmt-" not in err and ".json" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["twin"]


def test_interrupts_that_libraries_turn_into_other_errors(monkeypatch, capfd):
    def fail(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("maximum recursion depth exceeded") from None

    monkeypatch.setattr("recnmt_hf.commands.corpus.run", fail)
    before = signal.getsignal(signal.SIGINT)
    # The handler of a foreground process; tests in the background inherit an ignored signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["corpus", "out"]) == 130
        assert capfd.readouterr().err.strip() == "recnmt corpus: interrupted."
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)

    def own(*_):  # handler of a calling program
        raise KeyboardInterrupt

    seen = []
    monkeypatch.setattr("recnmt_hf.commands.corpus.run", lambda *_: seen.append(signal.getsignal(2)) or 1 / 0)
    signal.signal(signal.SIGINT, own)
    try:
        assert main(["corpus", "out"]) == 1
        assert seen == [own] and signal.getsignal(signal.SIGINT) is own
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(main, ["corpus", "out"]).result() == 1
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def talking(monkeypatch):
    """The command `corpus` that prints and writes no files."""
    monkeypatch.setattr("recnmt_hf.commands.corpus.run", lambda args: print("pairs"))


def test_full_disk_under_standard_output(talking, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["corpus", "out"]) == 2
    assert "No space left on device" in capfd.readouterr().err


def test_a_reader_may_close_the_pipe(talking, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["corpus", "out"]) == 0
    assert capfd.readouterr().err == ""


def test_closed_streams(talking, monkeypatch, capfd):
    """Writing to a closed standard output and reading a closed standard input are errors."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["corpus", "out"]) == 2
    assert "Standard output is closed, so results" in capfd.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr("recnmt_hf.commands.arguments.load_translator", lambda args: Echo([]))
    assert main(["translate", "model"]) == 2
    assert "Standard input" in capfd.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["translate", "model"]) == 2


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
