"""Runs in two stages: a variant's baseline, then the variant that starts from it."""

import json
import re
import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from test_kills import SIZE, end_like, killed_everywhere, tiny
from user_errors import rejects

from recnmt_hf.families import FAMILIES
from recnmt_hf.models.configuration_nmt_transformer import NMTTransformerConfig
from recnmt_hf.models.modeling_nmt_transformer import NMTTransformerForConditionalGeneration
from recnmt_hf.training.building import Architecture, build_config, with_fields_of
from recnmt_hf.training.checkpoints import checkpoints_in, state_of
from recnmt_hf.training.run import train


VARIANT = {"type": "biarn_transformer"}


def staged(folder, **sections):
    """Two updates of the baseline and two of the variant."""
    sections["training"] = {"baseline_steps": 2, "logging_steps": 1, **sections.get("training", {})}
    return tiny(folder, **{"model": VARIANT, **sections})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    train(staged(folder), folder / "run")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished / "run", tmp_path / "run")


def test_the_first_stage_is_the_baselines_own_run(finished, tmp_path):
    """Bit for bit: the same data in the same order, and the learning rate of the whole run."""
    plan = staged(finished, model={"type": "nmt_transformer"}, training={"baseline_steps": None, "keep_last": 4})
    train(plan, tmp_path / "plain")
    plain = tmp_path / "plain" / "checkpoint-2"
    for name in ("model.safetensors", "optimizer.pt", "config.json"):
        assert (finished / "run/baseline/checkpoint-2" / name).read_bytes() == (plain / name).read_bytes()


def test_the_second_stage_continues_the_first(finished):
    """Its steps, rates and data are those of one run; optimizer and best checkpoint are its own."""
    run = finished / "run"
    assert [step for step, _ in checkpoints_in(run / "baseline")] == [1, 2]
    assert [step for step, _ in checkpoints_in(run)] == [3, 4]
    assert json.loads((run / "model/config.json").read_text())["model_type"] == "biarn_transformer"
    state = state_of(run / "checkpoint-4")
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3, 4]
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4]
    assert state["best_model_checkpoint"] in (None, str(run / "checkpoint-4"))
    optimizer = torch.load(run / "checkpoint-4/optimizer.pt", weights_only=True)
    assert {entry["step"].item() for entry in optimizer["state"].values()} == {2}


def test_the_learning_rate_rises_to_its_schedule_again(finished, tmp_path):
    """Over the steps of the warm-up; the schedule is that of the run without stages."""
    rates, shares = {}, [1, 1, 1, 0.5, 1, 1]
    for name, steps in (("plain", None), ("staged", 3)):
        training = {"baseline_steps": steps, "max_steps": 6, "warmup_steps": 2, "lr_scheduler_type": "linear"}
        model = VARIANT if steps else {"type": "nmt_transformer"}
        train(staged(finished, model=model, training=training), tmp_path / name)
        log = state_of(tmp_path / name / "checkpoint-6")["log_history"]
        rates[name] = [entry["learning_rate"] for entry in log if "loss" in entry]
    assert rates["staged"] == pytest.approx([r * share for r, share in zip(rates["plain"], shares, strict=True)])


def test_the_variant_starts_from_the_baseline(finished, tmp_path, capsys):
    train(staged(finished, training={"max_steps": 3, "learning_rate": 0.0}, average={"count": 1}), tmp_path / "run")
    assert f"Warm start from {tmp_path / 'run/baseline/checkpoint-2'}: copied" in capsys.readouterr().err
    before = load_file(tmp_path / "run/baseline/checkpoint-2/model.safetensors")
    after = load_file(tmp_path / "run/model/model.safetensors")
    assert before.keys() < after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_killed_at_every_file_operation_of_both_stages(tmp_path):
    """From the first checkpoint on; the states before it are those of any run (test_kills.py)."""
    training = {"max_steps": 3, "keep_last": 1, "keep_best": 0, "eval_strategy": "no"}
    plan = staged(tmp_path, average={"count": 1}, training=training)
    plan.test = {}
    since = "baseline/checkpoint-1/config.json"
    states, resumed = killed_everywhere(plan, tmp_path / "run", None, tmp_path / "killed", since=since)
    after_first = [tree for _, tree in states if "baseline/checkpoint-2/complete.json" in tree]
    assert sum("checkpoint-3/complete.json" not in tree for tree in after_first) > 10 and len(resumed) > 2


def test_a_finished_run_in_two_stages_is_resumed_without_either(finished, run, capsys):
    train(staged(finished), run, resume=True)
    messages = capsys.readouterr().err
    assert "The run ended with checkpoint-4." in messages and "NMTTransformer" not in messages
    end_like(run, finished / "run", "resumed")


def test_resumed_without_its_first_stage(finished, run):
    """The second stage needs the baseline no more; without any checkpoint of its own it needs the last one."""
    shutil.rmtree(run / "checkpoint-4")
    shutil.copytree(run / "baseline", run.parent / "kept")
    shutil.rmtree(run / "baseline")
    train(staged(finished), run, resume=True)
    for name in ("checkpoint-4/model.safetensors", "model/model.safetensors"):
        assert (run / name).read_bytes() == (finished / "run" / name).read_bytes()
    for name in ("checkpoint-3", "checkpoint-4", "model"):
        shutil.rmtree(run / name)
    shutil.move(run.parent / "kept", run / "baseline")
    train(staged(finished), run, resume=True)
    end_like(run, finished / "run", "from the baseline")


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_another_baseline_is_refused(finished, run, steps):
    shutil.rmtree(run / "checkpoint-4")
    with rejects("or start again with --overwrite or in", f"training.baseline_steps: 2 -> {steps}"):
        train(staged(finished, training={"baseline_steps": steps}), run, resume=True)


def test_share_of_steps_refers_to_the_first_run(finished, tmp_path, capsys):
    """Half of four steps; a resumed run with more steps keeps the baseline that it has."""
    plan = staged(finished, training={"baseline_steps": 0.5})
    train(plan, tmp_path / "run")
    assert "The first 2 of 4 steps train the baseline" in capsys.readouterr().err
    end_like(tmp_path / "run", finished / "run", "a share")
    train(staged(finished, training={"baseline_steps": 0.5, "max_steps": 6}), tmp_path / "run", resume=True)
    assert "training.max_steps: 4 -> 6" in capsys.readouterr().err
    assert [step for step, _ in checkpoints_in(tmp_path / "run")] == [5, 6]
    assert [step for step, _ in checkpoints_in(tmp_path / "run/baseline")] == [1, 2]


def test_early_stopping_of_the_variant(finished, tmp_path):
    """The baseline has none, so its last checkpoint, from which the variant starts, has no state of it."""
    training = {"early_stopping_patience": 1, "eval_steps": 1, "learning_rate": 0.0}
    train(staged(finished, training={**training, "max_steps": 9}), tmp_path / "run")
    assert [step for step, _ in checkpoints_in(tmp_path / "run")] == [3, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "swish", "scale_embedding": False, "position_embedding_type": "marian"},
        {"encoder_attention_heads": 2, "self_attention_type": "directional", "decoder_attention_heads": 1},
        {"self_attention_type": "relative", "position_embedding_type": "sinusoidal"},
    ],
)
def test_a_trained_model_keeps_what_its_weights_compute(finished, tmp_path, capsys, changes):
    """Fields without parameters, such as the activation of an imported model, are not those of the preset."""
    source = NMTTransformerConfig.from_pretrained(finished / "run/baseline/checkpoint-2")
    torch.manual_seed(1)
    fields = source.fields_of(NMTTransformerConfig) | {"position_embedding_type": None} | changes
    trained = NMTTransformerForConditionalGeneration(NMTTransformerConfig(**fields)).eval()
    shutil.copytree(finished / "run/model", tmp_path / "trained", ignore=shutil.ignore_patterns("*.safetensors"))
    trained.save_pretrained(tmp_path / "trained")
    sizes = {name: getattr(source, name) for name in SIZE}
    model = {"type": "nmt_transformer", "init_from": str(tmp_path / "trained"), "fields": sizes}
    plain = {"model": model, "training": {"baseline_steps": None, "learning_rate": 0.0}, "average": {"count": 1}}
    train(staged(finished, **plain), tmp_path / "run")
    message = re.search(r"that the recipe does not state: (.*)\.", capsys.readouterr().err)[1]
    assert {max(changes)} <= {part.split(":")[0] for part in message.split(", ")}
    found = NMTTransformerForConditionalGeneration.from_pretrained(tmp_path / "run/model")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        outputs = [each(input_ids=ids, decoder_input_ids=ids).logits for each in (trained, found)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    # A resumed run reads its intact checkpoint in place of the trained model.
    shutil.rmtree(tmp_path / "trained")
    config = tmp_path / "run/checkpoint-4/config.json"
    config.write_bytes(bytes(config.stat().st_size))
    longer = {**plain, "training": {**plain["training"], "max_steps": 5}}
    train(staged(finished, **longer), tmp_path / "run", resume=True)
    for name, value in changes.items():
        assert getattr(NMTTransformerConfig.from_pretrained(tmp_path / "run/model"), name) == value


@pytest.mark.parametrize("family", FAMILIES)
def test_a_baseline_changes_no_preset(family, tmp_path):
    """What a trained baseline of the same preset gives is what the variant has; RNNsearch leaves RNMT's relations."""
    config_class = FAMILIES[family].load_class("Config")
    for preset in config_class.presets:
        section = Architecture(family, preset)
        own = build_config(section)
        own.save_pretrained(tmp_path / "own")
        (own.baseline() or own).save_pretrained(tmp_path / "baseline")
        for folder in ("own", "baseline"):
            found = build_config(with_fields_of(tmp_path / folder, section))
            assert found.fields_of(config_class) == own.fields_of(config_class), preset
    if "rnmt" in family:
        search = FAMILIES["rnmt"].load_class("Config").from_preset("tiny", decoder_type="rnnsearch", relation_layers=0)
        search.save_pretrained(tmp_path / "search")
        section = Architecture(family, "tiny")
        found = build_config(with_fields_of(tmp_path / "search", section))
        assert found.fields_of(config_class) == build_config(section).fields_of(config_class)


@pytest.mark.parametrize(
    ("model", "training", "warns"),
    [
        (VARIANT, {"baseline_steps": None}, True),
        (VARIANT, {"baseline_steps": 1}, False),
        ({**VARIANT, "fields": {"recurrence_encoder_type": None}}, {"baseline_steps": None}, False),
    ],
)
def test_training_a_variant_from_scratch_warns(finished, tmp_path, capsys, model, training, warns):
    plan = staged(finished, model=model, training={"max_steps": 2, **training}, average={"count": 1})
    with (
        mock.patch("recnmt_hf.training.run.TranslationTrainer", side_effect=InterruptedError),  # the warning is enough
        pytest.raises(InterruptedError),
    ):
        train(plan, tmp_path / "run")
    messages = capsys.readouterr().err
    assert ("never learn to align" in messages and "Set training.baseline_steps" in messages) == warns
