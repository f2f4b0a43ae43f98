"""RNMT: relation networks in a recurrent encoder-decoder."""

from .family import Family, PaperRow, PaperTask, Subject


NIST = PaperTask("NIST", ("zh", "en"), "BLEU (case-insensitive)", ("MT03", "MT04", "MT05", "MT06", "average"))
WMT17 = PaperTask(
    "WMT17", ("en", "de"), "BLEU (case-insensitive)", ("newstest2015", "newstest2016", "newstest2017", "average")
)
WMT16 = PaperTask("WMT16", ("en", "de"), "BLEU", ("newstest2016",))
ALIGNMENT = PaperTask("Zh-En alignment", ("zh", "en"), "AER", ("Liu and Sun (2015)",))

TABLES = (
    NIST.table(
        "table 1",
        PaperRow("RNNsearch*", (37.93, 40.53, 36.65, 35.80, 37.73)),
        PaperRow("RNNsearch", (33.70, 36.15, 31.81, 32.71, 33.59)),
        PaperRow("VRNMT", (38.08, 41.07, 36.82, 36.72, 38.17)),
        PaperRow("RNMT", (39.24, 42.01, 37.79, 37.81, 39.21), "< .01"),
        size="zh_en",
    ),
    WMT17.table(
        "table 2",
        PaperRow("RNNsearch*", (21.4, 25.6, 20.1, 22.4)),
        PaperRow("RNNsearch", (17.3, 20.9, 16.6, 18.3)),
        PaperRow("RNMT", (22.7, 27.8, 21.8, 24.1), added=4.1),
        size="en_de",
    ),
    WMT16.table("table 3", PaperRow("BiRNN+GCN", (23.9,)), PaperRow("RNMT", (25.4,)), size="en_de"),
    ALIGNMENT.table(
        "table 4",
        PaperRow("RNNsearch*", (46.76,)),
        PaperRow("RNMT", (45.66,)),
        size="zh_en",
        note="The BLEU column of this table equals the averages of table 2 and cannot belong to Zh-En.",
        kind="analysis",
    ),
)

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
    tables=TABLES,
    small={
        "decoder_layers": 1,
        "relation_conv_channels": [6],
        "relation_hidden_size": 8,
        "readout_dropout": 0.0,
        "init_uniform": None,
    },
    subject=Subject(
        "relations", "strength of the relations between source words", "relations.inspect_relations", ("layer",)
    ),
)
