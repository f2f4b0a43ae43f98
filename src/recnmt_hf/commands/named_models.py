"""Newly initialized models by name, for the scripts of the repository."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..errors import UserError


if TYPE_CHECKING:
    import torch


def parse_model(text: str) -> tuple[str, dict[str, object]]:
    """Parse `"name:field=value,..."` into a name and fields, with values in YAML; `UserError` without a value."""
    from ..training.recipe_yaml import load_yaml

    name, _, pairs = text.partition(":")
    values: dict[str, object] = {}
    for pair in filter(None, pairs.split(",")):
        field, equals, value = pair.partition("=")
        if not equals:
            raise UserError("parameters.no_value", field=text, value=pair)
        values[field] = load_yaml(value, f"{field} of {name}")
    return name, values


MODEL_HELP = (
    "names of models: marian, or model types of this package, each with field=value pairs after a colon, e.g. "
    "nmt_transformer:normalize_before=true,d_model=256"
)


def build_model(name: str, size: str, vocab_size: int, overrides: dict[str, object]) -> torch.nn.Module:
    """
    Build a newly initialized model with the sizes of a preset. `name` is a `model_type` of this package, or `"marian"`
    for transformers' MarianMTModel. Raise `UserError` for an unknown name or field.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

    from .. import MODEL_TYPES, NMTTransformerConfig
    from ..hub.marian import SHARED_FIELDS

    if name != "marian" and name not in MODEL_TYPES:
        raise UserError("parameters.unknown_model", value=name, models=", ".join(("marian", *MODEL_TYPES)))
    config_class: Any = MarianConfig if name == "marian" else CONFIG_MAPPING[name]
    unknown = set(overrides) - {field.name for field in fields(config_class)} - {"attn_implementation"}
    if unknown:
        raise UserError("parameters.unknown_field", field=name, names=", ".join(map(repr, sorted(unknown))))
    if name == "marian":
        config = NMTTransformerConfig.from_preset(size, vocab_size=vocab_size)
        values = {field: getattr(config, field) for field in SHARED_FIELDS}
        try:
            return MarianMTModel(MarianConfig(**{**values, "forced_eos_token_id": None, **overrides}))
        except (StrictDataclassError, ValueError, RuntimeError, TypeError) as error:
            raise UserError("parameters.marian", reason=" ".join(str(error).split()).rstrip(".")) from error
    return AutoModelForSeq2SeqLM.from_config(config_class.from_preset(size, **{"vocab_size": vocab_size, **overrides}))
