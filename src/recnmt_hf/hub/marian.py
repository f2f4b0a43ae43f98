"""Import of MarianMT checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel

from .._loading_errors import explained_loading
from ..evaluation.model_checks import check_loading
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.modeling_nmt_transformer import NMTTransformerForConditionalGeneration
from ..models.user_errors import UserError


# Fields that both configurations have under the same name.
SHARED_FIELDS = (
    "vocab_size",
    "decoder_vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "activation_function",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "scale_embedding",
    "max_position_embeddings",
    "share_encoder_decoder_embeddings",
    "tie_word_embeddings",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)
# MarianMT's sinusoids are computed, not learned: the zoo makes the same ones itself.
COMPUTED = {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}


def config_from_marian(config: MarianConfig) -> NMTTransformerConfig:
    """The configuration of the same network."""
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    return NMTTransformerConfig(
        **fields,
        normalize_before=False,
        position_embedding_type="marian",
        final_logits_bias=True,
        init_std=config.init_std,
    )


def from_marian(model_or_path: MarianMTModel | str | Path, **kwargs: Any) -> NMTTransformerForConditionalGeneration:
    """
    An `NMTTransformerForConditionalGeneration` that computes what a MarianMT model computes.

    Args:
        model_or_path (`MarianMTModel`, `str` or `Path`): The model, its folder, or its id on the Hub.
        **kwargs: Passed on to `MarianMTModel.from_pretrained`.

    Returns:
        The model in evaluation mode, with the data type, weights and generation settings of the original. Its tokenizer
        is the original's.

    Raises:
        ValueError: The files lack a parameter or hold a foreign one, a parameter has no place in the model, or stays
            without a value.
    """
    if isinstance(model_or_path, MarianMTModel):
        marian = model_or_path
    else:
        settings: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with explained_loading(model_or_path):
            loaded: Any = MarianMTModel.from_pretrained(str(model_or_path), **settings, **kwargs)
            marian, info = loaded
        check_loading(marian, info)
    config = config_from_marian(marian.config)
    model = NMTTransformerForConditionalGeneration(config)
    model.to(marian.dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    source = {name: tensor for name, tensor in marian.state_dict().items() if name not in COMPUTED}
    own = model.state_dict()
    foreign = sorted(set(source) - set(own))
    empty = sorted(set(own) - set(source))
    if foreign or empty:
        raise UserError(
            f"This MarianMT model does not fit: {', '.join(foreign) or 'nothing'} has no place, "
            f"{', '.join(empty) or 'nothing'} stays empty. Remedy: use a model of the plain MarianMT architecture."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(source[name])
    model.generation_config = marian.generation_config
    model.to(marian.device)  # type: ignore[arg-type]  # as above
    return model.eval()
