"""Ensembles of models in memory; `Translator.from_pretrained` makes those of folders."""

from recnmt_hf import Translator
from recnmt_hf.inference.backends.torch_model import EnsembleBackend


def ensemble_of(members):
    """Return a translator that averages the log-probabilities of others."""
    return Translator.from_backend(EnsembleBackend([member.backend for member in members]), members[0].task)
