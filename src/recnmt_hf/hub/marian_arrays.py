"""Arrays of Marian's Transformers, by name, and the parameters that they become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.seq2seq_loss import FORBIDDEN


# The output matrix, now and in older releases of Marian, where it is transposed.
OUTPUT, OLD_OUTPUT = "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W"
OUTPUT_BIAS = "decoder_ff_logit_out_b"


class Place(NamedTuple):
    """
    Arrays of Marian and the parameter that they become. Kinds: `"matrix"` is transposed, and several become its rows;
    `"vector"` has one row in Marian; `"table"` and `"biases"` have an entry for each symbol, and further ones here.
    """

    arrays: tuple[str, ...]
    parameter: str
    kind: str


def linear(arrays: str, bias: str, module: str) -> list[Place]:
    """Return the places of a matrix and its bias."""
    return [Place((arrays,), f"{module}.weight", "matrix"), Place((bias,), f"{module}.bias", "vector")]


def norm(prefix: str, module: str, ending: str = "") -> list[Place]:
    """Return the places of a layer norm."""
    names = {"scale": "weight", "bias": "bias"}
    return [Place((f"{prefix}_ln_{name}{ending}",), f"{module}.{own}", "vector") for name, own in names.items()]


def attention(prefix: str, module: str) -> list[Place]:
    """Return the places of the four maps of an attention."""
    maps = [linear(f"{prefix}_W{name}", f"{prefix}_b{name}", f"{module}.{name}_proj") for name in "qkv"]
    maps.append(linear(f"{prefix}_Wo", f"{prefix}_bo", f"{module}.out_proj"))
    return [place for places in maps for place in places]


def places_of(config: NMTTransformerConfig, has_bias: bool = True) -> Iterator[Place]:
    """Yield the places of all parameters of a model."""
    shares = config.share_encoder_decoder_embeddings
    tables = {"Wemb": "model.shared"} if shares else {}
    if not shares:
        tables = {f"{side}_Wemb": f"model.{side}.embed_tokens" for side in ("encoder", "decoder")}
    if not config.tie_word_embeddings:
        tables[OUTPUT] = "lm_head"
    yield from (Place((array,), f"{module}.weight", "table") for array, module in tables.items())
    if has_bias:
        yield Place((OUTPUT_BIAS,), "final_logits_bias", "biases")
    ending = "_pre" if config.normalize_before else ""
    for side in ("encoder", "decoder"):
        for i in range(getattr(config, f"{side}_layers")):
            prefix, layer = f"{side}_l{i + 1}", f"model.{side}.layers.{i}"
            if side == "encoder" or config.decoder_autoregression == "self_attention":
                yield from attention(f"{prefix}_self", f"{layer}.self_attn")
                yield from norm(f"{prefix}_self_Wo", f"{layer}.self_attn_layer_norm", ending)
            else:
                yield from RECURRENCES[config.decoder_autoregression](config, prefix, layer, ending)
            if side == "decoder":
                yield from attention(f"{prefix}_context", f"{layer}.encoder_attn")
                yield from norm(f"{prefix}_context_Wo", f"{layer}.encoder_attn_layer_norm", ending)
            for number in "12":
                yield from linear(f"{prefix}_ffn_W{number}", f"{prefix}_ffn_b{number}", f"{layer}.fc{number}")
            yield from norm(f"{prefix}_ffn_ffn", f"{layer}.final_layer_norm", ending)
        if config.normalize_before:
            yield from norm(f"{side}_top", f"model.{side}.layer_norm")


def ssru_places(config: NMTTransformerConfig, prefix: str, layer: str, ending: str) -> Iterator[Place]:
    """Yield the places of an SSRU."""
    prefix, module = f"{prefix}_rnn", f"{layer}.self_attn"
    yield Place((f"{prefix}_W", f"{prefix}_Wf"), f"{module}.in_proj.weight", "matrix")
    yield Place((f"{prefix}_bf",), f"{module}.forget_bias", "vector")
    if config.decoder_recurrence_projection:
        yield from linear(f"{prefix}_Wo", f"{prefix}_bo", f"{module}.out_proj")
    # Marian names the norm after the sub-layer `_rnn_ffn`, the one before it `_rnn`.
    yield from norm(prefix if ending else f"{prefix}_ffn", f"{module}_layer_norm", ending)


def average_places(config: NMTTransformerConfig, prefix: str, layer: str, ending: str) -> Iterator[Place]:
    """Yield the places of an average attention."""
    prefix, module = f"{prefix}_aan", f"{layer}.self_attn"
    maps = {str(number): f"fc{number}" for number in range(1, 1 + config.aan_ffn_layers * config.aan_ffn)}
    if config.aan_gate == "separate":
        maps |= {"i": "input_gate", "f": "forget_gate"}
    for name, own in maps.items():
        yield from linear(f"{prefix}_W{name}", f"{prefix}_b{name}", f"{module}.{own}")
    yield from norm(f"{prefix}_ffn", f"{module}_layer_norm", ending)


RECURRENCES = {"ssru": ssru_places, "average_attention": average_places}


def array_shape(place: Place, parameter: torch.Size, size: int) -> tuple[int, ...]:
    """Return the shape of a place's arrays in Marian, from that of the parameter and a number of symbols."""
    if place.kind == "matrix":
        return parameter[1], parameter[0] // len(place.arrays)
    if place.kind == "vector":
        return 1, parameter[0]
    return (size, parameter[1]) if place.kind == "table" else (1, size)


def fill(place: Place, parameter: torch.Tensor, arrays: Sequence[np.ndarray]) -> None:
    """Copy arrays into a parameter, or into the part of it that belongs to Marian's symbols."""
    values = [torch.from_numpy(array.copy()) for array in arrays]
    if place.kind == "matrix":
        parameter.copy_(torch.cat([matrix.T for matrix in values]))
    elif place.kind == "vector":
        parameter.copy_(values[0][0])
    elif place.kind == "table":
        parameter.zero_()[: len(values[0])] = values[0]
    else:
        parameter.fill_(FORBIDDEN)[:, : values[0].shape[1]] = values[0]


def extract(place: Place, parameter: torch.Tensor, size: int) -> list[np.ndarray]:
    """Return the arrays of a place, the inverse of [`fill`]. Marian reads arrays in the order of C only."""
    if place.kind == "matrix":
        values = [part.T for part in parameter.chunk(len(place.arrays))]
    elif place.kind == "vector":
        values = [parameter[None]]
    else:
        values = [parameter[:size] if place.kind == "table" else parameter[:, :size]]
    return [np.ascontiguousarray(value.float().cpu().numpy()) for value in values]
