"""The models of the zoo: their names and files, and their registration with transformers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


# model_type -> (class prefix, configuration module, modeling module)
FAMILIES = {
    "biarn_transformer": ("BiARNTransformer", "configuration_biarn_transformer", "modeling_biarn_transformer"),
    "gret": ("GRET", "configuration_gret", "modeling_gret"),
    "nmt_transformer": ("NMTTransformer", "configuration_nmt_transformer", "modeling_nmt_transformer"),
    "onlstm_transformer": (
        "ONLSTMTransformer",
        "configuration_onlstm_transformer",
        "modeling_onlstm_transformer",
    ),
    "rnmt": ("RNMT", "configuration_rnmt", "modeling_rnmt"),
    "rpe_transformer": ("RPETransformer", "configuration_rpe_transformer", "modeling_rpe_transformer"),
}
# model_type -> what stands behind the prefix in the names of further classes, and the Auto class of each
FURTHER = {"onlstm_transformer": {"ForSequencePairClassification": "AutoModelForSequenceClassification"}}
MODEL_TYPES = tuple(FAMILIES)
# What stands behind the prefix in the names of a model's classes.
CONFIG, MODELS = "Config", ("PreTrainedModel", "Model", "ForConditionalGeneration")

_COMMAND = "recnmt"
_COMMAND_MODULE = f"{__package__}.commands.main"


def public_names() -> dict[str, str]:
    """The public names of each model, four or more, and the modules that hold them, relative to the package."""
    names = {}
    for model_type, (prefix, configuration, modeling) in FAMILIES.items():
        names[f"{prefix}{CONFIG}"] = f".models.{configuration}"
        suffixes = (*MODELS, *FURTHER.get(model_type, ()))
        names.update({f"{prefix}{suffix}": f".models.{modeling}" for suffix in suffixes})
    return names


def register() -> None:
    """
    Makes transformers' `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and what [`FURTHER`] names know the zoo, and
    `transformers.pipeline` the task `recnmt-translation`.
    """
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

    from .inference.pipeline import register_pipeline

    for model_type, (prefix, configuration, modeling) in FAMILIES.items():
        config_class = getattr(importlib.import_module(f".models.{configuration}", __package__), f"{prefix}{CONFIG}")
        models = importlib.import_module(f".models.{modeling}", __package__)
        AutoConfig.register(model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, getattr(models, f"{prefix}Model"), exist_ok=True)
        AutoModelForSeq2SeqLM.register(
            config_class, getattr(models, f"{prefix}ForConditionalGeneration"), exist_ok=True
        )
        for suffix, auto_class in FURTHER.get(model_type, {}).items():
            model_class = getattr(models, f"{prefix}{suffix}")
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
    register_pipeline()


def is_command() -> bool:
    """
    Whether this interpreter was started as the console command, which registers once it has read its arguments: help
    and complaints need no models. Processes that the command starts itself are none.
    """
    script = (sys.argv or [""])[0]
    if script not in sys.orig_argv:  # of a spawned process, which has its parent's arguments
        return False
    if script == "-m":  # while Python looks for the module
        return sys.orig_argv[sys.orig_argv.index(script) + 1 :][:1] == [_COMMAND_MODULE]
    return Path(script).stem == _COMMAND
