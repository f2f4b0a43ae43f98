"""Translating: penalties, n-best, lengths, empty and long input; scores equal those of translating."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers
from user_errors import rejects

import recnmt_hf
from recnmt_hf.data.records import Tokens
from recnmt_hf.inference import DecodingOptions, Translator
from recnmt_hf.inference.backends import torch_model


def test_scores_by_one_sentence_at_a_time(translator, corpus):
    """Scores of text do not depend on the batch, and are the sum of the model's own log-softmax."""
    pairs = corpus["test"][:8]
    together = translator.score([p.en for p in pairs], [p.de for p in pairs])
    for pair, score in zip(pairs, together, strict=True):
        assert translator.score([pair.en], [pair.de])[0].log_prob == pytest.approx(score.log_prob, abs=1e-9)
        labels = torch.tensor([translator.encode_target(pair.de).ids])
        loss = translator.model(torch.tensor([translator.encode_source(pair.en).ids]), labels=labels).loss
        assert score.log_prob == pytest.approx(-loss.item() * labels.shape[1], rel=1e-9)
    with pytest.raises(ValueError, match="shorter"):
        translator.score(["a", "b"], ["c"])
    with rejects(field="sources"):
        translator.score("ab", ["c", "d"])


def test_scores_and_alignments_never_hold_the_logits_of_a_batch(any_family, corpus, monkeypatch):
    """They would be gigabytes with large vocabularies. Alignments need none."""
    sources, targets = [pair.en for pair in corpus["test"][:8]], [pair.de for pair in corpus["test"][:8]]
    whole, rows, own = any_family.score(sources, targets), [], torch_model.chosen_log_probs

    def counted(logits, labels):
        rows.append(labels.numel())
        return own(logits, labels)

    with monkeypatch.context() as patch:
        patch.setattr(torch_model, "chosen_log_probs", counted)
        patch.setattr(torch_model, "LOGITS_AT_A_TIME", 5 * any_family.model.lm_head.out_features)
        parts = any_family.score(sources, targets)
    assert len(rows) > 8 and max(rows) == 5
    for one, other in zip(parts, whole, strict=True):
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)
    ids = list(map(any_family.encode_source, sources)), list(map(any_family.encode_target, targets))
    expected = any_family.align_tokens(*ids, None, 4096)
    monkeypatch.setattr(type(any_family.model), "forward", None)
    assert any_family.align_tokens(*ids, None, 4096) == expected


def test_long_sentences_are_rejected_or_split(translator, sentences):
    long = " ".join(sentences)
    limit = max(len(translator.encode_source(s)) for s in sentences)
    with rejects(field="Sentence 2"):
        translator([sentences[0], long], max_source_length=limit, split_sentences="never")
    whole = {"split_sentences": "never", "beams": 2, "max_length_extra": 3}
    split = translator([long, sentences[0]], max_source_length=limit, on_long="split", **whole)
    assert split[1].text == translator([sentences[0]], **whole)[0].text

    def pieces_of(text, limit):
        options = DecodingOptions(max_source_length=limit, on_long="split", split_sentences="never")
        return translator.codec.encode(text, options).pieces

    pieces = pieces_of(long, limit)
    assert all(len(piece) <= limit for piece in pieces)
    joined = " ".join(translator.tokenizer.decode(piece.ids, skip_special_tokens=True) for piece in pieces)
    assert joined == long, "nothing is cut"
    assert len(pieces_of("x" * 400, 20)) > 1
    numbers = " ".join(["It cost 1,000,000.50 at 12:30, see http://a.b/c."] * 4)
    pieces = pieces_of(numbers, len(translator.encode_source(numbers)) // 3)
    texts = [translator.tokenizer.decode(piece.ids, skip_special_tokens=False) for piece in pieces]
    assert len(texts) > 2 and all(text.count("http") == text.count("see") for text in texts if "http" in text)
    beyond = " ".join(sentences * 20)
    with rejects(field="Sentence 1"):
        translator([beyond], split_sentences="never")


def test_the_head_trained_to_align_words_is_the_default(translator, sentences, monkeypatch):
    pairs = [list(map(ids, sentences[:2])) for ids in (translator.encode_source, translator.encode_target)]

    def rows(layer=None, head=None):
        return np.concatenate([row.ravel() for row in translator.attention(*pairs, layer, head, 4096)])

    before, one, mean = rows(), rows(1, 2), rows(1)
    monkeypatch.setattr(translator.model.config, "alignment_head", [1, 2])
    assert np.array_equal(rows(), one) and not np.array_equal(before, one)
    assert np.array_equal(rows(1), mean) and np.array_equal(rows(0), before)


@pytest.mark.parametrize("literal", ["</s>", "<pad>", "the <s> dog", "a</s>b <unk>"])
def test_control_tokens_in_a_text_are_text(translator, literal):
    """Also with a tokenizer of another model, which would treat them as control tokens."""
    taking = type(translator.tokenizer)(
        tokenizer_object=translator.tokenizer.backend_tokenizer,
        **{f"{name}_token": getattr(translator.tokenizer, f"{name}_token") for name in ("pad", "bos", "eos", "unk")},
    )
    assert {0, 1, 2, 3} & set(taking(literal)["input_ids"][:-1])
    other = Translator(translator.model, taking)
    for encode in (other.encode_source, other.encode_target):
        assert encode(literal).ids[-1] == 2 and {0, 1, 2}.isdisjoint(encode(literal).ids[:-1])
    assert other.score([literal], [literal])[0].log_prob == translator.score([literal], [literal])[0].log_prob


NOTHING = ["\u200b", "\ufeff", "\u00ad", "\x00\x07", "\u2028", "\u200e \u2060", "\ufe0f\u3164"]


def test_invisible_text_has_an_empty_translation(translator, sentences):
    found = translator([*NOTHING, sentences[0]])
    assert [each.text for each in found[:-1]] == [""] * len(NOTHING) and found[-1].text
    assert all(each.hypotheses[0].tokens == [] and each.score == 0.0 for each in found[:-1])
    assert translator([NOTHING[0]], alignments=True)[0].hypotheses[0].alignment == []


def test_a_source_without_tokens(translator, monkeypatch):
    """Its translation is empty, also if the source has a control token of its own, such as one for the language."""
    assert not translator.codec.is_empty_source("x") and translator.codec.is_empty_source("\u200b")
    codec = translator.codec
    monkeypatch.setattr(codec, "control_ids", (codec.control_ids[0] | {9}, codec.control_ids[1]))
    for nothing in ([2], [9, 2]):
        monkeypatch.setattr(codec, "encode_source", lambda sentence, direction=None, nothing=nothing: Tokens(nothing))
        assert translator(["x"])[0].text == "" and translator.codec.is_empty_source("x")
        with rejects(field="Pair 1: source"):
            translator.score(["x"], ["a"])


def test_unknown_tokens_are_reported_once(translator, sentences, caplog):
    list(translator.translate(iter([*sentences[:2], "Ж Ж"]), beams=1, max_length_extra=1, buffer=1))
    assert caplog.text.count("of the source tokens are unknown to the tokenizer") == 1
    caplog.clear()
    translator(sentences[:2], beams=1, max_length_extra=1)
    assert "unknown" not in caplog.text
    translator.score(["Ж Ж Ж"], ["a"])
    assert "of the source tokens are unknown to the tokenizer" in caplog.text


def test_unscorable_pairs_are_rejected_by_their_place(translator):
    blank = [((text, "b"), ": source") for text in (" ", *NOTHING)]
    for pair, field in (*blank, (("b", [400]), ": translation"), (("b", [7] * 200), "")):
        for places in (None, ["one", "two"]):
            with rejects(field=f"{'two' if places else 'Pair 2'}{field}"):
                translator.score(["a", pair[0]], [[7] * 128, pair[1]], places=places)


def test_a_row_ends_with_its_end_token_or_before_its_padding(translator, monkeypatch):
    end, padding = translator.model.config.eos_token_id, translator.target_tokenizer.pad_token_id
    assert translator.codec.strip([7, 8, end, padding, 9]) == [7, 8, end] and translator.codec.strip([end, 7]) == [end]
    assert translator.codec.strip([7, padding, 8, padding, padding, padding]) == [7, padding, 8]
    assert translator.codec.strip([padding]) == []
    monkeypatch.setattr(translator.model.generation_config, "eos_token_id", [8, 9])
    assert translator.codec.strip([7, end, 9, 8]) == [7, end, 9]
    monkeypatch.setattr(translator.model.generation_config, "eos_token_id", None)
    assert translator.codec.strip([7, 8, end, 9]) == [7, 8, end], "as the configuration says"


@pytest.fixture
def two_vocabularies(corpus, tmp_path):
    """Return a model with words on one side and subwords on the other, and both tokenizers."""
    source = recnmt_hf.train_tokenizer((p.en for p in corpus["train"]), "word", 500)
    target = recnmt_hf.train_tokenizer((p.de for p in corpus["train"]), "bpe", 300)
    config = recnmt_hf.NMTTransformerConfig.from_preset(
        "tiny", vocab_size=len(source), decoder_vocab_size=len(target), share_encoder_decoder_embeddings=False
    )
    folder = tmp_path / "two-vocabularies"
    recnmt_hf.NMTTransformerForConditionalGeneration(config).save_pretrained(folder)
    source.save_pretrained(folder)
    target.save_pretrained(folder / "target_tokenizer")
    return folder, source, target


def test_target_tokenizer_of_its_own(two_vocabularies, sentences):
    folder, source, target = two_vocabularies
    translator = Translator.from_pretrained(folder, device="cpu")
    assert len(translator.tokenizer) == len(source) and len(translator.target_tokenizer) == len(target)
    expected = [each.text for each in translator(sentences[:2], beams=2, max_length_extra=2)]
    most = len(target) - 1
    assert most != len(source) - 1 and len(translator.score(["a"], [[5, most]])[0].token_log_probs) == 2
    with rejects(field="Pair 1: translation"):
        translator.score(["a"], [[5, most + 1]])
    assert json.loads((folder / "config.json").read_text())["decoder_vocab_size"] == len(target)
    for given in ({}, {"target_tokenizer": target}):
        pipe = transformers.pipeline("recnmt-translation", model=str(folder), device="cpu", **given)
        found = pipe(sentences[:2], beams=2, max_length_extra=2)
        assert [hypotheses[0]["translation_text"] for hypotheses in found] == expected


@pytest.mark.parametrize("separate", [True, False])
def test_target_tokenizer_of_the_hub(two_vocabularies, tiny_folder, tmp_path, separate):
    """Files are in the Hub's cache; a model without a target tokenizer uses its only one."""
    folder = two_vocabularies[0] if separate else tiny_folder
    cached = tmp_path / "cache" / "models--someone--pair"
    shutil.copytree(folder, cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    place = {"cache_dir": str(tmp_path / "cache"), "local_files_only": True}
    translator = Translator.from_pretrained("someone/pair", device="cpu", **place)
    assert (translator.target_tokenizer is not translator.tokenizer) == separate
    if separate:
        # An unreadable one is not ignored.
        (cached / "snapshots" / ("a" * 40) / "target_tokenizer" / "tokenizer.json").write_text("{")
        with rejects(field="someone/pair"):
            Translator.from_pretrained("someone/pair", device="cpu", **place)


@pytest.mark.parametrize(
    ("name", "fields", "limits"),
    [
        ("RNMT", {}, (None, None)),
        ("NMTTransformer", {}, (8, 7)),
        ("NMTTransformer", {"self_attention_type": "relative"}, (None, None)),
        ("NMTTransformer", {"decoder_position_embeddings": False}, (8, None)),
    ],
    ids=str,
)
def test_only_tables_of_positions_limit_a_sentence(tokenizer, name, fields, limits):
    config = getattr(recnmt_hf, f"{name}Config").from_preset(
        "tiny", vocab_size=len(tokenizer), share_encoder_decoder_embeddings=True, max_position_embeddings=8, **fields
    )
    model = getattr(recnmt_hf, f"{name}ForConditionalGeneration")(config)
    translator = recnmt_hf.Translator(model, tokenizer, check=False)
    assert (translator.backend.limits.source, translator.backend.limits.target) == limits
    if limits[0] is None:
        assert translator(["a b c d e f g h i j k"], max_new_tokens=1)


def test_limits_of_lengths(translator):
    """The limit follows the source, is at least the prefix and its end, and at most the model's."""
    options = DecodingOptions(max_length_factor=1.5, max_length_extra=2)
    assert translator.max_lengths([[5] * 3, [5]], [[], []], options) == [6, 3]
    none = DecodingOptions(max_length_factor=0.1, max_length_extra=0)
    assert translator.max_lengths([[5] * 3], [[]], none) == [1]
    assert translator.max_lengths([[5] * 3], [[7] * 4], none) == [5]
    assert translator.max_lengths([[5] * 500], [[]], options) == [translator.backend.limits.target]


def test_long_sentences_may_be_truncated(translator, sentences):
    """The end token and the prefix are kept."""
    options = DecodingOptions(max_source_length=6, on_long="truncate")
    whole = translator.encode_source(sentences[0]).ids
    prepared = translator.codec.encode(sentences[0], options, "Der Hund")
    assert prepared.pieces == [Tokens([*whole[:5], whole[-1]])] and prepared.separators == [""] and len(whole) > 6
    assert prepared.openings[0].ids == translator.encode_target("Der Hund").ids[:-1]
    assert translator.codec.encode_prefix(" ", "The sentence") == []
    at_limit = translator.codec.encode(sentences[0], DecodingOptions(max_source_length=len(whole)))
    assert at_limit.pieces == [Tokens(whole)] and at_limit.separators == [""]


def test_scores_are_left_out_on_request(translator, sentences):
    options = {"beams": 1, "max_length_extra": 5}
    (bare,) = translator.translate(sentences[:1], scores=False, **options)
    assert math.isnan(bare.score) and bare.text == translator(sentences[0], **options)[0].text
    for wanted, expected in ((True, []), (False, None)):
        assert translator("", alignments=wanted)[0].hypotheses[0].alignment == expected
