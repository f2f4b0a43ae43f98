"""RPEHead and MPRHead: recurrent positional embeddings."""

from .family import COMBINATIONS, WMT14, Family, PaperRow, PaperTask, Subject


NIST = PaperTask("NIST", ("zh", "en"), "BLEU", ("NIST02", "NIST03", "NIST04"))

TABLES = (
    WMT14.table(
        "table 1",
        PaperRow("Transformer", (27.25,), parameters=97.35),
        PaperRow("relative", (27.60,), parameters=97.42),
        PaperRow("directional", (27.66,), parameters=97.39),
        PaperRow("RPEHead", (28.11,), "< .01", parameters=97.84),
        PaperRow("MPRHead", (28.35,), "< .01", parameters=97.72),
    ),
    WMT14.table(
        "table 1",
        PaperRow("Transformer", (28.22,), parameters=272.6),
        PaperRow("MPRHead", (29.11,), "< .01", parameters=289.1),
        size="big",
        note="No reading of the equations gives MPRHead 16.5M parameters more.",
    ),
    NIST.table(
        "table 2",
        PaperRow("Transformer", (46.62, 45.90, 45.95), parameters=77.94),
        PaperRow("relative", (46.91, 46.47, 45.96), parameters=77.01),
        PaperRow("RPEHead", (47.06, 46.21, 46.32), parameters=78.04),
        PaperRow("MPRHead", (47.69, 47.27, 47.31), "< .01", parameters=78.04),
        note="The 77.01M parameters of relative positions are fewer than those of the baseline.",
    ),
    NIST.table(
        "table 2",
        PaperRow("Transformer", (47.88, 47.58, 47.37), parameters=243.7),
        PaperRow("MPRHead", (48.73, 48.61, 48.21), "< .01", parameters=245.5),
        size="big",
    ),
    WMT14.table(
        "table 3",
        PaperRow("Transformer", (27.25,), parameters=97.35),
        PaperRow("Transformer without decoder PE", (26.73,)),
        PaperRow("Transformer without encoder PE", (10.71,)),
        PaperRow("RPEHead", (28.11,), "< .01", parameters=97.84),
        PaperRow("RPEHead without decoder RPE and PE", (27.54,)),
        PaperRow("RPEHead without encoder RPE and PE", (11.16,)),
        PaperRow("MPRHead", (28.35,), "< .01", parameters=97.72),
        PaperRow("MPRHead without decoder RPE and PE", (27.74,)),
        PaperRow("MPRHead without encoder RPE and PE", (10.89,)),
        PaperRow("MPRHead without any RPE and PE", (10.43,)),
        proposed="MPRHead",
        kind="ablation",
    ),
)

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
    tables=TABLES,
    combinations=COMBINATIONS,
    small={"rpe_type": "mprhead", "rpe_cell": "lstm"},
    subject=Subject(
        "positions",
        "similarity of recurrent positional embeddings by distance",
        "recurrent_positions.inspect_positions",
        ("target",),
    ),
)
