"""Configuration of the recurrent encoder-decoder with relation networks, and of its two baselines."""

from typing import Any, ClassVar, Literal

from .configuration_seq2seq import (
    DERIVED,
    Filled,
    Seq2SeqConfig,
    any_layers,
    interval,
    layer_count,
    positive,
    probability,
    size,
    strict_config,
)


Numbers = list[int] | tuple[int, ...]
TWO_CONVOLUTIONS = {"relation_conv_kernels": [1, 3], "relation_conv_channels": [128, 256], "relation_hidden_size": 256}


@strict_config
class RNMTConfig(Seq2SeqConfig):
    r"""
    Configuration of [`RNMTModel`], the recurrent encoder-decoder with relation-network layers (RNMT, Zhang et al.,
    2018, "Refining Source Representations with Relation Networks for Neural Machine Translation"), and of its
    baselines: `relation_layers=0` is RNNsearch*, and with `decoder_type="rnnsearch"` too it is RNNsearch (Bahdanau et
    al., 2015).

    All fields of [`Seq2SeqConfig`]; `d_model` is the width of the embeddings, of every GRU and of the attention.
    Defaults that differ: `vocab_size=30000`, `dropout=0`, `scale_embedding=False`, separate and untied embeddings.

    Args:
        encoder_layers (`int`, *optional*): Recurrent layers of the encoder: bidirectional ones (`"concat"`), or
            alternately directed ones (`"stacked"`). `None`: 1 or 2.
        encoder_rnn_layout (`str`, *optional*): `"concat"`: annotations are `[forward; backward]` of two GRUs side by
            side, `2 * d_model` wide (Eq. 1). `"stacked"`: GRUs in opposite directions, each reading the one below,
            annotations `d_model` wide. `None`: `"concat"` for RNNsearch, else `"stacked"`.
        decoder_type (`str`, *optional*, defaults to `"conditional_gru"`): `"conditional_gru"`: one GRU reads the
            previous word and drives the attention, a second one reads the context (Eq. 13). `"rnnsearch"`: the previous
            state drives the attention, one GRU reads both.
        readout (`str`, *optional*, defaults to `"maxout"`): Layer that reads state, previous word and context before
            the output matrix. `"maxout"`: the larger of two linear maps. `"tanh"`: the hyperbolic tangent of one.
        readout_dropout (`float`, *optional*, defaults to 0.5): Dropout of the read-out.
        relation_layers (`int`, *optional*): Number of relation-network layers, one after each of the encoder's first
            GRUs. `None`: 2, as far as `encoder_layers` allows, or 0 with `encoder_rnn_layout="concat"`.
        relation_conv_kernels (`list[int]`, *optional*, defaults to `[3]`): Odd widths of the convolutions (Eq. 7).
        relation_conv_channels (`list[int]`, *optional*, defaults to `[96]`): Output channels of each.
        relation_conv_mode (`str`, *optional*, defaults to `"stacked"`): Each convolution reads the one before, or all
            read the input and are concatenated (`"parallel"`).
        relation_batch_norm (`bool` or `str`, *optional*, defaults to `True`): Batch norm over the real tokens between
            each convolution and its leaky ReLU. `"renormalized"`: by the running averages in training too (Ioffe,
            2017), for batches of sentences of similar length, whose statistics are not those of other sentences.
        relation_hidden_size (`int`, *optional*, defaults to 128): m, the width of the perceptrons.
        relation_gp_layers (`int`, *optional*, defaults to 4): Layers of the perceptron over pairs of words (Eqs. 8-9).
        relation_mlp_layers (`int`, *optional*, defaults to 2): Layers of the perceptron after it (Eq. 10).
        relation_residual (`bool`, *optional*, defaults to `True`): Residual connections around each GRU and relation
            layer (Eq. 11). This and the next two fields have no effect without relation layers.
        relation_dense_connection (`bool`, *optional*, defaults to `True`): Each layer reads all outputs below (Eq. 12).
        relation_dense_include_embeddings (`bool`, *optional*, defaults to `True`): Whether these include embeddings.
        connections_without_relations (`bool`, *optional*, defaults to `False`): Connect GRUs without relation layers.
        init_uniform (`float`, *optional*, defaults to 0.1): Matrices start uniform in `[-init_uniform, init_uniform]`,
            biases at zero. `None`: see `init_std`; without it, matrices are Xavier-uniform or orthogonal.
    """

    model_type = "rnmt"
    former_fields = frozenset(
        {
            *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
            *("activation_function", "attention_dropout", "activation_dropout", "normalize_before", "layer_norm_eps"),
            *("position_embedding_type", "encoder_position_embeddings", "decoder_position_embeddings"),
        }
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"d_model": 128, "readout_dropout": 0.1, "relation_conv_channels": [32], "relation_hidden_size": 32},
        "small": {"d_model": 256, "relation_conv_channels": [48], "relation_hidden_size": 64},
        # The paper's settings: WMT En-De, and NIST Zh-En with its two convolutions.
        "base": {},
        "en_de": {},
        "zh_en": TWO_CONVOLUTIONS,
        "big": {"d_model": 1024, **TWO_CONVOLUTIONS},
    }

    vocab_size: int = size(30000)
    encoder_layers: Filled[int] = layer_count(DERIVED)
    decoder_layers: int = interval(1, 1, "1")(1)  # the decoder is one recurrence
    dropout: float | int = probability(0.0)
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = False
    tie_word_embeddings: bool = False
    encoder_rnn_layout: Filled[Literal["concat", "stacked"]] = DERIVED
    decoder_type: Literal["conditional_gru", "rnnsearch"] = "conditional_gru"
    readout: Literal["maxout", "tanh"] = "maxout"
    readout_dropout: float | int = probability(0.5)
    relation_layers: Filled[int] = any_layers(DERIVED)
    relation_conv_kernels: Filled[Numbers] = DERIVED
    relation_conv_channels: Filled[Numbers] = DERIVED
    relation_conv_mode: Literal["stacked", "parallel"] = "stacked"
    relation_batch_norm: bool | Literal["renormalized"] = True
    relation_hidden_size: int = size(128)
    relation_gp_layers: int = layer_count(4)
    relation_mlp_layers: int = layer_count(2)
    relation_residual: bool = True
    relation_dense_connection: bool = True
    relation_dense_include_embeddings: bool = True
    connections_without_relations: bool = False
    init_uniform: float | int | None = positive(0.1)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.relation_layers is None:
            most = 2 if self.encoder_layers is None else self.encoder_layers
            self.relation_layers = 0 if self.encoder_rnn_layout == "concat" else min(most, 2)
        if self.encoder_rnn_layout is None:
            plain = self.decoder_type == "rnnsearch" and self.relation_layers == 0
            self.encoder_rnn_layout = "concat" if plain else "stacked"
        if self.encoder_layers is None:
            self.encoder_layers = 1 if self.encoder_rnn_layout == "concat" else 2
        self.relation_conv_kernels = [3] if self.relation_conv_kernels is None else self.relation_conv_kernels
        self.relation_conv_channels = [96] if self.relation_conv_channels is None else self.relation_conv_channels
        super().__post_init__(**kwargs)

    def cache_layer_types(self) -> list[str]:
        return ["recnmt_recurrent"] * self.decoder_layers

    @property
    def annotation_size(self) -> int:
        """Width of the encoder's annotations."""
        return 2 * self.d_model if self.encoder_rnn_layout == "concat" else self.d_model

    @property
    def connects_layers(self) -> bool:
        """`True` if the encoder's layers may have residual and dense connections (Eqs. 11-12)."""
        return self.relation_layers > 0 or self.connections_without_relations

    @property
    def num_attention_heads(self) -> int:
        """Heads of additive attention, for tools that describe models."""
        return 1

    @property
    def compares_all_pairs(self) -> bool:
        """`True` if a layer computes features of all pairs of words, so that batches should bound squared lengths."""
        return self.relation_layers > 0

    def baseline(self) -> "RNMTConfig | None":
        return RNMTConfig(**self.fields_of(RNMTConfig, relation_layers=0)) if self.relation_layers else None

    def check_values(self) -> None:
        super().check_values()
        connects = self.connections_without_relations
        is_stacked = self.encoder_rnn_layout == "stacked"  # the other layout's outputs are twice as wide as its inputs
        self.require(is_stacked or not connects, "connections_without_relations", "False", "encoder_rnn_layout")
        self.require(is_stacked or self.relation_layers == 0, "encoder_rnn_layout", "'stacked'", "relation_layers")
        fewest = self.relation_layers <= self.encoder_layers  # each follows a recurrent layer
        self.require(fewest, "relation_layers", "at most encoder_layers", "encoder_layers")
        self.require(self.init_uniform is None or self.init_std is None, "init_std", "None", "init_uniform")
        kernels, channels = self.relation_conv_kernels, self.relation_conv_channels
        for name, values in (("relation_conv_kernels", kernels), ("relation_conv_channels", channels)):
            is_list = bool(values) and all(type(value) is int and value >= 1 for value in values)
            self.require(is_list, name, "a list of integers of at least 1")
        # A word has as many neighbours on either side.
        self.require(all(kernel % 2 for kernel in kernels), "relation_conv_kernels", "odd widths")
        is_paired = len(kernels) == len(channels)
        self.require(is_paired, "relation_conv_channels", "one number per width", "relation_conv_kernels")
