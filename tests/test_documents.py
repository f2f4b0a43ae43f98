"""README and model cards: snippets run, commands parse, links lead somewhere."""

import re
import shlex

import pytest

from recnmt_hf._registration import FAMILIES
from recnmt_hf.commands.main import build_parser, parse


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def documents(repository):
    folders = [repository / "model_cards", repository / ".github"]
    return [repository / "README.md", *(file for folder in folders for file in sorted(folder.glob("*.md")))]


@pytest.mark.slow
def test_python_snippets_run_in_order(repository, tmp_path, monkeypatch, capsys):
    """As they stand, but for the number of training steps."""
    monkeypatch.chdir(tmp_path)
    for document in documents(repository):
        names = {"__name__": "snippet"}
        for number, code in enumerate(blocks(document.read_text(), "python"), start=1):
            code = re.sub(r'("max_steps": |max_steps=)\d+', r"\g<1>2", code)
            exec(compile(code, f"{document.name}, snippet {number}", "exec"), names)
    assert "sequences" not in capsys.readouterr().err


def test_commands_parse(repository):
    found = 0
    for document in documents(repository):
        for block in blocks(document.read_text(), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["recnmt"]:
                    parse(build_parser(words[1]), words[1:])
                    found += 1
                for word in words:
                    if word.startswith(("scripts/", "tests/", "src/")):
                        assert (repository / word).exists(), word
    assert found >= 7


def test_links_lead_somewhere(repository):
    for document in documents(repository):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), (document.name, target)


def test_files_named_in_the_text_exist(repository):
    for document in documents(repository):
        for name in re.findall(r"`((?:scripts|tests|src|model_cards|\.github)/[\w./-]*)`", document.read_text()):
            assert (repository / name).exists(), (document.name, name)


def test_no_placeholder_is_left(repository):
    for document in documents(repository):
        assert not re.search(r"@[A-Z]+@|TODO|FIXME", document.read_text()), document.name


@pytest.mark.parametrize("module", [name for family in FAMILIES.values() for name in family[1:]])
def test_docstring_examples(module):
    import doctest
    import importlib

    result = doctest.testmod(importlib.import_module(f"recnmt_hf.models.{module}"))
    assert result.attempted > 0 and result.failed == 0


def test_docstring_example_of_the_penalty():
    import doctest

    import recnmt_hf.evaluation.decoding

    result = doctest.testmod(recnmt_hf.evaluation.decoding)
    assert result.attempted > 0 and result.failed == 0
