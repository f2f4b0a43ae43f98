"""Checkpoints: incomplete ones are skipped; averages of several."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.training.checkpoints import (
    MANIFEST,
    average_checkpoints,
    checkpoints_in,
    choose_checkpoints,
    is_complete,
    mark_complete,
    newest_checkpoint,
)


def make(run, step, value=None, bleu=None, metric="eval_bleu"):
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    value = float(step) if value is None else value
    save_file({"a": torch.full((3,), value), "n": torch.tensor([step])}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    history = [{"step": s, metric: float(b)} for s, b in (bleu or {}).items()]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    mark_complete(folder)
    return folder


def test_incomplete_checkpoints_are_ignored(tmp_path):
    folders = [make(tmp_path, step) for step in (10, 20, 30)]
    assert newest_checkpoint(tmp_path) == folders[2]
    (folders[2] / MANIFEST).unlink()  # writing was cut off before the end
    assert newest_checkpoint(tmp_path) == folders[1]
    weights = folders[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])  # a copy was cut off
    assert newest_checkpoint(tmp_path) == folders[0]
    (folders[0] / "config.json").unlink()
    assert newest_checkpoint(tmp_path) is None
    (folders[0] / MANIFEST).write_text("{")
    assert not is_complete(folders[0])


def test_average_is_the_mean_and_copies_other_files(tmp_path):
    folders = [make(tmp_path / "run", step) for step in (1, 2, 6)]
    out = average_checkpoints(folders, tmp_path / "mean")
    tensors = load_file(out / "model.safetensors")
    assert tensors["a"].tolist() == [3.0] * 3 and tensors["n"].item() == 6
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_average_has_its_own_card_and_copies_tokenizer_files(tmp_path, tiny_folder):
    """The evidence of an averaged model does not describe the mean."""
    shutil.copytree(tiny_folder, tmp_path / "one")
    for name in ("README.md", "evidence.json", "source.spm"):
        (tmp_path / "one" / name).write_text("38.2 BLEU")
    (tmp_path / "one/translations").mkdir()
    out = average_checkpoints([tmp_path / "one", tiny_folder], tmp_path / "mean")
    assert not (out / "evidence.json").exists()
    out = average_checkpoints([tiny_folder, tmp_path / "one"], tmp_path / "other")
    assert not (out / "evidence.json").exists() and not (out / "translations").exists()
    assert (out / "source.spm").read_text() == "38.2 BLEU"
    assert "nmt_transformer" in (out / "README.md").read_text()
    assert "38.2" not in (out / "README.md").read_text()


def test_half_precision_is_averaged_in_float32(tmp_path):
    """Added up in bfloat16, whose steps above 1 are 1/128, the small values would be lost one after the other."""
    folders = []
    for i, value in enumerate([1.0] + [2.0**-8] * 7):
        folder = tmp_path / f"checkpoint-{i}"
        folder.mkdir()
        save_file({"a": torch.full((1,), value, dtype=torch.bfloat16)}, folder / "model.safetensors")
        folders.append(folder)
    mean = load_file(average_checkpoints(folders, tmp_path / "mean") / "model.safetensors")["a"]
    assert mean.dtype == torch.bfloat16
    exact = torch.tensor((1 + 7 / 256) / 8, dtype=torch.bfloat16)
    assert mean.item() == exact.item() != 1 / 8


def test_choice_of_last_and_best(tmp_path):
    bleu = {10: 1.0, 20: 9.0, 30: 5.0, 40: 9.0}
    for step in bleu:
        make(tmp_path, step, bleu=bleu)

    def steps(*arguments):
        return [int(folder.name.split("-")[1]) for folder in choose_checkpoints(tmp_path, *arguments)]

    assert steps(2) == [30, 40]
    assert steps(3, "best") == [40, 20, 30]
    assert steps(1, "best", "eval_bleu", False) == [10]
    assert steps(9) == [10, 20, 30, 40]
    with rejects(field=str(tmp_path)):
        steps(1, "best", "eval_chrf")
    with rejects(field="which"):
        steps(1, "first")
    with rejects(field="count"):
        steps(0)
    with rejects(field=str(tmp_path / "nowhere")):
        choose_checkpoints(tmp_path / "nowhere", 1)


def test_skipped_checkpoints_are_reported(tmp_path, capsys):
    """Older ones replace them only if --count allows it."""
    for step in (10, 20, 30):
        make(tmp_path / "run", step)
    damaged = tmp_path / "run/checkpoint-30/config.json"
    damaged.write_text("{ }")
    words = ["average", str(tmp_path / "run"), "-o", str(tmp_path / "mean"), "--count"]
    assert main([*words, "3"]) == 2
    reported = f"{damaged.parent} is incomplete and skipped: config.json has 3 bytes, not 2."
    err = capsys.readouterr().err
    assert reported in err and "--count" in err
    assert not (tmp_path / "mean").exists()
    assert main([*words, "2"]) == 0
    messages = capsys.readouterr()
    assert reported in messages.err and "checkpoint-10" in messages.out and "checkpoint-30" not in messages.out
    assert load_file(tmp_path / "mean/model.safetensors")["a"].tolist() == [15.0] * 3


def test_the_best_by_loss_is_the_lowest(tmp_path, capsys):
    loss = {10: 3.0, 20: 1.0, 30: 2.0}
    for step in loss:
        make(tmp_path / "run", step, bleu=loss, metric="eval_loss")
    best = choose_checkpoints(tmp_path / "run", 2, "best", "eval_loss")
    assert [folder.name for folder in best] == ["checkpoint-20", "checkpoint-30"]
    words = ["average", str(tmp_path / "run"), "--count", "1", "--which", "best", "-o", str(tmp_path / "mean")]
    assert main([*words, "--metric", "eval_bleu", "--lower-is-better"]) == 2
    assert "--lower-is-better" in capsys.readouterr().err
    assert main([*words, "--metric", "eval_loss"]) == 0
    assert load_file(tmp_path / "mean" / "model.safetensors")["n"].item() == 20


@pytest.mark.parametrize(
    "state",
    [
        *("", "[", "[]", "null", "[" * 100_000, '{"log_history": 5}', '{"log_history": [5]}'),
        *(
            '{"log_history": [{"eval_bleu": 3}]}',
            '{"log_history": [{"step": "x"}]}',
            '{"log_history": [{"step": 1e400}]}',
        ),
        '{"log_history": [{"step": 1, "eval_bleu": 1' + "0" * 400 + "}]}",
    ],
)
def test_a_damaged_state_is_named(tmp_path, state):
    folder = make(tmp_path, 1)
    (folder / "trainer_state.json").write_text(state)
    mark_complete(folder)
    with rejects(field=str(folder / "trainer_state.json")):
        choose_checkpoints(tmp_path, 1, "best")


@pytest.mark.parametrize("manifest", ["[" * 100_000, json.dumps({"files": {"a\0b": 3}}), '{"files": {"/": "x"}}'])
def test_a_damaged_manifest_makes_a_checkpoint_incomplete(tmp_path, manifest):
    (make(tmp_path, 1) / "complete.json").write_text(manifest)
    assert checkpoints_in(tmp_path) == []


def test_wrong_folders_are_named(tmp_path):
    good = make(tmp_path, 1)
    with rejects("There is no checkpoint to average"):
        average_checkpoints([], tmp_path / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    torch.save({}, empty / "pytorch_model.bin")
    with rejects(field=str(empty), kind=FileNotFoundError):
        average_checkpoints([good, empty], tmp_path / "out")
    cut = tmp_path / "cut"
    shutil.copytree(good, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-5])
    with rejects("model.safetensors has 135 bytes, not 140", field=str(cut)):
        average_checkpoints([good, cut], tmp_path / "out")
    (cut / MANIFEST).unlink()
    with rejects(field=str(cut / "model.safetensors")):
        average_checkpoints([good, cut], tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    save_file({"b": torch.zeros(1)}, other / "model.safetensors")
    with rejects(field=str(other)):
        average_checkpoints([good, other], tmp_path / "out")
