"""Configuration of the recurrent encoder-decoder with relation networks, and of its two baselines."""

from typing import Any, ClassVar

from .configuration_seq2seq import FROM_OTHERS, MOST_LAYERS, Filled, Seq2SeqConfig


class RNMTConfig(Seq2SeqConfig):
    r"""
    Configuration of [`RNMTModel`], the recurrent encoder-decoder with relation-network layers (RNMT, Zhang et al.,
    2018, "Refining Source Representations with Relation Networks for Neural Machine Translation"), and of its
    baselines: `relation_layers=0` is RNNsearch*, and with `decoder_type="rnnsearch"` too it is RNNsearch (Bahdanau et
    al., 2015).

    All fields of [`Seq2SeqConfig`], of which `d_model` is the width of embeddings, of every GRU and of the attention.
    Defaults that differ: `vocab_size=30000`, `dropout=0`, `scale_embedding=False`, separate and untied embeddings.
    Fields that only a Transformer has, as files of earlier releases name them, are read over.

    Args:
        encoder_layers (`int`, *optional*):
            Recurrent layers of the encoder: bidirectional ones (`"concat"`), or alternately directed ones
            (`"stacked"`). `None`: 1 or 2.
        encoder_rnn_layout (`str`, *optional*):
            `"concat"`: annotations are `[forward; backward]` of two GRUs side by side, `2 * d_model` wide (Eq. 1).
            `"stacked"`: GRUs in opposite directions, each reading the one below, annotations `d_model` wide. `None`:
            `"concat"` for RNNsearch, else `"stacked"`.
        decoder_type (`str`, *optional*, defaults to `"conditional_gru"`):
            `"conditional_gru"`: one GRU reads the previous word and drives the attention, a second one reads the
            context (Eq. 13). `"rnnsearch"`: the previous state drives the attention, one GRU reads both.
        readout (`str`, *optional*, defaults to `"maxout"`):
            Between state, previous word and context, and the output matrix: the larger of two linear maps, or
            `"tanh"` of one.
        readout_dropout (`float`, *optional*, defaults to 0.5):
            Dropout of the read-out.
        relation_layers (`int`, *optional*):
            Relation-network layers; the first ones of the encoder's GRUs are followed by one each. `None`: 2, as far as
            `encoder_layers` allows, or 0 with `encoder_rnn_layout="concat"`.
        relation_conv_kernels (`list[int]`, *optional*, defaults to `[3]`):
            Odd widths of the convolutions (Eq. 7).
        relation_conv_channels (`list[int]`, *optional*, defaults to `[96]`):
            Output channels of each.
        relation_conv_mode (`str`, *optional*, defaults to `"stacked"`):
            Each convolution reads the one before, or all read the input and are concatenated (`"parallel"`).
        relation_batch_norm (`bool`, *optional*, defaults to `True`):
            Batch norm over the real tokens between each convolution and its leaky ReLU.
        relation_hidden_size (`int`, *optional*, defaults to 128):
            m, the width of the perceptrons.
        relation_gp_layers (`int`, *optional*, defaults to 4):
            Layers of the perceptron over pairs of words (graph propagation, Eqs. 8-9).
        relation_mlp_layers (`int`, *optional*, defaults to 2):
            Layers of the perceptron after it (Eq. 10); the last one is `d_model` wide.
        relation_residual (`bool`, *optional*, defaults to `True`):
            Residual connections around each GRU and relation layer (Eq. 11). As the next two, it acts where there are
            relation layers.
        relation_dense_connection (`bool`, *optional*, defaults to `True`):
            Each layer reads a linear map of all outputs below (Eq. 12).
        relation_dense_include_embeddings (`bool`, *optional*, defaults to `True`):
            Whether the embeddings are among them.
        connections_without_relations (`bool`, *optional*, defaults to `False`):
            Has the residual and dense connections act on the stacked GRUs alone too, with `relation_layers=0`: a
            control that shows what they bring without relations.
        init_uniform (`float`, *optional*, defaults to 0.1):
            Matrices start uniform in `[-init_uniform, init_uniform]`, biases at zero. `None`: as `init_std` says
            (Xavier-uniform and orthogonal matrices unless it is given).

    Example:

    ```python
    >>> from recnmt_hf import RNMTConfig
    >>> RNMTConfig.from_preset("tiny", vocab_size=1000, relation_layers=0, decoder_type="rnnsearch").encoder_rnn_layout
    'concat'

    ```
    """

    model_type = "rnmt"
    former_fields = frozenset(
        (
            *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
            *("activation_function", "attention_dropout", "activation_dropout", "normalize_before", "layer_norm_eps"),
            *("position_embedding_type", "encoder_position_embeddings", "decoder_position_embeddings"),
        )
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"d_model": 128, "readout_dropout": 0.1, "relation_conv_channels": [32], "relation_hidden_size": 32},
        "small": {"d_model": 256, "relation_conv_channels": [48], "relation_hidden_size": 64},
        # The paper's settings: WMT En-De, and NIST Zh-En with its two convolutions.
        "base": {},
        "en_de": {},
        "zh_en": {"relation_conv_kernels": [1, 3], "relation_conv_channels": [128, 256], "relation_hidden_size": 256},
        "big": {
            "d_model": 1024,
            "relation_conv_kernels": [1, 3],
            "relation_conv_channels": [128, 256],
            "relation_hidden_size": 256,
        },
    }

    vocab_size: int = 30000
    encoder_layers: Filled[int] = FROM_OTHERS
    decoder_layers: int = 1
    dropout: float | int = 0.0
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = False
    tie_word_embeddings: bool = False
    encoder_rnn_layout: Filled[str] = FROM_OTHERS
    decoder_type: str = "conditional_gru"
    readout: str = "maxout"
    readout_dropout: float | int = 0.5
    relation_layers: Filled[int] = FROM_OTHERS
    relation_conv_kernels: Filled[list[int]] = FROM_OTHERS
    relation_conv_channels: Filled[list[int]] = FROM_OTHERS
    relation_conv_mode: str = "stacked"
    relation_batch_norm: bool = True
    relation_hidden_size: int = 128
    relation_gp_layers: int = 4
    relation_mlp_layers: int = 2
    relation_residual: bool = True
    relation_dense_connection: bool = True
    relation_dense_include_embeddings: bool = True
    connections_without_relations: bool = False
    init_uniform: float | None = 0.1

    def __post_init__(self, **kwargs: Any) -> None:
        if self.relation_layers is None:
            fewer = isinstance(self.encoder_layers, int) and self.encoder_layers < 2
            self.relation_layers = 0 if self.encoder_rnn_layout == "concat" else 1 if fewer else 2
        if self.encoder_rnn_layout is None:
            plain = self.decoder_type == "rnnsearch" and self.relation_layers == 0
            self.encoder_rnn_layout = "concat" if plain else "stacked"
        if self.encoder_layers is None:
            self.encoder_layers = 1 if self.encoder_rnn_layout == "concat" else 2
        if self.relation_conv_kernels is None:
            self.relation_conv_kernels = [3]
        if self.relation_conv_channels is None:
            self.relation_conv_channels = [96]
        super().__post_init__(**kwargs)

    def cache_layer_types(self) -> list[str]:
        return ["recnmt_recurrent"] * self.decoder_layers

    @property
    def annotation_size(self) -> int:
        """Width of the encoder's annotations."""
        return 2 * self.d_model if self.encoder_rnn_layout == "concat" else self.d_model

    @property
    def is_residual(self) -> bool:
        """Whether the encoder's layers have residual connections (Eq. 11)."""
        return self.relation_residual and (self.relation_layers > 0 or self.connections_without_relations)

    @property
    def is_dense(self) -> bool:
        """Whether the encoder's layers read all outputs below (Eq. 12)."""
        return self.relation_dense_connection and (self.relation_layers > 0 or self.connections_without_relations)

    @property
    def num_attention_heads(self) -> int:
        """Additive attention has one; tools that describe a model ask for it."""
        return 1

    @num_attention_heads.setter
    def num_attention_heads(self, value: int) -> None:
        raise NotImplementedError("Additive attention has one head. Remedy: leave num_attention_heads out.")

    @property
    def compares_all_pairs(self) -> bool:
        """Whether a layer computes something for each pair of words, so that batches should bound squared lengths."""
        return self.relation_layers > 0

    def baseline(self) -> "RNMTConfig | None":
        if self.relation_layers == 0:
            return None
        return RNMTConfig(**{**self.fields_of(RNMTConfig), "relation_layers": 0})

    def check_values(self) -> None:
        super().check_values()
        if self.decoder_layers != 1:
            self.refuse("decoder_layers", "1", "leave it out: the decoder is one recurrence")
        self.check_choice("encoder_rnn_layout", ("concat", "stacked"))
        self.check_choice("decoder_type", ("conditional_gru", "rnnsearch"))
        self.check_choice("readout", ("maxout", "tanh"))
        self.check_fraction("readout_dropout")
        self.check_whole("relation_layers", minimum=0, maximum=MOST_LAYERS)
        self.check_whole("relation_gp_layers", "relation_mlp_layers", maximum=MOST_LAYERS)
        self.check_whole("relation_hidden_size")
        self.check_choice("relation_conv_mode", ("stacked", "parallel"))
        self.check_flag(
            "relation_batch_norm",
            "relation_residual",
            "relation_dense_connection",
            "relation_dense_include_embeddings",
            "connections_without_relations",
        )
        if self.connections_without_relations and self.encoder_rnn_layout == "concat":
            self.refuse(
                "connections_without_relations",
                'False while encoder_rnn_layout="concat", whose outputs are twice as wide as its inputs',
                'leave it out, or set encoder_rnn_layout="stacked"',
            )
        self.check_convolutions()
        if self.init_uniform is not None and not (
            isinstance(self.init_uniform, (int, float))
            and not isinstance(self.init_uniform, bool)
            and self.init_uniform > 0
        ):
            self.refuse("init_uniform", "None or a number > 0", "use 0.1, or None for other initialisations")
        if self.init_uniform is not None and self.init_std is not None:
            self.refuse(
                "init_std", f"None while init_uniform={self.init_uniform}", "set init_uniform=None (null in YAML)"
            )
        if self.relation_layers and self.encoder_rnn_layout == "concat":
            self.refuse(
                "encoder_rnn_layout",
                f'"stacked" while relation_layers={self.relation_layers}',
                "leave it out, or set relation_layers=0 for a baseline without them",
            )
        if self.relation_layers > self.encoder_layers:
            self.refuse(
                "relation_layers",
                f"at most encoder_layers={self.encoder_layers}: each one follows a recurrent layer",
                "use fewer, or more encoder_layers",
            )

    def check_convolutions(self) -> None:
        for field in ("relation_conv_kernels", "relation_conv_channels"):
            value = getattr(self, field)
            whole = isinstance(value, (list, tuple)) and all(
                isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in value
            )
            if not whole or not value:
                self.refuse(field, "a list of whole numbers >= 1", "write one number for each convolution, e.g. [1, 3]")
        if any(kernel % 2 == 0 for kernel in self.relation_conv_kernels):
            self.refuse("relation_conv_kernels", "odd widths (a word has as many on either side)", "use 1, 3 or 5")
        if len(self.relation_conv_kernels) != len(self.relation_conv_channels):
            self.refuse(
                "relation_conv_channels",
                f"as long as relation_conv_kernels={self.relation_conv_kernels}",
                "give each convolution a width and a number of channels",
            )


RNMTConfig.register_for_auto_class()
