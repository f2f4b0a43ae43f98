"""Errors that the user can correct, and files of others, which are read within a limit."""

import copy
import io
import pickle
import sys

import pytest
from user_errors import rejects

from recnmt_hf._loading_errors import read_bounded, read_small_text
from recnmt_hf.analysis.plots import check_picture
from recnmt_hf.errors import ExistingFileError, MissingFileError, UserError
from recnmt_hf.hub.marian import import_marian
from recnmt_hf.metrics import rouge_scores, tokenized_bleu_score
from recnmt_hf.metrics.bleu import moses_tokenizer


@pytest.mark.parametrize("kind", [UserError, MissingFileError, ExistingFileError])
def test_an_error_has_message_and_field_in_every_process(kind):
    error = kind("2000 is not allowed.", field="beams")
    assert str(error) == "beams: 2000 is not allowed."
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), other.field) == (kind, str(error), "beams")


def test_a_field_inside_a_section_and_a_message_without_field():
    error = UserError("beams=2000 is not allowed.", field="beams").inside("decoding")
    assert (error.field, str(error)) == ("decoding.beams", "decoding.beams=2000 is not allowed.")
    error = UserError("The files have different lengths.").inside("data")
    assert str(error) == "data: The files have different lengths."


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("rouge_score", "metrics", lambda: rouge_scores(["a"], ["a"])),
        ("sacremoses", "metrics", lambda: tokenized_bleu_score(["a"], ["a"], language="de")),
        ("sentencepiece", "marian", lambda: import_marian("folder", "out")),
        ("matplotlib", "plots", lambda: check_picture("a.png")),
    ],
)
def test_the_remedy_for_a_missing_package_installs_its_extra(monkeypatch, module, extra, use):
    moses_tokenizer.cache_clear()
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with rejects(f'Run pip install "recnmt-hf[{extra}]', module):
        use()


def test_files_without_an_end_are_not_read(tmp_path):
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "small.json").write_text('{"a": "ä"}', encoding="utf-8")
    assert read_small_text(tmp_path / "small.json") == '{"a": "ä"}'
    with rejects(field=str(tmp_path / "endless.json")):
        read_small_text(tmp_path / "endless.json")
    assert read_bounded(io.BytesIO(b"123"), "x", 3) == b"123"
    with rejects(field="x"):
        read_bounded(io.BytesIO(b"1234"), "x", 3)
