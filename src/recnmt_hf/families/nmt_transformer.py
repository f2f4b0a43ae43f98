"""The base Transformer."""

from .family import Family, PaperFigure


FAMILY = Family(
    model_type="nmt_transformer",
    prefix="NMTTransformer",
    paper="Vaswani et al., 2017, *Attention Is All You Need*",
    citation="""\
@inproceedings{vaswani2017attention,
  title = {Attention Is All You Need},
  author = {Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and Gomez, Aidan N.
            and Kaiser, Lukasz and Polosukhin, Illia},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2017}
}
""",
    figures=(
        PaperFigure("WMT14 newstest2014", ("en", "de"), "base", "BLEU (multi-bleu)", "", "27.3"),
        PaperFigure("WMT14 newstest2014", ("en", "de"), "big", "BLEU (multi-bleu)", "", "28.4"),
    ),
    small={"self_attention_type": "directional"},
)
