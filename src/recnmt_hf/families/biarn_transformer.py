"""BiARN: a recurrence encoder in addition to the Transformer's."""

from .family import Family, PaperFigure, Subject


FAMILY = Family(
    model_type="biarn_transformer",
    prefix="BiARNTransformer",
    paper="Hao et al., 2019, *Modeling Recurrence for Transformer*",
    citation="""\
@inproceedings{hao2019modeling,
  title = {Modeling Recurrence for Transformer},
  author = {Hao, Jie and Wang, Xing and Yang, Baosong and Wang, Longyue and Zhang, Jinfeng and Tu, Zhaopeng},
  booktitle = {Proceedings of NAACL-HLT},
  year = {2019}
}
""",
    figures=(
        PaperFigure("WMT14 newstest2014", ("en", "de"), "base", "BLEU", "27.31", "28.21 (p < .01)"),
        PaperFigure("WMT14 newstest2014", ("en", "de"), "big", "BLEU", "28.58", "28.98 (p < .05)"),
        PaperFigure("WMT17 newstest2017", ("zh", "en"), "base", "BLEU", "24.13", "24.70 (p < .01)"),
        PaperFigure("WMT17 newstest2017", ("zh", "en"), "big", "BLEU", "24.56", "25.10 (p < .01)"),
    ),
    small={"fusion_type": "gated_sum", "fusion_layers": "all", "recurrence_steps": 3},
    subject=Subject(
        "attention", "attention of the recurrence encoder's steps", "recurrence.inspect_attention", ("layer", "head")
    ),
)
