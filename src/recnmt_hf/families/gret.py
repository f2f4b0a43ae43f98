"""GRET: a global representation by capsule routing."""

from .family import COMBINATIONS, WMT14, Family, PaperRow, PaperTask, Subject


WMT17 = PaperTask("WMT17", ("zh", "en"), "BLEU", ("newstest2017",))
WMT14_DE_EN = PaperTask("WMT14", ("de", "en"), "BLEU", ("newstest2014",))
WMT16 = PaperTask("WMT16", ("ro", "en"), "BLEU", ("newstest2016",))
LCSTS = PaperTask("LCSTS", ("zh", "zh"), "ROUGE", ("ROUGE-1", "ROUGE-2", "ROUGE-L"))
BAG_OF_WORDS = PaperTask(
    "words of the translation among the K most likely", ("zh", "en"), "percent", ("top-200", "top-500", "top-1000")
)

TABLES = (
    WMT14.table(
        "table 3",
        PaperRow("Transformer", (27.20,), parameters=61.9),
        PaperRow("none", (27.39,), parameters=61.9),
        PaperRow("capsules", (28.02,), parameters=63.6),
        PaperRow("capsules and layers", (28.32,), parameters=68.1),
        PaperRow("capsules and gate", (28.23,), parameters=63.6),
        PaperRow("layers", (27.81,), parameters=66.6),
        PaperRow("layers and gate", (27.76,), parameters=66.8),
        PaperRow("gate", (27.53,), parameters=62.1),
        PaperRow("all", (28.46,), "< .05", parameters=68.3),
        note="The paper prints +1.02 for the row without a gate, which gives 28.22.",
        kind="ablation",
    ),
    WMT17.table("table 1", PaperRow("Transformer", (24.31,)), PaperRow("GRET", (25.53,), "< .01")),
    WMT14.table("table 1", PaperRow("Transformer", (27.20,)), PaperRow("GRET", (28.46,), "< .05")),
    WMT14_DE_EN.table("table 1", PaperRow("Transformer", (32.34,)), PaperRow("GRET", (33.79,), "< .01")),
    WMT16.table(
        "table 1",
        PaperRow("Transformer", (32.17,)),
        PaperRow("GRET", (33.06,), "< .01"),
        note="The paper names newstest2015 as development set, which this pair does not have.",
    ),
    LCSTS.table("table 2", PaperRow("Transformer", (43.14, 29.26, 39.72)), PaperRow("GRET", (44.77, 30.96, 41.21))),
    WMT14.table(
        "table 4",
        PaperRow("Transformer", (28.47,), parameters=249),
        PaperRow("GRET", (29.33,), parameters=273),
        size="big",
    ),
    BAG_OF_WORDS.table(
        "table 5",
        PaperRow("last", (43, 52, 64)),
        PaperRow("average", (49, 57, 69)),
        PaperRow("global", (63, 74, 81)),
        kind="analysis",
    ),
)

FAMILY = Family(
    model_type="gret",
    prefix="GRET",
    paper="Weng et al., 2020, *GRET: Global Representation Enhanced Transformer*",
    citation="""\
@inproceedings{weng2020gret,
  title = {GRET: Global Representation Enhanced Transformer},
  author = {Weng, Rongxiang and Wei, Haoran and Huang, Shujian and Yu, Heng and Bing, Lidong and Luo, Weihua
            and Chen, Jiajun},
  booktitle = {Proceedings of AAAI},
  year = {2020}
}
""",
    tables=TABLES,
    combinations=COMBINATIONS,
    small={"num_capsules": 4},
    subject=Subject(
        "global",
        "words that each capsule reads, and the gate of each target token",
        "global_state.inspect_global_state",
        ("target", "layer"),
    ),
)
