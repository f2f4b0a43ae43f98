"""RNMT: relation networks in a recurrent encoder-decoder."""

from .family import Family, PaperFigure


FAMILY = Family(
    model_type="rnmt",
    prefix="RNMT",
    paper="Zhang et al., 2018, *Refining Source Representations with Relation Networks for Neural Machine Translation*",
    citation="""\
@inproceedings{zhang2018refining,
  title = {Refining Source Representations with Relation Networks for Neural Machine Translation},
  author = {Zhang, Wen and Hu, Jiawei and Feng, Yang and Liu, Qun},
  booktitle = {Proceedings of COLING},
  year = {2018}
}
""",
    figures=(
        PaperFigure(
            "NIST MT03 to MT06, average", ("zh", "en"), "", "BLEU (case-insensitive)", "37.73", "39.21 (p < .01)"
        ),
        PaperFigure("WMT17 newstest2017", ("en", "de"), "", "BLEU (case-insensitive)", "20.1", "21.8"),
    ),
    small={
        "decoder_layers": 1,
        "relation_conv_channels": [6],
        "relation_hidden_size": 8,
        "readout_dropout": 0.0,
        "init_uniform": None,
    },
)
