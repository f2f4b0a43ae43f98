"""Configuration of the base Transformer with its self-attention variants."""

from typing import Literal

from .configuration_seq2seq import size, strict_config
from .configuration_transformer import TransformerConfig


@strict_config
class NMTTransformerConfig(TransformerConfig):
    r"""
    Configuration of [`NMTTransformerModel`], the Transformer of Vaswani et al. (2017) with two variants of
    self-attention. All fields of [`TransformerConfig`], and:

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
    """

    model_type = "nmt_transformer"

    self_attention_type: Literal["absolute", "relative", "directional"] = "absolute"
    max_relative_positions: int = size(16)
    relative_per_head: bool = True
    directional_include_self: bool = False

    def default_position_embedding_type(self) -> str:
        return "none" if self.self_attention_type == "relative" else "sinusoidal"

    def check_values(self) -> None:
        super().check_values()
        is_paired = self.self_attention_type != "directional" or self.encoder_attention_heads % 2 == 0
        self.require(is_paired, "encoder_attention_heads", "even", "self_attention_type")


NMTTransformerConfig.register_for_auto_class()
