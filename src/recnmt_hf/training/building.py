"""The configuration of a recipe's model."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedConfig

from .._values import shown
from ..data.tokenizer_pair import TokenizerPair
from ..models.user_errors import UserError
from .model_types import config_class_of


if TYPE_CHECKING:
    from .recipe import ModelSection


def build_config(section: ModelSection, **vocabulary: Any) -> Any:
    """
    Build the configuration of a recipe's model.

    Args:
        section ([`ModelSection`]): Type, preset and fields.
        **vocabulary: Fields that the tokenizers decide, unless `section.fields` has them.

    Raises:
        UserError: The type, preset or a field does not exist, or a value is not allowed.
    """
    config_class = config_class_of(section.type)
    known = {field.name for field in fields(config_class)} | config_class.former_fields
    for name in section.fields:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"write {near[0]}" if near else f"see the fields of {config_class.__name__}"
            raise UserError(
                f"model.fields.{name} is not allowed: {config_class.__name__} has no {name}. Remedy: {hint}."
            )
    if section.preset not in config_class.presets:
        raise UserError(
            f"model.preset={shown(section.preset)} is not allowed; {section.type} has "
            f"{', '.join(config_class.presets)}. Remedy: choose one of them, and say the rest in model.fields."
        )
    try:
        return config_class.from_preset(section.preset, **{**vocabulary, **section.fields})
    except UserError as error:
        raise UserError(f"model.fields: {error}") from error
    except (TypeError, ValueError) as error:  # of transformers, which checks some types itself
        raise UserError(f"model.fields: {error}. Remedy: correct it.") from error


def model_config(section: ModelSection, tokenizers: TokenizerPair) -> Any:
    """
    Build the configuration of a recipe's model for its tokenizers.

    Raises:
        UserError: `model.fields` has a vocabulary that is smaller than the tokenizer's, or the padding ids differ.
    """
    tokenizers.check_padding()
    source, target = tokenizers
    start = target.pad_token_id if target.bos_token_id is None else target.bos_token_id
    vocabulary = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": tokenizers.is_joint,
        "pad_token_id": target.pad_token_id,
        "eos_token_id": target.eos_token_id,
        "bos_token_id": target.bos_token_id,
        "decoder_start_token_id": start,
    }
    for name in ("vocab_size", "decoder_vocab_size"):
        size = section.fields.get(name)
        if isinstance(size, int) and size < vocabulary[name]:
            raise UserError(
                f"model.fields.{name}={size} is smaller than the tokenizer's {vocabulary[name]} symbols. Remedy: "
                "leave it out, or train a smaller tokenizer."
            )
    config = build_config(section, **vocabulary)
    tokenizers.stamp(config)
    return config


def baseline_config(config: Any, tokenizers: TokenizerPair) -> PreTrainedConfig:
    """Return the configuration of the plain model that a variant starts from."""
    config = config.baseline()
    tokenizers.stamp(config)
    return config


def generation_config(config: Any, beams: int) -> GenerationConfig:
    """Return the defaults of `model.generate`; Vaswani's length penalty is the Translator's."""
    return GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        max_length=min(config.max_position_embeddings, 256),
        num_beams=beams,
    )
