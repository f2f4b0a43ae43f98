"""VRNMT: latent variables in the decoder of a recurrent encoder-decoder."""

from .family import Family, PaperRow
from .rnmt import NIST


TABLES = (
    NIST.table(
        "table 1",
        PaperRow("RNNsearch*", (37.93, 40.53, 36.65, 35.80, 37.73)),
        PaperRow("VRNMT", (38.08, 41.07, 36.82, 36.72, 38.17)),
        size="zh_en",
        note="Printed by Zhang et al. (2018), the paper of RNMT.",
    ),
)

FAMILY = Family(
    model_type="vrnmt",
    prefix="VRNMT",
    paper="Su et al., 2018, *Variational Recurrent Neural Machine Translation*",
    citation="""\
@inproceedings{su2018variational,
  title = {Variational Recurrent Neural Machine Translation},
  author = {Su, Jinsong and Wu, Shan and Xiong, Deyi and Lu, Yaojie and Han, Xianpei and Zhang, Biao},
  booktitle = {Proceedings of AAAI},
  year = {2018}
}
""",
    tables=TABLES,
    small={"decoder_layers": 1, "readout_dropout": 0.0, "init_uniform": None},
)
