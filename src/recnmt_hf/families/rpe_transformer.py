"""RPEHead and MPRHead: recurrent positional embeddings."""

from .family import Family, PaperFigure, Subject


FAMILY = Family(
    model_type="rpe_transformer",
    prefix="RPETransformer",
    paper="Chen et al., 2019, *Recurrent Positional Embedding for Neural Machine Translation*",
    citation="""\
@inproceedings{chen2019recurrent,
  title = {Recurrent Positional Embedding for Neural Machine Translation},
  author = {Chen, Kehai and Wang, Rui and Utiyama, Masao and Sumita, Eiichiro},
  booktitle = {Proceedings of EMNLP-IJCNLP},
  year = {2019}
}
""",
    figures=(
        PaperFigure("WMT14 newstest2014", ("en", "de"), "base", "BLEU, MPRHead", "27.25", "28.35 (p < .01)"),
        PaperFigure("WMT14 newstest2014", ("en", "de"), "big", "BLEU, MPRHead", "28.22", "29.11 (p < .01)"),
        PaperFigure(
            "NIST02 / 03 / 04", ("zh", "en"), "base", "BLEU, MPRHead", "46.62 / 45.90 / 45.95", "47.69 / 47.27 / 47.31"
        ),
    ),
    small={"rpe_type": "mprhead", "rpe_cell": "lstm"},
    subject=Subject(
        "positions",
        "similarity of recurrent positional embeddings by distance",
        "recurrent_positions.inspect_positions",
        ("target",),
    ),
)
