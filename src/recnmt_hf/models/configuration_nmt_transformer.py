"""Configuration of the base Transformer with its self-attention variants and light decoders."""

from typing import Any, ClassVar, Literal

from .configuration_seq2seq import DERIVED, Filled, Seq2SeqConfig, interval, positive, probability, size, strict_config


# The first sub-layer of a layer: self-attention, or a recurrence of [`~.mixers`].
Mixer = Literal[
    "self_attention",
    "ssru",
    "average_attention",
    "mingru",
    "mlstm",
    "mamba2",
    "gated_delta",
]


def layer_sizes(d_model: int, layers: int, heads: int, ffn_dim: int, **fields: Any) -> dict[str, Any]:
    """Return the fields of a preset with equal sizes in encoder and decoder."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": ffn_dim}
    sides = {f"{side}_{name}": number for name, number in sizes.items() for side in ("encoder", "decoder")}
    return {"d_model": d_model, **sides, **fields}


def student_sizes(d_model: int, decoder_layers: int, ffn_dim: int) -> dict[str, Any]:
    """Return the fields of a Marian student with an SSRU decoder, of the sizes of browsermt/students."""
    return {
        "d_model": d_model,
        "decoder_layers": decoder_layers,
        "encoder_ffn_dim": ffn_dim,
        "decoder_ffn_dim": ffn_dim,
        "decoder_autoregression": "ssru",
        "position_embedding_type": "tensor2tensor",
        "layer_norm_eps": 1e-6,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    }


@strict_config
class NMTTransformerConfig(Seq2SeqConfig):
    r"""
    Configuration of [`NMTTransformerModel`], the Transformer of Vaswani et al. (2017) with two variants of
    self-attention and two recurrences in place of the decoder's. All fields of [`Seq2SeqConfig`], and:

    Args:
        encoder_attention_heads (`int`, *optional*, defaults to 8): Heads of the encoder; a divisor of `d_model`.
        decoder_attention_heads (`int`, *optional*, defaults to 8): Heads of each decoder self- and cross-attention.
        encoder_ffn_dim, decoder_ffn_dim (`int`, *optional*, default to 2048): Inner width of the feed-forward blocks.
        activation_function (`str`, *optional*, defaults to `"relu"`): Activation of the feed-forward blocks; any name
            of `transformers.activations.ACT2FN`.
        attention_dropout (`float`, *optional*, defaults to 0.1): Dropout of the attention weights.
        activation_dropout (`float`, *optional*, defaults to 0.1): Dropout after the feed-forward activation.
        normalize_before (`bool`, *optional*, defaults to `False`): `False`: post-norm, `LN(x + sub(x))`, no norm after
            the last layer. `True`: pre-norm, `x + sub(LN(x))`, with one norm after the last layer.
        layer_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the layer norms.
        position_embedding_type (`str`, *optional*): `"sinusoidal"` (the paper's interleaved sine and cosine),
            `"marian"` (transformers' MarianMT: sines first, then cosines), `"tensor2tensor"` (the same order with the
            frequencies of tensor2tensor, THUMT and Marian itself), `"learned"` or `"none"`. Defaults to `"sinusoidal"`.
        encoder_position_embeddings, decoder_position_embeddings (`bool`, *optional*, default to `True`): `False`
            removes positions from the input.
        alignment_head (`list[int]`, *optional*): `[decoder layer, head]`, from 0, of the cross-attention that was
            trained to align words; word alignment reads it by default.
        self_attention_type (`str`, *optional*, defaults to `"absolute"`): `"absolute"`: plain self-attention.
            `"relative"`: relative position representations for keys and values in encoder and decoder self-attention
            (Shaw et al., 2018), absolute positions off unless `position_embedding_type` names one. `"directional"`:
            half of the encoder's heads see earlier words, half see later ones (the masks of DiSAN, Shen et al., 2018).
        max_relative_positions (`int`, *optional*, defaults to 16): k; larger distances share its representation.
        relative_per_head (`bool`, *optional*, defaults to `True`): One table per head, or one for all of a layer.
        directional_include_self (`bool`, *optional*, defaults to `False`): Directional masks: let words see themselves.
        decoder_autoregression (`str` or `list[str]`, *optional*, defaults to `"self_attention"`): First sub-layer of
            the decoder's layers, or of each: `"self_attention"`; `"ssru"`, the simpler simple recurrent unit (Kim et
            al., 2019); `"average_attention"` (Zhang et al., 2018); `"mingru"` (Feng et al., 2024), `"mlstm"` (Beck et
            al., 2024), `"mamba2"` (Dao and Gu, 2024) or `"gated_delta"` (Yang et al., 2024).
        encoder_mixer (`str` or `list[str]`, *optional*, defaults to `"self_attention"`): The same for the encoder's
            layers, where recurrences run in both directions.
        decoder_recurrence_projection (`bool`, *optional*, defaults to `False`): SSRU: add an output matrix.
        decoder_recurrence_dropout (`float`, *optional*, defaults to 0): SSRU: dropout of its input, alike in all words.
        aan_ffn (`bool`, *optional*, defaults to `False`): Average attention: map averages by a feed-forward block.
        aan_ffn_dim (`int`, *optional*): Inner width of this block. `None`: `decoder_ffn_dim`.
        aan_ffn_layers (`int`, *optional*, defaults to 2): Its matrices; 1 has no second one and the width `d_model`.
        aan_activation (`str`, *optional*, defaults to `"relu"`): Its activation.
        aan_gate (`str`, *optional*, defaults to `"joint"`): Average attention: the gates of word and average read both
            (`"joint"`, Eq. 3), one each (`"separate"`, as in Marian), or there are none (`"none"`).
    """

    model_type = "nmt_transformer"
    attribute_map = {**Seq2SeqConfig.attribute_map, "num_attention_heads": "encoder_attention_heads"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": layer_sizes(128, 2, 4, 256, attention_dropout=0.0, activation_dropout=0.0),
        "small": layer_sizes(256, 3, 4, 1024, dropout=0.2),
        "base": {},
        "big": layer_sizes(1024, 6, 16, 4096, dropout=0.3),
        # The students of browsermt/students; they are trained without dropout on a teacher's translations.
        "student_tiny": student_sizes(256, 2, 1536),
        "student_base": student_sizes(512, 2, 2048),
        "student_base_memory": student_sizes(384, 4, 1536),
    }

    encoder_attention_heads: int = size(8)
    decoder_attention_heads: int = size(8)
    encoder_ffn_dim: int = size(2048)
    decoder_ffn_dim: int = size(2048)
    activation_function: str = "relu"
    attention_dropout: float | int = probability(0.1)
    activation_dropout: float | int = probability(0.1)
    normalize_before: bool = False
    layer_norm_eps: float = positive(1e-5)
    position_embedding_type: Filled[Literal["sinusoidal", "marian", "tensor2tensor", "learned", "none"]] = DERIVED
    encoder_position_embeddings: bool = True
    decoder_position_embeddings: bool = True
    alignment_head: list[int] | None = None
    self_attention_type: Literal["absolute", "relative", "directional"] = "absolute"
    max_relative_positions: int = size(16)
    relative_per_head: bool = True
    directional_include_self: bool = False
    decoder_autoregression: Mixer | list[Mixer] = "self_attention"
    encoder_mixer: Mixer | list[Mixer] = "self_attention"
    decoder_recurrence_projection: bool = False
    decoder_recurrence_dropout: float | int = probability(0.0)
    aan_ffn: bool = False
    aan_ffn_dim: Filled[int] = size(DERIVED)
    aan_ffn_layers: int = interval(1, 2)(2)
    aan_activation: str = "relu"
    aan_gate: Literal["joint", "separate", "none"] = "joint"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.aan_ffn_dim is None:
            self.aan_ffn_dim = self.decoder_ffn_dim
        if self.position_embedding_type is None:
            is_relative = self.self_attention_type == "relative"
            # A recurrence would have no positions at all.
            has_positions = not is_relative or "self_attention" in self.mixers("decoder")
            allowed, other = "given; 'none' removes the decoder's positions too", "decoder_autoregression"
            self.require(has_positions, "position_embedding_type", allowed, "self_attention_type", other)
            self.position_embedding_type = "none" if is_relative else "sinusoidal"
        super().__post_init__(**kwargs)

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        sides = {"source": self.encoder_position_embeddings, "target": self.decoder_position_embeddings}
        return tuple(side for side, has in sides.items() if has and self.position_embedding_type != "none")

    def mixers(self, side: str) -> list[str]:
        """Return the first sub-layer of each layer of `"encoder"` or `"decoder"`."""
        value = self.encoder_mixer if side == "encoder" else self.decoder_autoregression
        return [value] * getattr(self, f"{side}_layers") if isinstance(value, str) else list(value)

    def cache_layer_types(self) -> list[str] | None:
        kinds = self.mixers("decoder")
        if set(kinds) <= {"self_attention"}:
            return super().cache_layer_types()
        return ["full_attention" if kind == "self_attention" else "recnmt_recurrent" for kind in kinds]

    def baseline(self) -> "NMTTransformerConfig | None":
        """Return the Transformer with self-attention, from which recurrences can be initialized, or `None`."""
        if {*self.mixers("encoder"), *self.mixers("decoder")} <= {"self_attention"}:
            return None
        plain = dict.fromkeys(("decoder_autoregression", "encoder_mixer"), "self_attention")
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig, **plain))

    def check_values(self) -> None:
        from transformers.activations import ACT2FN  # here, since it imports all that models need

        super().check_values()
        for name in ("activation_function", "aan_activation"):
            self.require(getattr(self, name) in ACT2FN, name, "a name in transformers' ACT2FN")
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            self.require(self.d_model % getattr(self, name) == 0, name, "a divisor of d_model", "d_model")
        self.require(self.d_model % 2 == 0, "d_model", "even")
        for field, side in (("encoder_mixer", "encoder"), ("decoder_autoregression", "decoder")):
            kinds, heads = self.mixers(side), f"{side}_attention_heads"
            is_complete = len(kinds) == getattr(self, f"{side}_layers")
            self.require(is_complete, field, "a name, or a list with one for each layer", f"{side}_layers")
            has_matrices = not set(kinds).isdisjoint(("mlstm", "mamba2", "gated_delta"))
            is_divided = self.d_model % (4 * getattr(self, heads)) == 0
            is_paired = side == "decoder" or getattr(self, heads) % 2 == 0  # for both directions
            allowed = "a divisor of d_model / 4 (encoder: an even one)"
            self.require(not has_matrices or (is_divided and is_paired), heads, allowed, "d_model", field)
        if self.alignment_head is not None:
            layer, head = self.alignment_head if len(self.alignment_head) == 2 else (-1, -1)
            exists = 0 <= layer < self.decoder_layers and 0 <= head < self.decoder_attention_heads
            others = "decoder_layers", "decoder_attention_heads"
            self.require(exists, "alignment_head", "None or [decoder layer, head], counted from 0", *others)
        is_paired = self.self_attention_type != "directional" or self.encoder_attention_heads % 2 == 0
        self.require(is_paired, "encoder_attention_heads", "even", "self_attention_type")
