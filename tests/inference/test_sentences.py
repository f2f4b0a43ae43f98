"""Texts of several sentences: splitting, joining the translations, and warnings of short translations."""

import json

import pytest
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.inference import DecodingOptions, Hypothesis, Translation, results
from recnmt_hf.inference.model_settings import EVIDENCE, ModelTask, read_model_task
from recnmt_hf.inference.results import is_far_too_short
from recnmt_hf.training.metrics import TextScorer
from recnmt_hf.training.testing import test_model as score_test_set


OPTIONS = {"beams": 2, "max_length_extra": 4, "max_length_factor": 0}


@pytest.mark.parametrize("spaces", [(" ", " "), ("  ", "\t"), ("\n", "\n\n  ")])
def test_a_text_is_translated_sentence_by_sentence(translator, sentences, spaces):
    text = f"{sentences[0]}{spaces[0]}{sentences[1]}{spaces[1]}{sentences[2]}"
    (found,) = translator(text, **OPTIONS)
    alone = [each.hypotheses[0] for each in translator(sentences[:3], **OPTIONS)]
    assert found.source == text
    assert found.text == f"{alone[0].text}{spaces[0]}{alone[1].text}{spaces[1]}{alone[2].text}"
    assert found.hypotheses[0].log_prob == pytest.approx(sum(each.log_prob for each in alone), abs=1e-9)
    assert found.hypotheses[0].tokens == [token for each in alone for token in each.tokens]


@pytest.mark.parametrize(
    ("options", "prefix", "summarizes", "is_split"),
    [
        ({}, "", False, True),
        ({"split_sentences": "never"}, "", False, False),
        ({"num_hypotheses": 2}, "", False, True),
        ({}, "Der", False, False),
        ({}, "", True, False),
        ({"on_long": "truncate"}, "", False, False),
        ({"split_sentences": "always"}, "Der", True, True),
        ({"split_sentences": "always", "on_long": "truncate"}, "", False, True),
    ],
)
def test_when_a_text_is_split(translator, sentences, options, prefix, summarizes, is_split):
    translator.task = ModelTask(summarizes=summarizes)
    prepared = translator.codec.encode(" ".join(sentences), DecodingOptions(beams=2, **options), prefix)
    assert len(prepared.pieces) == (len(sentences) if is_split else 1)
    assert translator.codec.encode(sentences[0], DecodingOptions(beams=2, **options)).separators == [""]


def test_alignments_have_positions_in_the_whole_text(translator, sentences):
    text = " ".join(sentences)
    (found,) = translator(text, alignments=True, **OPTIONS)
    expected, tokens, source = [], [], []
    for each in translator(sentences, alignments=True, **OPTIONS):
        best = each.hypotheses[0]
        expected += [(i + len(source), j + len(tokens)) for i, j in best.alignment]
        source += translator.encode_source(each.source).ids[:-1]
        tokens += best.tokens
    assert found.hypotheses[0].tokens == tokens and source == translator.encode_source(text).ids[:-1]
    assert found.hypotheses[0].alignment == expected and len(expected) > 3


def test_with_alignments_a_text_is_split_only_if_its_tokens_stay_the_same(translator, monkeypatch):
    """Otherwise positions would not refer to the text."""
    encode = translator.encode_source
    monkeypatch.setattr(translator, "encode_source", lambda text, *_, **__: encode(str(text).replace(". ", "_")))
    options = DecodingOptions(alignments=True), DecodingOptions()
    assert [len(translator.codec.encode("We sleep. We sleep.", each).pieces) for each in options] == [1, 2]


def test_a_long_sentence_of_a_text_is_rejected_or_split(translator, sentences):
    text = f"We sleep. {' '.join(each.rstrip('.') for each in sentences)}"
    with rejects(field="Sentence 1, part 2"):
        translator(text, max_source_length=12)
    prepared = translator.codec.encode(text, DecodingOptions(max_source_length=12, on_long="split"))
    assert len(prepared.pieces) > 2 and prepared.separators[:2] == ["", " "]
    assert prepared.pieces[0] == translator.encode_source("We sleep.")


def test_the_language_of_the_source(translator, monkeypatch):
    """The option takes precedence over the model's folder, and that over the tokenizer."""
    text = "Am 3. Mai schlief er."  # by the rules of another language, two sentences

    def parts(**options):
        return len(translator.codec.encode(text, DecodingOptions(**options)).pieces)

    assert parts() == parts(source_lang="fr") == 2 and parts(source_lang="de") == parts(source_lang="de-AT") == 1
    monkeypatch.setattr(translator.tokenizer, "source_lang", "de", raising=False)
    assert parts() == 1
    translator.task = ModelTask("en")
    assert parts() == 2 and parts(source_lang="de") == 1
    with rejects(field="source_lang"):
        DecodingOptions(source_lang="d e")


def test_the_task_in_a_folder(tmp_path):
    assert read_model_task(tmp_path) == read_model_task("someone/unknown", local_files_only=True) == ModelTask()
    for evidence, task in (
        ({"languages": ["zh", "zh"]}, ModelTask("zh", True, "zh")),
        ({"languages": ["zh", "en"], "recipe": {"training": {"text_metric": "rouge"}}}, ModelTask("zh", True, "en")),
        ({"languages": [], "recipe": {"training": {"text_metric": "bleu"}}}, ModelTask()),
        ({"languages": [1, None]}, ModelTask()),
        ([], ModelTask()),
    ):
        (tmp_path / EVIDENCE).write_text(json.dumps(evidence))
        assert read_model_task(tmp_path) == task


def test_scores_and_test_sets_do_not_split_lines(translator, sentences, monkeypatch, capsys):
    text = " ".join(sentences)
    whole = translator.encode_source(text)
    seen = []
    search = translator.search

    def observed(requests, *rest):
        seen.extend(piece for request in requests for piece in request.pieces)
        return search(requests, *rest)

    monkeypatch.setattr(translator, "search", observed)
    options = DecodingOptions(**OPTIONS)
    score, found, _ = score_test_set(translator, "set", [text], [["Ja, ja, ja."]], "de", options, TextScorer())
    assert "1 of 1 references are longer than max_length_factor and max_length_extra allow" in capsys.readouterr().err
    assert seen == [whole] and "split_sentences" not in score.decoding
    assert found == [translator(text, split_sentences="never", **OPTIONS)[0].text]
    expected = sum(translator.score_tokens([whole], [translator.encode_target("Ja.")], 4096)[0])
    assert translator.score([text], ["Ja."])[0].log_prob == pytest.approx(expected, abs=1e-9)


def test_tokens_of_a_split_text_are_not_scored(tiny_folder, tmp_path, capsys):
    (tmp_path / "a.en").write_text("We sleep.\nWe sleep. We sleep.\n")
    words = ["translate", str(tiny_folder), "-i", str(tmp_path / "a.en"), "--format", "jsonl", "--beams", "1"]
    for choice, code in (("auto", 2), ("never", 0)):
        records = tmp_path / f"{choice}.jsonl"
        # A random model does not end its translations.
        ending = ["--split-sentences", choice, "--generate", "forced_eos_token_id=2"]
        assert main([*words, "-o", str(records), *ending]) == 0
        assert main(["score", str(tiny_folder), "--jsonl", str(records)]) == code
    assert "has the tokens of several sentences," in capsys.readouterr().err


LONG = "The old farmer sees that the small dog follows the girl who loves the green bird."


@pytest.mark.parametrize(
    ("source", "text", "is_short"),
    [
        (LONG, "Der alte Bauer.", True),
        (LONG, "Der alte Bauer sieht den kleinen Hund.", False),
        (LONG, "", True),
        ("The dog sees the cat and the bird.", "Ja.", False),  # the source is too short
        (LONG, "老农夫看见小狗跟着女孩", False),
        (LONG, "老农夫看", True),
        ("老农夫看见小狗跟着爱绿鸟的女孩，他很高兴，因为女孩也爱小狗。", "The farmer.", True),
        ("老农夫看见小狗跟着爱绿鸟的女孩，他很高兴，因为女孩也爱小狗。", "The old farmer sees a small dog.", False),
    ],
)
def test_which_translations_are_far_too_short(source, text, is_short):
    assert is_far_too_short(Translation(source, [Hypothesis(text, -1.0, -1.0)])) is is_short
    cut = Hypothesis(text, -1.0, -1.0, finished=False)  # truncated by a limit
    assert not is_far_too_short(Translation(source, [cut]))


def test_a_call_warns_once(translator, monkeypatch):
    """Here translations always have two words."""

    def search(requests, *rest):
        return [[[Hypothesis("", -1.0, -1.0, [5, 2])] for _ in request.pieces] for request in requests]

    warnings = []
    monkeypatch.setattr(results.logger, "warning", warnings.append)
    monkeypatch.setattr(translator, "search", search)
    monkeypatch.setattr(translator.target_tokenizer, "batch_decode", lambda rows, **_: ["Wir sehen."] * len(rows))
    list(translator.translate([LONG, "We sleep."] * 7, buffer=3))
    assert len(warnings) == 1
    assert warnings[0].startswith("7 of 14 ") and "(sentence numbers: 1, 3, 5, 7, 9, ...)" in warnings[0]
