"""Configuration of the Transformer whose encoder stacks recurrent and self-attention layers."""

from typing import Any, ClassVar

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import FROM_OTHERS, Filled
from .configuration_transformer import TransformerConfig


LAYER_TYPES = ("attention", "lstm", "onlstm")
# The encoders of tables 1 and 2, bottom to top at base and big size, and whether they have the short-cut.
ENCODERS: dict[str, tuple[tuple[tuple[str, int], ...], bool]] = {
    "attention": ((("attention", 6),), False),
    "lstm": ((("lstm", 6),), False),
    "onlstm": ((("onlstm", 6),), False),
    "lstm_attention": ((("lstm", 6), ("attention", 4)), False),
    "onlstm_attention": ((("onlstm", 6), ("attention", 4)), False),
    "hybrid": ((("onlstm", 3), ("attention", 3)), False),
    "hybrid_shortcut": ((("onlstm", 3), ("attention", 3)), True),
    "reversed": ((("attention", 3), ("onlstm", 3)), False),
    "lstm_8": ((("lstm", 8),), False),
    "attention_10": ((("attention", 10),), False),
}
# Smaller sizes have one layer for as many of the paper's, rounded up.
SHARES = {"tiny": 3, "small": 2, "base": 1, "big": 1}


def presets_of_encoders() -> dict[str, dict[str, Any]]:
    """`"base"` etc. with the proposed encoder, the hybrid with its short-cut, and `"base_lstm"` etc. with each one."""
    found = {}
    for size, fields in TransformerConfig.presets.items():
        for name, (parts, shortcut) in ENCODERS.items():
            types = [kind for kind, count in parts for _ in range(-(-count // SHARES[size]))]
            layers = {"encoder_layers": len(types), "encoder_layer_types": types, "encoder_shortcut": shortcut}
            found[f"{size}_{name}"] = {**fields, **layers}
        found[size] = found[f"{size}_hybrid_shortcut"]
    return found


class ONLSTMTransformerConfig(NMTTransformerConfig):
    r"""
    Configuration of [`ONLSTMTransformerModel`], the Transformer whose encoder stacks LSTM or ON-LSTM layers and
    self-attention layers in any order (Hao et al., 2019, "Towards Better Modeling Hierarchical Structure for
    Self-Attention with Ordered Neurons"). All fields of [`NMTTransformerConfig`], and:

    Args:
        encoder_layer_types (`list[str]`, *optional*):
            The encoder's layers from the bottom to the top, each `"attention"`, `"lstm"` or `"onlstm"`; their number is
            `encoder_layers`. `None`: half of `encoder_layers` ON-LSTM, the rest attention above them (3 and 3).
        encoder_shortcut (`bool`, *optional*, defaults to `False`):
            Adds the states of the top recurrent layer to those of the top attention layer (Eq. 10); of an encoder with
            attention layers above recurrent ones. The presets `tiny`, `small`, `base` and `big` have it.
        onlstm_chunk_size (`int`, *optional*, defaults to 1):
            C, the channels that share a master gate; a divisor of `rnn_hidden_size` that leaves two gates or more.
        rnn_hidden_size (`int`, *optional*):
            Width of a recurrent layer's states in each direction. `None`: `d_model`.
        rnn_bidirectional (`bool`, *optional*, defaults to `True`):
            Whether recurrent layers run in both directions; else from left to right.
        rnn_ffn (`bool`, *optional*, defaults to `False`):
            Whether a feed-forward block follows each recurrent layer.
        rnn_input_position_embeddings (`bool`, *optional*, defaults to `False`):
            Whether words get positions where the bottom layer is recurrent; where it is attention,
            `encoder_position_embeddings` says so.

    Example:

    ```python
    >>> from recnmt_hf import ONLSTMTransformerConfig
    >>> ONLSTMTransformerConfig.from_preset("base", vocab_size=1000).encoder_layer_types
    ['onlstm', 'onlstm', 'onlstm', 'attention', 'attention', 'attention']
    >>> ONLSTMTransformerConfig.from_preset("base_lstm_8", vocab_size=1000).encoder_layers
    8

    ```
    """

    model_type = "onlstm_transformer"
    presets: ClassVar[dict[str, dict[str, Any]]] = presets_of_encoders()

    encoder_layer_types: Filled[list[str]] = FROM_OTHERS
    encoder_shortcut: bool = False
    onlstm_chunk_size: int = 1
    rnn_hidden_size: Filled[int] = FROM_OTHERS
    rnn_bidirectional: bool = True
    rnn_ffn: bool = False
    rnn_input_position_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.encoder_layer_types is None:
            count = self.encoder_layers if isinstance(self.encoder_layers, int) else 0
            recurrent = (count + 1) // 2
            self.encoder_layer_types = ["onlstm"] * recurrent + ["attention"] * (count - recurrent)
        elif isinstance(self.encoder_layer_types, (list, tuple)) and self.encoder_layer_types:
            self.encoder_layer_types = list(self.encoder_layer_types)
            if self.encoder_layers == type(self).encoder_layers:  # as nobody said otherwise
                self.encoder_layers = len(self.encoder_layer_types)
        if self.rnn_hidden_size is None:
            self.rnn_hidden_size = self.d_model
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "ONLSTMTransformerConfig":
        """As for every model; other `encoder_layers` or `encoder_layer_types` replace both of the preset's."""
        types = overrides.get("encoder_layer_types")
        if "encoder_layers" in overrides:
            overrides = {"encoder_layer_types": None, **overrides}
        elif isinstance(types, (list, tuple)) and types:
            overrides = {"encoder_layers": len(types), **overrides}
        return super().from_preset(name, **overrides)  # type: ignore[return-value]

    @property
    def recurrent_layers(self) -> int:
        """How many layers are recurrent."""
        return sum(kind != "attention" for kind in self.encoder_layer_types)

    @property
    def starts_recurrent(self) -> bool:
        """Whether the bottom layer is recurrent."""
        return self.encoder_layer_types[0] != "attention"

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        sides = super().sides_with_positions
        if self.starts_recurrent and not self.rnn_input_position_embeddings:
            sides = tuple(side for side in sides if side != "source")
        return sides

    def baseline(self) -> NMTTransformerConfig | None:
        if self.recurrent_layers == 0:
            return None
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig))

    def check_values(self) -> None:
        super().check_values()
        types = self.encoder_layer_types
        if not isinstance(types, list) or not types or not all(kind in LAYER_TYPES for kind in types):
            named = ", ".join(repr(kind) for kind in LAYER_TYPES)
            self.refuse("encoder_layer_types", f"a list of {named}", "name each layer, the bottom one first")
        if self.encoder_layers != len(types):
            self.refuse(
                "encoder_layers",
                f"{len(types)} while encoder_layer_types={types!r}",
                "leave encoder_layers out, or name as many layers",
            )
        self.check_flag("encoder_shortcut", "rnn_bidirectional", "rnn_ffn", "rnn_input_position_embeddings")
        self.check_whole("onlstm_chunk_size", "rnn_hidden_size")
        if self.rnn_hidden_size % self.onlstm_chunk_size or self.rnn_hidden_size // self.onlstm_chunk_size < 2:
            self.refuse(
                "onlstm_chunk_size",
                f"a divisor of rnn_hidden_size={self.rnn_hidden_size} that leaves two chunks or more, since the last "
                "one is never written",
                "use 1",
            )
        recurrent = self.recurrent_layers
        if self.encoder_shortcut and not (0 < recurrent < len(types) and "attention" not in types[:recurrent]):
            self.refuse(
                "encoder_shortcut",
                f"False while encoder_layer_types={types!r} has no attention layers above recurrent ones alone",
                "stack attention layers on recurrent ones",
            )


ONLSTMTransformerConfig.register_for_auto_class()
