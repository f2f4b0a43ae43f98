"""Configuration of the Transformer with recurrent positional embeddings."""

import math
from typing import Any

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import FROM_OTHERS, Filled


RPE_TYPES = (None, "rpehead", "mprhead")
RPE_CELLS = ("rnn", "gru", "lstm", "sru")
# Which type of input a partition of the heads belongs to.
PARTITIONS = {"typed": "rpehead", "slice": "mprhead"}


class RPETransformerConfig(NMTTransformerConfig):
    r"""
    Configuration of [`RPETransformerModel`], the Transformer whose input takes the order of the words from a recurrence
    (Chen et al., 2019, "Recurrent Positional Embedding for Neural Machine Translation"). All fields of
    [`NMTTransformerConfig`], and:

    Args:
        rpe_type (`str`, *optional*, defaults to `"mprhead"`):
            How recurrent and other channels share the input: `"rpehead"` gives the last `rpe_dim` channels, a whole
            number of heads, to the recurrence; `"mprhead"` gives each head's slice a part of both (Eqs. 7-11). `None`:
            no recurrence, the plain Transformer.
        rpe_dim (`int`, *optional*):
            d_r, the channels of the recurrence: even, from 0 to `d_model`; the others keep their position embeddings.
            `"rpehead"`: a multiple of the width of a head. `"mprhead"`: a multiple of the number of heads. `None`: the
            paper's share, five eighths of `d_model` with `"rpehead"` (320 at base size) and half with `"mprhead"`
            (256), rounded to what is allowed.
        rpe_encoder, rpe_decoder (`bool`, *optional*, default to `True`):
            `False`: these channels of the encoder's or the decoder's input are the bare embedding.
            `encoder_position_embeddings` and `decoder_position_embeddings` say the same of the other channels; a side
            with neither reads plain embeddings.
        rpe_cell (`str`, *optional*, defaults to `"rnn"`):
            `"rnn"` (tanh), `"gru"`, `"lstm"`, or the simple recurrent unit `"sru"` (Lei et al., 2018).
        rpe_recurrence (`str`, *optional*, defaults to `"hidden"`):
            The recurrent state in Eq. 6: the `"hidden"` state of the cell, in both directions over the source; or the
            `"projected"` embedding r itself, as the equation has it, which leaves one direction only.
        rpe_head_partition (`str`, *optional*, defaults to `"none"`):
            Input of the heads of the first layer's self-attention: `"none"`: the whole input, as Eqs. 4, 7 and 11
            have it. `"typed"` (of an RPEHead): recurrent heads the recurrent channels, the others the other channels.
            `"slice"` (of an MPRHead): each head its own slice.

    Example:

    ```python
    >>> from recnmt_hf import RPETransformerConfig, RPETransformerForConditionalGeneration
    >>> config = RPETransformerConfig.from_preset("base", vocab_size=1000, rpe_type="rpehead")
    >>> config.rpe_dim
    320
    >>> RPETransformerConfig.from_preset("big", vocab_size=1000).rpe_dim
    512

    ```
    """

    model_type = "rpe_transformer"

    rpe_type: str | None = "mprhead"
    rpe_dim: Filled[int] = FROM_OTHERS
    rpe_encoder: bool = True
    rpe_decoder: bool = True
    rpe_cell: str = "rnn"
    rpe_recurrence: str = "hidden"
    rpe_head_partition: str = "none"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rpe_dim is None:
            self.rpe_dim = self.usual_rpe_dim()
        super().__post_init__(**kwargs)

    def rpe_step(self) -> int:
        """`rpe_dim` is a multiple of this: whole heads or a channel of each head on both sides, and even."""
        heads = (self.encoder_attention_heads, self.decoder_attention_heads)
        if self.rpe_type == "rpehead":
            heads = (self.d_model // heads[0], self.d_model // heads[1])
        return math.lcm(2, *heads)

    def usual_rpe_dim(self) -> int:
        """The paper's share of the channels; 0 where sizes are wrong, which `check_values` then says."""
        sizes = (self.d_model, self.encoder_attention_heads, self.decoder_attention_heads)
        if self.rpe_type is None or not all(isinstance(size, int) and size > 0 for size in sizes):
            return 0
        step = self.rpe_step() or 1
        share = self.d_model * 5 / 8 if self.rpe_type == "rpehead" else self.d_model / 2
        rounded = math.floor(share / step + (0.5 if self.rpe_type == "rpehead" else 0)) * step
        return min(max(rounded, step), self.d_model)

    @property
    def recurrent_channels(self) -> int:
        """d_r; 0 where there is no recurrent part."""
        return 0 if self.rpe_type is None else self.rpe_dim

    def mixes(self, side: str) -> bool:
        """Whether the input of `"encoder"` or `"decoder"` is made of two parts; else it is the plain Transformer's."""
        if self.recurrent_channels == 0:
            return False
        has_positions = {"encoder": "source", "decoder": "target"}[side] in self.sides_with_positions
        return has_positions or self.has_recurrence(side)

    def has_recurrence(self, side: str) -> bool:
        """Whether a recurrence runs over the words of `"encoder"` or `"decoder"`."""
        return self.recurrent_channels > 0 and (self.rpe_encoder if side == "encoder" else self.rpe_decoder)

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        return super().sides_with_positions if self.recurrent_channels < self.d_model else ()

    def cache_layer_types(self) -> list[str] | None:
        if not self.has_recurrence("decoder"):
            return None
        return ["recnmt_recurrent_attention"] + ["full_attention"] * (self.decoder_layers - 1)

    def baseline(self) -> NMTTransformerConfig | None:
        if not (self.mixes("encoder") or self.mixes("decoder")):
            return None
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig))

    def check_values(self) -> None:
        super().check_values()
        self.check_flag("rpe_encoder", "rpe_decoder")
        self.check_choice("rpe_type", RPE_TYPES)
        self.check_choice("rpe_cell", RPE_CELLS)
        self.check_choice("rpe_recurrence", ("hidden", "projected"))
        self.check_choice("rpe_head_partition", ("none", *PARTITIONS))
        self.check_whole("rpe_dim", minimum=0)
        step = self.rpe_step()
        if self.rpe_dim > self.d_model or self.rpe_dim % step:
            what = "the width of a head" if self.rpe_type == "rpehead" else "the number of heads"
            self.refuse(
                "rpe_dim",
                f"a multiple of {step} (even, and of {what}) from 0 to d_model={self.d_model}",
                "leave it out for the paper's share of the channels",
            )
        kind = PARTITIONS.get(self.rpe_head_partition)
        if kind not in (None, self.rpe_type):
            self.refuse(
                "rpe_head_partition",
                f'"none" while rpe_type={self.rpe_type!r}',
                f"set rpe_type={kind!r}, whose heads it parts",
            )
        if self.rpe_cell == "sru" and self.rpe_recurrence == "projected":
            self.refuse(
                "rpe_recurrence",
                '"hidden" while rpe_cell="sru", whose state passes no matrix that could read r',
                'use "rnn", "gru" or "lstm"',
            )


RPETransformerConfig.register_for_auto_class()
