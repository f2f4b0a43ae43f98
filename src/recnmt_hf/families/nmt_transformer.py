"""The base Transformer."""

from .family import Family, PaperRow, PaperTask


WMT14 = PaperTask("WMT14", ("en", "de"), "BLEU (multi-bleu)", ("newstest2014",))

TABLES = (
    WMT14.table("table 2", PaperRow("Transformer", (27.3,), parameters=65)),
    WMT14.table("table 2", PaperRow("Transformer", (28.4,), parameters=213), size="big"),
)

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
    tables=TABLES,
    small={"self_attention_type": "directional"},
)
