"""Checkpoints: manifests, faults of damaged ones, choice and rotation, and averages of several."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.training import checkpoints
from recnmt_hf.training.checkpoints import MANIFEST, average_checkpoints, checkpoints_in, faults_of, mark_complete


FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "optimizer.pt": b"moments",
    "target_tokenizer/tokenizer.json": b"words",
}


@pytest.fixture
def folder(tmp_path):
    """A complete checkpoint."""
    folder = tmp_path / "checkpoint-10"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    mark_complete(folder)
    return folder


def weights(folder, **tensors):
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def run_of(run, values, best=None, metric="eval_bleu"):
    """A run with a complete checkpoint for each step, and the validation values of all of them in the newest's log."""
    for step in values:
        folder = weights(run / f"checkpoint-{step}", a=torch.full((3,), float(step)), n=torch.tensor([step]))
        (folder / "config.json").write_text("{}")
        log = [{"step": other, metric: value} for other, value in values.items() if value is not None]
        state = {"log_history": [{"step": 1, "loss": 5.0}, *log], "best_model_checkpoint": best}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        mark_complete(folder)
    return run


def rotate(run, *values):
    """Rotate the checkpoints; return the steps of those that are left."""
    names = ("keep_last", "keep_best", "metric_for_best_model", "greater_is_better")
    checkpoints.rotate_checkpoints(SimpleNamespace(folder=run, **dict(zip(names, values, strict=True))))
    return [step for step, _ in checkpoints_in(run)]


def test_manifest_holds_sizes_and_sums_of_all_files(folder):
    """But not of itself, and not of a card, which earlier versions listed."""
    (folder / "README.md").write_text("a card")
    mark_complete(folder)  # once more
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert manifest == {
        "files": {name: len(content) for name, content in FILES.items()},
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()},
    }
    assert sorted(path.name for path in folder.glob("complete*")) == [MANIFEST]
    (folder / MANIFEST).write_text(json.dumps({name: {**values, "README.md": 9} for name, values in manifest.items()}))
    assert faults_of(folder) == []


def test_each_fault_is_named(folder):
    assert faults_of(folder) == []
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"weight")
    (folder / "optimizer.pt").write_bytes(b"Moments")
    (folder / "target_tokenizer/tokenizer.json").write_bytes(b"Words")
    faults = [
        "config.json has no bytes, not 2",
        "model.safetensors has 6 bytes, not 7",
        "optimizer.pt has changed since it was saved",
        "target_tokenizer/tokenizer.json has changed since it was saved",
    ]
    assert faults_of(folder) == faults
    assert faults_of(folder, contents=False) == faults[:2]
    assert faults_of(folder, training_state=False) == [faults[0], faults[1], faults[3]]
    for text in ("{", "[]", "{}", '{"files": 3}'):
        (folder / MANIFEST).write_text(text)
        (fault,) = faults_of(folder)
        assert fault.startswith("complete.json cannot be read (")


def test_the_newest_intact_checkpoint(tmp_path, capsys):
    """Damaged ones are reported, incomplete ones skipped; if all are damaged, the error names them."""
    run = run_of(tmp_path / "run", {9: 1.0, 10: 2.0, 11: 3.0, 12: 4.0})
    newest_intact_checkpoint = checkpoints.newest_intact_checkpoint
    assert newest_intact_checkpoint(run) == run / "checkpoint-12" and capsys.readouterr().err == ""
    (run / "checkpoint-12" / MANIFEST).unlink()  # its saving was cut off, which is no damage
    (run / "checkpoint-11" / "config.json").write_text("[]")
    (run / "checkpoint-10" / "config.json").write_text("{ }")
    assert checkpoints.newest_checkpoint(run) == run / "checkpoint-11", "only sizes are compared"
    assert newest_intact_checkpoint(run) == run / "checkpoint-9"
    faults = ["config.json has changed since it was saved.", "config.json has 3 bytes, not 2."]
    assert [text.split(": ")[1] for text in capsys.readouterr().err.splitlines()] == faults
    (run / "checkpoint-9" / "config.json").unlink()
    with rejects(*(f"checkpoint-{step} is damaged" for step in (9, 10, 11)), field=str(run)):
        newest_intact_checkpoint(run)
    shutil.rmtree(run)
    assert newest_intact_checkpoint(run) is None


def test_choice_of_last_and_best(tmp_path):
    """Of equally good checkpoints the newer ones are chosen."""
    run = run_of(tmp_path / "run", {10: 1.0, 20: 9.0, 30: 5.0, 40: 9.0, 100: None})

    def steps(*arguments):
        return [checkpoints.steps_of(folder) for folder in checkpoints.choose_checkpoints(run, *arguments)]

    assert steps(2) == [40, 100] and steps(9) == [10, 20, 30, 40, 100]
    assert steps(3, "best") == [40, 20, 30]
    assert steps(1, "best", "eval_bleu", False) == [10]
    with rejects(field=str(run)):
        steps(1, "best", "eval_chrf")
    with rejects(field=str(tmp_path / "nowhere")):
        checkpoints.choose_checkpoints(tmp_path / "nowhere", 1)
    run = run_of(tmp_path / "loss", {10: 3.0, 20: 1.0, 30: 2.0}, metric="eval_loss")
    assert steps(2, "best", "eval_loss") == [20, 30]


@pytest.mark.parametrize(
    "last, best, metric, greater, left",
    [
        (2, 0, "eval_bleu", True, [40, 50]),
        (2, 1, None, True, [40, 50]),
        (0, 0, "eval_bleu", True, [50]),
        (1, 2, "eval_bleu", True, [20, 30, 50]),
        (1, 2, "bleu", False, [10, 40, 50]),
        (1, 2, "chrf", True, [50]),
        (9, 9, "bleu", True, [10, 20, 30, 40, 50]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, last, best, metric, greater, left):
    run = run_of(tmp_path / "run", {10: 1.0, 20: 9.0, 30: 8.0, 40: 2.0, 50: 5.0})
    assert rotate(run, last, best, metric, greater) == left


def test_rotation_keeps_the_best_checkpoint_of_the_trainer(tmp_path):
    run = run_of(tmp_path / "run", {10: 1.0, 20: 9.0, 30: None}, best="/where/the/run/was/before/checkpoint-10")
    checkpoints.discard(run / "checkpoint-20")  # values of steps whose checkpoints are gone do not count
    assert rotate(run, 1, 0, None, True) == [10, 30]


def test_average_is_the_mean_and_copies_other_files(tmp_path):
    run = run_of(tmp_path / "run", {1: None, 2: None, 6: None})
    out = average_checkpoints([folder for _, folder in checkpoints_in(run)], tmp_path / "not" / "there" / "yet")
    tensors = load_file(out / "model.safetensors")
    assert tensors["a"].tolist() == [3.0] * 3 and tensors["n"].item() == 6
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "as transformers writes weights"


def test_average_has_its_own_card_and_copies_tokenizer_files(tmp_path, tiny_folder):
    """The evidence of an averaged model does not describe the mean."""
    shutil.copytree(tiny_folder, tmp_path / "one")
    others = ("trainer_state.json", "model.safetensors.index.json", "scheduler.pt", "notes.md")
    for name in ("README.md", "evidence.json", "source.spm", *others):
        (tmp_path / "one" / name).write_text("38.2 BLEU")
    (tmp_path / "one/translations").mkdir()
    (tmp_path / "one/target_tokenizer").mkdir()
    out = average_checkpoints([tiny_folder, tmp_path / "one"], tmp_path / "mean")
    copied = {path.name for path in out.iterdir()}
    assert {"source.spm", "target_tokenizer"} <= copied and not copied & {"evidence.json", "translations", *others}
    assert "nmt_transformer" in (out / "README.md").read_text()
    assert "38.2" not in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        # Added up in bfloat16, whose steps above 1 are 1/128, the small values would be lost one after the other.
        ([1.0] + [2.0**-8] * 7, torch.bfloat16, (1 + 7 / 256) / 8),
        # Not in double precision, of which a large model would need twice the memory.
        ([2.0**24, 1.0, 1.0], torch.float32, torch.tensor(2.0**24).div(3).item()),
        ([1.0, 1.0 + 1e-12, 1.0 + 2e-12], torch.float64, 1.0 + 1e-12),
    ],
)
def test_precision_of_the_mean(tmp_path, values, dtype, expected):
    folders = [weights(tmp_path / str(i), a=torch.tensor([value], dtype=dtype)) for i, value in enumerate(values)]
    mean = load_file(average_checkpoints(folders, tmp_path / "mean") / "model.safetensors")["a"]
    assert mean.dtype == dtype and mean.item() == pytest.approx(torch.tensor(expected, dtype=dtype).item(), abs=1e-15)


def test_incomplete_checkpoints_are_skipped(tmp_path, capsys):
    """The others are averaged, and named."""
    run = run_of(tmp_path / "run", {10: 3.0, 20: 1.0, 30: 2.0}, metric="eval_loss")
    damaged = run / "checkpoint-30/config.json"
    damaged.write_text("{ }")
    words = ["average", str(run), "-o", str(tmp_path / "mean"), "--count"]
    assert main([*words, "3"]) == 0
    printed = capsys.readouterr().out
    assert "checkpoint-20" in printed and "checkpoint-30" not in printed
    assert load_file(tmp_path / "mean/model.safetensors")["a"].tolist() == [15.0] * 3
    shutil.rmtree(tmp_path / "mean")
    assert main([*words, "1", "--which", "best", "--metric", "eval_loss"]) == 0
    assert load_file(tmp_path / "mean/model.safetensors")["n"].item() == 20


def test_models_that_cannot_be_averaged(tmp_path):
    good = weights(tmp_path / "checkpoint-1", a=torch.ones(1))
    (good / "optimizer.pt").write_text("moments")
    mark_complete(good)
    (good / "optimizer.pt").unlink()  # which is not needed
    (tmp_path / "empty").mkdir()
    other = weights(tmp_path / "other", b=torch.zeros(1))
    larger = weights(tmp_path / "larger", a=torch.zeros(2))
    for folder, kind in ((tmp_path / "empty", FileNotFoundError), (other, ValueError), (larger, ValueError)):
        with rejects(field=str(folder), kind=kind):
            average_checkpoints([good, folder], tmp_path / "mean")
    with rejects(field=str(larger), kind=FileExistsError):
        average_checkpoints([good], larger)
    average_checkpoints([good], tmp_path / "mean")
    save_file({"a": torch.zeros(1)}, good / "model.safetensors")
    with rejects("model.safetensors has changed since it was saved", field=str(good)):
        average_checkpoints([good], tmp_path / "mean-of-damaged")
