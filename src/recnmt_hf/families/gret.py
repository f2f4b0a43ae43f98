"""GRET: a global representation by capsule routing."""

from .family import Family, PaperFigure, Subject


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
    figures=(
        PaperFigure("WMT14 newstest2014", ("en", "de"), "base", "BLEU", "27.20", "28.46 (p < .05)"),
        PaperFigure("WMT14 newstest2014", ("en", "de"), "big", "BLEU", "28.47", "29.33"),
        PaperFigure("WMT14 newstest2014", ("de", "en"), "base", "BLEU", "32.34", "33.79 (p < .01)"),
        PaperFigure("WMT16", ("ro", "en"), "base", "BLEU", "32.17", "33.06 (p < .01)"),
        PaperFigure("WMT17", ("zh", "en"), "base", "BLEU", "24.31", "25.53 (p < .01)"),
        PaperFigure("LCSTS", ("zh", "zh"), "base", "ROUGE-1 / 2 / L", "43.14 / 29.26 / 39.72", "44.77 / 30.96 / 41.21"),
    ),
    small={"num_capsules": 4},
    subject=Subject(
        "global",
        "words that each capsule reads, and the gate of each target token",
        "global_state.inspect_global_state",
        ("target", "layer"),
    ),
)
