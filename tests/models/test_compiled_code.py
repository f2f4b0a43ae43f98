"""Parts in C: made by the user's compiler, and never missed."""

import ctypes
import os
import stat

import pytest

from recnmt_hf.models import compiled_code, compiled_on_lstm, ordered_neurons


SOURCE = "int twice(int x) { return 2 * x; }"


@pytest.fixture
def fresh_steps():
    """Nothing is remembered, before and after."""
    for each in (compiled_on_lstm.compiled_steps, ordered_neurons.proven_steps):
        each.cache_clear()
    yield
    for each in (compiled_on_lstm.compiled_steps, ordered_neurons.proven_steps):
        each.cache_clear()


def program(folder, text):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def needs_compiler():
    if compiled_code.compiler() is None:
        pytest.skip("there is no C compiler")


def test_it_leaves_no_file(tmp_path, monkeypatch):
    needs_compiler()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = compiled_code.compiled(SOURCE)
    assert isinstance(library, ctypes.CDLL) and library.twice(21) == 42
    assert not list(tmp_path.iterdir())


def test_the_environment_names_the_compiler(tmp_path, monkeypatch):
    """With its options; one that is not there is not replaced by another."""
    needs_compiler()
    real = compiled_code.compiler()[0]
    calls = tmp_path / "calls"
    monkeypatch.setenv("CC", program(tmp_path, f'echo "$@" >> {calls}; exec {real} "$@"') + " -DNAMED")
    assert compiled_code.compiled("#ifndef NAMED\n#error\n#endif\n" + SOURCE).twice(4) == 8
    assert calls.read_text().startswith("-DNAMED -march=native")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiled_code.compiler() is None and compiled_code.compiled(SOURCE) is None
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(ValueError, match=r"CC='gcc \"' is not a command \(No closing quotation\)\. Remedy: "):
        compiled_code.compiled(SOURCE)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled_code.compiler() is None
    os.symlink(real, tmp_path / "gcc")
    assert compiled_code.compiler() == [str(tmp_path / "gcc")]


@pytest.mark.parametrize("text", ["exit 1", "echo broken >&2; exit 1", "sleep 30", "exit 0", ": > $7"])
def test_a_compiler_that_fails(text, tmp_path, monkeypatch):
    """It says no, hangs, writes nothing, or nothing that can be loaded."""
    monkeypatch.setattr(compiled_code, "PATIENCE", 0.2)
    monkeypatch.setenv("CC", program(tmp_path, text))
    assert compiled_code.compiled(SOURCE) is None


def test_a_processor_that_the_compiler_does_not_know(tmp_path, monkeypatch):
    needs_compiler()
    real = compiled_code.compiler()[0]
    refusing = f'case "$*" in *native*) exit 1;; esac; exec {real} "$@"'
    monkeypatch.setenv("CC", program(tmp_path, refusing))
    assert compiled_code.compiled(SOURCE).twice(1) == 2


def test_steps_that_compute_something_else_are_not_taken(fresh_steps, monkeypatch):
    """Whatever a compiler makes of them, they prove themselves beside those of torch."""
    needs_compiler()
    wrong = compiled_on_lstm.SOURCE.replace("1.0f / 24", "1.0f / 20")
    assert wrong != compiled_on_lstm.SOURCE
    monkeypatch.setattr(compiled_on_lstm, "SOURCE", wrong)
    assert compiled_on_lstm.compiled_steps() is not None
    assert ordered_neurons.proven_steps() is None


def test_without_a_compiler_nothing_is_missed(fresh_steps, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert ordered_neurons.proven_steps() is None
