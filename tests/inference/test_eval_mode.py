"""Inference disables dropout and then restores the mode of each module."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from ensembles import ensemble_of

from recnmt_hf.analysis.sentences import run_encoder, run_pair
from recnmt_hf.inference.backends.torch_model import eval_mode
from recnmt_hf.inference.pipeline import TranslationPipeline
from recnmt_hf.inference.translator import align_pairs


SOURCES = ["The dog sees the cat.", "We sleep."]
TARGETS = ["Der Hund sieht die Katze.", "Wir schlafen."]
SHORT = {"beams": 2, "max_new_tokens": 4}

# What runs a model, by module or class: family of the model, and a call. `recnmt inspect` runs `sentences`.
ENTRIES = {
    "Translator.__call__": ("biarn_transformer", lambda t: t(SOURCES, **SHORT)),
    "Translator.translate": ("rnmt", lambda t: list(t.translate(SOURCES, alignments=True, **SHORT))),
    "Translator.score": ("onlstm_transformer", lambda t: t.score(SOURCES, TARGETS)),
    "ensemble_of.__call__": ("nmt_transformer", lambda t: ensemble_of([t, t])(SOURCES, **SHORT)),
    "TranslationPipeline.__call__": (
        "nmt_transformer",
        lambda t: TranslationPipeline(t.model, t.tokenizer, device="cpu")(SOURCES, **SHORT),
    ),
    "translator.align_pairs": ("nmt_transformer", lambda t: list(align_pairs(t, SOURCES, TARGETS))),
    "sentences.run_encoder": ("gret", lambda t: run_encoder(t, SOURCES[0])[0].last_hidden_state),
    "sentences.run_pair": ("gret", lambda t: run_pair(t, SOURCES[0], TARGETS[0])[0].logits),
}


@pytest.fixture(scope="module")
def translators(random_translator):
    """Return a random model of each family with a large dropout."""
    return {name: random_translator(name, dropout=0.5) for name in sorted({name for name, _ in ENTRIES.values()})}


def in_training(translator):
    """Put a model into training mode except for one module, as if that were frozen; return it with its modes."""
    translator.model.train()
    list(translator.model.modules())[-1].eval()
    return translator, modes(translator.model)


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def plain(value):
    """Convert a result to values that can be compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    value = dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", ENTRIES)
def test_a_model_in_training_is_run_without_dropout(translators, name):
    family, run = ENTRIES[name]
    translators[family].model.eval()
    expected = plain(run(translators[family]))
    translator, before = in_training(translators[family])
    assert plain(run(translator)) == expected
    assert modes(translator.model) == before


def test_modes_return_after_an_error(translators, monkeypatch):
    translator, before = in_training(translators["nmt_transformer"])

    def fail(*args, **kwargs):
        assert not any(module.training for module in translator.model.modules())
        raise RuntimeError("no memory")

    monkeypatch.setattr(translator.model.get_encoder(), "forward", fail)
    for run in (lambda: translator(SOURCES), lambda: translator.score(SOURCES, TARGETS)):
        with pytest.raises(RuntimeError, match="no memory"):
            run()
        assert modes(translator.model) == before


def test_modes_return_between_results_of_a_generator(translators):
    """A model stays in training mode while its translations are read, also if only the first is read."""
    translator, before = in_training(translators["nmt_transformer"])
    for stream in (translator.translate(SOURCES, buffer=1, **SHORT), align_pairs(translator, SOURCES, TARGETS)):
        next(stream)
        assert modes(translator.model) == before
        stream.close()
        assert modes(translator.model) == before


def test_threads_share_a_model():
    """The last block restores the mode, whatever the order in which blocks of several threads end."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1))
    model[1].eval()
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with eval_mode(model):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    with eval_mode(model, model):
        thread.start()
        assert inside.wait(10)
    assert not model[0].training and torch.is_grad_enabled()
    leave.set()
    thread.join()
    assert [module.training for module in model.modules()] == [True, True, False]
