"""BiRNN+GCN: graph convolutions over dependency trees in a recurrent encoder-decoder."""

from .family import Family


FAMILY = Family(
    model_type="gcn_rnmt",
    prefix="GCNRNMT",
    paper="Bastings et al., 2017, *Graph Convolutional Encoders for Syntax-aware Neural Machine Translation*",
    citation="""\
@inproceedings{bastings2017graph,
  title = {Graph Convolutional Encoders for Syntax-aware Neural Machine Translation},
  author = {Bastings, Jasmijn and Titov, Ivan and Aziz, Wilker and Marcheggiani, Diego and Sima'an, Khalil},
  booktitle = {Proceedings of EMNLP},
  year = {2017}
}
""",
    small={
        "decoder_layers": 1,
        "encoder_rnn_layout": "stacked",
        "num_relations": 7,
        "dropout": 0.0,
        "readout_dropout": 0.0,
        "gcn_dropout": 0.0,
        "init_uniform": None,
    },
)
