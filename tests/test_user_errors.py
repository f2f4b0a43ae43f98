"""The catalogue of errors: every code that is raised has a message, with the details that it mentions."""

import ast
import copy
import inspect
import pickle
from string import Formatter

import pytest

from recnmt_hf import errors
from recnmt_hf.errors import ExistingFileError, MissingFileError, UserError
from recnmt_hf.models import user_errors
from recnmt_hf.models.user_errors import MESSAGES


@pytest.fixture
def message(monkeypatch):
    monkeypatch.setitem(MESSAGES, "test.size", "{field}={value} is not allowed; it must be at most {most:,}.")
    monkeypatch.setitem(MESSAGES, "test.lines", "The files have different lengths.")


@pytest.mark.parametrize("kind", [UserError, MissingFileError, ExistingFileError])
def test_an_error_has_code_field_and_value_in_every_process(message, kind):
    error = kind("test.size", field="beams", value=2000, most=1000)
    assert str(error) == "beams=2000 is not allowed; it must be at most 1,000."
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other)) == (kind, str(error))
        assert (other.code, other.field, other.value) == ("test.size", "beams", 2000)


def test_a_field_inside_a_section_and_a_message_without_field(message):
    error = UserError("test.size", field="beams", value=2000, most=1000).inside("decoding")
    assert (error.field, str(error)[:18]) == ("decoding.beams", "decoding.beams=200")
    assert str(UserError("test.lines").inside("data")) == "data: The files have different lengths."


def test_a_code_has_one_message():
    nodes = [node for module in (user_errors, errors) for node in ast.parse(inspect.getsource(module)).body]
    catalogues = [node.value for node in nodes if isinstance(node, (ast.AnnAssign, ast.AugAssign))]
    codes = [key.value for catalogue in catalogues for key in catalogue.keys]
    assert len(codes) == len(set(codes)) and set(codes) == set(MESSAGES)


ERRORS = ("UserError", "MissingFileError", "ExistingFileError")


def raised_codes(repository):
    """Yield file, code and names of details of each error in src whose code is a literal."""
    for path in sorted((repository / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                code = node.args[0].value
                if name in ERRORS and isinstance(code, str):
                    yield path, code, {keyword.arg for keyword in node.keywords}


def test_every_message_is_used(repository):
    files = [path for folder in ("src", "scripts") for path in (repository / folder).rglob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert not [code for code in MESSAGES if source.count(f'"{code}"') < 2]


def test_raised_errors_give_the_details_of_their_messages(repository):
    for path, code, given in raised_codes(repository):
        assert code in MESSAGES, f"{path}: {code}"
        named = {name.split(".")[0].split("[")[0] for _, name, _, _ in Formatter().parse(MESSAGES[code]) if name}
        if None not in given:  # `**details`
            missing, unused = named - given - {"field", "value"}, given - named - {"field", "value"}
            assert not missing and not unused, f"{path}, {code}: missing {missing}, unused {unused}"
