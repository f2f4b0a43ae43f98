"""BiARN: a recurrence encoder in addition to the Transformer's."""

from .family import COMBINATIONS, PROBING, WMT14, Family, PaperRow, PaperTask, Subject


WMT17 = PaperTask("WMT17", ("zh", "en"), "BLEU", ("newstest2017",))

TABLES = (
    WMT14.table(
        "table 1",
        PaperRow("Transformer", (27.31,), parameters=88.0),
        PaperRow("6-layer BiRNN", (27.54,)),
        PaperRow("6-layer BiARN", (27.72,)),
        PaperRow("3-layer BiARN", (28.10,)),
        PaperRow("1-layer BiARN", (28.21,), "< .01", added=9.4),
        kind="ablation",
    ),
    WMT14.table(
        "table 2",
        PaperRow("gated sum, top layer", (28.12,)),
        PaperRow("gated sum, all layers", (28.02,)),
        PaperRow("stack, top layer", (28.21,)),
        PaperRow("stack, all layers", (27.93,)),
        proposed="stack, top layer",
        kind="ablation",
    ),
    WMT14.table(
        "figure 5",
        PaperRow("1 step", (27.50,)),
        PaperRow("4 steps", (27.99,)),
        PaperRow("8 steps", (28.21,)),
        PaperRow("16 steps", (27.92,)),
        PaperRow("a step for each word", (27.33,)),
        proposed="8 steps",
        kind="ablation",
    ),
    WMT14.table(
        "table 3",
        PaperRow("Transformer", (27.31,), parameters=88.0),
        PaperRow("BiARN", (28.21,), "< .01", added=9.4),
    ),
    WMT14.table(
        "table 3",
        PaperRow("Transformer", (28.58,), parameters=264.1),
        PaperRow("BiARN", (28.98,), "< .05", added=69.4),
        size="big",
        note="Four times the increase of the base model would be 37.6M; only a recurrence 2,048 wide has 69.3M.",
    ),
    WMT17.table(
        "table 3",
        PaperRow("Transformer", (24.13,), parameters=107.9),
        PaperRow("BiARN", (24.70,), "< .01", added=9.4),
    ),
    WMT17.table(
        "table 3",
        PaperRow("Transformer", (24.56,), parameters=303.9),
        PaperRow("BiARN", (25.10,), "< .01", added=69.4),
        size="big",
    ),
    WMT14.table(
        "table 4",
        PaperRow("Transformer", (27.31,)),
        PaperRow("relative positions", (27.64,)),
        PaperRow("directional masks", (27.58,)),
        PaperRow("multi-column encoder", (27.47,)),
        PaperRow("BiARN", (28.21,)),
        kind="ablation",
    ),
    PROBING.table(
        "table 5",
        PaperRow("Transformer", (92.20, 63.00, 44.74, 79.02, 71.24, 89.24, 84.69, 84.53, 52.13, 62.47)),
        PaperRow("6-layer BiRNN", (89.90, 77.46, 44.47, 79.55, 71.53, 89.17, 85.99, 84.96, 51.75, 61.92)),
        PaperRow("6-layer BiARN", (89.78, 72.02, 44.45, 79.21, 71.31, 88.38, 85.64, 85.00, 53.27, 62.38)),
        PaperRow("3-layer BiARN", (89.80, 72.61, 44.28, 79.43, 71.84, 88.93, 85.79, 84.99, 53.30, 62.42)),
        PaperRow("1-layer BiARN", (90.91, 73.68, 45.15, 79.62, 72.21, 89.00, 85.54, 84.54, 53.44, 62.71)),
        kind="analysis",
    ),
)

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
    tables=TABLES,
    combinations={**COMBINATIONS, "multi-column encoder": {"encoder_type": "multi_column"}},
    small={"fusion_type": "gated_sum", "fusion_layers": "all", "recurrence_steps": 3},
    subject=Subject(
        "attention", "attention of the recurrence encoder's steps", "recurrence.inspect_attention", ("layer", "head")
    ),
)
