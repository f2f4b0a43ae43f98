"""LSTM, ON-LSTM and self-attention encoders."""

from .family import COMBINATIONS, PROBING, WMT14, Family, PaperRow, Subject


TABLES = (
    WMT14.table(
        "tables 1 and 2",
        PaperRow("attention", (27.31,), parameters=88),
        PaperRow("lstm", (27.23,), parameters=97),
        PaperRow("onlstm", (27.44,), parameters=110),
        PaperRow("lstm and attention", (27.78,), "< .05", parameters=104),
        PaperRow("onlstm and attention", (28.27,), "< .01", parameters=123),
        PaperRow("hybrid", (28.21,), "< .01", parameters=99),
        PaperRow("hybrid with short-cut", (28.37,), "< .01", parameters=99),
        PaperRow("reversed", (27.39,), parameters=99),
        PaperRow("more lstm", (27.25,), parameters=102.2),
        PaperRow("more attention", (27.76,), parameters=100.6),
        proposed="hybrid with short-cut",
        note="104M and 102.2M contradict the other rows: four attention layers cost 12.6M there, two LSTM layers 9.4M.",
    ),
    WMT14.table(
        "table 1",
        PaperRow("attention", (28.58,), parameters=264),
        PaperRow("hybrid with short-cut", (29.30,), "< .01", parameters=308),
        size="big",
    ),
    PROBING.table(
        "table 3",
        PaperRow("attention, final", (92.71, 81.79, 44.78, 84.53, 52.66, 84.76, 85.18, 81.45, 49.87, 68.97)),
        PaperRow("onlstm, final", (90.70, 76.42, 52.58, 86.32, 82.68, 86.00, 85.44, 86.78, 49.54, 72.03)),
        PaperRow("hybrid, recurrent", (91.94, 90.38, 51.19, 86.29, 81.79, 83.88, 85.56, 85.72, 49.23, 72.06)),
        PaperRow("hybrid, attention", (89.50, 79.10, 52.55, 87.92, 82.05, 86.05, 84.59, 85.80, 49.12, 72.05)),
        PaperRow("hybrid, final", (89.86, 80.37, 53.28, 87.89, 81.90, 85.91, 85.81, 85.38, 49.92, 72.23)),
        kind="analysis",
    ),
)

FAMILY = Family(
    model_type="onlstm_transformer",
    prefix="ONLSTMTransformer",
    paper="Hao et al., 2019, *Towards Better Modeling Hierarchical Structure for Self-Attention with Ordered Neurons*",
    citation="""\
@inproceedings{hao2019towards,
  title = {Towards Better Modeling Hierarchical Structure for Self-Attention with Ordered Neurons},
  author = {Hao, Jie and Wang, Xing and Shi, Shuming and Zhang, Jinfeng and Tu, Zhaopeng},
  booktitle = {Proceedings of EMNLP-IJCNLP},
  year = {2019}
}
""",
    tables=TABLES,
    combinations=COMBINATIONS,
    further_classes={"ForSequencePairClassification": "AutoModelForSequenceClassification"},
    small={"encoder_layer_types": ["onlstm", "attention"], "encoder_layers": 2, "encoder_shortcut": True},
    subject=Subject(
        "tree", "binary tree given by the master gates", "syntactic_distance.inspect_tree", ("layer", "direction")
    ),
)
