"""Files and folders that are written are whole or not there, and never what is read."""

import contextlib
import gzip
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
from user_errors import rejects

from recnmt_hf.data.files import PREFIX, LockedError, lock, open_output, open_output_folder, partial_folder
from recnmt_hf.errors import ExistingFileError


class Stop(BaseException):
    """Stands for an interrupt."""


def test_what_stood_there_stays_until_the_new_file_is_whole(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old\n")
    with pytest.raises(Stop), open_output(path) as file:
        file.write("new\n")
        file.flush()
        assert path.read_text() == "old\n"
        raise Stop
    assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["out.txt"]
    with open_output(path) as file:
        file.write("new\n")
    assert path.read_text() == "new\n" and os.listdir(tmp_path) == ["out.txt"]


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "out.txt.gz"
    with open_output(path) as file:
        file.write("whole\n")
    assert gzip.decompress(path.read_bytes()) == b"whole\n"


def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "real.txt").write_text("old\n")
    (tmp_path / "real.txt").chmod(0o640)
    (tmp_path / "link.txt").symlink_to("real.txt")
    (tmp_path / "dangling.txt").symlink_to("new.txt")
    for name, target in (("link.txt", "real.txt"), ("dangling.txt", "new.txt")):
        with open_output(tmp_path / name) as file:
            file.write("new\n")
        assert (tmp_path / name).is_symlink() and (tmp_path / target).read_text() == "new\n"
    assert (tmp_path / "real.txt").stat().st_mode & 0o777 == 0o640
    (tmp_path / "other.txt").touch()
    assert (tmp_path / "new.txt").stat().st_mode == (tmp_path / "other.txt").stat().st_mode


def test_own_input_is_refused_under_every_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("text\n")
    (tmp_path / "link.txt").symlink_to("in.txt")
    os.link("in.txt", "hard.txt")
    for name in ("in.txt", "./in.txt", str(tmp_path / "in.txt"), "link.txt", "hard.txt", "new/../in.txt"):
        with rejects(field=name), open_output(name, ["in.txt"]):
            pass
    assert (tmp_path / "in.txt").read_text() == "text\n"


def test_redirected_streams_are_files_too(tmp_path):
    """`recnmt translate < text -o text`, and `recnmt translate -i text >> text`."""
    path = tmp_path / "text"
    path.write_text("text\n")
    kept = [os.dup(0), os.dup(1)]
    try:
        for descriptor, given in ((0, (path, [None])), (1, (None, [path]))):
            with path.open("r+") as opened:
                os.dup2(opened.fileno(), descriptor)
            with rejects("is also an input and would be"), open_output(*given):
                pass
            os.dup2(kept[descriptor], descriptor)
    finally:
        for descriptor, copy in enumerate(kept):
            os.dup2(copy, descriptor)
            os.close(copy)


def test_outputs_that_cannot_be_written_are_found_first(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old\n")
    path.chmod(0o400)
    for wrong in (tmp_path, path) if not os.access(path, os.W_OK) else (tmp_path,):
        with pytest.raises(OSError, match=str(wrong)), open_output(wrong):
            pytest.fail("was opened")


def test_folder_appears_whole(tmp_path):
    path = tmp_path / "made" / "folder"
    with pytest.raises(Stop), open_output_folder(path) as working:
        (working / "one").write_text("1")
        raise Stop
    assert not any(path.parent.iterdir())
    with open_output_folder(path) as working:
        (working / "inner").mkdir()
        (working / "inner" / "one").write_text("1")
        assert not path.exists()
    assert (path / "inner" / "one").read_text() == "1" and path.stat().st_mode == path.parent.stat().st_mode
    with open_output_folder(path) as working:
        (working / "two").write_text("2")
    assert sorted(os.listdir(path)) == ["inner", "two"]


def test_a_folder_with_other_work_is_not_used(tmp_path):
    (tmp_path / "one").write_text("1")
    for place, settings in ((tmp_path, {"must_be_new": True}), (tmp_path / "one", {})):
        with pytest.raises((ExistingFileError, NotADirectoryError)), open_output_folder(place, **settings):
            pytest.fail("was opened")
    for name in ("a/config.json", "b/model/config.json", "c/checkpoint-7/tokenizer.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
        with rejects("contains a model"), open_output_folder(tmp_path / name[0]):
            pass


@contextlib.contextmanager
def another_process(work):
    """A forked process that calls `work`, then waits; the block is entered when it waits. It is killed at the end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with contextlib.ExitStack() as held:
                work(held)
                os.write(writer, b".")
                time.sleep(60)
        finally:
            os._exit(1)
    try:
        assert os.read(reader, 1) == b"."
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("kind", ["file", "folder", "new folder"])
def test_what_a_killed_process_left_is_deleted_by_the_next_one(tmp_path, kind):
    """But not what a living process is writing, nor what others have written."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "notes.partial").touch()
    names = iter("abc")

    def output():
        if kind == "file":
            return open_output(place / "out.txt")
        return open_output_folder(place / next(names) if kind == "new folder" else place)

    def unfinished():
        return [path for path in place.iterdir() if path.name.startswith(PREFIX)]

    with another_process(lambda held: held.enter_context(output())):
        assert len(unfinished()) == 1
        with output():
            assert len(unfinished()) == 2
        assert len(unfinished()) == 1
    assert len(unfinished()) == 1
    with output():
        assert len(unfinished()) == 1
    assert not unfinished() and (place / "notes.partial").exists()


def test_a_folder_that_another_process_is_deleting_is_not_used(tmp_path, monkeypatch):
    """Before it is locked, it looks like one that a killed process left."""
    make, made, held = tempfile.mkdtemp, [], contextlib.ExitStack()

    def made_and_locked_at_first(**options):
        made.append(Path(make(**options)))
        if len(made) == 1:
            held.enter_context(lock(made[0] / "lock"))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_locked_at_first)
    with held, partial_folder(tmp_path) as working:
        assert working == made[1] and working.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_lock_names_its_owner_and_ends_with_it(tmp_path):
    path = tmp_path / "lock"
    with another_process(lambda held: held.enter_context(lock(path))):
        with rejects("is in use", kind=LockedError) as caught, lock(path):
            pass
        assert re.search(r"in use \(process \d+ on \S+\)", str(caught.value))
        assert path.read_text().split()[1] != str(os.getpid())
    with lock(path) as unsupported:
        assert unsupported is None and path.read_text().split()[1] == str(os.getpid())
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert path.exists()
    assert not path.exists()
