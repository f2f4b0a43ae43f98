"""Configuration of the Transformer whose encoder stacks recurrent and self-attention layers."""

from typing import Any, ClassVar

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import FROM_OTHERS, Filled
from .configuration_transformer import TransformerConfig


LAYER_TYPES = ("attention", "lstm", "onlstm")
# How a sentence's vector is computed from its states, and the features of two vectors u and v for a classifier.
POOLINGS = ("last", "mean", "attention")
FEATURES = ("both", "compared")
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
# The encoders of logical inference (section 4.4), in the sizes of Tran et al. (2018) but for their width.
LOGIC_ENCODERS: dict[str, dict[str, Any]] = {
    "attention": {"encoder_layer_types": ["attention", "attention"], "encoder_shortcut": True},
    "lstm": {"encoder_layer_types": ["lstm", "lstm"]},
    "onlstm": {"encoder_layer_types": ["onlstm", "onlstm"]},
    "hybrid": {"encoder_layer_types": ["onlstm", "attention"], "encoder_shortcut": True},
}
LOGIC_SIZES = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "dropout": 0.2,
    "classifier_dropout": 0.2,
    "rnn_bidirectional": False,
    "num_labels": 7,
}
# Smaller sizes have one layer for as many of the paper's, rounded up.
SHARES = {"tiny": 3, "small": 2, "base": 1, "big": 1}


def presets_of_encoders() -> dict[str, dict[str, Any]]:
    """
    `"base"` etc. with the proposed encoder, the hybrid with its short-cut, `"base_lstm"` etc. with each one, and
    `"logic_lstm"` etc. of logical inference.
    """
    found = {}
    for size, fields in TransformerConfig.presets.items():
        for name, (parts, shortcut) in ENCODERS.items():
            types = [kind for kind, count in parts for _ in range(-(-count // SHARES[size]))]
            layers = {"encoder_layers": len(types), "encoder_layer_types": types, "encoder_shortcut": shortcut}
            found[f"{size}_{name}"] = {**fields, **layers}
        found[size] = found[f"{size}_hybrid_shortcut"]
    return found | {f"logic_{name}": LOGIC_SIZES | fields for name, fields in LOGIC_ENCODERS.items()}


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
            attention layers above recurrent ones, which the presets `tiny`, `small`, `base` and `big` have, or of
            attention layers alone, where it is the states half-way up that are added.
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
        pair_pooling (`str`, *optional*):
            Of [`ONLSTMTransformerForSequencePairClassification`], as the next three: what makes a sentence's vector,
            `"last"` (the state of the last word), `"mean"` or `"attention"` (of a learned query). `None`: the last
            word's above a recurrent layer, else attention.
        pair_pooling_heads (`int`, *optional*, defaults to 2):
            Heads of that attention.
        pair_features (`str`, *optional*, defaults to `"both"`):
            Features of two vectors for the classifier: `"both"` or `"compared"` (also their product and difference).
        classifier_dropout (`float`, *optional*, defaults to 0.0):
            Dropout of the classifier.

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
    pair_pooling: Filled[str] = FROM_OTHERS
    pair_pooling_heads: int = 2
    pair_features: str = "both"
    classifier_dropout: float | int = 0.0

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
        if self.pair_pooling is None:
            types = self.encoder_layer_types
            is_recurrent = isinstance(types, list) and bool(types) and types[-1] != "attention"
            self.pair_pooling = "last" if is_recurrent else "attention"
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
    def shortcut_layer(self) -> int:
        """
        How many layers are below the states that a short-cut adds to the top's; 0: it would have no such.
        """
        types, recurrent = self.encoder_layer_types, self.recurrent_layers
        if recurrent == 0:
            return len(types) // 2
        return recurrent if recurrent < len(types) and "attention" not in types[:recurrent] else 0

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
        if self.encoder_shortcut and not self.shortcut_layer:
            self.refuse(
                "encoder_shortcut",
                f"False while encoder_layer_types={types!r} has neither attention layers above recurrent ones alone "
                "nor two or more of attention alone",
                "stack attention layers on recurrent ones",
            )
        self.check_choice("pair_pooling", POOLINGS)
        self.check_choice("pair_features", FEATURES)
        self.check_fraction("classifier_dropout")
        self.check_whole("pair_pooling_heads")
        if self.pair_pooling == "attention" and self.d_model % self.pair_pooling_heads:
            self.refuse("pair_pooling_heads", f"a divisor of d_model={self.d_model}", "use 1")


ONLSTMTransformerConfig.register_for_auto_class()
