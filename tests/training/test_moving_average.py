"""Moving average of the weights: its values, evaluations and checkpoints with it, resumed runs."""

import pytest
import torch
from safetensors.torch import load_file
from test_kills import tiny
from test_training import trainer_for
from user_errors import rejects

from recnmt_hf.training import testing
from recnmt_hf.training.callbacks import TRAINED
from recnmt_hf.training.run import train


DECAY = 0.75


def plan(folder, **training):
    settings = {"ema_decay": DECAY, "keep_last": 4, **training}
    return tiny(training=settings, data={"cache_dir": str(folder / "data")}, average={"count": 1}, test={})


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
        train(plan(folder, gradient_accumulation_steps=request.param), folder / "run")
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
    train(plan(tmp_path, ema_decay=None, **settings), tmp_path / "run")
    plain, trained = weights(tmp_path, 4), weights(folder, 4, TRAINED)
    assert all(torch.equal(plain[name], trained[name]) for name in plain)


def test_a_resumed_run_is_the_same(run, tmp_path):
    folder, _, settings = run
    train(plan(tmp_path, max_steps=2, **settings), tmp_path / "run")
    train(plan(tmp_path, **settings), tmp_path / "run", resume=True)
    for name in ("model.safetensors", TRAINED):
        one, other = weights(folder, 4, name), weights(tmp_path, 4, name)
        assert all(torch.equal(one[key], other[key]) for key in one)
    with rejects(field="training.ema_decay"):
        train(plan(tmp_path, ema_decay=0.5, **settings), tmp_path / "run", resume=True)


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
