"""Tokenizers: plain text comes back, AutoTokenizer loads them."""

import pytest
from transformers import AutoTokenizer

from recnmt_hf.data.tokenization import load_tokenizer, train_tokenizer


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
    padded = tokenizer(texts[:3], padding=True, return_tensors="pt")
    assert set(padded) == {"input_ids", "attention_mask"}


def test_special_ids_are_the_configurations_defaults(tokenizer):
    from recnmt_hf import NMTTransformerConfig

    config = NMTTransformerConfig()
    assert tokenizer.pad_token_id == config.pad_token_id
    assert tokenizer.bos_token_id == config.decoder_start_token_id
    assert tokenizer.eos_token_id == config.eos_token_id


def test_sizes_and_words(corpus):
    texts = [pair.en for pair in corpus["train"]]
    assert len(train_tokenizer(texts, "bpe", 300)) == 300
    words = train_tokenizer(texts, "word", 5000)
    assert words.tokenize("The dog, I see.") == ["▁The", "▁dog", ",", "▁I", "▁see", "."]
    assert train_tokenizer(texts, "space", 5000).tokenize("The dog sleeps.") == ["▁The", "▁dog", "▁sleeps."]
    rare = words("The xylophone.")["input_ids"]
    assert words.unk_token_id in rare
    assert train_tokenizer(["Große Katze"], "word", 50, lowercase=True).tokenize("GROSSE katze")[-1] == "▁katze"


def test_spaces_are_folded(tokenizer):
    ids = tokenizer("  the \t dog\u00a0sleeps ")["input_ids"]
    assert ids == tokenizer("the dog sleeps")["input_ids"]


def test_wrong_demands():
    with pytest.raises(ValueError, match="no tokenizer 'unigram'; choose one of bpe, word, space, character"):
        train_tokenizer(["a"], "unigram")
    with pytest.raises(ValueError, match="vocab_size=4 leaves no room"):
        train_tokenizer(["a"], "bpe", 4)
    with pytest.raises(ValueError, match="found no text"):
        train_tokenizer([], "bpe", 100)


def test_loading_a_wrong_path(tmp_path):
    with pytest.raises(ValueError, match=r"No tokenizer could be loaded from .*Remedy"):
        load_tokenizer(tmp_path)
