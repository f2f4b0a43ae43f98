"""`recnmt translate` with several processes: the output of one process, in order, continued after an interruption."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest
from other_processes import launched, output_of

from recnmt_hf.commands import translation_parts
from recnmt_hf.commands.main import build_parser, main, parse
from recnmt_hf.inference import DecodingOptions, Translator


OPTIONS = ["--beams", "2", "--max-length-extra", "3"]


@pytest.fixture
def texts(corpus, tmp_path):
    path = tmp_path / "text.en"
    path.write_text("".join(f"{pair.en}\n" for pair in corpus["validation"][:25]) + "\n")
    return path


def main_of_two(words):
    """Run a command as the first of two processes of a launcher, which also does what the second would."""

    def translate_both(args, folder, rank, world):
        for number in range(world):
            translation_parts.translate_own_parts(args, folder, number, world)

    with (
        mock.patch.object(translation_parts, "translate_together", translate_both),
        mock.patch.object(translation_parts, "launched_processes", lambda: (0, 2)),
    ):
        return main(words)


def translate(folder, texts, name, *more, run=main):
    output = texts.parent / name
    assert run(["translate", str(folder), "-i", str(texts), "-o", str(output), *OPTIONS, *more]) == 0
    return output.read_text()


@pytest.mark.parametrize("form", ["text", "n-best", "jsonl"])
def test_output_of_one_process(tiny_folder, texts, monkeypatch, form):
    """Parts are translated alone, which may change the last digits of scores."""
    monkeypatch.setattr(translation_parts, "PART", 7)
    whole = translate(tiny_folder, texts, "whole", "--format", form)
    parts = translate(tiny_folder, texts, "parts", "--format", form, run=main_of_two)
    assert re.sub(r"-\d+\.\d+", "", parts) == re.sub(r"-\d+\.\d+", "", whole) and whole.count("\n") == 26
    assert sorted(path.name for path in texts.parent.iterdir()) == ["parts", "text.en", "whole"]


@pytest.mark.slow
def test_texts_of_one_line_each(tiny_folder, tmp_path, capsys):
    """A model copies what ends a line for other programs, here between the parts of a text; records keep it."""
    (tmp_path / "text").write_text("The dog sleeps.\u2028A cat sleeps.\n", encoding="utf-8")
    command = ["translate", str(tiny_folder), "-i", str(tmp_path / "text"), *OPTIONS]
    assert main(command) == 0 and len(capsys.readouterr().out.splitlines()) == 1
    assert main([*command, "--format", "jsonl"]) == 0
    (tmp_path / "records").write_text(capsys.readouterr().out, encoding="utf-8")
    record = json.loads((tmp_path / "records").read_text(encoding="utf-8"))
    assert record["parts"] == 2 and "\u2028" in record["text"]


@pytest.mark.slow
def test_processes_of_a_launcher(tiny_folder, texts):
    whole, output = translate(tiny_folder, texts, "whole"), texts.parent / "launched"
    words = ["translate", tiny_folder, "-i", texts, "-o", output, "--device", "cpu", *OPTIONS]
    output_of(launched("-m", "recnmt_hf.commands.main", *words))
    assert output.read_text() == whole


@pytest.mark.slow
def test_program_of_the_page(repository, tiny_folder, tmp_path):
    """The example of `split_between_processes`, in two processes."""
    page = (repository / "src/recnmt_hf/inference/README.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "split_between" in code)
    (tmp_path / "program.py").write_text(code.replace("outputs/first/model", str(tiny_folder)))
    options = ("--cpu", "--config_file", repository / "scripts/accelerate/cpu_2.yaml")
    output = output_of(launched(tmp_path / "program.py", module="accelerate.commands.launch", options=options))
    expected = Translator.from_pretrained(tiny_folder)(["The dog sleeps.", "A cat sees the man.", "The man sleeps."])
    assert output.splitlines()[-3:] == [translation.text for translation in expected]


def test_the_output_is_checked_first(tiny_folder, texts, capsys):
    command = ["translate", str(tiny_folder), "-i", str(texts), *OPTIONS]
    assert main_of_two([*command, "-o", str(tiny_folder)]) == main_of_two([*command, "-o", "/proc/version/out"]) == 2
    before = texts.read_text()
    assert main_of_two([*command, "-o", str(texts)]) == 2
    assert "is also an input and would be" in capsys.readouterr().err and texts.read_text() == before


def test_continued_after_an_interruption(tiny_folder, texts, monkeypatch, capsys):
    monkeypatch.setattr(translation_parts, "PART", 5)
    command = ["translate", str(tiny_folder), "-i", str(texts), "-o", str(texts.parent / "out"), *OPTIONS]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", lambda *_: 1 / 0)
        assert main_of_two(command) == 1
    (folder,) = texts.parent.glob("out.*.parts")
    (folder / "00000003").unlink()
    (folder / "00000003.123.partial").write_text("half")
    (folder / "00000000").write_text("kept\n" * 5)
    capsys.readouterr()
    assert main_of_two(command) == 0
    assert "5 parts in" in capsys.readouterr().err
    assert (texts.parent / "out").read_text().startswith("kept\n" * 5) and not folder.exists()
    # Parts of other options are not used.
    folder.mkdir()
    (folder / "00000000").write_text("kept\n" * 5)
    assert main_of_two([*command, "--max-length-extra", "2"]) == 0
    assert "kept" not in (texts.parent / "out").read_text()


def test_processes_end_with_the_one_that_started_them():
    """Otherwise their late results would mix with those of the next command."""
    code = """
import os, subprocess, sys, time
child = "import time; from recnmt_hf._interrupts import end_with_parent; import os; "
child += "end_with_parent(os.getppid()); print('ready', flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
process.stdout.readline()
print(process.pid, flush=True)
os._exit(0)
"""
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout)
    deadline = time.time() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.time() < deadline
        time.sleep(0.1)


def test_too_many_prefixes_and_pipes_are_rejected(tiny_folder, texts, monkeypatch, capsys):
    monkeypatch.setattr(translation_parts, "PART", 5)
    prefixes = texts.parent / "prefixes.de"
    prefixes.write_text("\n" * 28)
    command = ["translate", str(tiny_folder), "-o", str(texts.parent / "out"), *OPTIONS]
    assert main_of_two([*command, "-i", str(texts), "--prefix", str(prefixes)]) == 2
    assert "There are only 26 sentences, but more prefixes." in capsys.readouterr().err
    os.mkfifo(texts.parent / "pipe")
    assert main_of_two([*command, "-i", str(texts.parent / "pipe")]) == 2
    assert "Several processes need --input and" in capsys.readouterr().err


def test_an_output_in_the_folder_of_the_model_is_continued(tiny_folder, texts, tmp_path):
    """Its parts do not count as files of the model; any other file in the folder does."""
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    words = ["translate", str(model), "-i", str(texts), "-o", f"{model}/out.de"]
    args = parse(build_parser("translate"), words)
    args.options = DecodingOptions()
    folder = translation_parts.folder_of_parts(args)
    for place in (folder, model / ".recnmt-1.partial"):
        place.mkdir()
        (place / "00000000").write_text("x")
    (model / "out.de").write_text("x")
    assert translation_parts.folder_of_parts(args) == folder
    (model / "out.de.other").write_text("x")
    assert translation_parts.folder_of_parts(args) != folder


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_devices_of_several_processes(tiny_folder, texts, monkeypatch, quantization):
    """Each has a GPU, if the model runs on one."""
    devices = []

    def load(args):
        devices.append(args.device)
        raise InterruptedError

    monkeypatch.setattr(translation_parts.arguments, "load_translator", load)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(translation_parts, "PART", 7)
    options = [] if quantization is None else ["--quantization", quantization]
    words = ["translate", str(tiny_folder), "-i", str(texts), "-o", str(texts.parent / "o"), *options]
    args = parse(build_parser("translate"), words)
    for rank in range(3):
        with pytest.raises(InterruptedError):
            translation_parts.translate_own_parts(args, texts.parent, rank, 3)
    assert devices == ([None] * 3 if quantization else ["cuda:0", "cuda:1", "cuda:0"])


def test_parts_have_the_numbers_and_random_draws_of_the_whole(tiny_folder, texts, monkeypatch, capsys):
    monkeypatch.setattr(translation_parts, "PART", 7)
    texts.write_text("The dog sleeps.\n" * 20)
    sampled = ["--beams", "1", "--buffer", "7", "--seed", "3", "--generate", "do_sample=true"]
    whole = translate(tiny_folder, texts, "whole", *sampled)
    assert translate(tiny_folder, texts, "parts", *sampled, run=main_of_two) == whole
    assert len(set(whole.splitlines()[:7])) > 1
    texts.write_text("A dog.\n" * 9 + "The dog " * 300 + "\n")
    command = ["translate", str(tiny_folder), "-i", str(texts), "-o", str(texts.parent / "out")]
    assert main_of_two([*command, "--on-long", "error"]) == 2
    assert "Sentence 10 has" in capsys.readouterr().err
