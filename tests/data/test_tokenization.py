"""Tokenizers: plain text comes back, AutoTokenizer loads them."""

import pickle
import random
from statistics import mean

import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from user_errors import rejects

from recnmt_hf import NMTTransformerConfig
from recnmt_hf._plain_text import ids_of_texts
from recnmt_hf.data.tokenization import ResegmentedDataset, Resegmenter, add_tags, train_tokenizer


TEXTS = [
    "The dog's bag cost $3.50 (really), didn't it?",
    "„Straßenbahn“ — 20 % teurer; e-mail: a_b@c.de!",
    "你好，世界。今天天气很好！",
    "Ein kurzer Satz.",
]


@pytest.mark.parametrize("kind", ["bpe", "word", "space", "character"])
def test_text_comes_back(kind, tmp_path, corpus):
    texts = TEXTS + [text for pair in corpus["train"] for text in pair[:2]]
    train_tokenizer(texts, kind, 3000).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(" \u2581 \t".join(text.split()))["input_ids"] == ids  # of the last text
    padded = tokenizer(texts[:3], padding=True, return_tensors="pt")
    assert set(padded) == {"input_ids", "attention_mask"}


def test_special_ids_are_the_configurations_defaults(tokenizer):
    config = NMTTransformerConfig()
    ids = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    assert ids == (config.pad_token_id, config.decoder_start_token_id, config.eos_token_id)


def test_sizes_and_words(corpus):
    texts = [pair.en for pair in corpus["train"]]
    assert len(train_tokenizer(texts, "bpe", 300)) == 300
    words = train_tokenizer(texts, "word", 5000)
    assert words.tokenize("The dog, I see.") == ["▁The", "▁dog", ",", "▁I", "▁see", "."]
    assert train_tokenizer(texts, "space", 5000).tokenize("The dog sleeps.") == ["▁The", "▁dog", "▁sleeps."]
    assert words.unk_token_id in words("The xylophone.")["input_ids"]
    assert train_tokenizer(["Große Katze"], "word", 50, lowercase=True).tokenize("GROSSE katze")[-1] == "▁katze"


def test_wrong_demands():
    for texts, arguments, field in (
        (["a b c"], {"kind": "unigram"}, "kind"),
        (["a b c"], {"byte_fallback": True, "vocab_size": 260}, "vocab_size"),
        ([], {"byte_fallback": True, "vocab_size": 300}, "vocab_size"),
        ("one text", {}, "texts"),
    ):
        with rejects(field=field):
            train_tokenizer(texts, **arguments)


@pytest.mark.parametrize("kind", ["bpe", "word", "space", "character"])
def test_control_tokens_in_a_text_are_text(kind, tmp_path, corpus):
    """For whoever loads the tokenizer, also where they were in the text that it was trained on."""
    literal = "a <pad> b </s> c <s> d <unk>"
    texts = [pair.en for pair in corpus["train"]] + [literal, "a</s>b </s>", "</s>"] * 3
    train_tokenizer(texts, kind, 900).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer).__module__.startswith("transformers.")  # nothing of this package is needed
    for text in (literal, "</s>", "a</s>b"):
        ids = tokenizer(text)["input_ids"]
        controls = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
        assert ids[-1] == tokenizer.eos_token_id and controls.isdisjoint(ids[:-1])
        if kind != "space" or text == literal:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_bpe_of_some_size_writes_what_it_does_not_know_in_bytes(corpus, tmp_path):
    train_tokenizer((text for pair in corpus["train"] for text in pair[:2]), "bpe", 1000).save_pretrained(tmp_path)
    with_bytes = AutoTokenizer.from_pretrained(tmp_path)
    assert len(with_bytes) == 1000 and with_bytes.convert_tokens_to_ids("<0x41>") == 4 + 0x41
    texts = ["你好，世界。", "Ж and ß", "🙂 <0x41>", "naïve\tcafé", "a\x00b\x7f", *(pair.de for pair in corpus["test"])]
    rng = random.Random(3)
    texts += ["".join(chr(rng.randrange(0x21, 0xD7FF)) for _ in range(12)) for _ in range(200)]
    normalizer = with_bytes.backend_tokenizer.normalizer
    for text in texts:
        ids = with_bytes(text)["input_ids"]
        assert with_bytes.unk_token_id not in ids
        assert with_bytes.decode(ids, skip_special_tokens=True) == normalizer.normalize_str(text)
    assert with_bytes.convert_ids_to_tokens(with_bytes("the dog sleeps.")["input_ids"])[:2] == ["▁the", "▁dog"]
    assert with_bytes.unk_token_id == 3 and with_bytes.eos_token_id == 2


@pytest.mark.parametrize(
    ("size", "settings", "unknown"),
    [(999, {}, 1), (1000, {}, 0), (1000, {"byte_fallback": False}, 1), (300, {"byte_fallback": True}, 0)],
)
def test_bytes_only_where_there_is_room_or_wanted(size, settings, unknown):
    tokenizer = train_tokenizer(["你好世界今天天气很好", "hello world"], vocab_size=size, **settings)
    assert tokenizer("Ж")["input_ids"].count(tokenizer.unk_token_id) == unknown


def test_an_alphabet_larger_than_the_vocabulary_is_cut():
    """The rarest characters are written in bytes; the vocabulary keeps its size."""
    texts = ["".join(map(chr, range(0x4E00, 0x4E00 + 300))), "好好好好"]
    tokenizer = train_tokenizer(texts, "bpe", 300, byte_fallback=True)
    assert len(tokenizer) == 300 and "好" in tokenizer.get_vocab()
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


SPECIAL_TEXTS = ["The old cat sleeps.", "Käse, 1.5 kg: ok?", "  x   y ", "naïve café 你好", "</s> <unk> <0x41> >>de<<"]


@pytest.fixture(scope="module", params=[False, True], ids=["unknown", "bytes"])
def bpe(request, corpus):
    texts = (text for pair in corpus["train"] for text in pair[:2])
    tokenizer = train_tokenizer(texts, "bpe", 700, byte_fallback=request.param)
    add_tags(tokenizer, [">>de<<"])
    return tokenizer


@pytest.fixture(scope="module")
def rows(bpe, corpus):
    texts = [text for pair in corpus["train"] for text in pair[:2]] + SPECIAL_TEXTS
    return ids_of_texts(bpe, texts)


def test_without_dropout_nothing_changes(bpe, rows):
    plain = Resegmenter(bpe, 0.0)
    assert [plain(ids, "seed") for ids in rows] == rows


def test_other_segmentations_of_the_same_text(bpe, rows):
    resegmenter = Resegmenter(bpe, 0.1)
    first, again, other = ([resegmenter(ids, seed) for ids in rows] for seed in ("1", "1", "2"))
    assert first == again and mean(a != b for a, b in zip(first, other, strict=True)) > 0.8
    assert [bpe.decode(ids) for ids in first] == [bpe.decode(ids) for ids in rows]
    longer = sum(map(len, first)) / sum(map(len, rows))
    assert 1.05 < longer < 1.5
    characters = Resegmenter(bpe, 0.999)(rows[0], "1")
    assert max(len(token) for token in bpe.convert_ids_to_tokens(characters[:-1])) <= 2
    assert pickle.loads(pickle.dumps(resegmenter))(rows[0], "1") == first[0]


def test_an_epoch_and_a_row_decide(bpe, rows):
    prepared = Dataset.from_dict({"input_ids": rows, "labels": rows})
    data = ResegmentedDataset(prepared, (Resegmenter(bpe, 0.3), Resegmenter(bpe, 0.3)), seed=1)
    data.check()
    first = data.__getitems__([3, 4])
    assert data.__getitems__([4, 3]) == first[::-1] and first[0]["input_ids"] != first[0]["labels"]
    data.set_epoch(1)
    assert data.__getitems__([3, 4]) != first
    limited = ResegmentedDataset(prepared, (Resegmenter(bpe, 0.9), Resegmenter(bpe, 0.9)), seed=1, longest=3)
    assert limited.__getitems__([3])[0]["input_ids"] == rows[3]


@pytest.mark.parametrize("kind", ["word", "character", "space"])
def test_other_tokenizers(corpus, kind):
    tokenizer = train_tokenizer((pair.en for pair in corpus["train"]), kind, 200)
    with rejects(field="tokenizer.dropout"):
        Resegmenter(tokenizer, 0.1)
