"""
Interrupted runs: killed at every file operation, full disks, Ctrl-C.

A killed process leaves only its folder. So one undisturbed run is watched, and its folder is copied before each file
operation: each copy is the state after a kill at that moment. Files that grew since the last copy
are also cut short, since a kill may come in the middle of writing.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recnmt_hf.training.checkpoints import checkpoints_in, newest_checkpoint
from recnmt_hf.training.evidence import EVIDENCE, Evidence
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import checkpoint_to_resume, train


# Twenty short pairs of the generated corpus, which would take longer to generate.
PAIRS = {"tsv": str(Path(__file__).with_name("pairs.tsv"))}
SIZE = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}


def tiny(folder=None, **sections):
    """A recipe of four updates with a checkpoint each, of which the last two and the best stay; data in a folder."""
    plan = {
        "model": {"preset": "tiny", "fields": {**SIZE, **HEADS, "dropout": 0.2}},
        "data": {"train": [PAIRS], "validation": [PAIRS], **({"cache_dir": str(folder / "data")} if folder else {})},
        "tokenizer": {"kind": "word", "vocab_size": 40, "joint": False},
        "training": {
            **{"use_cpu": True, "max_tokens": 80, "learning_rate": 0.01, "bleu_samples": 0},
            **{"max_steps": 4, "warmup_steps": 1, "save_steps": 1, "eval_steps": 2, "keep_last": 2, "keep_best": 1},
        },
        "decoding": {"beams": 1, "max_length_extra": 2},
        "average": {"count": 2},
        "test": {"unseen": PAIRS},
    }
    for name, value in sections.items():
        plan[name] = {**plan[name], **value}
    return Recipe(**plan)


Tree = dict[str, bytes | None]  # files with their bytes, folders with None

_watcher: Callable[[str, tuple], None] | None = None
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _hook(event: str, arguments: tuple) -> None:
    global _watcher
    changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
    if _watcher is None or not (changes or (event == "open" and (arguments[2] or 0) & _WRITING)):
        return
    watcher, _watcher = _watcher, None
    try:
        watcher(event, arguments)
    finally:
        _watcher = watcher


@contextlib.contextmanager
def watched(watcher):
    """Calls `watcher` before every file operation that Python announces."""
    global _watcher
    if not hasattr(watched, "installed"):
        sys.addaudithook(_hook)  # for good, but it does nothing without a watcher
        watched.installed = True
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


class Snapshots:
    """The states in which a kill could leave a folder, without repetitions."""

    def __init__(self, folder):
        self.folder = folder
        self.contents: dict[bytes, bytes] = {}
        self.states: list[tuple[str, Tree]] = []
        self.seen: set[str] = set()
        self.before: Tree = self.look()[0]
        self.renamed = ""

    def __call__(self, event, arguments):
        now, written = self.look()
        before = dict(self.before)
        if self.renamed:  # at once, whatever was in it
            moved = {name: content for name, content in now.items() if name.startswith(self.renamed)}
            before = {name: content for name, content in before.items() if name in now} | moved
        for name in sorted(written, key=written.get):
            content = now[name]
            if content != before.get(name):
                for part in (content[: len(content) // 2], b""):
                    self.add(f"{name} cut short before {event}", {**before, name: part})
            before[name] = content
        self.before = now
        self.add(f"before {event} {arguments[:2]}", now)
        self.renamed = os.path.relpath(arguments[1], self.folder) if event == "os.rename" else ""

    def add(self, what, tree):
        name = name_of(tree)
        if name not in self.seen:
            self.seen.add(name)
            self.states.append((what, tree))

    def look(self):
        """The folder's content, and when each file was written; equal contents are kept once."""
        tree, written = {}, {}
        for parent, folders, files in os.walk(self.folder):
            place = os.path.relpath(parent, self.folder)
            tree |= {os.path.normpath(os.path.join(place, name)): None for name in folders}
            for name in files:
                path = os.path.join(parent, name)
                relative = os.path.normpath(os.path.join(place, name))
                with open(path, "rb") as file:
                    content = file.read()
                tree[relative] = self.contents.setdefault(content, content)
                written[relative] = os.stat(path).st_mtime_ns
        return tree, written


def name_of(tree: Tree) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(tree.items()):
        digest.update(f"{name}\0{content is None}\0".encode())
        digest.update(hashlib.sha256(content or b"").digest())
    return digest.hexdigest()


def name_of_resumed(tree: Tree) -> str:
    """Name what a resumed run depends on: all but the lock and the final model, in which only partial files matter."""
    has_partial = any(name.startswith("model/") and "/." in name for name in tree)
    rest = {name: content for name, content in tree.items() if name != ".lock" and not name.startswith("model/")}
    return f"{name_of(rest)} {has_partial}"


def restore(tree: Tree, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        (folder / name if content is None else (folder / name).parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    return folder


def names_in(folder: Path) -> set[str]:
    return set(Snapshots(folder).look()[0])


def end_like(folder: Path, expected: Path, what: str) -> None:
    """The same files, and the same final model bit for bit; what is known of it may differ in what a step took."""
    assert names_in(folder) == names_in(expected), what
    for file in (expected / "model").rglob("*"):
        if file.name == EVIDENCE:
            evidence = [Evidence.load(place / "model") for place in (folder, expected)]
            for run in evidence:
                for name in ("seconds_per_step", "seconds", "tokens_per_second"):
                    run.training.pop(name)
            assert evidence[0] == evidence[1], what
        elif file.is_file():
            assert (folder / "model" / file.relative_to(expected / "model")).read_bytes() == file.read_bytes(), what
    for file in expected.iterdir():
        assert not file.is_file() or (folder / file.name).read_bytes() == file.read_bytes(), what


@pytest.fixture(scope="module")
def shared_data(tmp_path_factory):
    """A recipe of two updates whose data is prepared already, and its undisturbed run."""
    folder = tmp_path_factory.mktemp("shared")
    training = {"max_steps": 2, "eval_strategy": "no"}
    plan = tiny(folder, training=training, average={"count": 2})
    train(plan, folder / "run")
    return plan, folder / "run"


def killed_everywhere(plan, folder, expected, scratch, resume=False, since=""):
    """Train in `folder`, resume from a kill at each file operation after `since`, and compare with `expected`."""
    snapshots = Snapshots(folder)
    with watched(snapshots):
        train(plan, folder, resume=resume)
    end_like(folder, expected or folder, "undisturbed")
    expected = expected or folder
    resumed = set()
    for what, tree in snapshots.states:
        if since and since not in tree:
            continue
        restore(tree, scratch)
        checkpoint_to_resume(scratch)
        cleaned = name_of_resumed(Snapshots(scratch).look()[0])
        if cleaned in resumed:
            continue  # copies that are equal then behave equally
        resumed.add(cleaned)
        train(plan, restore(tree, scratch), resume=True)
        end_like(scratch, expected, what)
    return snapshots.states, resumed


@pytest.mark.slow
def test_killed_at_every_file_operation(tmp_path):
    # The data is prepared once for all.
    plan = tiny(tmp_path, training={"max_steps": 3})
    states, resumed = killed_everywhere(plan, tmp_path / "run", None, tmp_path / "killed")
    assert len(states) > 300 and len(resumed) > 10
    assert [step for step, _ in checkpoints_in(tmp_path / "run")] == [2, 3]
    # A resumed run is killed likewise, with an old final model, a half-written checkpoint and other left-overs there.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    (again / "checkpoint-3" / "complete.json").rename(again / "checkpoint-3" / "complete.json.partial")
    (again / "model.partial").mkdir()
    killed_everywhere(plan, again, tmp_path / "run", tmp_path / "killed", resume=True)


@contextlib.contextmanager
def failing_at(part, error):
    """Raise an error where a path with `part` in it is opened, made or renamed to; a full disk stays full."""
    full = False
    places = {"open": 0, "os.mkdir": 0, "os.rename": 1}  # of the path among an event's arguments

    def watcher(event, arguments):
        nonlocal full
        here = event in places and part in str(arguments[places[event]])
        full = full or (here and isinstance(error, OSError))
        if here or (full and event in ("open", "os.mkdir")):
            raise error

    with watched(watcher):
        yield


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("part", "newest", "error"),
    [
        ("run.json", None, FULL),
        ("checkpoint-1", None, FULL),
        ("checkpoint-2/trainer_state", "checkpoint-1", FULL),
        ("checkpoint-2/trainer_state", "checkpoint-1", KeyboardInterrupt()),
        ("checkpoint-2/complete.json", "checkpoint-1", FULL),
        ("model.partial", "checkpoint-2", FULL),
        ("results.json", "checkpoint-2", FULL),
    ],
)
def test_full_disk_and_interrupt(tmp_path, shared_data, part, newest, error):
    """The resumed run has the same result."""
    plan, expected = shared_data
    kind, words = (Exception, "No space left") if error is FULL else (KeyboardInterrupt, None)
    with pytest.raises(kind, match=words), failing_at(part, error):
        train(plan, tmp_path / "run")
    assert not (tmp_path / "run/.lock").exists()
    assert newest_checkpoint(tmp_path / "run") == (tmp_path / "run" / newest if newest else None)
    train(plan, tmp_path / "run", resume=True)
    end_like(tmp_path / "run", expected, part)
