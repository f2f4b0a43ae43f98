"""Word alignments: formats, error rate, sub-words to words, and the way from a saved model to links and a picture."""

import evaluate
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from user_errors import rejects

from recnmt_hf import AlignmentErrorRate, RNMTConfig, RNMTForConditionalGeneration, Translator, train_tokenizer
from recnmt_hf.commands.main import main
from recnmt_hf.data.alignments import words_of_tokens
from recnmt_hf.inference.translator import align_pairs
from recnmt_hf.metrics.alignment import alignment_error_rate, format_links, parse_links


PAIRS = [("The dog sleeps .", "Der Hund schläft ."), ("The old teacher sees the cat , and sings .", "Er singt .")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A saved RNMT, untrained."""
    torch.manual_seed(3)
    config = RNMTConfig.from_preset("tiny", vocab_size=len(tokenizer), d_model=32, init_uniform=None)
    path = tmp_path_factory.mktemp("rnmt")
    RNMTForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_links_in_and_out():
    gold = parse_links("0-0 2p1 1?3")
    assert gold.sure == {(0, 0)} and gold.possible == {(0, 0), (2, 1), (1, 3)}
    assert parse_links("1-1 2p2", one_based=True).possible == {(0, 0), (1, 1)}
    assert format_links({(2, 1), (0, 5)}) == "0-5 2-1"
    assert parse_links("").possible == set() and format_links([]) == ""
    with rejects(field="gold, line 3"):
        parse_links("0-0 1:2", "gold, line 3")
    with rejects(field="the alignment"):
        parse_links("0-1", one_based=True)


def test_error_rate_by_hand():
    """Two sentences counted together: A = 4, S = 3, A & S = 2, A & P = 3."""
    gold = [parse_links("0-0 1-1 2p2"), parse_links("0-1")]
    found = [{(0, 0), (2, 2), (1, 0)}, {(0, 1)}]
    score = alignment_error_rate(found, gold)
    assert score.aer == pytest.approx(1 - (2 + 3) / (4 + 3))
    assert (score.precision, score.recall) == pytest.approx((3 / 4, 2 / 3))
    assert (score.links, score.sure, score.possible) == (4, 3, 4)
    assert str(score) == "AER 28.57 (precision 75.00, recall 66.67; 4 links, 3 sure, 4 possible)"
    with rejects(field="alignments"):
        alignment_error_rate(found[:1], gold)
    for links, gold, expected in ((set(), "0-0", (1, 0, 0)), ({(0, 0)}, "0p0", (0, 1, 0))):
        score = alignment_error_rate([links], [parse_links(gold)])
        assert (score.aer, score.precision, score.recall) == expected
    with rejects("Neither the alignments nor the gold"):
        alignment_error_rate([set()], [parse_links("0p0")])


def test_metric_of_evaluate():
    metric = AlignmentErrorRate()
    assert isinstance(metric, evaluate.Metric) and metric.description.startswith("Alignment error rate")
    result = metric.compute(predictions=["0-0 2-2 1-0", "0-1"], references=["0-0 1-1 2p2", "0-1"])
    assert result["aer"] == pytest.approx(2 / 7)
    metric.add_batch(predictions=["1-1"], references=["1-1"])
    assert metric.compute(one_based=True)["aer"] == 0
    assert (result["precision"], result["recall"]) == pytest.approx((3 / 4, 2 / 3))
    with rejects(field="reference 2"):
        metric.compute(predictions=["1-1", "1-1"], references=["1-1", "0-1"], one_based=True)


@pytest.mark.parametrize("kind", ["bpe", "word", "character"])
def test_tokens_belong_to_the_words_they_are_parts_of(kind):
    texts = ["Unhappily, the 12 dogs' owners  sleep !", "ein schöner Tag"]
    tokenizer = train_tokenizer(texts * 3, kind, 60 if kind != "word" else 40)
    for text in texts:
        ids, words = words_of_tokens(tokenizer, text)
        assert ids == tokenizer(text)["input_ids"] and words[-1] is None and None not in words[:-1]
        parts = {}
        for token, word in zip(ids, words, strict=True):
            if word is not None:
                parts[word] = parts.get(word, "") + tokenizer.convert_ids_to_tokens(token).replace("▁", "").strip()
        assert [parts[word] for word in sorted(parts)] == text.split()
    ids, words = words_of_tokens(tokenizer, "Ж the")  # unknown characters are words all the same
    assert words[0] == 0 and words[-2] == 1


def test_bytes_belong_to_the_word_of_their_character():
    tokenizer = train_tokenizer(["the dog"] * 3, "bpe", 300, byte_fallback=True)
    ids, words = words_of_tokens(tokenizer, "the Ж世 dog 🙂")
    assert len(ids) > 12 and words.pop() is None
    assert words == sorted(words) and words.count(1) >= 5 and words.count(3) >= 4 and set(words) == {0, 1, 2, 3}


class TokenizerOfTwoSides(PreTrainedTokenizerFast):
    """Each character is a token, spaces too; a translation begins with a token for its language."""

    def _switch_to_input_mode(self):
        self._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])

    def _switch_to_target_mode(self):
        special = [("<de>", 1), ("</s>", 2)]
        self._tokenizer.post_processor = TemplateProcessing(single="<de> $A </s>", special_tokens=special)


def test_spaces_and_control_tokens_anywhere():
    """A space belongs to the word behind it, or to the last one."""
    symbols = ["<pad>", "<de>", "</s>", "<unk>", " ", "a", "b"]
    backend = Tokenizer(WordLevel({symbol: id for id, symbol in enumerate(symbols)}, "<unk>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer = TokenizerOfTwoSides(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<de>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer._switch_to_input_mode()
    words = [0, 0, 0, 1, 1, 1, None]
    assert words_of_tokens(tokenizer, " ab b ") == ([4, 5, 6, 4, 6, 4, 2], words)
    assert words_of_tokens(tokenizer, " ab b ", is_target=True) == ([1, 4, 5, 6, 4, 6, 4, 2], [None, *words])


def test_links_to_the_end_token_are_dropped(folder, monkeypatch):
    translator = Translator.from_pretrained(folder, device="cpu")
    source, target = "The dog", "Der Hund"
    _, words = words_of_tokens(translator.tokenizer, source)
    _, spoken = words_of_tokens(translator.target_tokenizer, target, True)
    attention = torch.zeros(1, 1, len(spoken), len(words))
    attention[..., -1] = 1.0
    attention[0, 0, [word == 1 for word in spoken]] = torch.tensor([0.6 * (word == 0) for word in words])
    monkeypatch.setattr(translator.backend, "attention", lambda sources, targets: (attention,))
    (found,) = align_pairs(translator, [source], [target])
    assert found.links == [(0, 1)] and found.to_pharaoh() == "0-1"


@pytest.mark.parametrize("model", ["folder", "tiny_folder"])
def test_translate_and_align_link_alike(model, corpus, request):
    """One rule: where each word is a token, the links of a hypothesis are those of aligning its text, end token too."""
    source = Translator.from_pretrained(request.getfixturevalue(model), device="cpu")
    words = train_tokenizer((text for pair in corpus["train"] for text in pair[:2]), "space", 400)
    translator = Translator(source.model, words)
    with torch.no_grad():
        for parameter in translator.model.parameters():
            parameter.mul_(3.0)  # attention that differs between words
    sentences = [pair.en for pair in corpus["train"] if 3 not in words(pair.en)["input_ids"]][:6]
    assert len(sentences) > 2
    linked = 0
    for layer in (None, 0, "mean"):
        options = {"beams": 1, "alignments": True, "max_length_extra": 2, "alignment_layer": layer}
        for translation in translator(sentences, **options):
            hypothesis = translation.hypotheses[0]
            if hypothesis.text:
                assert words(hypothesis.text)["input_ids"][:-1] == [id for id in hypothesis.tokens if id != 2]
                (found,) = align_pairs(translator, [translation.source], [hypothesis.text], layer)
                assert found.links == [tuple(link) for link in hypothesis.alignment]
                linked += len(found.links)
    assert linked


def test_words_of_which_nothing_is_left_get_no_link(folder):
    """The tokenizer drops a zero-width space that stands alone, which is a word to whoever counts spaces."""
    translator = Translator.from_pretrained(folder, device="cpu")
    (found,) = align_pairs(translator, ["The dog"], ["Der \u200b Hund \u200b"])
    assert found.weights.shape == (4, 3) and len(found.target) == 4
    assert {j for _, j in found.links} <= {0, 1, 2} and not found.weights[3].any()


def test_attention_is_the_models_own(folder):
    """A batch of pairs as each alone; weights add up; they are the additive attention of forced decoding."""
    translator = Translator.from_pretrained(folder, device="cpu")
    together = list(align_pairs(translator, *zip(*PAIRS, strict=True)))
    for (source, target), found in zip(PAIRS, together, strict=True):
        (alone,) = align_pairs(translator, [source], [target])
        np.testing.assert_allclose(found.weights, alone.weights, atol=1e-6)
        np.testing.assert_allclose(found.weights.sum(1), 1.0, atol=1e-5)
        assert found.source == source.split() and found.target == target.split()
        assert found.weights.shape == (len(found.target), len(found.source) + 1)
        assert len({j for _, j in found.links}) == len(found.links)
        labels = translator.target_tokenizer(target, return_tensors="pt")["input_ids"]
        inputs = translator.tokenizer(source, return_tensors="pt")
        attention = translator.model(**inputs, labels=labels, output_attentions=True).cross_attentions[0][0, 0]
        _, words = words_of_tokens(translator.tokenizer, source)
        _, spoken = words_of_tokens(translator.target_tokenizer, target, True)
        own = attention[[word == 0 for word in spoken]].mean(0)[[word == 1 for word in words]].sum()
        assert found.weights[0, 1] == pytest.approx(own.item(), abs=1e-5)
    with pytest.raises(ValueError, match="is longer"):
        list(align_pairs(translator, ["a"], ["a", "b"]))
    with rejects(field="Pair 2: source"):
        list(align_pairs(translator, ["a", " "], ["a", "b"]))


@pytest.fixture
def files(tmp_path):
    for name, side in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        (tmp_path / name).write_text("\n".join(side), encoding="utf-8")
    (tmp_path / "gold").write_text("0-0 1-1 2-2 3p3\n9-1\n")
    return tmp_path


def test_command(folder, files, capsys):
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    pairs = ["--source", str(files / "source"), "--target", str(files / "target"), "--device", "cpu"]
    assert main(["align", str(folder), *pairs]) == 0
    lines = capsys.readouterr().out.splitlines()
    translator = Translator.from_pretrained(folder, device="cpu")
    assert lines == [found.to_pharaoh() for found in align_pairs(translator, *zip(*PAIRS, strict=True))]
    assert main(["align", str(folder), "--text", *PAIRS[0], "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:1]
    output, gold = ["-o", str(files / "links"), "--plot", str(files / "a.png")], ["--gold", str(files / "gold")]
    assert main(["align", str(folder), *pairs, *output, *gold, "--pair", "2"]) == 0
    assert (files / "a.png").stat().st_size > 5000
    measured = capsys.readouterr().out.splitlines()[-1]
    assert measured.startswith("AER ") and "5 possible" in measured
    assert (files / "links").read_text().splitlines() == lines
    assert main(["align", "--links", str(files / "links"), *gold]) == 0
    assert capsys.readouterr().out.strip() == measured
    (files / "gold").write_text("0-0 1-1 2-2 3p3\n9:1\n")
    assert main(["align", "--links", str(files / "links"), *gold]) == 2
    assert "gold, line 2" in capsys.readouterr().err


def test_command_for_a_transformer(tiny_folder, files, capsys):
    pairs = ["--source", str(files / "source"), "--target", str(files / "target"), "--device", "cpu"]
    outputs = []
    for choice in ([], ["--layer", "0"], ["--layer", "1"], ["--layer", "mean"], ["--layer", "1", "--head", "2"]):
        assert main(["align", str(tiny_folder), *pairs, *choice]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and all(len(output.splitlines()) == 2 for output in outputs)
