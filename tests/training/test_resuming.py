"""Resumed runs: allowed and forbidden changes, damaged checkpoints, folders and their lock, waiting processes."""

import json
import os
import re
import shutil
import signal
import textwrap
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import yaml
from other_processes import launched, output_of
from test_kills import PAIRS, tiny
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.errors import ExistingFileError
from recnmt_hf.training import checkpoints
from recnmt_hf.training.arguments import training_options
from recnmt_hf.training.checkpoints import MANIFEST, average_checkpoints, checkpoints_in, newest_checkpoint
from recnmt_hf.training.plan import FREE, FREE_PREFIXES, identity_of
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of four updates, and its recipe's data."""
    folder = tmp_path_factory.mktemp("finished")
    plan = tiny(folder)
    train(plan, folder / "run")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished / "run", tmp_path / "run")


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("model", {"type": "rnmt"}, ["model.type: 'nmt_transformer' -> 'rnmt'"]),
        ("tokenizer", {"vocab_size": 30}, ["tokenizer.vocab_size: 40 -> 30"]),
        ("training", {"max_tokens": 99, "optim": "sgd"}, ["max_tokens: 80 -> 99; training.optim: 'adamw_torch"]),
        ("training", {"gradient_accumulation_steps": 2}, ["training.gradient_accumulation_steps: 1 -> 2"]),
        ("data", {"train": [{"generated": "train", "size": 21}]}, ["'20 sentence pairs", "'21 sentence pairs"]),
        ("training", {"max_steps": 3}, ["is less than the 4 steps"]),
        ("data", {"max_source_length": 5}, ["data.train: '20 sentence pairs"]),
    ],
)
def test_forbidden_changes_are_rejected(finished, run, section, values, words):
    """The error names the fields with old and new values; the run is unchanged."""
    before = (run / "recipe.yaml").read_bytes()
    with rejects(*words):
        train(tiny(finished, **{section: values}), run, resume=True)
    assert (run / "recipe.yaml").read_bytes() == before
    assert [step for step, _ in checkpoints_in(run)] == [3, 4]


def test_every_other_setting_is_part_of_the_identity():
    """A new argument of training must not change in a resumed run, unless it is listed as free."""
    plain = Recipe().to_dict()
    for name in training_options().keys() - {"output_dir"}:
        settings = {**plain, "training": {**plain["training"], name: "another value"}}
        is_free = f"training.{name}" in FREE or f"training.{name}".startswith(FREE_PREFIXES)
        assert (identity_of(settings, True) == identity_of(plain, True)) == is_free, name


def test_allowed_changes_are_reported(finished, run, capsys):
    training = {"max_steps": 5, "logging_steps": 1, "keep_last": 3, "learning_rate": 0.02}
    data = {"train": [{"tsv": PAIRS["tsv"].replace("/training/", "/training/../training/")}]}
    plan = tiny(finished, training=training, decoding={"beams": 2}, data=data)
    earlier = yaml.safe_load((run / "recipe.yaml").read_text())
    earlier["data"]["schedule"] = []  # earlier versions wrote it
    (run / "recipe.yaml").write_text(yaml.safe_dump(earlier))
    assert Recipe.from_file(run / "recipe.yaml").to_dict()["data"].keys() == earlier["data"].keys() - {"schedule"}
    train(plan, run, resume=True)
    messages = capsys.readouterr().err
    for change in ("training.max_steps: 4 -> 5", "training.learning_rate: 0.01 -> 0.02", "decoding.beams: 1 -> 2"):
        assert f"Changed since the start of the run: {change}" in messages
    assert "data.train" not in messages  # other words for the same pairs
    assert yaml.safe_load((run / "recipe.yaml").read_text())["training"]["max_steps"] == 5
    log = json.loads((run / "checkpoint-5/trainer_state.json").read_text())["log_history"]
    # inverse_sqrt with one step of warm-up: the fifth update has half the rate
    assert [entry["learning_rate"] for entry in log if entry["step"] == 5 and "loss" in entry] == [pytest.approx(0.01)]


def test_a_finished_run_of_epochs_is_not_trained_again(finished, tmp_path):
    plan = tiny(finished, training={"max_steps": -1, "num_train_epochs": 1.5, "save_steps": 2})
    train(plan, tmp_path / "run")
    steps = [step for step, _ in checkpoints_in(tmp_path / "run")]
    train(plan, tmp_path / "run", resume=True)
    assert [step for step, _ in checkpoints_in(tmp_path / "run")] == steps


def test_without_the_state_of_the_optimizer(finished, tmp_path):
    """The Trainer would begin with a new optimizer and a new warm-up, silently."""
    plan = tiny(finished, training={"save_only_model": True})
    train(plan, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")
    train(plan, tmp_path / "run", resume=True)  # no step is missing
    plan.training.max_steps = 6
    newest = str(newest_checkpoint(tmp_path / "run"))
    with rejects(field=newest):
        train(plan, tmp_path / "run", resume=True)


def test_another_number_of_processes(finished, run, capsys):
    """The product of processes and accumulated batches must stay the same."""
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "processes": 4}))
    with rejects("gradient_accumulation_steps: 4 -> 1"):
        train(tiny(finished), run, resume=True)
    (run / "run.json").write_text(json.dumps({**record, "accumulation": 1, "processes": 1, "device": "cuda"}))
    train(tiny(finished), run, resume=True)
    assert "device: 'cuda' -> 'cpu'" in capsys.readouterr().err


def test_runs_of_earlier_versions_resume(finished, run, capsys):
    """Their manifests have no sums and may list their own partial file, and there is no record."""
    for _, folder in checkpoints_in(run):
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {**manifest["files"], f"{MANIFEST}.partial": 1234}
        (folder / MANIFEST).write_text(json.dumps({"files": files}))
    (run / "run.json").unlink()
    expected = (run / "model/model.safetensors").read_bytes()
    train(tiny(finished), run, resume=True)
    assert "The run ended with checkpoint-4." in capsys.readouterr().err
    assert (run / "model/model.safetensors").read_bytes() == expected
    with rejects(field="data.train"):
        (run / "run.json").unlink()
        train(tiny(finished, data={"train": [{"generated": "train", "size": 21}]}), run, resume=True)


def test_early_stopping_ends_a_resumed_run_too(finished, tmp_path, capsys):
    """Killed while the final model is made: the run has ended, and no step is made beyond it."""
    training = {"early_stopping_patience": 1, "learning_rate": 0.0, "eval_steps": 1}
    plan = tiny(finished, training=training)
    train(plan, tmp_path / "run")
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    train(plan, tmp_path / "run", resume=True)
    assert "The run ended with checkpoint-2." in capsys.readouterr().err
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    # More patience than before holds.
    train(tiny(finished, training={**training, "early_stopping_patience": 2}), tmp_path / "run", resume=True)
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-3"


def test_a_resumed_run_does_not_evaluate_its_checkpoint_again(finished, tmp_path):
    """Early stopping would count that as an evaluation without progress."""
    training = {"early_stopping_patience": 1, "eval_on_start": True, "eval_steps": 1, "keep_last": 9}
    plan = tiny(finished, training=training)
    train(plan, tmp_path / "run")
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-4"
    expected = (tmp_path / "run/model/model.safetensors").read_bytes()
    for name in ("checkpoint-3", "checkpoint-4", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    train(plan, tmp_path / "run", resume=True)
    log = json.loads((tmp_path / "run/checkpoint-4/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [0, 1, 2, 3, 4]
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(("metric", "mode"), [("bleu", "max"), ("loss", "min")])
def test_a_schedule_by_the_metric(finished, tmp_path, metric, mode):
    """It knows in which direction the metric improves, and follows a new learning rate."""
    training = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": metric, "bleu_samples": 1}
    training |= {"logging_steps": 1, "warmup_steps": 0}
    train(tiny(finished, training=training), tmp_path / "run")
    assert torch.load(tmp_path / "run/checkpoint-4/scheduler.pt")["mode"] == mode
    train(tiny(finished, training={**training, "max_steps": 5, "learning_rate": 0.002}), tmp_path / "run", resume=True)
    log = json.loads((tmp_path / "run/checkpoint-5/trainer_state.json").read_text())["log_history"]
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    assert rates[0] == 0.01 and rates[-1] == pytest.approx(0.002)
    # A checkpoint of an earlier version has no initial rate.
    state = torch.load(tmp_path / "run/checkpoint-5/optimizer.pt")
    del state["param_groups"][0]["initial_lr"]
    state["param_groups"][0]["lr"] = 0.001
    torch.save(state, tmp_path / "run/checkpoint-5/optimizer.pt")
    checkpoints.mark_complete(tmp_path / "run/checkpoint-5")
    training |= {"max_steps": 6, "learning_rate": 0.002}
    train(tiny(finished, training=training), tmp_path / "run", resume=True)
    assert torch.load(tmp_path / "run/checkpoint-6/optimizer.pt")["param_groups"][0]["lr"] == pytest.approx(0.001)
    training["metric_for_best_model"] = {"bleu": "loss", "loss": "bleu"}[metric]  # the direction would be another one
    with rejects(field="training.metric_for_best_model"):
        train(tiny(finished, training=training), tmp_path / "run", resume=True)


def test_mixed_precision_of_accelerate_is_recorded(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(tiny(finished), tmp_path / "run")
    evidence = json.loads((tmp_path / "run/model/evidence.json").read_text())
    assert evidence["training"]["dtype"] == "bfloat16"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    train(tiny(finished), tmp_path / "run", resume=True)
    assert "precision: 'bf16' -> 'no'" in capsys.readouterr().err


def test_resuming_without_steps_keeps_scores_and_speed(finished, run):
    """Those of `recnmt test`, with their translations, and the speed of the training."""
    source, target = run.parent / "extra.en", run.parent / "extra.de"
    source.write_text("The dog sleeps.\n")
    target.write_text("Der Hund schläft.\n")
    words = ["--set", "extra", str(source), str(target), "--device", "cpu", "--beams", "1"]
    assert main(["test", str(run / "model"), *words]) == 0
    before = json.loads((run / "model/evidence.json").read_text())
    train(tiny(finished), run, resume=True)
    after = json.loads((run / "model/evidence.json").read_text())
    assert {test["name"] for test in after["tests"]} == {"extra", "unseen"}
    assert after["training"] == before["training"] and after["training"]["seconds_per_step"] > 0
    assert len(list((run / "model/translations").iterdir())) == 2
    train(tiny(finished, training={"max_steps": 5}), run, resume=True)
    assert [test["name"] for test in json.loads((run / "model/evidence.json").read_text())["tests"]] == ["unseen"]


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damage_of_unchanged_size(finished, run, capsys):
    """The run resumes from the newest intact checkpoint; the damaged one is reported and never averaged."""
    flip(run / "checkpoint-4/optimizer.pt")
    expected = (run / "model/model.safetensors").read_bytes()
    train(tiny(finished), run, resume=True)
    messages = capsys.readouterr().err
    assert re.search(r"checkpoint-4 is damaged: optimizer\.pt has changed", messages)
    assert re.search(r"Resuming from .*checkpoint-3", messages)
    assert (run / "model/model.safetensors").read_bytes() == expected
    (run / "model/model.safetensors").write_bytes(expected[:-100])
    train(tiny(finished), run, resume=True)  # makes it again
    assert (run / "model/model.safetensors").read_bytes() == expected
    flip(run / "checkpoint-3/model.safetensors")
    flip(run / "checkpoint-4/config.json")
    with rejects(field=str(run)):
        train(tiny(finished), run, resume=True)
    assert [step for step, _ in checkpoints_in(run)] == [3, 4]


def test_a_run_excludes_others_but_not_readers(finished, run):
    patience = mock.patch.object(checkpoints, "LOCK_PATIENCE", 0.2)
    with checkpoints.locked(run):
        average_checkpoints([folder for _, folder in checkpoints_in(run)], run.parent / "mean")
        with patience, rejects(f"process {os.getpid()} on ", field=str(run)):
            train(tiny(finished), run, overwrite=True)
    train(tiny(finished), run, resume=True)


def contents(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


FOREIGN = [
    ["model.old/thesis.txt", "runs/a.txt"],
    ["checkpoint-500/trainer_state.json", "checkpoint-500/model.safetensors"],
    ["recipe.yaml", "run.json", "results.json"],
    ["tokenizers.partial/thesis.txt", ".thesis.partial"],
]


@pytest.mark.parametrize(
    ("in_run", "demand", "files"),
    [
        *((False, demand, files) for demand in ("resume", "overwrite") for files in FOREIGN),
        *((True, "overwrite", [name]) for name in ("thesis.txt", "models/a", "baseline/thesis.txt")),
    ],
)
def test_foreign_files_stay(finished, run, in_run, demand, files):
    """Another program's recipe.yaml and a stock Trainer's checkpoint are not a run."""
    folder = run if in_run else run.parent / "folder"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{model: thesis}")
    before = contents(folder)
    with rejects("nothing was deleted", field=str(folder), kind=ExistingFileError):
        train(tiny(finished), folder, **{demand: True})
    assert contents(folder) == before


def test_an_overwritten_run_stays_if_the_new_one_cannot_start(finished, run, tmp_path):
    (tmp_path / "empty.tsv").write_text("")
    before, wrong = contents(run), {"train": [{"tsv": str(tmp_path / "empty.tsv")}]}
    settings = tiny(finished).to_dict()
    settings["data"] = {**settings["data"], **wrong}
    with rejects("No sentence pairs in"):
        train(Recipe(**settings), run, overwrite=True)
    with rejects(field=str(run / "model")):  # or it would start from what it has deleted
        train(tiny(finished, model={"init_from": str(run / "model")}), run, overwrite=True)
    assert contents(run) == before
    with (
        mock.patch("recnmt_hf.training.run.TranslationTrainer.train", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        train(tiny(finished), run, overwrite=True)
    assert sorted(path.name for path in run.iterdir()) == ["recipe.yaml", "run.json"]


@pytest.mark.parametrize("remaining", ["recipe.yaml", "checkpoint-4"])
def test_signs_of_a_run(run, remaining):
    for path in run.iterdir():
        if path.name not in (remaining, "model"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for demand in ({"resume": True}, {"overwrite": True}):
        checkpoints.check_output(run, **{"resume": False, "overwrite": False, **demand})
    with rejects(field=str(run), kind=ExistingFileError):
        checkpoints.check_output(run, resume=False, overwrite=False)


SLOW_PREPARATION = """
    import os, sys, time
    from pathlib import Path
    import torch.distributed as dist
    from recnmt_hf.training import run
    from test_kills import tiny

    prepared, finished = run.prepare_inputs, run.finish

    def slowly(work):
        def late(*args):
            time.sleep(12)
            return work(*args)
        return late

    # The limit also holds for starting the process group, so both have to be ready.
    ready = Path(sys.argv[1]).parent
    (ready / f"{sys.argv[3]}-{os.environ['RANK']}").touch()
    while len(list(ready.glob(f"{sys.argv[3]}-*"))) < 2:
        time.sleep(0.01)
    if os.environ["RANK"] == "0":
        run.prepare_inputs, run.finish = slowly(prepared), slowly(finished)
    training = {"max_steps": 2, "ddp_timeout": 10, "eval_strategy": "no"}
    plan = tiny(training=training, data={"cache_dir": sys.argv[2]})
    plan.test = {}
    run.train(plan, sys.argv[1], resume=sys.argv[3] == "resumed")
    limit = dist.distributed_c10d._get_default_group()._get_backend(__import__("torch").device("cpu")).options._timeout
    os.write(1, f"limit {limit.total_seconds()}\\n".encode())  # in one piece: two processes write
    dist.destroy_process_group()
"""


def two_processes(tmp_path, *words):
    (tmp_path / "program.py").write_text(textwrap.dedent(SLOW_PREPARATION))
    path = os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
    return launched(tmp_path / "program.py", tmp_path / "run", *words, PYTHONPATH=path)


@pytest.mark.slow
def test_processes_wait_and_end_with_their_launcher(tmp_path, finished):
    """
    Only the launcher is killed while its processes wait: they end, so that the run can be resumed. There, preparing and
    finishing take longer than `ddp_timeout`, which limits everything else.
    """
    process = two_processes(tmp_path, finished / "data", "killed")
    deadline = time.time() + 300
    while not (tmp_path / "run/.lock").exists():
        assert process.poll() is None and time.time() < deadline, process.stdout.read()[-3000:]
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    process.stdout.close()
    assert output_of(two_processes(tmp_path, finished / "data", "resumed")).count("limit 10.0") == 2
    assert (tmp_path / "run/model/model.safetensors").is_file()
