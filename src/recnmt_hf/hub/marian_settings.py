"""Settings of Marian's Transformers, as its files store them, and the fields of a configuration that mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ..errors import UserError, short_repr
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from .checked_copy import check_fields


# Field of a configuration with the settings of the imported file.
IMPORTED_SETTINGS = "marian_settings"
# Values of a setting that is off.
OFF: tuple[Any, ...] = (False, 0, "", [], None)
# Settings that must have one of these values where they are given.
FIXED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-attention-mask": ("default", ""),
    "input-types": ([], ["sequence"], ["sequence", "sequence"]),
    **dict.fromkeys(
        (
            *("right-left", "ulr", "ulr-dim-emb", "ulr-trainable-transformation", "layer-normalization"),
            *("lemma-dim-emb", "lemma-dependency", "factors-dim-emb", "input-reorder", "input-join-fields"),
            *("transformer-no-projection", "transformer-tied-layers", "transformer-pool", "transformer-no-bias"),
            *("transformer-no-affine", "transformer-disable-position-embeddings", "transformer-train-positions"),
            *("transformer-alibi-shift", "transformer-alibi-trainable", "special-vocab", "word-penalty"),
        ),
        (False,),
    ),
}
# Settings without effect on a Transformer that translates. Marian does not read
# `transformer-train-position-embeddings`; trained positions are an array Wpos, which no parameter receives.
IGNORED = {
    *("enc-type", "enc-cell", "enc-cell-depth", "dec-cell-base-depth", "dec-cell-high-depth", "dim-rnn", "skip"),
    *("version", "bert-train-type-embeddings", "bert-type-vocab-size", "factors-combine", "separator-symbol"),
    *("transformer-depth-scaling", "transformer-train-position-embeddings"),
}
# Settings of a file for marian-decoder without effect on translations.
IGNORED_BY_SEARCH = {
    *("models", "vocabs", "relative-paths", "shortlist", "alignment", "n-best", "word-scores", "quiet", "log"),
    *("quiet-translation", "log-level", "cpu-threads", "num-devices", "devices", "workspace", "data-threads"),
    *("mini-batch", "mini-batch-words", "maxi-batch", "maxi-batch-sort", "max-length", "max-length-crop", "seed"),
    *("gemm-precision", "gemm-type", "optimize", "precision", "fp16", "skip-cost", "input", "output", "stat-freq"),
    *("ssplit-mode", "ssplit-prefix-file", "max-length-break"),
}
# Norm, dropout and sum before and after a sub-layer and after all layers, by whether the norm comes first.
ORDER = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
ORDERS = {False: ("", "dan", ""), True: ("n", "da", "n")}
ACTIVATIONS = {"swish": "silu", "relu": "relu"}
# Marian's gelu was x sigmoid(1.702 x) before a release. Kinds of gelu, with a release that computes them.
EXACT_GELU = (1, 12, 3)
GELUS = {"quick_gelu": "v1.12.0", "gelu": "v1.12.3"}
AUTOREGRESSIONS = {"self-attention": "self_attention", "rnn": "ssru", "average-attention": "average_attention"}
SWITCHES = (
    *("tied-embeddings", "tied-embeddings-src", "tied-embeddings-all", "output-omit-bias"),
    *("transformer-rnn-projection", "transformer-aan-nogate", "allow-unk", "allow-special"),
)
# Integers: name -> Marian's default (`None`: always stored), the least and the greatest value.
INTEGERS: dict[str, tuple[int | None, int, int]] = {
    "dim-emb": (None, 4, 2**16),
    "enc-depth": (None, 1, 1000),
    "dec-depth": (None, 1, 1000),
    "transformer-heads": (8, 1, 2**16),
    "transformer-dim-ffn": (2048, 1, 2**20),
    "transformer-decoder-dim-ffn": (0, 0, 2**20),
    "transformer-dim-aan": (2048, 1, 2**20),
    "transformer-aan-depth": (2, 1, 1000),
    "beam-size": (1, 1, 1000),
}
# Numbers of the search, with the defaults of the tools that publish students.
NUMBERS = {"normalize": 1.0, "max-length-factor": 3.0}
KNOWN = {
    *(*FIXED, *IGNORED, *ORDER, *SWITCHES, *INTEGERS, *NUMBERS, "dim-vocabs", "dec-cell"),
    *("transformer-ffn-activation", "transformer-aan-activation", "transformer-decoder-autoreg"),
    "transformer-guided-alignment-layer",
}
# Fields of every Transformer of Marian.
FUNCTION: dict[str, Any] = {
    "position_embedding_type": "tensor2tensor",
    "layer_norm_eps": 1e-6,
    "scale_embedding": True,
    "self_attention_type": "absolute",
    "encoder_position_embeddings": True,
    "decoder_position_embeddings": True,
}
# Settings of an exported model that was not imported, before those of its configuration.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("right-left", "ulr", "layer-normalization", "skip", "transformer-no-projection"), False),
    **dict.fromkeys(("transformer-pool", "transformer-train-position-embeddings"), False),
    **dict.fromkeys(("transformer-rnn-projection", "transformer-aan-nogate"), False),
    **{"bert-train-type-embeddings": True, "bert-type-vocab-size": 2, "input-types": [], "lemma-dim-emb": 0},
    **{"enc-type": "bidirectional", "enc-cell": "gru", "enc-cell-depth": 1, "dim-rnn": 1024, "ulr-dim-emb": 0},
    **{"dec-cell": "gru", "dec-cell-base-depth": 2, "dec-cell-high-depth": 1, "transformer-ffn-depth": 2},
    **{"transformer-aan-activation": "swish", "transformer-aan-depth": 2, "transformer-dim-aan": 2048},
    **{"transformer-guided-alignment-layer": "last", "transformer-postprocess-emb": "d", "type": "transformer"},
    **{"transformer-tied-layers": [], "ulr-trainable-transformation": False},
}


@dataclass(frozen=True)
class Settings:
    """
    Settings of a model, or of marian-decoder.

    Args:
        values (mapping): Names and values.
        path (`str`): Their file.
        ignored (set of `str`, *optional*): Names of further settings without effect.

    Raises:
        UserError: A setting is unknown, or has a value that is not supported; the message has name and value.
    """

    values: Mapping[str, Any]
    path: str
    ignored: Set[str] = frozenset()

    def __post_init__(self) -> None:
        for name in sorted(self.values):
            if name not in KNOWN and name not in self.ignored:
                raise UserError(
                    f"{self.path} has the setting {name}={short_repr(self.values[name])}, which is unknown. Only "
                    "Transformers are supported.",
                    field=name,
                )
            allowed = FIXED.get(name, ())
            if allowed and not any(is_same(self.values[name], one) for one in allowed):
                raise self.error(name, describe(allowed))
        for names, check in ((SWITCHES, self.is_on), (INTEGERS, self.integer), (NUMBERS, self.number)):
            for name in self.values.keys() & set(names):
                check(name)

    def error(self, name: str, allowed: str) -> UserError:
        """Return the error about the value of a setting."""
        value = self.values.get(name)
        return UserError(
            f"{self.path} has the setting {name}={short_repr(value)}, which is not supported; it must be {allowed}.",
            field=name,
        )

    def choose(self, name: str, meanings: Mapping[Any, Any], default: Any) -> Any:
        """Return what the value of a setting means."""
        value = self.values.get(name, default)
        for allowed, meaning in meanings.items():
            if is_same(value, allowed):
                return meaning
        raise self.error(name, describe(tuple(meanings)))

    def is_on(self, name: str) -> bool:
        """Return the value of one of the [`SWITCHES`]."""
        return self.choose(name, {True: True, False: False}, False)

    def activation(self, name: str) -> str:
        """Return the activation that a setting names; the release that saved the file decides which gelu it means."""
        if self.values.get(name) != "gelu":
            return self.choose(name, ACTIVATIONS, "swish")
        release = re.match(r"v(\d+)\.(\d+)\.(\d+)", str(self.values.get("version")))
        if release is None:
            raise self.error("version", f"a release of Marian, such as {GELUS['gelu']}, with {name}=gelu")
        return "gelu" if tuple(map(int, release.groups())) >= EXACT_GELU else "quick_gelu"

    def integer(self, name: str) -> int:
        """Return the value of one of the [`INTEGERS`]."""
        default, least, most = INTEGERS[name]
        value = self.values.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        """Return the value of one of the [`NUMBERS`]."""
        value = self.values.get(name, NUMBERS[name])
        if type(value) not in (int, float) or not 0 <= value <= 100:
            raise self.error(name, "a number from 0 to 100")
        return float(value)

    def vocabulary_sizes(self) -> tuple[int, int]:
        """Return the numbers of source and target symbols."""
        sizes = self.values.get("dim-vocabs")
        if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 2 for size in sizes):
            raise self.error("dim-vocabs", "two sizes")
        return sizes[0], sizes[1]

    def fields(self) -> dict[str, Any]:
        """Return the fields of the configuration of a model, without those of its vocabularies."""
        self.choose("type", {"transformer": None}, None)
        d_model, heads, ffn = map(self.integer, ("dim-emb", "transformer-heads", "transformer-dim-ffn"))
        if d_model % 2 or d_model % heads:
            raise self.error("dim-emb", f"even and a multiple of transformer-heads={heads}")
        is_tied = self.is_on("tied-embeddings-all")
        return {
            "d_model": d_model,
            "encoder_layers": self.integer("enc-depth"),
            "decoder_layers": self.integer("dec-depth"),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
            "encoder_ffn_dim": ffn,
            "decoder_ffn_dim": self.integer("transformer-decoder-dim-ffn") or ffn,
            "activation_function": self.activation("transformer-ffn-activation"),
            "share_encoder_decoder_embeddings": is_tied or self.is_on("tied-embeddings-src"),
            "tie_word_embeddings": is_tied or self.is_on("tied-embeddings"),
            "normalize_before": self.normalizes_before(),
            "alignment_head": [self.alignment_layer(), 0],
            **FUNCTION,
            **self.decoder_fields(),
        }

    def normalizes_before(self) -> bool:
        """Return whether the norm of a sub-layer comes first."""
        order = tuple(self.values.get(name) or "" for name in ORDER)
        is_first = self.choose(ORDER[0], {"n": True, "": False}, "")
        for name, own, expected in zip(ORDER, order, ORDERS[is_first], strict=True):
            if own != expected:
                raise self.error(name, f"{expected or 'off'} with {ORDER[0]}={order[0] or 'off'}")
        return is_first

    def alignment_layer(self) -> int:
        """Return the decoder layer, from 0, whose first head aligns words; Marian counts from 1."""
        count = self.integer("dec-depth")
        layers = {"last": count - 1} | {form: i - 1 for i in range(1, count + 1) for form in (i, str(i))}
        return self.choose("transformer-guided-alignment-layer", layers, "last")

    def decoder_fields(self) -> dict[str, Any]:
        """Return the fields of the decoder's self-attention, or of what replaces it."""
        kind = self.choose("transformer-decoder-autoreg", AUTOREGRESSIONS, "self-attention")
        fields: dict[str, Any] = {"decoder_autoregression": kind}
        if kind == "ssru":
            self.choose("dec-cell", {"ssru": None}, "gru")
            fields["decoder_recurrence_projection"] = self.is_on("transformer-rnn-projection")
        if kind == "average_attention":
            depth, width = self.integer("transformer-aan-depth"), self.integer("transformer-dim-aan")
            self.choose("transformer-aan-depth", {1: None, 2: None}, 2)
            if self.normalizes_before():  # only the average passes the norm, while the gates read the input itself
                raise self.error("transformer-preprocess", "off with transformer-decoder-autoreg=average-attention")
            fields["aan_gate"] = "none" if self.is_on("transformer-aan-nogate") else "separate"
            fields["aan_ffn"] = depth == 2
            if depth == 2:  # Marian has no second matrix if the first one leads to the model's width
                fields["aan_ffn_dim"] = width
                fields["aan_ffn_layers"] = 1 if width == self.integer("dim-emb") else 2
                fields["aan_activation"] = self.activation("transformer-aan-activation")
        return fields


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal. `True` is not 1, but what is off may have any type."""
    if other in OFF or value in OFF:
        return other in OFF and value in OFF
    return type(value) is type(other) and value == other


def describe(values: Iterable[Any]) -> str:
    """Return the allowed values of a setting, for messages."""
    return " or ".join(dict.fromkeys("off" if value in OFF else str(value) for value in values))


def imported_settings(config: NMTTransformerConfig) -> Mapping[str, Any]:
    """Return the settings of the imported file, empty for a model that was not imported."""
    settings = getattr(config, IMPORTED_SETTINGS, None)
    return settings if isinstance(settings, Mapping) else {}


def settings_of(config: NMTTransformerConfig, sizes: tuple[int, int], has_bias: bool) -> dict[str, Any]:
    """
    Return the settings of a model that passes [`check_function`], whose vocabularies have these sizes. Those of the
    imported file are kept while they describe the model.
    """
    imported = imported_settings(config)
    if imported:
        known = Settings(imported, IMPORTED_SETTINGS)
        own = {name: getattr(config, name, None) for name in known.fields()}
        if own == known.fields() and known.vocabulary_sizes() == sizes:
            return {**imported, "output-omit-bias": not has_bias}
    kind, shares, ties = (
        getattr(config, name)
        for name in ("decoder_autoregression", "share_encoder_decoder_embeddings", "tie_word_embeddings")
    )
    names = {own: name for name, own in [*AUTOREGRESSIONS.items(), *ACTIVATIONS.items(), ("swish", "swish")]}
    names |= dict.fromkeys(GELUS, "gelu")
    release = GELUS.get(config.activation_function) or GELUS.get(config.aan_activation, GELUS["gelu"])
    ffn = config.decoder_ffn_dim
    settings: dict[str, Any] = {
        **DEFAULTS,
        **{"dim-emb": config.d_model, "enc-depth": config.encoder_layers, "dec-depth": config.decoder_layers},
        **{"dim-vocabs": list(sizes), "output-omit-bias": not has_bias, "version": release},
        "tied-embeddings": ties and not shares,
        "tied-embeddings-src": shares and not ties,
        "tied-embeddings-all": shares and ties,
        "transformer-heads": config.decoder_attention_heads,
        "transformer-dim-ffn": config.encoder_ffn_dim,
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
    return settings


def check_function(config: NMTTransformerConfig) -> None:
    """Raise `UserError` for a model that Marian does not support."""
    activations = (*ACTIVATIONS.values(), "swish", *GELUS)
    fixed = {name: (value,) for name, value in FUNCTION.items()}
    check_fields(config, "Marian", {**fixed, "activation_function": activations})
    needed: dict[str, tuple[Any, ...]] = {
        "decoder_attention_heads": (config.encoder_attention_heads,),
        "decoder_start_token_id": (config.pad_token_id,),  # its embedding is zero, like Marian's first input
    }
    if config.decoder_autoregression == "average_attention":
        needed |= {"aan_gate": ("separate", "none"), "normalize_before": (False,)}
        if config.aan_ffn:
            other = {"gelu": "quick_gelu", "quick_gelu": "gelu"}.get(config.activation_function)  # no release has both
            needed["aan_activation"] = tuple(name for name in activations if name != other)
            needed["aan_ffn_layers"] = (1,) if config.aan_ffn_dim == config.d_model else (1, 2)
    check_fields(config, "Marian", needed)
