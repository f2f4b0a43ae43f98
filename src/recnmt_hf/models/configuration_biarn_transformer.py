"""Configuration of the Transformer with a recurrence encoder beside its own."""

from typing import Any, ClassVar

from .configuration_nmt_transformer import NMTTransformerConfig
from .configuration_seq2seq import FROM_OTHERS, MOST_LAYERS, Filled


RECURRENCE_ENCODER_TYPES = (None, "biarn", "arn", "birnn", "rnn")


class BiARNTransformerConfig(NMTTransformerConfig):
    r"""
    Configuration of [`BiARNTransformerModel`], the Transformer with an additional recurrence encoder (Hao et al., 2019,
    "Modeling Recurrence for Transformer"). All fields of [`NMTTransformerConfig`], and:

    Args:
        recurrence_encoder_type (`str`, *optional*, defaults to `"biarn"`):
            `"biarn"` and `"arn"`: attentive recurrent network in two directions or one, which makes
            `recurrence_steps` steps of attention to the source (Eqs. 12-13). `"birnn"` and `"rnn"`: a recurrent
            network over the words (Eqs. 9-11). `None`: none, the plain Transformer.
        recurrence_encoder_layers (`int`, *optional*, defaults to 1):
            Layers of the recurrence encoder.
        recurrence_steps (`int`, *optional*, defaults to 8):
            T, the steps of an ARN. `None`: as many as the sentence has tokens. An RNN makes one for each token anyway.
        recurrence_cell (`str`, *optional*, defaults to `"gru"`):
            `"gru"` or `"lstm"`; of the multi-column encoder too.
        recurrence_hidden_size (`int`, *optional*):
            Width of the recurrent state of each direction. `None`: `d_model`, or with
            `recurrence_direction_combination="concat"` the width that makes the directions `d_model` together.
        recurrence_initial_state (`str`, *optional*, defaults to `"mean_linear"`):
            `"mean_linear"`: `tanh(W mean(x) + b)` for each direction, `x` being the layer's input. `"mean"`: the mean
            itself (needs a hidden size of `d_model`). `"zeros"`.
        recurrence_position_embeddings (`bool`, *optional*, defaults to `False`):
            Whether the recurrence encoder (and the recurrent column of the multi-column encoder) reads positions too;
            an ARN otherwise reads a bag of words.
        recurrence_direction_combination (`str`, *optional*, defaults to `"project"`):
            `"project"`: a linear layer from both directions' states to `d_model`. `"concat"`: their concatenation.
        recurrence_source (`str`, *optional*, defaults to `"embeddings"`):
            Input of the recurrence encoder: the word embeddings or the output of the Transformer `"encoder"`.
        decoder_memory (`str`, *optional*, defaults to `"both"`):
            `"both"`: the decoder attends both encoders. `"recurrence"`: the recurrence encoder alone, in place of the
            Transformer encoder, which is not built unless the recurrence encoder reads it; no fusion takes place.
        fusion_type (`str`, *optional*, defaults to `"stack"`):
            `"stack"`: the recurrence states are attended after the encoder's states (Eqs. 14-15). `"gated_sum"`: both
            are attended from the same states, and a gate weighs the two (Eqs. 16-19).
        fusion_layers (`str`, *optional*, defaults to `"top"`):
            Decoder layers that attend the recurrence states: the `"top"` one, or `"all"`.
        fusion_gate (`str`, *optional*, defaults to `"vector"`):
            The gate of `"gated_sum"`: one weight per channel (`"vector"`) or per position (`"scalar"`).
        recurrence_memory_dropout (`float`, *optional*, defaults to 0):
            Probability with which training leaves H_r out for a sentence, in all layers that attend it beside H_e: the
            output of their attention to it is zero (`"stack"`), or the gate is 1 (`"gated_sum"`). Nothing is rescaled.
            0 is the paper's model; 0.5 keeps a model that is trained from scratch from relying on H_r before there is
            anything in H_e to attend.
        encoder_type (`str`, *optional*, defaults to `"transformer"`):
            `"multi_column"`: a column of recurrent layers on the word embeddings, merged with the Transformer encoder
            into one memory (Chen et al., 2018); the paper's baseline sets `recurrence_encoder_type=None` with it.
        multi_column_rnn_layers (`int`, *optional*, defaults to 6):
            Bidirectional layers of that column.
        multi_column_merge (`str`, *optional*, defaults to `"concat"`):
            `"concat"`: concatenation and a linear layer. `"sum"`.

    Example:

    ```python
    >>> from recnmt_hf import BiARNTransformerConfig, BiARNTransformerForConditionalGeneration
    >>> config = BiARNTransformerConfig.from_preset("tiny", vocab_size=1000, recurrence_steps=4)
    >>> BiARNTransformerForConditionalGeneration(config).config.recurrence_hidden_size
    128

    ```
    """

    model_type = "biarn_transformer"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **NMTTransformerConfig.presets,
        # Only twice the width explains the paper's size of the big model.
        "big": {**NMTTransformerConfig.presets["big"], "recurrence_hidden_size": 2048},
    }

    baseline_first: ClassVar[str | None] = (
        "the decoder of a BiARN that is trained from scratch attends the few recurrence states before it can align "
        "words, and may then never learn to align (10 BLEU less on Multi30k); the paper goes on from a trained "
        "Transformer"
    )

    recurrence_encoder_type: str | None = "biarn"
    recurrence_encoder_layers: int = 1
    recurrence_steps: int | None = 8
    recurrence_cell: str = "gru"
    recurrence_hidden_size: Filled[int] = FROM_OTHERS
    recurrence_initial_state: str = "mean_linear"
    recurrence_position_embeddings: bool = False
    recurrence_direction_combination: str = "project"
    recurrence_source: str = "embeddings"
    decoder_memory: str = "both"
    fusion_type: str = "stack"
    fusion_layers: str = "top"
    fusion_gate: str = "vector"
    recurrence_memory_dropout: float | int = 0.0
    encoder_type: str = "transformer"
    multi_column_rnn_layers: int = 6
    multi_column_merge: str = "concat"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.recurrence_hidden_size is None and isinstance(self.d_model, int):
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
        if self.recurrence_encoder_type is None and self.encoder_type == "transformer":
            return None
        return NMTTransformerConfig(**self.fields_of(NMTTransformerConfig))

    def check_values(self) -> None:
        super().check_values()
        self.check_choice("recurrence_encoder_type", RECURRENCE_ENCODER_TYPES)
        self.check_whole("recurrence_encoder_layers", "multi_column_rnn_layers", maximum=MOST_LAYERS)
        self.check_whole("recurrence_hidden_size")
        if self.recurrence_steps is not None:
            steps = self.recurrence_steps
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                self.refuse(
                    "recurrence_steps",
                    "a whole number >= 1, or None for the length of the sentence",
                    "use 8 (None is written null in YAML and JSON)",
                )
        self.check_choice("recurrence_cell", ("gru", "lstm"))
        self.check_choice("recurrence_initial_state", ("mean_linear", "mean", "zeros"))
        self.check_flag("recurrence_position_embeddings")
        self.check_choice("recurrence_direction_combination", ("project", "concat"))
        self.check_choice("recurrence_source", ("embeddings", "encoder"))
        self.check_choice("decoder_memory", ("both", "recurrence"))
        self.check_choice("fusion_type", ("stack", "gated_sum"))
        self.check_choice("fusion_layers", ("top", "all"))
        self.check_choice("fusion_gate", ("vector", "scalar"))
        self.check_fraction("recurrence_memory_dropout")
        self.check_choice("encoder_type", ("transformer", "multi_column"))
        self.check_choice("multi_column_merge", ("concat", "sum"))
        if self.recurrence_encoder_type is not None:
            self.check_recurrence()
        elif self.decoder_memory == "recurrence":
            self.refuse(
                "decoder_memory",
                '"both" while recurrence_encoder_type=None',
                "name a recurrence encoder, or leave decoder_memory out",
            )

    def check_recurrence(self) -> None:
        width, directions = self.recurrence_hidden_size, self.recurrence_directions
        if self.recurrence_initial_state == "mean" and width != self.d_model:
            self.refuse(
                "recurrence_initial_state",
                f'"mean_linear" or "zeros" while recurrence_hidden_size={width} differs from d_model={self.d_model}',
                f'use "mean_linear", or set recurrence_hidden_size={self.d_model}',
            )
        if self.recurrence_direction_combination == "concat" and directions * width != self.d_model:
            self.refuse(
                "recurrence_hidden_size",
                f"d_model / {directions} = {self.d_model / directions:g} with "
                'recurrence_direction_combination="concat"',
                f"set recurrence_hidden_size={self.d_model // directions} (presets name their own), or use "
                'recurrence_direction_combination="project"',
            )
        unread = self.decoder_memory == "recurrence" and self.recurrence_source == "embeddings"
        if unread and self.encoder_type == "multi_column":
            self.refuse(
                "encoder_type",
                '"transformer" while decoder_memory="recurrence": nothing would read the merged columns',
                'leave encoder_type out, or use recurrence_source="encoder"',
            )


BiARNTransformerConfig.register_for_auto_class()
