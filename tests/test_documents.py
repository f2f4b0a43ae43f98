"""README and model cards: snippets run, commands parse, links exist."""

import importlib
import logging
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import recnmt_hf
from recnmt_hf.commands.main import COMMANDS, build_parser, main, parse


LINK = re.compile(r"\]\(([^)]*)\)")


# Options that make the commands of the README fast enough for a test.
SHORTER = {
    "corpus": ["--train", "40", "--validation", "4", "--test", "4", "--test-deep", "4"],
    "train": [
        *("training.max_steps=6", "training.max_tokens=200"),
        *(f"training.{name}=2" for name in ("eval_steps", "save_steps", "bleu_samples")),
        "data.train={generated: train, size: 60}",
        "data.validation={generated: validation, size: 4}",
        "test={test: {generated: test, size: 2}}",
    ],
}


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def documents(repository):
    patterns = (
        "README.md",
        "src/recnmt_hf/*/README.md",
        "src/recnmt_hf/inference/migration.md",
        "scripts/*/README.md",
        "model_cards/*.md",
        ".github/*.md",
    )
    return [file for pattern in patterns for file in sorted(repository.glob(pattern))]


@pytest.mark.slow
def test_python_snippets_run_in_order(repository, tmp_path, monkeypatch, capsys):
    """Unchanged, except for the number of training steps in all but the README's first example."""
    monkeypatch.chdir(tmp_path)
    warnings = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: warnings.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    for document in documents(repository):
        names = {"__name__": "snippet"}
        for number, code in enumerate(blocks(document.read_text(), "python"), start=1):
            is_first = document == repository / "README.md" and number == 1
            if not is_first:
                code = re.sub(r'("max_steps": |max_steps=)\d+', r"\g<1>2", code)
            exec(compile(code, f"{document.name}, snippet {number}", "exec"), names)
            if is_first:
                best = capsys.readouterr().out.splitlines()[-1]
                assert f"It prints *{best}*" in document.read_text()
    assert not [text for text in warnings if "max_new_tokens" in text or "sequences" in text]


def test_commands_parse(repository):
    programs = {"scripts/benchmarks/compare.py"}
    programs |= {f"scripts/experiments/{path.name}" for path in (repository / "scripts/experiments").glob("*.py")}
    found = 0
    studies = repository / "scripts/experiments/studies.sh"
    for document in [*documents(repository), studies]:
        text = document.read_text() if document != studies else f"```bash\n{studies.read_text()}```"
        inline = re.findall(r"`(python scripts/experiments/[^`]+)`", text)  # in tables
        for block in [*blocks(text, "bash"), *inline]:
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["recnmt"]:
                    parse(build_parser(words[1]), words[1:])
                    found += 1
                if words[:1] == ["python"] and words[1] in programs:
                    importlib.import_module(Path(words[1]).stem).parse_arguments(words[2:])
                for word in words:
                    if word.startswith(("scripts/", "tests/", "src/")):
                        assert (repository / word).exists(), word
    assert found >= 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "outputs"),
    [
        ("src/recnmt_hf/commands/README.md", ["plain.de", "curves.png", "tree.png"]),
        ("scripts/tutorial/README.md", ["mine.de", "trace.jsonl", "relative/model/README.md", "repository/README.md"]),
    ],
)
def test_commands_run_in_order(repository, tmp_path, monkeypatch, capsys, cards_of_one_process, document, outputs):
    """The commands in their page, each on files that an earlier one wrote; trainings are cut to a few steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").symlink_to(repository / "scripts")
    text = (repository / document).read_text()
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines() if line]
    for line in lines:
        words = shlex.split(line)
        if words[0] != "recnmt":
            subprocess.run(line, shell=True, check=True)
            continue
        shorter = [] if "--plot" in words else SHORTER.get(words[1], [])
        if document.startswith("scripts") and words[1] == "train":
            shorter = [word for word in shorter if word.startswith("training.")]  # the data is the reader's own
        assert main([*words[1:], *shorter]) == 0, (line, capsys.readouterr().err)
    for name in outputs:
        assert (tmp_path / "outputs" / name).stat().st_size > 0


def test_links_lead_somewhere(repository):
    """Relative links name files that exist, and headings that their pages have."""
    for document in documents(repository):
        for link in LINK.findall(document.read_text()):
            target, _, anchor = link.partition("#")
            if link.startswith("http"):
                continue
            page = document.parent / target if target else document
            assert page.exists(), (document.name, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, (document.name, target, anchor)


def test_commands_are_listed_as_in_help(repository):
    page = (repository / "src/recnmt_hf/commands/README.md").read_text()
    assert re.findall(r"^\| `recnmt (\w+)` \|", page, flags=re.MULTILINE) == list(COMMANDS)


def test_links_of_the_published_readme_are_absolute(repository, tmp_path):
    """On PyPI no other file is next to the page."""
    shutil.copy(repository / "README.md", tmp_path)
    steps = yaml.safe_load((repository / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    (rewrite,) = (step["run"] for step in steps if "sed" in step.get("run", ""))
    subprocess.run(["bash", "-ec", rewrite], cwd=tmp_path, env={**os.environ, "GITHUB_REF_NAME": "v9"}, check=True)
    place = "https://github.com/recnmt-hf/recnmt_hf"
    before, after = (LINK.findall((folder / "README.md").read_text()) for folder in (repository, tmp_path))
    for target, absolute in zip(before, after, strict=True):
        kind = "raw" if target.endswith(".svg") else "blob"
        assert absolute == (target if target.startswith("https:") else f"{place}/{kind}/v9/{target}")


def test_citation_names_this_version(repository):
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert citation["version"] == recnmt_hf.__version__ and citation["date-released"]
