"""Folders of checkpoints: manifests, faults of damaged ones, rotation."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from user_errors import rejects

from recnmt_hf.training import checkpoints
from recnmt_hf.training.checkpoints import (
    MANIFEST,
    average_checkpoints,
    checkpoints_in,
    choose_checkpoints,
    copy_beside_weights,
    discard,
    faults_of,
    is_complete,
    mark_complete,
    metric_of_steps,
    newest_intact_checkpoint,
    rotate,
    steps_of,
)


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


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def run_of(tmp_path, values, best=None, metric="eval_bleu"):
    """A run with a complete checkpoint for each step, and the validation values of all of them in the newest's log."""
    for step in values:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        log = [{"step": other, metric: value} for other, value in values.items() if value is not None]
        state = {"log_history": [{"step": 1, "loss": 5.0}, *log], "best_model_checkpoint": best}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        mark_complete(folder)
    return tmp_path


def steps_in(run):
    return [step for step, _ in checkpoints_in(run)]


# -- one folder --------------------------------------------------------------------------------------------------------


def test_manifest_holds_sizes_and_sums_of_all_files(folder):
    (folder / "left.partial").write_text("of a run that was killed")
    mark_complete(folder)  # once more: the manifest does not list itself
    assert manifest_of(folder) == {
        "files": {name: len(content) for name, content in FILES.items()},
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()},
    }
    assert sorted(path.name for path in folder.glob("complete*")) == [MANIFEST]


def test_each_fault_is_named(folder):
    assert faults_of(folder) == []
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"weight")
    (folder / "optimizer.pt").write_bytes(b"Moments")
    (folder / "target_tokenizer/tokenizer.json").write_bytes(b"Words")
    faults = [
        "config.json is missing",
        "model.safetensors has 6 bytes, not 7",
        "optimizer.pt has changed since it was saved",
        "target_tokenizer/tokenizer.json has changed since it was saved",
    ]
    assert faults_of(folder) == faults
    assert faults_of(folder, contents=False) == faults[:2]
    assert faults_of(folder, training_state=False) == [faults[0], faults[1], faults[3]]


def test_sizes_decide_whether_a_checkpoint_is_complete(folder):
    (folder / "optimizer.pt").write_bytes(b"Moments")
    assert is_complete(folder)
    (folder / "optimizer.pt").write_bytes(b"")
    assert not is_complete(folder)


def test_manifests_of_earlier_versions(folder):
    """They have no sums, and may list what was left over of writing the manifest itself."""
    manifest = {"files": {"complete.json.partial": 5, **manifest_of(folder)["files"]}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert faults_of(folder) == []
    (folder / "optimizer.pt").write_bytes(b"Moments")
    assert faults_of(folder) == []
    (folder / "optimizer.pt").write_bytes(b"")
    assert faults_of(folder) == ["optimizer.pt has 0 bytes, not 7"]


def test_a_card_is_no_part_of_the_manifest(folder):
    """Not even of one by an earlier version, which lists it."""
    (folder / "README.md").write_text("a card")
    mark_complete(folder)
    assert "README.md" not in manifest_of(folder)["files"]
    listed = {name: {**values, "README.md": 6} for name, values in manifest_of(folder).items()}
    (folder / MANIFEST).write_text(json.dumps(listed))
    (folder / "README.md").write_text("another card")
    assert faults_of(folder) == [] and is_complete(folder)
    (folder / "README.md").unlink()
    assert faults_of(folder) == [] and is_complete(folder)
    (folder / "target_tokenizer" / "README.md").write_text("words")
    mark_complete(folder)
    (folder / "target_tokenizer" / "README.md").unlink()
    assert faults_of(folder) == ["target_tokenizer/README.md is missing"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": 3}'])
def test_an_unreadable_manifest_is_a_fault(folder, text):
    (folder / MANIFEST).write_text(text)
    (fault,) = faults_of(folder)
    assert fault.startswith("complete.json cannot be read (")
    (folder / MANIFEST).unlink()
    assert [fault.split(",")[0] for fault in faults_of(folder)] == ["complete.json is missing"]


def test_a_discarded_checkpoint_is_gone(folder):
    discard(folder)
    assert not folder.exists()
    discard(folder)
    folder.mkdir()
    (folder / "half").touch()
    discard(str(folder))
    assert not folder.exists()


def test_files_copied_with_the_weights(folder, tmp_path):
    names = ["modeling_x.py", "vocab.txt", "spm.model", "tokenizer_config.json"]
    others = ["trainer_state.json", "model.safetensors.index.json", "scheduler.pt", "notes.md"]
    for name in (*names, *others):
        (folder / name).touch()
    output = tmp_path / "output"
    output.mkdir()
    for _ in range(2):  # what is there already is written over
        copy_beside_weights(str(folder), str(output))
    assert sorted(path.name for path in output.iterdir()) == sorted([*names, "config.json", "target_tokenizer"])
    assert (output / "target_tokenizer" / "tokenizer.json").read_bytes() == b"words"


# -- the folders of a run ----------------------------------------------------------------------------------------------


def test_steps_are_read_from_the_name(tmp_path):
    assert steps_of(tmp_path / "checkpoint-of-a-run" / "checkpoint-1200") == 1200


def test_newest_intact_checkpoint_reports_damaged_ones(tmp_path):
    run = run_of(tmp_path, {9: 1.0, 10: 2.0, 11: 3.0, 12: 4.0})
    reports = []
    assert newest_intact_checkpoint(run, reports.append) == run / "checkpoint-12" and reports == []
    (run / "checkpoint-12" / MANIFEST).unlink()  # its saving was cut off, which is no damage
    (run / "checkpoint-11" / "weights").write_text("xx")
    (run / "checkpoint-10" / "weights").write_text("123")
    assert newest_intact_checkpoint(run, reports.append) == run / "checkpoint-9"
    assert reports == [
        f"{run / 'checkpoint-11'} is damaged: weights has changed since it was saved. An older checkpoint is used.",
        f"{run / 'checkpoint-10'} is damaged: weights has 3 bytes, not 2. An older checkpoint is used.",
    ]
    assert newest_intact_checkpoint(run) == run / "checkpoint-9"
    (run / "checkpoint-9" / "weights").unlink()
    with rejects(field=str(run)) as caught:
        newest_intact_checkpoint(run)
    assert all(f"checkpoint-{step} is damaged" in str(caught.value) for step in (9, 10, 11))
    shutil.rmtree(run)
    assert newest_intact_checkpoint(run) is None


def test_at_most_three_faults_of_a_checkpoint_are_reported(folder):
    for name in FILES:
        (folder / name).unlink()
    with rejects("Restore the files, or start again with") as caught:
        newest_intact_checkpoint(folder.parent)
    assert str(caught.value).count(" is missing") == 3


def test_metric_of_steps(tmp_path):
    assert metric_of_steps(tmp_path, "eval_bleu") == {}
    run = run_of(tmp_path, {9: 1.0, 10: None, 11: 3.0})
    assert metric_of_steps(run, "eval_bleu") == {9: 1.0, 11: 3.0}
    assert metric_of_steps(run, "eval_loss") == {}
    newest = run / "checkpoint-11"
    (newest / "trainer_state.json").write_text("{}")
    mark_complete(newest)
    assert metric_of_steps(run, "eval_bleu") == {}


def test_of_equally_good_checkpoints_the_newer_ones_are_chosen(tmp_path):
    run = run_of(tmp_path, {9: 5.0, 10: 5.0, 100: 4.0})
    assert [steps_of(each) for each in choose_checkpoints(run, 2, "best")] == [10, 9]


@pytest.mark.parametrize(
    "last, best, metric, greater, left",
    [
        (2, 0, "eval_bleu", True, [40, 50]),
        (2, 0, None, True, [40, 50]),
        (2, 1, None, True, [40, 50]),
        (0, 0, "eval_bleu", True, [50]),
        (1, 2, "eval_bleu", True, [20, 30, 50]),
        (1, 2, "bleu", True, [20, 30, 50]),
        (1, 1, "bleu", True, [20, 50]),
        (1, 2, "bleu", False, [10, 40, 50]),
        (1, 2, "chrf", True, [50]),
        (9, 9, "bleu", True, [10, 20, 30, 40, 50]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, last, best, metric, greater, left):
    run = run_of(tmp_path, {10: 1.0, 20: 9.0, 30: 8.0, 40: 2.0, 50: 5.0})
    rotate(str(run), last, best, metric, greater)
    assert steps_in(run) == left


def test_rotation_keeps_the_best_checkpoint_of_the_trainer(tmp_path):
    run = run_of(tmp_path, {10: 1.0, 20: 9.0, 30: 8.0}, best="/where/the/run/was/before/checkpoint-10")
    rotate(run, 1, 0, None, True)
    assert steps_in(run) == [10, 30]


def test_rotation_before_the_metric_of_a_kept_checkpoint_is_known(tmp_path):
    """Values of steps whose checkpoints are gone do not count."""
    run = run_of(tmp_path, {10: 1.0, 20: None, 30: None})
    discard(run / "checkpoint-10")
    rotate(run, 1, 2, "bleu", True)
    assert steps_in(run) == [30]


# -- averages ----------------------------------------------------------------------------------------------------------


def weights(folder, **tensors):
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def average(tmp_path, *values):
    folders = [weights(tmp_path / f"checkpoint-{i}", a=value) for i, value in enumerate(values)]
    return load_file(average_checkpoints(folders, tmp_path / "mean") / "model.safetensors")["a"]


def test_double_precision_is_averaged_in_itself(tmp_path):
    values = [torch.tensor([1.0 + i * 1e-12], dtype=torch.float64) for i in range(3)]
    assert average(tmp_path, *values).item() == pytest.approx(1 + 1e-12, abs=1e-15)


def test_single_precision_is_averaged_in_itself(tmp_path):
    """Not in double precision, of which a large model would need twice the memory."""
    values = [torch.tensor([value]) for value in (2.0**24, 1.0, 1.0)]
    assert average(tmp_path, *values).item() == torch.tensor(2.0**24).div(3).item()


def test_integers_are_copied_from_the_last_checkpoint(tmp_path):
    folders = [
        weights(tmp_path / f"checkpoint-{i}", a_count=torch.tensor([i]), b=torch.tensor([float(i)])) for i in range(3)
    ]
    mean = load_file(average_checkpoints(folders, tmp_path / "mean") / "model.safetensors")
    assert mean["a_count"].tolist() == [2] and mean["b"].tolist() == [1.0]


def test_an_average_is_written_as_transformers_writes_weights(tmp_path):
    folder = weights(tmp_path / "checkpoint-1", a=torch.ones(1))
    output = average_checkpoints([folder], tmp_path / "not" / "there" / "yet")
    with safe_open(output / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_average_ignores_damaged_training_state(tmp_path):
    folder = weights(tmp_path / "checkpoint-1", a=torch.ones(1))
    (folder / "optimizer.pt").write_text("moments")
    mark_complete(folder)
    (folder / "optimizer.pt").unlink()
    average_checkpoints([folder], tmp_path / "mean")
    weights(tmp_path / "other", a=torch.zeros(1))
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    with rejects("model.safetensors has changed since it was saved", field=str(folder)):
        average_checkpoints([folder], tmp_path / "mean-of-damaged")


def test_a_failed_average_leaves_nothing(tmp_path, monkeypatch):
    folder = weights(tmp_path / "checkpoint-1", a=torch.ones(1))
    left_over = tmp_path / ".mean.partial"
    left_over.mkdir()
    (left_over / "junk.json").touch()

    def full(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(checkpoints, "save_file", full)
        average_checkpoints([folder], tmp_path / "mean")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    left_over.mkdir()
    (left_over / "junk.json").touch()
    average_checkpoints([folder], tmp_path / "mean")
    assert [path.name for path in (tmp_path / "mean").iterdir()] == ["model.safetensors"]


def test_a_checkpoint_deleted_meanwhile_is_named(tmp_path, monkeypatch):
    folder = weights(tmp_path / "checkpoint-1", a=torch.ones(1))
    mark_complete(folder)
    saved = checkpoints.save_file

    def save_and_delete(*arguments, **more):
        saved(*arguments, **more)
        discard(folder)

    monkeypatch.setattr(checkpoints, "save_file", save_and_delete)
    with rejects(field=str(folder), kind=FileNotFoundError):
        average_checkpoints([folder], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
