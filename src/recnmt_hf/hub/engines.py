"""Base Transformers for CTranslate2, an engine in C++ for the CPU and CUDA."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.files import open_output_folder
from ..data.tokenizer_pair import TokenizerPair
from ..inference.backends.ctranslate2_model import load_engine_package
from ..inference.backends.export_settings import ENGINE_SETTINGS
from ..inference.loading import load_model
from ..inference.model_checks import check_weights
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.user_errors import UserError
from ..training.evidence import Evidence


QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")
# Names of activations that both have.
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_new": "GELUTanh", "swish": "SWISH", "silu": "SWISH"}


def export_ctranslate2(source: str | Path, output: str | Path, quantization: str = "float32") -> Path:
    """
    Writes a base Transformer as a model of CTranslate2, with its tokenizers; `Translator.from_pretrained` and
    `recnmt translate` take the folder as they take a model's.

    Args:
        source (`str` or `Path`): Folder or model id of an `nmt_transformer`, of either norm order, with absolute
            positions, or with relative ones that the heads share.
        output (`str` or `Path`): A new folder.
        quantization (`str`, *optional*, defaults to `"float32"`): How weights are stored: `"float32"`, `"float16"`,
            `"bfloat16"`, `"int16"`, or `"int8"` with the type of the rest behind it (`"int8_float16"`, ...).

    Returns:
        The folder.

    Raises:
        ValueError: CTranslate2 is not installed or has no such model, or the files are damaged.
        FileExistsError: The output is there and not empty.
    """
    load_engine_package()
    if quantization not in QUANTIZATIONS:
        raise UserError(f"There is no quantization {quantization!r}. Remedy: choose one of {', '.join(QUANTIZATIONS)}.")
    model: Any = load_model(source, "cpu")
    check_weights(model)
    check_expressible(model.config)
    tokenizers = TokenizerPair.load(source)
    tokenizers.check(model)
    specification = specification_of(model.float(), tokenizers)
    specification.validate()
    specification.optimize(quantization=quantization)
    with open_output_folder(output, must_be_new=True) as working:
        specification.save(str(working))
        tokenizers.save(working)
        about = {"config": model.config.to_dict(), "generation_config": model.generation_config.to_dict()}
        about |= {"format": "ctranslate2", "quantization": quantization}
        (working / ENGINE_SETTINGS).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
        evidence = Evidence.load(source) if Path(source).is_dir() else Evidence()
        evidence.tests = []  # they are of the model before it was stored in another way
        evidence.save(working)
    return Path(output)


def check_expressible(config: Any) -> None:
    """Raises `UserError` for a model that CTranslate2 does not compute."""
    if config.model_type != NMTTransformerConfig.model_type:
        raise UserError(
            f"CTranslate2 computes no {config.model_type}. Remedy: export a base Transformer "
            f"({NMTTransformerConfig.model_type}); the others run with `recnmt translate` (--quantization int8)."
        )
    is_relative = config.self_attention_type == "relative"
    faults = {
        "self_attention_type": config.self_attention_type == "directional",
        "relative_per_head": is_relative and config.relative_per_head,
        "position_embedding_type": is_relative and config.position_embedding_type != "none",
        "activation_function": config.activation_function not in ACTIVATIONS,
        "layer_norm_eps": config.layer_norm_eps != 1e-5,
    }
    for name, is_fault in faults.items():
        if is_fault:
            raise UserError(
                f"CTranslate2 computes no Transformer with {name}={getattr(config, name)!r}. Remedy: train one without "
                "it, or run this one with `recnmt translate`."
            )


def specification_of(model: Any, tokenizers: TokenizerPair) -> Any:
    """CTranslate2's description of a model, with weights of its own: quantization scales them where they stand."""
    from ctranslate2.specs import common_spec, transformer_spec  # type: ignore[import-untyped]

    config = model.config
    shared = {
        "pre_norm": config.normalize_before,
        "activation": getattr(common_spec.Activation, ACTIVATIONS[config.activation_function]),
        "relative_position": config.self_attention_type == "relative",
    }
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.encoder_attention_heads, **shared)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.decoder_attention_heads, **shared)
    specification = transformer_spec.TransformerSpec(encoder, decoder)
    for place, stack, embeddings in (
        (encoder, model.model.encoder, encoder.embeddings[0]),
        (decoder, model.model.decoder, decoder.embeddings),
    ):
        place.scale_embeddings = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        embeddings.weight = numbers(stack.embed_tokens.weight)
        if hasattr(place, "position_encodings"):
            place.position_encodings.encodings = positions_of(stack, config)
        if config.normalize_before:
            set_norm(place.layer_norm, stack.layer_norm)
        for layer, own in zip(place.layer, stack.layers, strict=True):
            set_self_attention(layer.self_attention, own.self_attn, own.self_attn_layer_norm)
            if place is decoder:
                set_cross_attention(layer.attention, own.encoder_attn, own.encoder_attn_layer_norm)
            set_linear(layer.ffn.linear_0, own.fc1)
            set_linear(layer.ffn.linear_1, own.fc2)
            set_norm(layer.ffn.layer_norm, own.final_layer_norm)
    decoder.projection.weight = numbers(model.lm_head.weight)
    if model.final_logits_bias is not None:
        decoder.projection.bias = numbers(model.final_logits_bias[0])
    vocabularies = [
        symbols_of(tokenizer, rows)
        for tokenizer, rows in zip(tokenizers, (config.vocab_size, config.decoder_vocab_size), strict=True)
    ]
    specification.register_source_vocabulary(vocabularies[0])
    specification.register_target_vocabulary(vocabularies[1])
    target = vocabularies[1]
    ends = model.generation_config.eos_token_id or config.eos_token_id
    specification.config.eos_token = target[ends[0] if isinstance(ends, list) else ends]
    specification.config.decoder_start_token = target[config.decoder_start_token_id]
    specification.config.bos_token = specification.config.decoder_start_token
    unknown = tokenizers.source.unk_token_id
    specification.config.unk_token = vocabularies[0][unknown if unknown is not None else 0]
    return specification


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float32, copy=True)


def positions_of(stack: Any, config: Any) -> np.ndarray:
    """A stack's table of positions; zeros where it has none."""
    module = stack.embed_input.embed_positions
    if module is None:
        return np.zeros((config.max_position_embeddings, config.d_model), np.float32)
    return numbers(module.weight if hasattr(module, "weight") else module.table)


def set_linear(place: Any, *modules: Any) -> None:
    """One matrix of several linear layers below each other."""
    place.weight = np.concatenate([numbers(module.weight) for module in modules])
    if modules[0].bias is not None:
        place.bias = np.concatenate([numbers(module.bias) for module in modules])


def set_norm(place: Any, module: Any) -> None:
    place.gamma, place.beta = numbers(module.weight), numbers(module.bias)


def set_self_attention(place: Any, module: Any, norm: Any) -> None:
    set_linear(place.linear[0], module.q_proj, module.k_proj, module.v_proj)
    set_linear(place.linear[1], module.out_proj)
    set_norm(place.layer_norm, norm)
    if hasattr(place, "relative_position_keys"):
        place.relative_position_keys = numbers(module.relative_keys[0])
        place.relative_position_values = numbers(module.relative_values[0])


def set_cross_attention(place: Any, module: Any, norm: Any) -> None:
    set_linear(place.linear[0], module.q_proj)
    set_linear(place.linear[1], module.k_proj, module.v_proj)
    set_linear(place.linear[2], module.out_proj)
    set_norm(place.layer_norm, norm)


def symbols_of(tokenizer: Any, rows: int) -> list[str]:
    """A name for each row of an embedding: the tokenizer's symbols, and others for rows beyond them."""
    symbols = {number: symbol for symbol, number in tokenizer.get_vocab().items()}
    taken = set(symbols.values())
    names = [symbols.get(number, f"<row {number}>") for number in range(rows)]
    if len(set(names)) < rows or len(taken) < len(symbols):
        raise UserError("Two rows of the embedding would have one name. Remedy: rename the tokenizer's symbol <row N>.")
    return names
