"""Packages of an extra that is not installed: the error names package and extra."""

import sys

import pytest
from user_errors import rejects

from recnmt_hf.analysis.plots import check_picture
from recnmt_hf.hub.marian import marian_tokenizer
from recnmt_hf.metrics import rouge_scores, tokenized_bleu_score
from recnmt_hf.metrics.bleu import moses_tokenizer


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("rouge_score", "metrics", lambda: rouge_scores(["a"], ["a"])),
        ("sacremoses", "metrics", lambda: tokenized_bleu_score(["a"], ["a"], language="de")),
        ("sentencepiece", "marian", lambda: marian_tokenizer("folder")),
        ("matplotlib", "plots", lambda: check_picture("a.png")),
    ],
)
def test_the_remedy_installs_the_extra(monkeypatch, module, extra, use):
    moses_tokenizer.cache_clear()
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with rejects('Run pip install "recnmt-hf[') as caught:
        use()
    assert f"[{extra}]" in str(caught.value) and module in str(caught.value)
