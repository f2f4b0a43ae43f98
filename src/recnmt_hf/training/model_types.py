"""What `model.type` of a recipe names: a registered `model_type`, or a class that can be imported."""

from __future__ import annotations

import difflib
import importlib
import re
from typing import Any, cast

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
)

from .._values import shown
from ..families import MODEL_TYPES
from ..models.configuration_seq2seq import Seq2SeqConfig
from ..models.seq2seq_base import Seq2SeqConditionalGeneration
from ..models.user_errors import UserError


CLASS_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)[.:]([^\W\d]\w*)")
EXAMPLE = "package.module:ClassForConditionalGeneration"


def check_model_type(name: Any) -> None:
    """
    A recipe's `model.type` is registered, or has the form of a class path. Imports nothing.

    Raises:
        UserError: It is neither.
    """
    if isinstance(name, str) and (is_registered(name) or CLASS_PATH.fullmatch(name)):
        return
    near = difflib.get_close_matches(str(name), MODEL_TYPES, n=1)
    raise UserError(
        f"model.type={shown(name)} is not allowed; it must be one of {', '.join(MODEL_TYPES)}, another model_type that "
        f"is registered with AutoConfig, or the path of a class, e.g. {EXAMPLE}. Remedy: "
        f"{f'write {near[0]}' if near else 'choose one of them'}."
    )


def is_registered(name: str) -> bool:
    """Whether it is the `model_type` of a configuration that recipes can build."""
    return name in MODEL_TYPES or (name in CONFIG_MAPPING and issubclass(CONFIG_MAPPING[name], Seq2SeqConfig))


def config_class_of(name: str) -> type[Seq2SeqConfig]:
    """
    The configuration class of a recipe's `model.type`. A class path is imported, and its class registered with the Auto
    classes, so that the trained model can be loaded in this process.

    Raises:
        UserError: The path names no generating class, or one whose configuration belongs to another model.
    """
    check_model_type(name)
    if is_registered(name):
        return cast("type[Seq2SeqConfig]", CONFIG_MAPPING[name])
    model_class = import_model_class(name)
    config_class, model_type = model_class.config_class, model_class.config_class.model_type
    owner = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(config_class, None)
    is_taken = model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] is not config_class
    if not model_type or is_taken or owner not in (None, model_class):
        raise UserError(
            f"model.type={name}: {config_class.__name__} has model_type={model_type!r}, which "
            f"{'belongs to another class' if model_type else 'is empty'}. Remedy: give {model_class.__name__} a "
            "configuration class with a model_type of its own."
        )
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, model_class.model_class, exist_ok=True)
    AutoModelForSeq2SeqLM.register(config_class, model_class, exist_ok=True)
    return config_class


def import_model_class(path: str) -> Any:
    """
    The generating class of a path.

    Raises:
        UserError: There is no such module or class, or it is no generating class.
    """
    match = CLASS_PATH.fullmatch(path)
    assert match is not None
    module_name, class_name = match.groups()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"model.type={path}: the module {module_name} cannot be imported ({error}). Remedy: correct the name, or "
            "install its package or add its folder to PYTHONPATH."
        ) from error
    if not hasattr(module, class_name):
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        raise UserError(
            f"model.type={path}: {module_name} has no {class_name}. Remedy: "
            f"{f'write {near[0]}' if near else 'correct the name'}."
        )
    found = getattr(module, class_name)
    if not (isinstance(found, type) and issubclass(found, Seq2SeqConditionalGeneration)):
        raise UserError(
            f"model.type={path}: {class_name} is not a generating model class. Remedy: name a subclass of one, e.g. of "
            "NMTTransformerForConditionalGeneration."
        )
    return found
