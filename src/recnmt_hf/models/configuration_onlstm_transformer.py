"""Configuration of the Transformer whose encoder stacks recurrent and self-attention layers."""

from typing import Any, ClassVar, Literal

from .configuration_nmt_transformer import NMTTransformerConfig, layer_sizes
from .configuration_seq2seq import DERIVED, Filled, probability, size, strict_config


LayerType = Literal["attention", "lstm", "onlstm"]
# Layers of the encoders of tables 1 and 2 at base and big size, from the bottom to the top.
ENCODERS: dict[str, dict[str, int]] = {
    "attention": {"attention": 6},
    "lstm": {"lstm": 6},
    "onlstm": {"onlstm": 6},
    "lstm_attention": {"lstm": 6, "attention": 4},
    "onlstm_attention": {"onlstm": 6, "attention": 4},
    "hybrid": {"onlstm": 3, "attention": 3},
    "hybrid_shortcut": {"onlstm": 3, "attention": 3},
    "reversed": {"attention": 3, "onlstm": 3},
    "lstm_8": {"lstm": 8},
    "attention_10": {"attention": 10},
}
# The encoders of logical inference (section 4.4): sizes of Tran et al. (2018) but for width; no dropout (see the card).
LOGIC_ENCODERS: dict[str, dict[str, Any]] = {
    "attention": {"encoder_layer_types": ["attention", "attention"], "encoder_shortcut": True},
    "lstm": {"encoder_layer_types": ["lstm", "lstm"]},
    "onlstm": {"encoder_layer_types": ["onlstm", "onlstm"]},
    "hybrid": {"encoder_layer_types": ["onlstm", "attention"], "encoder_shortcut": True},
}
LOGIC_SIZES = layer_sizes(128, 2, 2, 256, decoder_layers=1, rnn_bidirectional=False, num_labels=7)
LOGIC_SIZES |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
# Smaller sizes have one layer for this number of the paper's, rounded up.
SHARES = {"tiny": 3, "small": 2, "base": 1, "big": 1}


def presets_of_encoders() -> dict[str, dict[str, Any]]:
    """Return `"base"` etc. with the proposed encoder, `"base_lstm"` etc. with each one, and `"logic_lstm"` etc."""
    presets = {}
    for preset, share in SHARES.items():
        fields = NMTTransformerConfig.presets[preset]
        for name, counts in ENCODERS.items():
            types = [kind for kind, count in counts.items() for _ in range(-(-count // share))]
            layers = {"encoder_layers": len(types), "encoder_layer_types": types}
            presets[f"{preset}_{name}"] = {**fields, **layers, "encoder_shortcut": name == "hybrid_shortcut"}
        presets[preset] = presets[f"{preset}_hybrid_shortcut"]
    return presets | {f"logic_{name}": LOGIC_SIZES | fields for name, fields in LOGIC_ENCODERS.items()}


@strict_config
class ONLSTMTransformerConfig(NMTTransformerConfig):
    r"""
    Configuration of [`ONLSTMTransformerModel`], the Transformer whose encoder stacks LSTM or ON-LSTM layers and
    self-attention layers in any order (Hao et al., 2019, "Towards Better Modeling Hierarchical Structure for
    Self-Attention with Ordered Neurons"). All fields of [`NMTTransformerConfig`], and:

    Args:
        encoder_layer_types (`list[str]`, *optional*): The encoder's layers from the bottom to the top, each
            `"attention"`, `"lstm"` or `"onlstm"`; their number is `encoder_layers`. `None`: half of `encoder_layers`
            ON-LSTM, the rest attention above them (3 and 3).
        encoder_shortcut (`bool`, *optional*, defaults to `False`): Add the states of the top recurrent layer to those
            of the top attention layer (Eq. 10). The encoder must have attention layers above recurrent ones, as in the
            presets `tiny`, `small`, `base` and `big`, or attention layers alone; then the states half-way up are added.
        onlstm_chunk_size (`int`, *optional*, defaults to 1): C, the channels that share a master gate; a divisor of
            `rnn_hidden_size` that leaves two gates or more.
        rnn_hidden_size (`int`, *optional*): Width of a recurrent layer's states in each direction. `None`: `d_model`.
        rnn_bidirectional (`bool`, *optional*, defaults to `True`): Run recurrent layers in both directions.
        rnn_ffn (`bool`, *optional*, defaults to `False`): Add a feed-forward block after each recurrent layer.
        rnn_input_position_embeddings (`bool`, *optional*, defaults to `False`): Whether words get positions where the
            bottom layer is recurrent; above attention, `encoder_position_embeddings` decides.
        pair_pooling (`str`, *optional*): Vector of a sentence in [`ONLSTMTransformerForSequencePairClassification`]:
            `"last"` (the state of the last word), `"mean"` or `"attention"` (of a learned query). `None`: `"last"` if
            the top layer is recurrent, else `"attention"`.
        pair_pooling_heads (`int`, *optional*, defaults to 2): Heads of `pair_pooling="attention"`.
        pair_features (`str`, *optional*, defaults to `"both"`): Input of the classifier of sentence pairs: `"both"`
            vectors, or `"compared"` (also their product and absolute difference).
        classifier_dropout (`float`, *optional*, defaults to 0.0): Dropout of the classifier of sentence pairs.
    """

    model_type = "onlstm_transformer"
    presets: ClassVar[dict[str, dict[str, Any]]] = presets_of_encoders()

    encoder_layer_types: Filled[list[LayerType] | tuple[LayerType, ...]] = DERIVED
    encoder_shortcut: bool = False
    onlstm_chunk_size: int = size(1)
    rnn_hidden_size: Filled[int] = size(DERIVED)
    rnn_bidirectional: bool = True
    rnn_ffn: bool = False
    rnn_input_position_embeddings: bool = False
    pair_pooling: Filled[Literal["last", "mean", "attention"]] = DERIVED
    pair_pooling_heads: int = size(2)
    pair_features: Literal["both", "compared"] = "both"
    classifier_dropout: float | int = probability(0.0)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.encoder_layer_types is None:
            attention = self.encoder_layers // 2
            self.encoder_layer_types = ["onlstm"] * (self.encoder_layers - attention) + ["attention"] * attention
        else:
            self.encoder_layer_types = list(self.encoder_layer_types)
            self.require(len(self.encoder_layer_types) > 0, "encoder_layer_types", "a list with at least one layer")
            if self.encoder_layers == type(self).encoder_layers:  # the default
                self.encoder_layers = len(self.encoder_layer_types)
        if self.rnn_hidden_size is None:
            self.rnn_hidden_size = self.d_model
        if self.pair_pooling is None:
            self.pair_pooling = "attention" if self.encoder_layer_types[-1] == "attention" else "last"
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "ONLSTMTransformerConfig":
        """Return a configuration of a named size; `encoder_layers` or `encoder_layer_types` replace both fields."""
        types = overrides.get("encoder_layer_types")
        if "encoder_layers" in overrides:
            overrides = {"encoder_layer_types": None, **overrides}
        elif isinstance(types, (list, tuple)) and types:
            overrides = {"encoder_layers": len(types), **overrides}
        return super().from_preset(name, **overrides)  # type: ignore[return-value]

    @property
    def recurrent_layers(self) -> int:
        """Number of recurrent layers."""
        return sum(kind != "attention" for kind in self.encoder_layer_types)

    @property
    def shortcut_layer(self) -> int:
        """Number of layers below the states that a short-cut adds to the top layer's; 0 without such states."""
        types, recurrent = self.encoder_layer_types, self.recurrent_layers
        if recurrent == 0:
            return len(types) // 2
        return recurrent if recurrent < len(types) and "attention" not in types[:recurrent] else 0

    @property
    def starts_recurrent(self) -> bool:
        """`True` if the bottom layer is recurrent."""
        return self.encoder_layer_types[0] != "attention"

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        sides = super().sides_with_positions
        if self.starts_recurrent and not self.rnn_input_position_embeddings:
            sides = tuple(side for side in sides if side != "source")
        return sides

    def baseline(self) -> NMTTransformerConfig | None:
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig)) if self.recurrent_layers else None

    def check_values(self) -> None:
        super().check_values()
        count = len(self.encoder_layer_types)
        self.require(self.encoder_layers == count, "encoder_layers", count, "encoder_layer_types")
        width, chunk = self.rnn_hidden_size, self.onlstm_chunk_size
        is_chunked = width % chunk == 0 and width // chunk > 1  # the last chunk is never written
        allowed = "a divisor of rnn_hidden_size that leaves at least two chunks"
        self.require(is_chunked, "onlstm_chunk_size", allowed, "rnn_hidden_size")
        has_states = self.shortcut_layer > 0 or not self.encoder_shortcut
        allowed = "False; a short-cut needs attention layers above recurrent layers, or at least two attention layers"
        self.require(has_states, "encoder_shortcut", allowed, "encoder_layer_types")
        is_divided = self.pair_pooling != "attention" or self.d_model % self.pair_pooling_heads == 0
        self.require(is_divided, "pair_pooling_heads", "a divisor of d_model", "d_model")
