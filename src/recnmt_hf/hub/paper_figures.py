"""What the papers report for their models, to stand beside what a model of the zoo scored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperFigure:
    """
    A row of a paper's table.

    Attributes:
        task (`str`): Corpus and languages.
        languages (`tuple[str, str]`): Source and target.
        size (`str`): The preset that it corresponds to.
        metric (`str`): What was measured.
        baseline (`str`): What the paper's own baseline has.
        model (`str`): What its model has.
    """

    task: str
    languages: tuple[str, str]
    size: str
    metric: str
    baseline: str
    model: str


WMT14, EN_DE, ZH_EN = "WMT14 newstest2014", ("en", "de"), ("zh", "en")
# model_type -> paper, and its rows
PAPERS: dict[str, tuple[str, tuple[PaperFigure, ...]]] = {
    "nmt_transformer": (
        "Vaswani et al., 2017, *Attention Is All You Need*",
        (
            PaperFigure(WMT14, EN_DE, "base", "BLEU (multi-bleu)", "", "27.3"),
            PaperFigure(WMT14, EN_DE, "big", "BLEU (multi-bleu)", "", "28.4"),
        ),
    ),
    "biarn_transformer": (
        "Hao et al., 2019, *Modeling Recurrence for Transformer*",
        (
            PaperFigure(WMT14, EN_DE, "base", "BLEU", "27.31", "28.21 (p < .01)"),
            PaperFigure(WMT14, EN_DE, "big", "BLEU", "28.58", "28.98 (p < .05)"),
            PaperFigure("WMT17 newstest2017", ZH_EN, "base", "BLEU", "24.13", "24.70 (p < .01)"),
            PaperFigure("WMT17 newstest2017", ZH_EN, "big", "BLEU", "24.56", "25.10 (p < .01)"),
        ),
    ),
    "rpe_transformer": (
        "Chen et al., 2019, *Recurrent Positional Embedding for Neural Machine Translation*",
        (
            PaperFigure(WMT14, EN_DE, "base", "BLEU, MPRHead", "27.25", "28.35 (p < .01)"),
            PaperFigure(WMT14, EN_DE, "big", "BLEU, MPRHead", "28.22", "29.11 (p < .01)"),
            PaperFigure(
                "NIST02 / 03 / 04", ZH_EN, "base", "BLEU, MPRHead", "46.62 / 45.90 / 45.95", "47.69 / 47.27 / 47.31"
            ),
        ),
    ),
    "onlstm_transformer": (
        "Hao et al., 2019, *Towards Better Modeling Hierarchical Structure for Self-Attention with Ordered Neurons*",
        (
            PaperFigure(WMT14, EN_DE, "base", "BLEU", "27.31", "28.37 (p < .01)"),
            PaperFigure(WMT14, EN_DE, "big", "BLEU", "28.58", "29.30 (p < .01)"),
        ),
    ),
    "gret": (
        "Weng et al., 2020, *GRET: Global Representation Enhanced Transformer*",
        (
            PaperFigure(WMT14, EN_DE, "base", "BLEU", "27.20", "28.46 (p < .05)"),
            PaperFigure(WMT14, EN_DE, "big", "BLEU", "28.47", "29.33"),
            PaperFigure(WMT14, ("de", "en"), "base", "BLEU", "32.34", "33.79 (p < .01)"),
            PaperFigure("WMT16", ("ro", "en"), "base", "BLEU", "32.17", "33.06 (p < .01)"),
            PaperFigure("WMT17", ZH_EN, "base", "BLEU", "24.31", "25.53 (p < .01)"),
            PaperFigure(
                "LCSTS", ("zh", "zh"), "base", "ROUGE-1 / 2 / L", "43.14 / 29.26 / 39.72", "44.77 / 30.96 / 41.21"
            ),
        ),
    ),
    "rnmt": (
        "Zhang et al., 2018, *Refining Source Representations with Relation Networks for Neural Machine Translation*",
        (
            PaperFigure("NIST MT03 to MT06, average", ZH_EN, "", "BLEU (case-insensitive)", "37.73", "39.21 (p < .01)"),
            PaperFigure("WMT17 newstest2017", EN_DE, "", "BLEU (case-insensitive)", "20.1", "21.8"),
        ),
    ),
}
