"""Settings and arrays of Marian's Transformers, and the configuration fields and parameters that mean the same."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from ..errors import UserError, short_repr
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.seq2seq_loss import FORBIDDEN
from .checked_copy import check_fields


IMPORTED = "marian_settings"  # field of a configuration
OFF: tuple[Any, ...] = (False, 0, "", [], None)  # values of a setting that is off
# Norm, dropout and sum before and after a sub-layer and after all layers, by whether the norm comes first.
ORDER = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
ORDERS = {False: ("", "dan", ""), True: ("n", "da", "n")}
ACTIVATIONS = {"swish": "silu", "relu": "relu"}
# Marian's gelu was x sigmoid(1.702 x) before a release. Kinds of gelu, with a release that computes them.
EXACT_GELU = (1, 12, 3)
GELUS = {"quick_gelu": "v1.12.0", "gelu": "v1.12.3"}
AUTOREGRESSIONS = {"self-attention": "self_attention", "rnn": "ssru", "average-attention": "average_attention"}
# Known settings, defaults, and those of marian-decoder without effect.
TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
DEFAULTS, SEARCH_DEFAULTS = TABLE["defaults"], TABLE["search_defaults"]
# Supported values of all known settings; an empty list allows any.
SETTINGS: dict[str, range | list[Any]] = {name: [] for name in TABLE["any"].split()}
for names, (least, most) in TABLE["ranges"].items():
    SETTINGS |= dict.fromkeys(names.split(), range(least, most + 1))
for names, values in TABLE["values"].items():
    SETTINGS |= dict.fromkeys(names.split(), values)
# Settings and fields with the same values.
SAME = {
    **{"dim-emb": "d_model", "enc-depth": "encoder_layers", "dec-depth": "decoder_layers"},
    **{"transformer-heads": "decoder_attention_heads", "transformer-dim-ffn": "encoder_ffn_dim"},
}
# Fields of every Transformer of Marian.
FUNCTION: dict[str, Any] = {
    **{"position_embedding_type": "tensor2tensor", "layer_norm_eps": 1e-6, "self_attention_type": "absolute"},
    **dict.fromkeys(("scale_embedding", "encoder_position_embeddings", "decoder_position_embeddings"), True),
}


@dataclass(frozen=True)
class Settings:
    """Settings of a model, or of marian-decoder; `UserError` for unknown ones and for values without support."""

    values: Mapping[str, Any]
    path: str  # of their file
    is_search: bool = False  # whether they are those of marian-decoder, some of which have no effect on translations

    def __post_init__(self) -> None:
        for name, value in sorted({**dict.fromkeys(TABLE["required"]), **self.values}.items()):
            allowed = SETTINGS.get(name, [])
            if isinstance(allowed, range):
                is_supported = type(value) is int and value in allowed
            else:
                is_supported = not allowed or any(is_same(value, one) for one in allowed)
            is_known = name in SETTINGS or (self.is_search and name in TABLE["without_effect"].split())
            self.require(is_supported and is_known, name)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting, or its default; `False` if it is off."""
        value = self.values.get(name, {**DEFAULTS, **SEARCH_DEFAULTS}.get(name))
        return False if value in OFF else value

    def require(self, is_supported: bool, name: str) -> None:
        """Raise `UserError` about the value of a setting unless it is supported."""
        if not is_supported:
            value = short_repr(self.values.get(name))
            raise UserError(f"{self.path} has the setting {name}={value}, which is not supported.", field=name)

    def activation(self, name: str) -> str:
        """Return the activation that a setting names; the release that saved the file decides which gelu it means."""
        if self[name] != "gelu":
            return ACTIVATIONS[self[name]]
        release = re.match(r"v(\d+)\.(\d+)\.(\d+)", str(self["version"]))
        self.require(release is not None, "version")
        return "gelu" if release and tuple(map(int, release.groups())) >= EXACT_GELU else "quick_gelu"

    def fields(self) -> dict[str, Any]:
        """Return the fields of the configuration of a model, without those of its vocabularies."""
        is_norm_first = self[ORDER[0]] == "n"
        for name, expected in zip(ORDER, ORDERS[is_norm_first], strict=True):
            self.require((self.values.get(name) or "") == expected, name)
        # The decoder layer, from 0, whose first head aligns words; Marian counts from 1.
        layers = {str(i): i - 1 for i in range(1, self["dec-depth"] + 1)} | {"last": self["dec-depth"] - 1}
        aligning = str(self["transformer-guided-alignment-layer"])
        self.require(aligning in layers, "transformer-guided-alignment-layer")
        is_tied, kind = self["tied-embeddings-all"], AUTOREGRESSIONS[self["transformer-decoder-autoreg"]]
        fields = {
            **{field: self[name] for name, field in SAME.items()},
            "encoder_attention_heads": self["transformer-heads"],
            "decoder_ffn_dim": self["transformer-decoder-dim-ffn"] or self["transformer-dim-ffn"],
            "activation_function": self.activation("transformer-ffn-activation"),
            "share_encoder_decoder_embeddings": is_tied or self["tied-embeddings-src"],
            "tie_word_embeddings": is_tied or self["tied-embeddings"],
            "normalize_before": is_norm_first,
            "alignment_head": [layers[aligning], 0],
            **FUNCTION,
            "decoder_autoregression": kind,
        }
        if kind == "ssru":
            self.require(self["dec-cell"] == "ssru", "dec-cell")
            fields["decoder_recurrence_projection"] = self["transformer-rnn-projection"]
        if kind == "average_attention":
            depth, width = self["transformer-aan-depth"], self["transformer-dim-aan"]
            # Only the average passes the norm, while the gates read the input itself.
            self.require(not is_norm_first, ORDER[0])
            fields["aan_gate"] = "none" if self["transformer-aan-nogate"] else "separate"
            fields["aan_ffn"] = depth == 2
            if depth == 2:  # Marian has no second matrix if the first one leads to the model's width
                fields["aan_ffn_dim"] = width
                fields["aan_ffn_layers"] = 1 if width == self["dim-emb"] else 2
                fields["aan_activation"] = self.activation("transformer-aan-activation")
        return fields


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal. `True` is not 1, but what is off may have any type."""
    if other in OFF or value in OFF:
        return other in OFF and value in OFF
    return type(value) is type(other) and value == other


def settings_of(config: NMTTransformerConfig, sizes: tuple[int, int], has_bias: bool) -> dict[str, Any]:
    """Return settings equivalent to a model's fields, preferably those of the imported file, or raise `UserError`."""
    names = {own: name for name, own in [*AUTOREGRESSIONS.items(), *ACTIVATIONS.items(), ("swish", "swish")]}
    names |= dict.fromkeys(GELUS, "gelu")
    needed = {"decoder_autoregression": tuple(AUTOREGRESSIONS.values()), "encoder_mixer": ("self_attention",)}
    needed |= dict.fromkeys(("activation_function", "aan_activation"), tuple(names))
    check_fields(config, "Marian", needed)

    def differing(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
        fields = Settings(settings, IMPORTED).fields()
        if not getattr(config, "alignment_head", None):
            del fields["alignment_head"]
        if config.aan_ffn_layers == 1:  # without a second matrix its width is not used
            fields.pop("aan_ffn_dim", None)
        own = {name: getattr(config, name) for name in fields}
        return [(name, one) for name, one in own.items() if {"swish": "silu"}.get(str(one), one) != fields[name]]

    imported = getattr(config, IMPORTED, None)
    if imported and not differing(imported) and imported.get("dim-vocabs") == list(sizes):
        return {**imported, "output-omit-bias": not has_bias}
    shares, ties = config.share_encoder_decoder_embeddings, config.tie_word_embeddings
    kind, ffn = str(config.decoder_autoregression), config.decoder_ffn_dim
    release = GELUS.get(config.activation_function) or GELUS.get(config.aan_activation, GELUS["gelu"])
    settings: dict[str, Any] = {
        **DEFAULTS,
        **{name: getattr(config, field) for name, field in SAME.items()},
        **{"dim-vocabs": list(sizes), "output-omit-bias": not has_bias, "version": release},
        "tied-embeddings": ties and not shares,
        "tied-embeddings-src": shares and not ties,
        "tied-embeddings-all": shares and ties,
        "transformer-decoder-dim-ffn": 0 if ffn == config.encoder_ffn_dim else ffn,
        "transformer-ffn-activation": names[config.activation_function],
        "transformer-decoder-autoreg": names[kind],
        **dict(zip(ORDER, ORDERS[config.normalize_before], strict=True)),
    }
    if head := getattr(config, "alignment_head", None):
        settings["transformer-guided-alignment-layer"] = head[0] + 1
    if kind == "ssru":
        settings |= {"dec-cell": "ssru", "transformer-rnn-projection": config.decoder_recurrence_projection}
    if kind == "average_attention":
        settings |= {"transformer-aan-nogate": config.aan_gate == "none", "transformer-aan-depth": 1 + config.aan_ffn}
        settings["transformer-aan-activation"] = names[config.aan_activation]
        settings["transformer-dim-aan"] = config.d_model if config.aan_ffn_layers == 1 else config.aan_ffn_dim
    for name, value in differing(settings):
        raise UserError(f"Marian does not support {name}={short_repr(value)}. Use `recnmt translate`.", field=name)
    return settings


# The output matrix, now and in older releases of Marian, where it is transposed.
OUTPUT, OLD_OUTPUT = "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W"
OUTPUT_BIAS = "decoder_ff_logit_out_b"
# Values of a parameter for symbols that Marian does not have.
FURTHER = {"table": 0.0, "biases": FORBIDDEN}
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


class Place(NamedTuple):
    """
    Arrays of Marian and the parameter that they become. Kinds: `"matrix"` is transposed, and several become its rows;
    `"vector"` has one row in Marian; `"table"` and `"biases"` have an entry for each symbol, and further ones here.
    """

    arrays: tuple[str, ...]
    parameter: str
    kind: str

    def views(self, parameter: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return views of a parameter with the shapes of Marian's arrays; `sizes` are those of the vocabularies."""
        size = sizes[self.arrays[0] != "encoder_Wemb"]  # all tables but one belong to the target
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
