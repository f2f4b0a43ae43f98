"""Configuration of the Transformer with an additional recurrence encoder."""

from typing import Any, ClassVar, Literal

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import DERIVED, Filled, layer_count, probability, size, strict_config


@strict_config
class BiARNTransformerConfig(NMTTransformerConfig):
    r"""
    Configuration of [`BiARNTransformerModel`], the Transformer with an additional recurrence encoder (Hao et al., 2019,
    "Modeling Recurrence for Transformer"). All fields of [`NMTTransformerConfig`], and:

    Args:
        recurrence_encoder_type (`str`, *optional*, defaults to `"biarn"`): `"biarn"` and `"arn"`: attentive recurrent
            network in two directions or one, which makes `recurrence_steps` steps of attention to the source (Eqs.
            12-13). `"birnn"` and `"rnn"`: a recurrent network over the words (Eqs. 9-11). `None`: no such encoder.
        recurrence_encoder_layers (`int`, *optional*, defaults to 1): Layers of the recurrence encoder.
        recurrence_steps (`int`, *optional*, defaults to 8): T, the steps of an ARN. `None`: as many as the sentence has
            tokens. An RNN always makes one for each token.
        recurrence_cell (`str`, *optional*, defaults to `"gru"`): `"gru"` or `"lstm"`, also of the multi-column encoder.
        recurrence_hidden_size (`int`, *optional*): Width of the recurrent state of each direction. `None`: `d_model`,
            or with `recurrence_direction_combination="concat"` the width that makes the directions `d_model` together.
        recurrence_initial_state (`str`, *optional*, defaults to `"mean_linear"`): `"mean_linear"`: `tanh(W mean(x) +
            b)` of the layer's input. `"mean"`: the mean itself (needs a hidden size of `d_model`). `"zeros"`.
        recurrence_position_embeddings (`bool`, *optional*, defaults to `False`): Whether the recurrence encoder (and
            the column of the multi-column encoder) reads positions too; an ARN otherwise reads a bag of words.
        recurrence_direction_combination (`str`, *optional*, defaults to `"project"`): `"project"`: a linear layer from
            both directions' states to `d_model`. `"concat"`: their concatenation.
        recurrence_source (`str`, *optional*, defaults to `"embeddings"`): Input of the recurrence encoder: the word
            embeddings or the output of the Transformer `"encoder"`.
        decoder_memory (`str`, *optional*, defaults to `"both"`): `"both"`: the decoder attends to both encoders.
            `"recurrence"`: the recurrence encoder alone, in place of the Transformer encoder, which is not built unless
            the recurrence encoder reads it; no fusion takes place.
        fusion_type (`str`, *optional*, defaults to `"stack"`): `"stack"`: the recurrence states are attended after the
            encoder's states (Eqs. 14-15). `"gated_sum"`: both are attended from the same states and gated (Eqs. 16-19).
        fusion_layers (`str`, *optional*, defaults to `"top"`): Layers that attend H_r: the `"top"` one or `"all"`.
        fusion_gate (`str`, *optional*, defaults to `"vector"`): The gate of `"gated_sum"`: one weight per channel
            (`"vector"`) or per position (`"scalar"`).
        recurrence_memory_dropout (`float`, *optional*, defaults to 0): Probability of dropping H_r for a training
            sentence, in all layers that attend to H_e too: their attention to it is zero (`"stack"`), or the gate is
            1 (`"gated_sum"`). Nothing is rescaled. 0 is the paper's model; with 0.5 a model trained from scratch does
            not rely on H_r before H_e is trained.
        encoder_type (`str`, *optional*, defaults to `"transformer"`): `"multi_column"`: a column of recurrent layers on
            the word embeddings, merged with the Transformer encoder into one memory (Chen et al., 2018); the paper's
            baseline sets `recurrence_encoder_type=None` with it.
        multi_column_rnn_layers (`int`, *optional*, defaults to 6): Bidirectional layers of that column.
        multi_column_merge (`str`, *optional*, defaults to `"concat"`): `"concat"`: concatenation and a linear layer.
            `"sum"`.
    """

    model_type = "biarn_transformer"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **NMTTransformerConfig.presets,
        # Only twice the width agrees with the paper's size of the big model.
        "big": {**NMTTransformerConfig.presets["big"], "recurrence_hidden_size": 2048},
    }

    baseline_first: ClassVar[str | None] = (
        "the decoder of a BiARN trained from scratch may never learn to align words (10 BLEU less on Multi30k); the "
        "paper starts from a trained Transformer"
    )

    recurrence_encoder_type: Literal["biarn", "arn", "birnn", "rnn"] | None = "biarn"
    recurrence_encoder_layers: int = layer_count(1)
    recurrence_steps: int | None = size(8)
    recurrence_cell: Literal["gru", "lstm"] = "gru"
    recurrence_hidden_size: Filled[int] = size(DERIVED)
    recurrence_initial_state: Literal["mean_linear", "mean", "zeros"] = "mean_linear"
    recurrence_position_embeddings: bool = False
    recurrence_direction_combination: Literal["project", "concat"] = "project"
    recurrence_source: Literal["embeddings", "encoder"] = "embeddings"
    decoder_memory: Literal["both", "recurrence"] = "both"
    fusion_type: Literal["stack", "gated_sum"] = "stack"
    fusion_layers: Literal["top", "all"] = "top"
    fusion_gate: Literal["vector", "scalar"] = "vector"
    recurrence_memory_dropout: float | int = probability(0.0)
    encoder_type: Literal["transformer", "multi_column"] = "transformer"
    multi_column_rnn_layers: int = layer_count(6)
    multi_column_merge: Literal["concat", "sum"] = "concat"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.recurrence_hidden_size is None:
            halves = self.recurrence_direction_combination == "concat" and self.recurrence_directions == 2
            self.recurrence_hidden_size = self.d_model // 2 if halves else self.d_model
        super().__post_init__(**kwargs)

    @property
    def recurrence_directions(self) -> int:
        """Directions of the recurrence encoder: 2 or 1."""
        return 1 if self.recurrence_encoder_type in ("arn", "rnn") else 2

    @property
    def attends_source_words(self) -> bool:
        return self.decoder_memory == "both"

    def baseline(self) -> NMTTransformerConfig | None:
        differs = self.recurrence_encoder_type is not None or self.encoder_type != "transformer"
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig)) if differs else None

    def check_values(self) -> None:
        super().check_values()
        if self.recurrence_encoder_type is None:
            self.require(self.decoder_memory == "both", "decoder_memory", "'both'", "recurrence_encoder_type")
            return
        width = self.recurrence_hidden_size
        if self.recurrence_initial_state == "mean":
            others = ("recurrence_hidden_size", "d_model")
            self.require(width == self.d_model, "recurrence_initial_state", "'mean_linear' or 'zeros'", *others)
        if self.recurrence_direction_combination == "concat":
            part, others = self.d_model / self.recurrence_directions, ("recurrence_direction_combination", "d_model")
            self.require(width == part, "recurrence_hidden_size", f"{part:g}", *others)
        # Otherwise the merged columns would be unused.
        is_read = self.decoder_memory == "both" or self.recurrence_source == "encoder"
        others = ("decoder_memory", "recurrence_source")
        self.require(is_read or self.encoder_type == "transformer", "encoder_type", "'transformer'", *others)
