"""The model of a recipe: its configuration with the vocabulary of the tokenizers, and fresh weights."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..data.tokenizer_pair import TokenizerPair
from ..inference.translator import DecodingOptions
from ..models.user_errors import UserError
from .checks import build_config
from .recipe import Recipe


def build_model(
    recipe: Recipe,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    baseline: bool = False,
) -> PreTrainedModel:
    """A fresh model whose vocabulary is that of the tokenizers; on demand the plain one that a variant starts from."""
    config = model_config(recipe, TokenizerPair(source_tokenizer, target_tokenizer), baseline)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config = generation_config(config, recipe)
    return model


def model_config(recipe: Recipe, tokenizers: TokenizerPair, baseline: bool = False) -> PreTrainedConfig:
    """
    The configuration of [`build_model`]'s model.

    Raises:
        UserError: `model.fields` names a vocabulary that is smaller than the tokenizer's, or the padding ids differ.
    """
    tokenizers.check_padding()
    source, target = tokenizers
    vocabulary = {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": tokenizers.is_joint,
        "pad_token_id": target.pad_token_id,
        "eos_token_id": target.eos_token_id,
        "bos_token_id": target.bos_token_id,
        "decoder_start_token_id": first_not_none(target.bos_token_id, target.pad_token_id),
    }
    for name in ("vocab_size", "decoder_vocab_size"):
        given = recipe.model.fields.get(name)
        if isinstance(given, int) and given < vocabulary[name]:
            raise UserError(
                f"model.fields.{name}={given} is smaller than the tokenizer's {vocabulary[name]} symbols. Remedy: "
                "leave it out, or train a smaller tokenizer."
            )
    config = build_config(recipe, **vocabulary)
    if baseline:
        config = config.baseline()
    tokenizers.stamp(config)
    return config


def first_not_none(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def generation_config(config: Any, recipe: Recipe) -> GenerationConfig:
    """What `model.generate` does without arguments: the recipe's beams (Vaswani's penalty is the Translator's)."""
    options = DecodingOptions(**recipe.decoding)
    return GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        max_length=min(config.max_position_embeddings, 256),
        num_beams=options.beams,
    )
