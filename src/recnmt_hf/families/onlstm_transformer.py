"""LSTM, ON-LSTM and self-attention encoders."""

from .family import Family, PaperFigure, Subject


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
    figures=(
        PaperFigure("WMT14 newstest2014", ("en", "de"), "base", "BLEU", "27.31", "28.37 (p < .01)"),
        PaperFigure("WMT14 newstest2014", ("en", "de"), "big", "BLEU", "28.58", "29.30 (p < .01)"),
    ),
    further_classes={"ForSequencePairClassification": "AutoModelForSequenceClassification"},
    small={"encoder_layer_types": ["onlstm", "attention"], "encoder_layers": 2, "encoder_shortcut": True},
    subject=Subject(
        "tree", "binary tree given by the master gates", "syntactic_distance.inspect_tree", ("layer", "direction")
    ),
)
