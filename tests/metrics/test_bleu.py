"""Metrics against independent counts, and their evaluate.Metric form."""

import math
from collections import Counter
from contextlib import suppress

import langcodes
import pytest
import sacrebleu
from user_errors import rejects

from recnmt_hf import Bleu, ChrF, Ter, TokenizedBleu
from recnmt_hf.metrics import (
    bleu_tokenizer,
    compare_systems,
    sacrebleu_score,
    scores_by_length,
    ter_score,
    tokenized_bleu_score,
)


HYPOTHESES = ["the cat sat on the mat", "a dog barks at the old man", "he sees it", "rain falls in the night"]
REFERENCES = ["the cat sat on a mat", "a dog barked at the old man", "he sees it now", "rain fell in the night"]
SECOND = ["the cat is on the mat", "a dog barks at an old man", "he can see it", "it rains in the night"]


def multi_bleu(hypotheses, streams):
    """Corpus BLEU by its definition (Papineni et al., 2002): clipped n-gram counts, closest reference length."""
    matches, totals, length, reference_length = [0] * 4, [0] * 4, 0, 0
    for i, hypothesis in enumerate(hypotheses):
        words = hypothesis.split()
        references = [stream[i].split() for stream in streams]
        length += len(words)
        reference_length += min((abs(len(r) - len(words)), len(r)) for r in references)[1]
        for n in range(1, 5):
            grams = Counter(tuple(words[j : j + n]) for j in range(len(words) - n + 1))
            most = Counter()
            for reference in references:
                most |= Counter(tuple(reference[j : j + n]) for j in range(len(reference) - n + 1))
            matches[n - 1] += sum((grams & most).values())
            totals[n - 1] += sum(grams.values())
    if 0 in matches:
        return 0.0
    mean = math.exp(sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / 4)
    return 100 * min(1.0, math.exp(1 - reference_length / length)) * mean


@pytest.mark.parametrize("streams", [[REFERENCES], [REFERENCES, SECOND]], ids=["one", "two"])
def test_tokenized_bleu_is_multi_bleu(streams):
    assert tokenized_bleu_score(HYPOTHESES, streams).score == pytest.approx(multi_bleu(HYPOTHESES, streams), abs=1e-9)
    upper = [line.title() for line in HYPOTHESES]
    assert tokenized_bleu_score(upper, streams).score < tokenized_bleu_score(upper, streams, lowercase=True).score
    assert tokenized_bleu_score(upper, streams, lowercase=True).score == pytest.approx(multi_bleu(HYPOTHESES, streams))
    assert tokenized_bleu_score(["x y z"], [["a b c"]]).score == 0.0


def test_signatures():
    score = sacrebleu_score(HYPOTHESES, REFERENCES)
    assert score.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "case:lc" in sacrebleu_score(HYPOTHESES, REFERENCES, lowercase=True).signature
    tokenized = tokenized_bleu_score(HYPOTHESES, REFERENCES, language="en")
    assert "tok:none|smooth:none" in tokenized.signature and tokenized.signature.endswith("pretok:moses-en")
    assert str(score).startswith(f"BLEU {score.score:.2f}, length ratio {score.length_ratio:.3f}, brevity penalty ")


def test_texts_without_spaces_are_compared_by_parts():
    """For every form of a code, as sacrebleu chooses where it does; one wrong character does not make BLEU 0."""
    texts = {"zh": "我今天去学校看书", "ja": "今日は学校で本を読む", "th": "วันนี้ฉันไปโรงเรียน", "lo": "ມື້ນີ້ຂ້ອຍໄປໂຮງຮຽນ"}
    texts |= {"km": "ថ្ងៃនេះខ្ញុំទៅសាលា", "ko": "나는오늘학교에갑니다", "my": "ဒီနေ့ကျောင်းသွားတယ်", "bo": "དེ་རིང་ང་སློབ་གྲྭར་འགྲོ"}
    for language, text in texts.items():
        forms = {language, f"{language}-XX", langcodes.get(language).to_alpha3(), f"{language.upper()}_Abcd"}
        (tokenizer,) = set(map(bleu_tokenizer, forms))
        score = sacrebleu_score([text[:-1] + "x"], [text], tokenize=tokenizer)
        assert score.score > 50 > sacrebleu_score([text[:-1] + "x"], [text]).score == 0
        assert f"tok:{tokenizer}|" in score.signature
        with suppress(RuntimeError):  # its package is not installed
            own = sacrebleu.BLEU(trg_lang=language).tokenizer.signature()
            assert own == "13a" or tokenizer == own
    assert bleu_tokenizer("cmn_Hans") == bleu_tokenizer("yue") == "zh"
    assert {bleu_tokenizer(code) for code in (None, "", "de", "eng_Latn", "unknown")} == {"13a"}


def test_tokenized_bleu_separates_words_as_moses_does():
    """French elides, English does not; an ampersand stays one, so that both sides may be counted by hand."""
    french, apart = ["l'homme & l'enfant voient l'arbre ."], ["l' homme & l' enfant voient l' arbre ."]
    references = ["l'homme & l'enfant voit l'arbre ."]
    found = tokenized_bleu_score(french, references, language="fr")
    assert found.score == pytest.approx(multi_bleu(apart, [["l' homme & l' enfant voit l' arbre ."]]))
    assert (found.name, found.signature.rpartition("|")[2]) == ("tokenized BLEU", "pretok:moses-fr")
    assert tokenized_bleu_score(["a & b c"], ["a &amp; b c"], language="en").score == 0


@pytest.mark.parametrize("metric", [Bleu, ChrF, Ter, TokenizedBleu])
def test_metric_classes(metric):
    single = metric().compute(predictions=HYPOTHESES, references=REFERENCES)
    assert single == metric().compute(predictions=HYPOTHESES, references=[[r] for r in REFERENCES])
    both = metric().compute(predictions=HYPOTHESES, references=[list(r) for r in zip(REFERENCES, SECOND, strict=True)])
    assert "nrefs:2" in both["signature"]


def test_wrong_values():
    with rejects(field="reference 1"):
        sacrebleu_score(HYPOTHESES, REFERENCES[:3])
    for references in ([], "one text", [["a"] * 4, "b"]):
        with rejects(field="references"):
            sacrebleu_score(HYPOTHESES, references)
    with rejects(field="language"):
        tokenized_bleu_score(HYPOTHESES, REFERENCES, language="german")
    with rejects(field="edges"):
        scores_by_length(["a"] * 4, HYPOTHESES, REFERENCES, [15, 15])
    for systems in ({"a": HYPOTHESES}, [("a", HYPOTHESES), ("a", SECOND)]):
        with rejects("A comparison needs a baseline"):
            compare_systems(systems, REFERENCES)
    for options in ({"samples": 0}, {"seed": 0}, {"tokenize": "klingon"}, {"method": "t-test"}):
        with rejects(field=next(iter(options))):
            compare_systems({"a": HYPOTHESES, "b": SECOND}, REFERENCES, **options)


def test_bins_by_length():
    sources = ["w " * n for n in (3, 15, 16, 60)]
    bins = scores_by_length(sources, HYPOTHESES, REFERENCES, [15, 30, 45])
    assert [(name, count) for name, count, _ in bins] == [("(0, 15]", 2), ("(15, 30]", 1), ("(45, inf]", 1)]
    assert bins[0][2].score == pytest.approx(sacrebleu_score(HYPOTHESES[:2], REFERENCES[:2]).score)
    empty = scores_by_length(["", *sources[1:]], HYPOTHESES, REFERENCES, [15])
    assert empty[0][0] == "[0, 15]" and sum(count for _, count, _ in empty) == len(sources)
    unspaced = scores_by_length(["我今天去 学校", "one two", "วันนี้", "one"], HYPOTHESES, REFERENCES, [2, 6])
    assert [(name, count) for name, count, _ in unspaced] == [("(0, 2]", 2), ("(2, 6]", 2)]


def test_tokenizer_of_bins_and_significance():
    """The tokenizer of the score is also that of bins and tests: characters of a language without spaces."""
    references = ["我们 看见 一只 猫 。", "他 来 了 。", "你 好 吗 ？", "是 的 。"]
    hypotheses = ["我们 看见 两只 猫 。", "他 来 了 。", "你 好 ？", "是 的 。"]
    score = sacrebleu_score(hypotheses, references, tokenize="zh").score
    (everything,) = scores_by_length(["one two"] * 4, hypotheses, references, [15], tokenize="zh")
    first, _ = compare_systems({"a": hypotheses, "b": references}, references, samples=10, tokenize="zh")
    assert everything[2].score == first.score == score != sacrebleu_score(hypotheses, references).score
    assert "tok:zh" in everything[2].signature and "tok:zh" in first.signature


def test_ter_counts_characters_of_languages_without_spaces():
    references, hypotheses = ["孙亮，字子明，是孙权的小儿子。"], ["孙亮，字子明，是孙权的大儿子。"]
    score = ter_score(hypotheses, references, "zh")
    assert score.score == pytest.approx(100 / 15) and "asian:yes" in score.signature
    assert ter_score(hypotheses, references).score == 100


def test_tokenizers_that_cannot_be_used(monkeypatch):
    with rejects(field="tokenize"):
        Bleu().compute(predictions=HYPOTHESES, references=REFERENCES, tokenize="mecab")

    def lacks(name):
        raise RuntimeError("Please install mecab-python3.")

    monkeypatch.setattr(sacrebleu.metrics.bleu, "_get_tokenizer", lacks)
    with rejects(field="tokenize"):
        sacrebleu_score(HYPOTHESES, REFERENCES, tokenize="ja-mecab")
