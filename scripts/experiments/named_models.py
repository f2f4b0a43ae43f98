"""Newly initialized models by name, for `parameters.py` and the benchmarks."""

from dataclasses import fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from recnmt_hf import MODEL_TYPES, NMTTransformerConfig
from recnmt_hf.hub.marian import SHARED_FIELDS
from recnmt_hf.training.recipe_yaml import load_yaml


MODEL_HELP = (
    "names of models: marian, or model types of this package, each with field=value pairs after a colon, e.g. "
    "nmt_transformer:normalize_before=true,d_model=256"
)


def parse_model(text: str) -> tuple[str, dict[str, object]]:
    """Parse `"name:field=value,..."` into a name and fields, with values in YAML."""
    name, _, pairs = text.partition(":")
    values: dict[str, object] = {}
    for pair in filter(None, pairs.split(",")):
        field, equals, value = pair.partition("=")
        if not equals:
            raise SystemExit(f"{pair} in {text} has no value; write field=value (null for none)")
        values[field] = load_yaml(value, f"{field} of {name}")
    return name, values


def build_model(name: str, size: str, vocab_size: int, overrides: dict[str, object]) -> torch.nn.Module:
    """
    Build a newly initialized model with the sizes of a preset. `name` is a `model_type` of this package, or `"marian"`
    for transformers' MarianMTModel. Exit with a message for an unknown name or field.
    """
    if name != "marian" and name not in MODEL_TYPES:
        raise SystemExit(f"There is no model type {name!r}; choose one of marian, {', '.join(MODEL_TYPES)}")
    config_class: Any = MarianConfig if name == "marian" else CONFIG_MAPPING[name]
    unknown = set(overrides) - {field.name for field in fields(config_class)} - {"attn_implementation"}
    if unknown:
        raise SystemExit(f"The configuration of {name} has no field {', '.join(map(repr, sorted(unknown)))}")
    if name == "marian":
        config = NMTTransformerConfig.from_preset(size, vocab_size=vocab_size)
        values = {field: getattr(config, field) for field in SHARED_FIELDS}
        return MarianMTModel(MarianConfig(**{**values, "forced_eos_token_id": None, **overrides}))
    return AutoModelForSeq2SeqLM.from_config(config_class.from_preset(size, **{"vocab_size": vocab_size, **overrides}))
