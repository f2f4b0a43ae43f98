"""Faults of translations that a score does not show."""

import pytest

from recnmt_hf.metrics.suspicion import suspicions


REFERENCES = [f"the farmer number {i} sees a dog" for i in range(20)]
SOURCES = [f"der Bauer Nummer {i} sieht einen Hund" for i in range(20)]


@pytest.mark.parametrize(
    ("hypotheses", "fault"),
    [
        (["yes", "no", "the dog sleeps in the house"] * 4 + REFERENCES[12:], "one of three strings"),
        (SOURCES[:6] + REFERENCES[6:], "copies of their sources"),
        (["the farmer"] * 1 + [f"{i}" for i in range(6)] + REFERENCES[7:], "shorter than half"),
        ([text + " and" + text * 2 for text in REFERENCES[:6]] + REFERENCES[6:], "longer than twice"),
    ],
)
def test_each_fault_is_one_sentence(hypotheses, fault):
    assert fault in next(suspicions(hypotheses, REFERENCES, SOURCES))


def test_texts_without_spaces_need_their_language():
    texts = ["农夫有一条狗。", "她读书。"]
    assert "language" in next(suspicions(texts, texts, tokenize="13a"))
    assert list(suspicions(texts, texts, tokenize="zh")) == list(suspicions(SOURCES, SOURCES, tokenize="13a")) == []


def test_good_translations_and_equal_sources_raise_no_suspicion():
    assert [*suspicions(REFERENCES, REFERENCES, SOURCES), *suspicions(["yes"] * 20, ["yes"] * 20, ["ja"] * 20)] == []
