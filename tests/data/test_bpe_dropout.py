"""BPE dropout: the tokenizer's own segmentation without it; with it the same text, by seed, epoch and row."""

import pickle
from statistics import mean

import pytest
from user_errors import rejects

from recnmt_hf._plain_text import ids_of_texts
from recnmt_hf.data.bpe_dropout import ResegmentedDataset, Resegmenter
from recnmt_hf.data.tokenization import add_tags, train_tokenizer


TEXTS = ["The old cat sleeps.", "Käse, 1.5 kg: ok?", "  x   y ", "naïve café 你好", "</s> <unk> <0x41> >>de<<"]


@pytest.fixture(scope="module", params=[False, True], ids=["unknown", "bytes"])
def bpe(request, corpus):
    texts = (text for pair in corpus["train"] for text in pair[:2])
    tokenizer = train_tokenizer(texts, "bpe", 700, byte_fallback=request.param)
    add_tags(tokenizer, [">>de<<"])
    return tokenizer


@pytest.fixture(scope="module")
def rows(bpe, corpus):
    texts = [text for pair in corpus["train"] for text in pair[:2]] + TEXTS
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
    class Data:
        def __len__(self):
            return len(rows)

        def __getitems__(self, indices):
            return [{"input_ids": rows[index], "labels": rows[index]} for index in indices]

    data = ResegmentedDataset(Data(), (Resegmenter(bpe, 0.3), Resegmenter(bpe, 0.3)), seed=1)
    data.check()
    first = data.__getitems__([3, 4])
    assert data.__getitems__([4, 3]) == first[::-1] and first[0]["input_ids"] != first[0]["labels"]
    data.set_epoch(1)
    assert data.__getitems__([3, 4]) != first
    limited = ResegmentedDataset(Data(), (Resegmenter(bpe, 0.9), Resegmenter(bpe, 0.9)), seed=1, longest=3)
    assert limited.__getitems__([3])[0]["input_ids"] == rows[3]


@pytest.mark.parametrize("kind", ["word", "character", "space"])
def test_other_tokenizers(corpus, kind):
    tokenizer = train_tokenizer((pair.en for pair in corpus["train"]), kind, 200)
    with rejects(field="tokenizer.dropout"):
        Resegmenter(tokenizer, 0.1)
