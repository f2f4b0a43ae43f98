"""Models whose loss depends on the training step, and values of their outputs in logs and evidence."""

import json
import logging

import pytest
import torch
from test_kills import tiny
from test_stock_trainer import trainer_for as stock_trainer_for
from test_training import trainer_for
from transformers import AutoModelForSeq2SeqLM

import recnmt_hf
from recnmt_hf.hub.card import curve_table
from recnmt_hf.models import modeling_vrnmt
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
    sizes = {
        "vocab_size": len(tokenizer),
        "d_model": 16,
        "init_uniform": None,
        "share_encoder_decoder_embeddings": True,
    }
    return recnmt_hf.VRNMTForConditionalGeneration(recnmt_hf.VRNMTConfig.from_preset("tiny", **sizes, **fields))


def plan(folder, **training):
    training = {"logging_steps": 1, "keep_last": 6, "max_steps": 6, **training}
    return tiny(model={"preset": "tiny", **VRNMT}, training=training, data={"cache_dir": str(folder / "data")}, test={})


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


def test_transformers_trainer_with_the_callback(tmp_path, tokenizer, steps):
    trainer = stock_trainer_for(tmp_path, tokenizer, "VRNMT", {"kl_annealing_steps": 2}, max_steps=4)
    trainer.train()
    assert {step for step, _ in steps} == {-1} and {weight for _, weight in steps} == {1.0}
    steps.clear()
    trainer = stock_trainer_for(tmp_path, tokenizer, "VRNMT", {"kl_annealing_steps": 2}, max_steps=4)
    trainer.add_callback(TrainingStepCallback())
    trainer.train()
    assert list(dict.fromkeys(steps)) == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.0)]


@pytest.mark.parametrize("annealing", [2, 100])
def test_collapse_is_reported_once_after_annealing(annealing, tmp_path, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(modeling_vrnmt, "COLLAPSED", 1e9)
    model = vrnmt(tokenizer, kl_annealing_steps=annealing)
    trainer = trainer_for(tmp_path, tokenizer, model, max_steps=5, logging_steps=1)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("recnmt_hf").addHandler(caplog.handler)
        try:
            trainer.train()
        finally:
            logging.getLogger("recnmt_hf").removeHandler(caplog.handler)
    warnings = {record.message for record in caplog.records if "latent variables" in record.message}
    assert len(warnings) == (1 if annealing == 2 else 0)
    assert trainer.has_warned == (annealing == 2)
