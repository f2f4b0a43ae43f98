"""Configuration of the recurrent encoder-decoder with graph convolutions over dependency trees."""

from typing import Any, ClassVar, Literal

from .configuration_rnmt import RNMTConfig
from .configuration_seq2seq import DERIVED, Filled, any_layers, probability, size, strict_config


DIRECTIONS = ("in", "out", "loop")


@strict_config
class GCNRNMTConfig(RNMTConfig):
    r"""
    Configuration of [`GCNRNMTModel`], a recurrent encoder-decoder whose encoder ends with graph convolutions over the
    source's dependency tree (BiRNN+GCN, Bastings et al., 2017, "Graph Convolutional Encoders for Syntax-aware Neural
    Machine Translation"). All fields of [`RNMTConfig`], with the defaults `encoder_rnn_layout="concat"`,
    `relation_layers=0`, `decoder_type="rnnsearch"`, `dropout=0.2` and `readout_dropout=0.2`, and:

    Args:
        encoder_type (`str`, *optional*, defaults to `"birnn"`): Encoder below the graph convolutions: recurrent layers,
            convolutions over embeddings with learned positions (`"cnn"`), or a bag of words (`"bow"`).
        encoder_layers (`int`, *optional*): Layers of that encoder. `None`: 1, the only choice for `"bow"`.
        cnn_kernel_size (`int`, *optional*, defaults to 5): Odd width of the convolutions of `encoder_type="cnn"`.
        gcn_layers (`int`, *optional*, defaults to 2): Graph-convolution layers; 0 is the baseline without syntax.
        gcn_residual (`bool` or `str`, *optional*, defaults to `True`): Residual connections around graph-convolution
            layers if there are two or more of them; `"always"`: also around a single one.
        gcn_gates (`bool`, *optional*, defaults to `True`): Weights each edge by a gate.
        gcn_label_biases (`bool`, *optional*, defaults to `True`): Biases of messages and gates depend on the edge's
            relation. `False`: one bias per direction.
        gcn_directions (`list[str]`, *optional*): Which messages a word receives: from its dependents (`"in"`), from its
            head (`"out"`), from itself (`"loop"`). `None`: all.
        gcn_edge_dropout (`float`, *optional*, defaults to 0.2): Probability of removing an edge of the tree in
            training, drawn for each layer and direction.
        gcn_dropout (`float`, *optional*, defaults to 0.2): Dropout of the output of the graph convolutions.
        num_relations (`int`, *optional*, defaults to 101): Ids of dependency relations; 0 is the unknown relation.
        gcn_root (`str`, *optional*, defaults to `"none"`): Read by the data pipeline: the root word has no head, or has
            a special token as its head (`"token"`).
        gcn_subwords (`str`, *optional*, defaults to `"first_piece"`): Read by the data pipeline: the first piece of a
            word has the word's edge, or all pieces have it (`"all_pieces"`).
    """

    model_type = "gcn_rnmt"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"d_model": 128, "dropout": 0.1, "readout_dropout": 0.1, "gcn_dropout": 0.1},
        "small": {"d_model": 256},
        "base": {},
        # The width of the GRUs in the experiments on the full WMT16 corpus.
        "wmt16": {"d_model": 800},
        "big": {"d_model": 1024},
    }

    encoder_rnn_layout: Filled[Literal["concat", "stacked"]] = "concat"
    relation_layers: Filled[int] = any_layers(0)
    decoder_type: Literal["conditional_gru", "rnnsearch"] = "rnnsearch"
    dropout: float | int = probability(0.2)
    readout_dropout: float | int = probability(0.2)
    encoder_type: Literal["birnn", "cnn", "bow"] = "birnn"
    cnn_kernel_size: int = size(5)
    gcn_layers: int = any_layers(2)
    gcn_residual: bool | Literal["always"] = True
    gcn_gates: bool = True
    gcn_label_biases: bool = True
    gcn_directions: Filled[list[str] | tuple[str, ...]] = DERIVED
    gcn_edge_dropout: float | int = probability(0.2)
    gcn_dropout: float | int = probability(0.2)
    num_relations: int = size(101)
    gcn_root: Literal["none", "token"] = "none"
    gcn_subwords: Literal["first_piece", "all_pieces"] = "first_piece"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.encoder_layers is None and self.encoder_type != "birnn":
            self.encoder_layers = 1
        if self.gcn_directions is None:
            self.gcn_directions = list(DIRECTIONS)
        super().__post_init__(**kwargs)

    @property
    def annotation_size(self) -> int:
        """Width of the encoder's annotations."""
        return super().annotation_size if self.encoder_type == "birnn" else self.d_model

    @property
    def sides_with_positions(self) -> tuple[str, ...]:
        return ("source",) if self.encoder_type == "cnn" else ()

    @property
    def reads_trees(self) -> bool:
        """`True` if the encoder reads dependency trees."""
        return self.gcn_layers > 0 and list(self.gcn_directions) != ["loop"]

    @property
    def tree_options(self) -> dict[str, str] | None:
        return {"subwords": self.gcn_subwords, "root": self.gcn_root} if self.reads_trees else None

    def baseline(self) -> "GCNRNMTConfig | None":
        return GCNRNMTConfig(**self.fields_of(GCNRNMTConfig, gcn_layers=0)) if self.gcn_layers else None

    def check_values(self) -> None:
        super().check_values()
        is_recurrent = self.encoder_type == "birnn"
        is_single = self.encoder_type != "bow" or self.encoder_layers == 1
        self.require(is_single, "encoder_layers", "1", "encoder_type")
        self.require(is_recurrent or self.relation_layers == 0, "relation_layers", "0", "encoder_type")
        connects = self.connections_without_relations
        self.require(is_recurrent or not connects, "connections_without_relations", "False", "encoder_type")
        self.require(self.cnn_kernel_size % 2 == 1, "cnn_kernel_size", "odd")
        names = list(self.gcn_directions)
        is_list = bool(names) and len(set(names)) == len(names) and set(names) <= set(DIRECTIONS)
        self.require(is_list, "gcn_directions", f"a list of some of {', '.join(DIRECTIONS)}")
