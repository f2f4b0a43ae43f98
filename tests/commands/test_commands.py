"""The console command and the scripts: the same functions, readable errors, the workflow from corpus to scores."""

import json
import os
import select
import shutil
import sys
import threading

import pytest

from recnmt_hf.commands.main import COMMANDS, GROUPS, MOVED, build_parser, main


def call(capsys, *words):
    """Return exit code, standard output and standard error of a subcommand."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def texts(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("texts")
    for split in ("validation", "test"):
        for side in ("en", "de"):
            lines = [getattr(pair, side) for pair in corpus[split][:6]]
            (folder / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_help_and_env(capsys):
    code, out, _ = call(capsys, "env")
    assert code == 0 and all(f"{name}: " in out for name in ("recnmt_hf", "Python", "torch", "GPU", "extras"))
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            build_parser(command).parse_args([command, "--help"])
        assert stop.value.code == 0
        assert f"recnmt {command}" in capsys.readouterr().out


def test_translate_score_evaluate(tmp_path, capsys, tiny_folder, texts):
    """`score` reports the scores that `translate` wrote, to 1e-5."""
    shared = ("--device", "cpu", "--length-penalty", "0.8")
    found = tmp_path / "found.jsonl"
    words = ["--format", "jsonl", "--n-best", "2", "--beams", "3", "--max-length-extra", "5", "--alignments"]
    code, _, err = call(capsys, "translate", tiny_folder, "-i", texts / "test.en", "-o", found, *words, *shared)
    assert code == 0, err
    records = [json.loads(line) for line in found.read_text().splitlines()]
    assert [r["line"] for r in records] == [i for i in range(6) for _ in range(2)]
    assert all(set(r) >= {"source", "text", "score", "log_prob", "tokens", "alignment"} for r in records)
    code, out, _ = call(capsys, "score", tiny_folder, "--jsonl", found, *shared)
    for record, line in zip(records, out.splitlines(), strict=True):
        log_prob, score = map(float, line.split("\t"))
        assert log_prob == pytest.approx(record["log_prob"], abs=1e-5)
        assert score == pytest.approx(record["score"], abs=1e-5)
    code, out, err = call(capsys, "score", tiny_folder, "-s", texts / "test.en", "-t", texts / "test.de", *shared)
    assert code == 0 and len(out.splitlines()) == 6 and "6 pairs" in err

    plain = tmp_path / "plain.de"
    call(capsys, "translate", tiny_folder, "-i", texts / "test.en", "-o", plain, "--max-length-extra", 3, *shared)
    words = ["--length-edges", 5, 10, "--examples", 2, "--significance", "all", "--samples", 50, "--language", "de"]
    references = ("-r", texts / "test.de", "-s", texts / "test.en", *words, "--json", tmp_path / "e.json")
    code, out, _ = call(capsys, "evaluate", plain, texts / "test.de", *references)
    assert code == 0
    expected = ["BLEU 100.00 (nrefs:1", "chrF2", "TER", "tokenized BLEU (case-insensitive)", "(5, 10] words"]
    expected += ["paired bootstrap", "paired randomization", "paired sign test, against"]
    for words in (*expected, "(6 sentences better, 0 worse)", "reference  "):
        assert words in out, words
    report = json.loads((tmp_path / "e.json").read_text())
    assert [len(rows) for rows in report["comparisons"].values()] == [2, 2, 2]


def test_files_are_written_although_the_reader_of_a_pipe_is_gone(tmp_path, texts, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    name = "h\udce9.de"  # not UTF-8
    shutil.copy(texts / "test.de", tmp_path / name)
    words = [str(tmp_path / name), "-r", str(texts / "test.de"), "--json", str(tmp_path / "scores.json")]
    with open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["evaluate", *words, "--examples", "3"]) == 0
    (system,) = json.loads((tmp_path / "scores.json").read_text())["systems"].items()
    assert system[0].endswith("h\\xe9.de") and system[1]["scores"][0]["score"] == pytest.approx(100)


def test_translations_of_test_sets_have_one_line_each(tmp_path, tiny_folder, texts, monkeypatch):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    decode = "transformers.PreTrainedTokenizerFast.batch_decode"
    monkeypatch.setattr(decode, lambda self, rows, **kwargs: ["a\nb\u2028c" for _ in rows])
    words = ["--set", "small", str(texts / "test.en"), str(texts / "test.de"), "--beams", "1", "--device", "cpu"]
    assert main(["test", str(model), *words]) == 0
    assert (model / "translations/small.txt").read_text().splitlines() == ["a b c"] * 6


def test_the_length_penalty_is_tuned_on_a_validation_set(tmp_path, capsys, tiny_folder, texts):
    """The best of the grid on the validation set, by a search of its own for each test set."""
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    words = ["--set", "small", texts / "test.en", texts / "test.de", "--device", "cpu", "--max-length-extra", 3]
    words += ["--tune-length-penalty", texts / "validation.en", texts / "validation.de"]
    code, out, err = call(capsys, "test", model, *words)
    assert code == 0, err
    assert [line.partition(":")[0] for line in out.splitlines()] == ["small", "small_tuned"]
    first, second = json.loads((model / "evidence.json").read_text())["tests"]
    alpha = float(err.partition("length penalty ")[2].partition(":")[0])
    assert (first["decoding"]["length_penalty"], second["decoding"]["length_penalty"]) == (0.6, alpha)


def test_translate_answers_on_a_pipe(tiny_folder, monkeypatch):
    """With a buffer of one line, each translation is written before the next line is read."""
    questions, answers = os.pipe(), os.pipe()
    found = []

    def ask():
        with open(questions[1], "wb", buffering=0) as asking:
            for line in (b"The dog sleeps.\n", b"\n", b"We see a cat. We sleep.\n"):
                asking.write(line)
                if select.select([answers[0]], [], [], 20)[0]:
                    found.append(os.read(answers[0], 10000))

    client = threading.Thread(target=ask)
    words = ["translate", str(tiny_folder), "--buffer", "1", "--beams", "1", "--max-length-extra", "2"]
    with open(questions[0]) as stdin, open(answers[1], "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        client.start()
        assert main(words) == 0
        client.join()
    os.close(answers[0])
    assert len(found) == 3 and all(each.endswith(b"\n") and each.count(b"\n") == 1 for each in found)
    assert found[1] == b"\n"


@pytest.mark.parametrize(
    ("command", "program"), [(command, program) for command, program in MOVED.items() if "python" in program]
)
def test_moved_commands_name_their_program(capsys, repository, command, program):
    code, out, err = call(capsys, command, "--help")
    assert (code, out) == (2, "") and program in err and "0.4.0" in err
    assert (repository / program.split()[1]).is_file()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("export model out --format onnx", "convert model -o out --to onnx"),
        ("export-marian model out", "convert model -o out --to marianmt"),
        ("export-marian model out.npz", "convert model -o out.npz --to marian"),
        ("import-marian opus out", "convert opus -o out"),
        ("card run", "publish --card-only run"),
        ("plot run other -o a.svg", "train --plot run other -o a.svg"),
        ("tree model A", "inspect model A --subject tree"),
        ("corpus out --train 3", "corpus -o out --train 3"),
        ("evaluate a -r b --test sign", "evaluate a -r b --significance sign"),
        ("translate model --beam-size 2 --alignment-layer 1", "translate model --num-beams 2 --layer 1"),
    ],
)
def test_earlier_names_mean_the_new_ones(monkeypatch, capsys, old, new):
    seen = []
    for line in (old, new):
        words = line.split()
        name = MOVED.get(words[0], f"recnmt {words[0]}").split()[1]
        (group,) = (group for group, commands in GROUPS.items() if name in commands)
        monkeypatch.setattr(f"recnmt_hf.commands.{group}.run_{name}", lambda args: seen.append(vars(args)))
        assert main(words) == 0
        assert ("0.4.0" in capsys.readouterr().err) == (words[0] in MOVED)
    for name in seen[0].keys() - {"run", "parser", "to"}:
        assert seen[0][name] == seen[1][name], name


def test_quiet_shows_only_warnings_and_errors(capsys, tiny_folder, texts):
    words = ("score", tiny_folder, "-s", texts / "test.en", "-t", texts / "test.de")
    code, out, err = call(capsys, *words)
    assert code == 0 and "perplexity" in err
    assert call(capsys, *words, "--quiet") == (0, out, "")
    code, _, err = call(capsys, "score", "nowhere/at/all", *words[2:], "--quiet")
    assert code == 2 and "nowhere/at/all" in err


def test_a_revision_is_that_of_from_pretrained(monkeypatch, capsys, tiny_folder):
    from recnmt_hf import Translator

    seen = []
    monkeypatch.setattr(Translator, "from_pretrained", lambda *_, **settings: seen.append(settings) or 1 / 0)
    assert main(["translate", str(tiny_folder), "--revision", "v1"]) == 1
    assert main(["translate", str(tiny_folder)]) == 1
    assert seen[0].pop("revision") == "v1" and seen[0] == seen[1]
