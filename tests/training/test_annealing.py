"""Losses that depend on the training step, means of outputs in logs and evidence, moving averages of the weights."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_kills import tiny
from test_stock_trainer import trainer_for as stock_trainer_for
from test_training import trainer_for
from transformers import AutoModelForSeq2SeqLM
from user_errors import rejects

import recnmt_hf
from recnmt_hf.hub.card import curve_table
from recnmt_hf.models import modeling_vrnmt
from recnmt_hf.training import testing
from recnmt_hf.training.callbacks import TRAINED
from recnmt_hf.training.evidence import Evidence
from recnmt_hf.training.run import train
from recnmt_hf.training.trainer import TrainingStepCallback


VRNMT = {"type": "vrnmt", "fields": {"d_model": 16, "dropout": 0.2, "init_uniform": None, "kl_annealing_steps": 3}}


@pytest.fixture
def steps(monkeypatch):
    """The steps and weights of the divergence with which losses are computed, in order."""
    seen = []
    original = modeling_vrnmt.VRNMTForConditionalGeneration.current_kl_weight

    def watch(self):
        weight = original(self)
        seen.append((int(self.model.training_step), round(float(weight), 4)))
        return weight

    monkeypatch.setattr(modeling_vrnmt.VRNMTForConditionalGeneration, "current_kl_weight", watch)
    return seen


def vrnmt(tokenizer, **fields):
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "init_uniform": None}
    sizes["share_encoder_decoder_embeddings"] = True
    return recnmt_hf.VRNMTForConditionalGeneration(recnmt_hf.VRNMTConfig.from_preset("tiny", **sizes, **fields))


def plan(folder, **training):
    training = {"logging_steps": 1, "keep_last": 6, "max_steps": 6, **training}
    return tiny(folder, model={"preset": "tiny", **VRNMT}, training=training, test={})


def logged(folder, step):
    log = json.loads((folder / f"checkpoint-{step}/trainer_state.json").read_text())["log_history"]
    return [entry["mean_kl"] for entry in log if "mean_kl" in entry]


def test_a_resumed_run_anneals_as_an_uninterrupted_one(tmp_path, steps):
    """Weights of the divergence, logged values and parameters are the same."""
    train(plan(tmp_path), tmp_path / "whole")
    expected = [(step, round(min(step / 3, 1.0), 4)) for step in range(6)]
    assert steps == expected
    steps.clear()
    train(plan(tmp_path, max_steps=2), tmp_path / "resumed")
    train(plan(tmp_path), tmp_path / "resumed", resume=True)
    assert steps == expected
    assert len(logged(tmp_path / "whole", 6)) == 6
    assert logged(tmp_path / "whole", 6) == logged(tmp_path / "resumed", 6)
    one, other = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "resumed"))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_annealing_begins_with_the_second_stage(tmp_path, steps):
    """Its first step has the weight 0; only its steps log a divergence, which the evidence keeps."""
    train(plan(tmp_path, baseline_steps=2, max_steps=4), tmp_path / "run")
    train(plan(tmp_path, baseline_steps=2), tmp_path / "run", resume=True)
    assert [step for step, _ in steps] == [0, 1, 2, 3]
    curve = Evidence.load(tmp_path / "run/model").curve
    assert [row["step"] for row in curve if "mean_kl" in row] == [3, 4, 5, 6]
    heads, *rows = [line.split(" | ") for line in curve_table(curve).splitlines() if "---" not in line]
    assert heads[0] == "| step" and heads[-1] == "training kl |"
    assert [row[-1] != " |" for row in rows] == [False, True, True]  # evaluations after steps 2, 4 and 6
    assert json.loads((tmp_path / "run/baseline/checkpoint-2/config.json").read_text())["model_type"] == "rnmt"


def test_means_are_those_of_all_words_of_an_interval(tmp_path, tokenizer, monkeypatch):
    """Over batches of different sizes and accumulated ones, like the loss."""
    found = []
    forward = modeling_vrnmt.VRNMTForConditionalGeneration.forward

    def watch(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        if outputs.kl is not None:
            found.append((outputs.kl_terms.sum().item(), (kwargs["labels"] != -100).sum().item()))
        return outputs

    settings = {"max_steps": 4, "max_tokens": 150, "gradient_accumulation_steps": 3, "logging_steps": 2}
    trainer = trainer_for(tmp_path, tokenizer, vrnmt(tokenizer), **settings)
    monkeypatch.setattr(modeling_vrnmt.VRNMTForConditionalGeneration, "forward", watch)
    trainer.train()
    means = [entry["mean_kl"] for entry in trainer.state.log_history if "mean_kl" in entry]
    assert len(means) == 2 and len({count for _, count in found}) > 1
    half = next(i for i in range(len(found)) if abs(mean(found[: i + 1]) - means[0]) < 1e-5) + 1
    assert half == len(found) - half or half == 6
    assert means == pytest.approx([mean(found[:half]), mean(found[half:])], rel=1e-5)


def mean(values):
    return sum(value for value, _ in values) / sum(count for _, count in values)


@pytest.mark.parametrize("anneals", [False, True])
def test_transformers_trainer_with_the_callback(tmp_path, tokenizer, steps, anneals):
    trainer = stock_trainer_for(tmp_path, tokenizer, "VRNMT", {"kl_annealing_steps": 2}, max_steps=4)
    if anneals:
        trainer.add_callback(TrainingStepCallback())
    trainer.train()
    assert list(dict.fromkeys(steps)) == ([(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.0)] if anneals else [(-1, 1.0)])


@pytest.mark.parametrize("annealing", [2, 100])
def test_collapse_is_reported_once_after_annealing(annealing, tmp_path, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(modeling_vrnmt, "COLLAPSED", 1e9)
    model = vrnmt(tokenizer, kl_annealing_steps=annealing)
    trainer = trainer_for(tmp_path, tokenizer, model, max_steps=5, logging_steps=1)
    with caplog.at_level("WARNING", logger="recnmt_hf.progress"):
        trainer.train()
    warnings = {record.message for record in caplog.records if "latent variables" in record.message}
    assert len(warnings) == (1 if annealing == 2 else 0)


DECAY = 0.75


def averaging(folder, **training):
    return tiny(folder, training={"ema_decay": DECAY, "keep_last": 4, **training}, average={"count": 1}, test={})


@pytest.fixture(scope="module", params=[1, 2], ids=["", "accumulation"])
def run(request, tmp_path_factory):
    """A run of four updates, of one batch or two, and the weights of its evaluations."""
    folder, evaluated = tmp_path_factory.mktemp("averaged"), []
    own = testing.token_loss

    def watched(self, model, dataset):
        evaluated.append({name: value.detach().clone() for name, value in model.named_parameters()})
        return own(self, model, dataset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "token_loss", watched)
        train(averaging(folder, gradient_accumulation_steps=request.param), folder / "run")
    return folder, evaluated, {"gradient_accumulation_steps": request.param}


def weights(folder, step, name="model.safetensors"):
    path = folder / f"run/checkpoint-{step}" / name
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def test_checkpoints_have_the_average(run):
    folder, *_ = run
    average = weights(folder, 1, TRAINED)
    for step in range(1, 5):
        trained, found = weights(folder, step, TRAINED), weights(folder, step)
        average = {name: DECAY * average[name] + (1 - DECAY) * trained[name] for name in average}
        for name, value in average.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)
    assert not torch.equal(found["model.decoder.embed_tokens.weight"], trained["model.decoder.embed_tokens.weight"])
    final = folder / "run/model"
    assert torch.equal(load_file(final / "model.safetensors")[name], found[name]) and not (final / TRAINED).exists()


def test_evaluations_have_the_average_and_training_does_not(run, tmp_path):
    folder, evaluated, settings = run
    for step, seen in zip((2, 4), evaluated, strict=True):
        saved = weights(folder, step)
        assert all(torch.equal(saved[name], seen[name]) for name in saved)
    train(averaging(tmp_path, ema_decay=None, **settings), tmp_path / "run")
    plain, trained = weights(tmp_path, 4), weights(folder, 4, TRAINED)
    assert all(torch.equal(plain[name], trained[name]) for name in plain)


def test_a_resumed_run_is_the_same(run, tmp_path):
    folder, _, settings = run
    train(averaging(tmp_path, max_steps=2, **settings), tmp_path / "run")
    train(averaging(tmp_path, **settings), tmp_path / "run", resume=True)
    for name in ("model.safetensors", TRAINED):
        one, other = weights(folder, 4, name), weights(tmp_path, 4, name)
        assert all(torch.equal(one[key], other[key]) for key in one)
    with rejects(field="training.ema_decay"):
        train(averaging(tmp_path, ema_decay=0.5, **settings), tmp_path / "run", resume=True)


def test_the_best_model_is_loaded_at_the_end(tmp_path, tokenizer):
    """Evaluating and saving after the training use the best average instead of the last."""
    # The learning rate rises from 0 to one that destroys the model.
    settings = {"learning_rate": 1e3, "warmup_steps": 1, "max_steps": 2, "bleu_samples": 0, "ema_decay": DECAY}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "loss"}
    trainer = trainer_for(tmp_path, tokenizer, load_best_model_at_end=True, **settings)
    trainer.train()
    first, last = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.evaluate()["eval_loss"] == first < last
    trainer.save_model(tmp_path / "saved")
    best, saved = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out/checkpoint-1", "saved"))
    assert all(torch.equal(value, saved[name]) for name, value in best.items())
