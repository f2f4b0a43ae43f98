"""Configuration of the base Transformer with its self-attention variants and light decoders."""

from typing import Any, ClassVar, Literal

from .configuration_seq2seq import DERIVED, Filled, interval, probability, size, strict_config
from .configuration_transformer import TransformerConfig


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
class NMTTransformerConfig(TransformerConfig):
    r"""
    Configuration of [`NMTTransformerModel`], the Transformer of Vaswani et al. (2017) with two variants of
    self-attention and two recurrences in place of the decoder's. All fields of [`TransformerConfig`], and:

    Args:
        self_attention_type (`str`, *optional*, defaults to `"absolute"`): `"absolute"`: plain self-attention.
            `"relative"`: relative position representations for keys and values in encoder and decoder self-attention
            (Shaw et al., 2018), absolute positions off unless `position_embedding_type` names one. `"directional"`:
            half of the encoder's heads see earlier words, half see later ones (the masks of DiSAN, Shen et al., 2018).
        max_relative_positions (`int`, *optional*, defaults to 16): Larger distances share its representation;
            the tables have `2 k + 1` rows.
        relative_per_head (`bool`, *optional*, defaults to `True`): One table per head, or one per layer that its heads
            share.
        directional_include_self (`bool`, *optional*, defaults to `False`): Let a word see itself under the
            directional masks.
        decoder_autoregression (`str`, *optional*, defaults to `"self_attention"`): First sub-layer of the decoder's
            layers: `"self_attention"`; `"ssru"`, the simpler simple recurrent unit (Kim et al., 2019); or
            `"average_attention"` (Zhang et al., 2018).
        decoder_recurrence_projection (`bool`, *optional*, defaults to `False`): SSRU: add an output matrix.
        decoder_recurrence_dropout (`float`, *optional*, defaults to 0): SSRU: dropout of its input, with the same
            channels for all words.
        aan_ffn (`bool`, *optional*, defaults to `False`): Average attention: map the averages by a feed-forward block,
            the paper's main model.
        aan_ffn_dim (`int`, *optional*): Inner width of this block. `None`: `decoder_ffn_dim`.
        aan_ffn_layers (`int`, *optional*, defaults to 2): Its matrices; 1 has no second one and the width `d_model`.
        aan_activation (`str`, *optional*, defaults to `"relu"`): Its activation.
        aan_gate (`str`, *optional*, defaults to `"joint"`): Average attention: the gates of word and average read both
            (`"joint"`, Eq. 3), one each (`"separate"`, as in Marian), or there are none (`"none"`).
    """

    model_type = "nmt_transformer"
    # The students of browsermt/students; they are trained without dropout on a teacher's translations.
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **TransformerConfig.presets,
        "student_tiny": student_sizes(256, 2, 1536),
        "student_base": student_sizes(512, 2, 2048),
        "student_base_memory": student_sizes(384, 4, 1536),
    }

    self_attention_type: Literal["absolute", "relative", "directional"] = "absolute"
    max_relative_positions: int = size(16)
    relative_per_head: bool = True
    directional_include_self: bool = False
    decoder_autoregression: Literal["self_attention", "ssru", "average_attention"] = "self_attention"
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
        super().__post_init__(**kwargs)

    def default_position_embedding_type(self) -> str:
        if self.self_attention_type != "relative":
            return "sinusoidal"
        # A recurrence would have no positions at all.
        has_positions = self.decoder_autoregression == "self_attention"
        allowed, other = "given; 'none' removes the decoder's positions too", "decoder_autoregression"
        self.require(has_positions, "position_embedding_type", allowed, "self_attention_type", other)
        return "none"

    def cache_layer_types(self) -> list[str] | None:
        if self.decoder_autoregression == "self_attention":
            return super().cache_layer_types()
        return ["recnmt_recurrent"] * self.decoder_layers

    def baseline(self) -> "NMTTransformerConfig | None":
        """Return the Transformer with self-attention, from which a light decoder can be initialized, or `None`."""
        if self.decoder_autoregression == "self_attention":
            return None
        fields = self.fields_of(NMTTransformerConfig)
        return NMTTransformerConfig(**{**fields, "decoder_autoregression": "self_attention"})

    def check_values(self) -> None:
        from transformers.activations import ACT2FN  # here, since it imports all that models need

        super().check_values()
        is_paired = self.self_attention_type != "directional" or self.encoder_attention_heads % 2 == 0
        self.require(is_paired, "encoder_attention_heads", "even", "self_attention_type")
        self.require(self.aan_activation in ACT2FN, "aan_activation", "a name in transformers' ACT2FN")
