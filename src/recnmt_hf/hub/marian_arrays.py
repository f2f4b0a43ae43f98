"""Arrays of Marian's Transformers, by name, and the parameters that they become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.seq2seq_loss import FORBIDDEN


# The output matrix, now and in older releases of Marian, where it is transposed.
OUTPUT, OLD_OUTPUT = "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W"
OUTPUT_BIAS = "decoder_ff_logit_out_b"
# Values of a parameter for symbols that Marian does not have.
FURTHER = {"table": 0.0, "biases": FORBIDDEN}


class Place(NamedTuple):
    """
    Arrays of Marian and the parameter that they become. Kinds: `"matrix"` is transposed, and several become its rows;
    `"vector"` has one row in Marian; `"table"` and `"biases"` have an entry for each symbol, and further ones here.
    """

    arrays: tuple[str, ...]
    parameter: str
    kind: str

    def views(self, parameter: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
        """Return views of a parameter with the shapes of Marian's arrays; a table has `size` symbols."""
        if self.kind == "matrix":
            return [part.T for part in parameter.chunk(len(self.arrays))]
        if self.kind == "vector":
            return [parameter[None]]
        return [parameter[:size] if self.kind == "table" else parameter[:, :size]]


def linear(prefix: str, module: str, **maps: str) -> list[Place]:
    """Return the places of linear layers; `maps` are the ends of Marian's names, and the layers within a module."""
    return [
        Place((f"{prefix}_{array}{end}",), f"{module}{layer}.{name}", kind)
        for end, layer in maps.items()
        for array, name, kind in (("W", "weight", "matrix"), ("b", "bias", "vector"))
    ]


def norm(prefix: str, module: str, ending: str = "") -> list[Place]:
    """Return the places of a layer norm."""
    names = {"scale": "weight", "bias": "bias"}
    return [Place((f"{prefix}_ln_{name}{ending}",), f"{module}.{own}", "vector") for name, own in names.items()]


ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def places_of(config: NMTTransformerConfig, has_bias: bool = True) -> Iterator[Place]:
    """Yield the places of all parameters of a model."""
    if config.share_encoder_decoder_embeddings:
        tables = {"Wemb": "model.shared"}
    else:
        tables = {f"{side}_Wemb": f"model.{side}.embed_tokens" for side in ("encoder", "decoder")}
    if not config.tie_word_embeddings:
        tables[OUTPUT] = "lm_head"
    yield from (Place((array,), f"{module}.weight", "table") for array, module in tables.items())
    if has_bias:
        yield Place((OUTPUT_BIAS,), "final_logits_bias", "biases")
    ending = "_pre" if config.normalize_before else ""
    for side in ("encoder", "decoder"):
        for i in range(getattr(config, f"{side}_layers")):
            prefix, layer = f"{side}_l{i + 1}", f"model.{side}.layers.{i}."
            kind = "self_attention" if side == "encoder" else config.decoder_autoregression
            if kind == "self_attention":
                yield from linear(f"{prefix}_self", f"{layer}self_attn.", **ATTENTION)
                normed = f"{prefix}_self_Wo"
            elif kind == "ssru":
                rnn, module = f"{prefix}_rnn", f"{layer}self_attn."
                yield Place((f"{rnn}_W", f"{rnn}_Wf"), f"{module}in_proj.weight", "matrix")
                yield Place((f"{rnn}_bf",), f"{module}forget_bias", "vector")
                if config.decoder_recurrence_projection:
                    yield from linear(rnn, module, o="out_proj")
                # Marian names the norm after the sub-layer `_rnn_ffn`, the one before it `_rnn`.
                normed = rnn if ending else f"{rnn}_ffn"
            else:
                maps = {str(number): f"fc{number}" for number in range(1, 1 + config.aan_ffn_layers * config.aan_ffn)}
                if config.aan_gate == "separate":
                    maps |= {"i": "input_gate", "f": "forget_gate"}
                yield from linear(f"{prefix}_aan", f"{layer}self_attn.", **maps)
                normed = f"{prefix}_aan_ffn"
            yield from norm(normed, f"{layer}self_attn_layer_norm", ending)
            if side == "decoder":
                yield from linear(f"{prefix}_context", f"{layer}encoder_attn.", **ATTENTION)
                yield from norm(f"{prefix}_context_Wo", f"{layer}encoder_attn_layer_norm", ending)
            yield from linear(f"{prefix}_ffn", layer, **{"1": "fc1", "2": "fc2"})
            yield from norm(f"{prefix}_ffn_ffn", f"{layer}final_layer_norm", ending)
        if config.normalize_before:
            yield from norm(f"{side}_top", f"model.{side}.layer_norm")
