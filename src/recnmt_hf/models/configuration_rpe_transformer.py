"""Configuration of the Transformer with recurrent positional embeddings."""

import math
from typing import Any, Literal

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import DERIVED, Filled, any_size, strict_config


@strict_config
class RPETransformerConfig(NMTTransformerConfig):
    r"""
    Configuration of [`RPETransformerModel`], the Transformer with recurrent positional embeddings
    (Chen et al., 2019, "Recurrent Positional Embedding for Neural Machine Translation"). All fields of
    [`NMTTransformerConfig`], and:

    Args:
        rpe_type (`str`, *optional*, defaults to `"mprhead"`): Division of the input into recurrent and other channels:
            `"rpehead"` gives the last `rpe_dim` channels, a whole number of heads, to the recurrence; `"mprhead"` gives
            each head's slice a part of both (Eqs. 7-11). `None`: no recurrence, the plain Transformer.
        rpe_dim (`int`, *optional*): d_r, the channels of the recurrence: even, from 0 to `d_model`; the others keep
            their position embeddings. `"rpehead"`: a multiple of the width of a head. `"mprhead"`: a multiple of the
            number of heads. `None`: the paper's share, five eighths of `d_model` with `"rpehead"` (320 at base size)
            and half with `"mprhead"` (256), rounded to what is allowed.
        rpe_encoder, rpe_decoder (`bool`, *optional*, default to `True`): `False`: these channels of the encoder's or
            the decoder's input are the plain embedding. `encoder_position_embeddings` and `decoder_position_embeddings`
            do the same for the other channels.
        rpe_cell (`str`, *optional*, defaults to `"rnn"`): `"rnn"` (tanh), `"gru"`, `"lstm"`, or the simple recurrent
            unit `"sru"` (Lei et al., 2018).
        rpe_recurrence (`str`, *optional*, defaults to `"hidden"`): The recurrent state in Eq. 6: the `"hidden"` state
            of the cell, in both directions over the source; or the `"projected"` embedding r itself, as in the
            equation, which allows only one direction.
        rpe_head_partition (`str`, *optional*, defaults to `"none"`): Input of the heads of the first layer's
            self-attention: `"none"`: the whole input, as in Eqs. 4, 7 and 11. `"typed"` (of an RPEHead): recurrent
            heads the recurrent channels, others the rest. `"slice"` (of an MPRHead): each head its own slice.
    """

    model_type = "rpe_transformer"

    rpe_type: Literal["rpehead", "mprhead"] | None = "mprhead"
    rpe_dim: Filled[int] = any_size(DERIVED)
    rpe_encoder: bool = True
    rpe_decoder: bool = True
    rpe_cell: Literal["rnn", "gru", "lstm", "sru"] = "rnn"
    rpe_recurrence: Literal["hidden", "projected"] = "hidden"
    rpe_head_partition: Literal["none", "typed", "slice"] = "none"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rpe_dim is None:
            # The paper's share of the channels, rounded to what is allowed.
            step, is_head = self.rpe_step() or 1, self.rpe_type == "rpehead"
            share = self.d_model * 5 / 8 / step + 0.5 if is_head else self.d_model / 2 / step
            self.rpe_dim = min(max(math.floor(share), 1) * step, self.d_model) if self.rpe_type else 0
        super().__post_init__(**kwargs)

    def rpe_step(self) -> int:
        """Return a divisor of `rpe_dim`: whole heads or one channel of each head on both sides, and even."""
        heads = (self.encoder_attention_heads, self.decoder_attention_heads)
        if self.rpe_type == "rpehead":
            heads = (self.d_model // heads[0], self.d_model // heads[1])
        return math.lcm(2, *heads)

    @property
    def recurrent_channels(self) -> int:
        """d_r, 0 without a recurrent part."""
        return 0 if self.rpe_type is None else self.rpe_dim

    def splits_input(self, side: str) -> bool:
        """Return whether the input of `"encoder"` or `"decoder"` has two parts, unlike the plain Transformer's."""
        has_positions = {"encoder": "source", "decoder": "target"}[side] in self.sides_with_positions
        return self.recurrent_channels > 0 and (has_positions or self.has_recurrence(side))

    def has_recurrence(self, side: str) -> bool:
        """Return whether a recurrence runs over the words of `"encoder"` or `"decoder"`."""
        return self.recurrent_channels > 0 and (self.rpe_encoder if side == "encoder" else self.rpe_decoder)

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        return super().sides_with_positions if self.recurrent_channels < self.d_model else ()

    def cache_layer_types(self) -> list[str] | None:
        types = super().cache_layer_types()
        if not self.has_recurrence("decoder"):
            return types
        return ["recnmt_recurrent", *(types or ["full_attention"] * self.decoder_layers)[1:]]

    def baseline(self) -> NMTTransformerConfig | None:
        differs = self.splits_input("encoder") or self.splits_input("decoder")
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig)) if differs else None

    def check_values(self) -> None:
        super().check_values()
        step = self.rpe_step() or 1
        is_share = self.rpe_dim <= self.d_model and self.rpe_dim % step == 0
        others = ("d_model", "encoder_attention_heads", "decoder_attention_heads")
        self.require(is_share, "rpe_dim", f"a multiple of {step} from 0 to d_model", *others)
        kind = {"none": self.rpe_type, "typed": "rpehead", "slice": "mprhead"}[self.rpe_head_partition]
        self.require(kind == self.rpe_type, "rpe_head_partition", "'none'", "rpe_type")
        for field, side in (("decoder_autoregression", "decoder"), ("encoder_mixer", "encoder")):
            has_heads = self.mixers(side)[:1] in ([], ["self_attention"]) or not self.splits_input(side)
            self.require(self.rpe_head_partition == "none" or has_heads, "rpe_head_partition", "'none'", field)
        # The state of an SRU passes through no matrix that could read r.
        has_matrix = self.rpe_cell != "sru" or self.rpe_recurrence == "hidden"
        self.require(has_matrix, "rpe_recurrence", "'hidden'", "rpe_cell")
