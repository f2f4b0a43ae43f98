"""Reading pairs: what is right is read, what is wrong is named with file and line."""

import gzip
import json
import os
import pickle
import struct
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Translation
from transformers import ByT5Tokenizer
from user_errors import rejects

from recnmt_hf.data.corpora import Corpus, load_pairs, load_test_set
from recnmt_hf.data.prepared import ShardSettings, prepare_dataset, tokenize_pairs, tokenizer_fingerprint
from recnmt_hf.data.records import Sentence
from recnmt_hf.data.text import SentencePair, is_plain_file, read_aligned, read_lines
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.errors import UserError


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_zstandard_of_several_frames(tmp_path):
    """As pzstd writes it: before each frame, one to skip with its size."""
    codec = pa.Codec("zstd")
    frames = [codec.compress(f"{text}\n".encode(), asbytes=True) for text in ("One", "Two")]
    path, url = tmp_path / "a.zst", "memory://corpus/a.zst"
    path.write_bytes(b"".join(struct.pack("<3I", 0x184D2A50, 4, len(frame)) + frame for frame in frames))
    fsspec.filesystem("memory").pipe(url, path.read_bytes())
    assert list(read_lines(path)) == list(read_lines(url)) == ["One", "Two"] and not is_plain_file(str(path))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_parallel_files(tmp_path, suffix):
    source = write(tmp_path / f"a.en{suffix}", "One.\n Two. \nThree\u2028\x85\x0b\x1estill three.\n")
    target = write(tmp_path / f"a.de{suffix}", "Eins.\nZwei.\nDrei.")
    pairs = [("One.", "Eins."), ("Two.", "Zwei."), ("Three\u2028\x85\x0b\x1estill three.", "Drei.")]
    assert list(read_aligned([source, target])) == pairs


def test_ragged_files_are_counted(tmp_path):
    source, target = write(tmp_path / "a.en", "1\n2\n3\n4\n"), write(tmp_path / "a.de", "1\n2\n")
    for paths in ([source, target], [target, source]):
        with rejects("lines, but", "4", "2"):
            list(read_aligned(paths))


def test_several_references(tmp_path):
    """A test set keeps them aligned; training data have one target."""
    source = write(tmp_path / "a.en", "One.\nTwo.\nThree.\n")
    first, second = write(tmp_path / "a.de0", "Eins.\nZwei.\nDrei.\n"), write(tmp_path / "a.de1", "Ein.\n\nDreie.\n")
    corpus = {"source": source, "target": [first, Path(second)]}
    assert load_test_set(corpus, "en", "de", "skip") == (["One.", "Three."], [["Eins.", "Drei."], ["Ein.", "Dreie."]])
    with rejects("2", field=second):
        load_test_set(corpus, "en", "de")
    with pytest.raises(ValueError, match="zip"):
        load_test_set([{"source": source, "target": first}, corpus], "en", "de", "skip")
    with rejects(field="target"):
        list(load_pairs(corpus, "en", "de"))


def test_empty_lines_are_refused_or_skipped(tmp_path):
    paths = write(tmp_path / "a.en", "1\n\n3\n"), write(tmp_path / "a.de", "1\n2\n3\n")
    assert list(read_aligned(paths, "skip")) == [("1", "1"), ("3", "3")]
    for on_empty, field in (("error", paths[0]), ("drop", "on_empty")):
        with rejects(field=field):
            list(read_aligned(paths, on_empty))


GOOD = {
    "text": b"One\nTwo\nThree\n",
    "tsv": b"One\tEins\nTwo\tZwei\nThree\tDrei\n",
    "jsonl": b'{"en": "One", "de": "Eins"}\n{"en": "Two", "de": "Zwei"}\n{"en": "Three", "de": "Drei"}\n',
    "conllu": b"".join(b"1\t%b\t_\t_\t_\t_\t0\troot\t_\t_\n\n" % word for word in (b"One", b"Two", b"Three")),
}
ZSTD = pa.Codec("zstd")
# What happens to a file, and the first line that cannot be read: `None` for the whole file.
DAMAGE = {
    "missing": (lambda content: None, None),
    "empty": (lambda content: b"", None),
    "cut gzip": (lambda content: gzip.compress(content * 99, mtime=0)[:-20], None),
    "gzip of another checksum": (lambda content: gzip.compress(content * 99)[:-8] + b"\0" * 8, None),
    "cut zstd": (lambda content: ZSTD.compress(content * 99, asbytes=True)[:-9], None),
    "latin-1": (lambda content: content.replace(b"Two", b"Zw\xf6lf"), 2),
    "utf-16": (lambda content: content.decode().encode("utf-16"), 1),
    "endless line": (lambda content: b"Two" * 2**23, 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("reader", GOOD)
def test_damaged_files_are_named(tmp_path, reader, damage):
    """For every reader, with the line if only one is wrong."""
    change, line = DAMAGE[damage]
    good, path = tmp_path / "good", tmp_path / "damaged"
    content = change(GOOD[reader])
    if content is not None:
        path.write_bytes(content)
    good.write_bytes(GOOD["text"])
    corpora = {
        "text": {"source": path, "target": path},
        "conllu": {"source": good, "target": good, "source_trees": path},
    }
    with pytest.raises((OSError, UserError)) as caught:
        list(load_pairs(corpora.get(reader, {reader: path}), "en", "de"))
    place = path if line is None else f"{path}, line {line if reader != 'conllu' else 2 * line - 1}"
    assert str(place) in str(caught.value)


def test_lines_of_other_formats(tmp_path):
    pairs = [SentencePair("One", "Eins"), SentencePair("Two", "Zwei")]
    path = write(tmp_path / "a.tsv", "\ufeffOne\tEins\nTwo\tZwei\n")
    assert list(Corpus(tsv=path).pairs("en", "de")) == pairs
    write(tmp_path / "a.tsv", "One\tEins\nTwo\tZwei\tDrei\n")
    with rejects("2", "3", field=path):
        list(Corpus(tsv=path).pairs("en", "de"))
    lines = '{"translation": {"en": "One", "de": "Eins"}}\n{"en": "Two", "de": "Zwei"}\n'
    path = write(tmp_path / "a.jsonl", lines)
    assert list(Corpus(jsonl=path).pairs("de", "en")) == [SentencePair(*pair[::-1]) for pair in pairs]
    with rejects(field=path):
        list(Corpus(jsonl=path).pairs("de", "de"))
    write(tmp_path / "a.jsonl", json.dumps({"article": "Ein Text.", "title": "Text"}) + "\n")
    corpus = Corpus(jsonl=path, source_column="article", target_column="title")
    assert list(corpus.pairs("de", "de")) == [SentencePair("Ein Text.", "Text")]


@pytest.fixture
def hub_format(tmp_path):
    """A translation set as the Hub has them: parquet files with a `translation` feature."""
    rows = {"translation": [{"en": "One", "de": "Eins"}, {"en": "Two", "de": "Zwei"}]}
    data = Dataset.from_dict(rows, features=Features({"translation": Translation(languages=["en", "de"])}))
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    data.to_parquet(str(folder / "data/train-00000-of-00001.parquet"))
    return folder


def test_datasets_translation_set(hub_format):
    corpus = Corpus(dataset=str(hub_format), split="train")
    assert list(corpus.pairs("de", "en")) == [SentencePair("Eins", "One"), SentencePair("Zwei", "Two")]
    assert len(list(Corpus(dataset=str(hub_format), split="train[:1]").pairs("en", "de"))) == 1
    for wrong, words in ((corpus, "columns de, en"), (replace(corpus, split="dev"), "cannot be read")):
        with rejects(words):
            list(wrong.pairs("en", "fr"))


def test_columns_are_found_by_other_codes_of_their_languages(hub_format, tmp_path):
    codes = "eng_Latn", "de-AT"
    path = write(tmp_path / "a.jsonl", '{"de": "Eins", "en": "One", "en_note": "no language"}\n')
    for corpus in (Corpus(dataset=str(hub_format), split="train[:1]"), Corpus(jsonl=path)):
        assert list(corpus.pairs(*codes)) == [SentencePair("One", "Eins")]
        own = replace(corpus, source_lang=codes[1], target_lang=codes[0])
        assert list(own.pairs("fr", "it")) == [SentencePair("Eins", "One")]
    first = next(Corpus(generated="test", size=1).pairs("en", "de"))
    assert next(Corpus(generated="test", size=1).pairs(*codes)) == first
    with rejects(field="target_lang"):
        Corpus(jsonl=path, target_lang="../de")


@pytest.mark.parametrize("split", ["train", "train[:1]"])
def test_changed_files_of_datasets_are_read_again(tmp_path, split):
    """Also if their time and size are the same."""
    corpus = Corpus(dataset="json", data_files=str(tmp_path / "a.jsonl"), split=split)
    for text in ("One", "Two"):
        write(tmp_path / "a.jsonl", json.dumps({"en": text, "de": text}) + "\n")
        os.utime(tmp_path / "a.jsonl", (10**9, 10**9))
        assert list(corpus.pairs("en", "de")) == [SentencePair(text, text)]


def prepared(tokenizer, folder, corpora, **settings):
    return prepare_dataset(corpora, "en", "de", tokenizer, tokenizer, folder, **settings)


def test_prepared_dataset_is_cached_filtered_and_keeps_text(tmp_path, tokenizer, monkeypatch):
    prepare = partial(prepared, tokenizer, tmp_path / "cache", [{"generated": "validation", "size": 30}])
    data = prepare(keep_text=True)
    lengths = {"source_length", "target_length"}
    assert len(data) == 30 and set(data.column_names) == {"source", "target", "input_ids", "labels", *lengths}
    for row in data:
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == row["target"]
        assert row["labels"][-1] == tokenizer.eos_token_id and len(row["labels"]) == row["target_length"]
    monkeypatch.setattr("recnmt_hf.data.prepared.tokenize_pairs", lambda *a: pytest.fail("prepared twice"))
    assert prepare(keep_text=True)["labels"][:] == data["labels"][:]
    monkeypatch.undo()
    limit = sorted(data["target_length"][:])[15]
    short = prepare(max_target_length=limit)
    assert 0 < len(short) < 30 and max(short["target_length"][:]) <= limit
    with rejects("All 30"):
        prepare(max_source_length=1)


def test_several_processes_tokenize_alike(tmp_path, tokenizer):
    corpora = {"generated": "validation", "size": 2000}
    alone, shared = (prepared(tokenizer, tmp_path / f"{count}", corpora, num_proc=count) for count in (1, 2))
    assert alone[:] == shared[:]


def test_a_copy_of_a_corpus_keeps_its_secrets(tmp_path):
    """Where `replace` makes it, for the URLs that it keeps; they are not shown."""
    urls = {"source": "http://user:zebra41@host/a", "target": ["http://user:zebra42@host/b", tmp_path / "c"]}
    corpus = Corpus(**urls, source_tag="<x>")
    copy = pickle.loads(pickle.dumps(replace(replace(corpus, source_tag=None), target_lang="de")))
    for own in (corpus, copy):
        assert own.with_secret("source") == urls["source"] and own.with_secret("target")[0] == urls["target"][0]
        assert "zebra" not in f"{own} {asdict(own)} {own.identity()}"
    second = Corpus(tsv="http://host/a?key=train"), Corpus(tsv="http://host/a?key=valid")
    assert [own.with_secret("tsv")[-5:] for own in second] == ["train", "valid"]
    other = replace(copy, source="http://user:panda43@host/d")
    assert other.with_secret("source") == "http://user:panda43@host/d"
    assert replace(other, source="e").with_secret("source") == "e"


@pytest.mark.parametrize("nothing", ["\u200b", "\u2028", "\x07", "\u3164\ufe0f"])
def test_lines_of_invisible_characters_are_blank(tmp_path, nothing):
    tsv, jsonl = write(tmp_path / "a.tsv", f"One\t{nothing}\nOne\tEins\n"), tmp_path / "a.jsonl"
    write(jsonl, "".join(json.dumps({"en": text, "de": "x"}) + "\n" for text in (nothing, "One")))
    for corpus in (Corpus(tsv=tsv), Corpus(jsonl=str(jsonl))):
        with rejects("line 1: blank sentence"):
            list(corpus.pairs("en", "de"))
        assert len(list(corpus.pairs("en", "de", "skip"))) == 1


@pytest.mark.parametrize(
    "bad", [*("{", "[]", "[" * 100000, '{"en": "x"}', '{"en": 1, "de": "x"}'), '{"en": "\\ud800", "de": "x"}']
)
def test_jsonl_that_no_sentence_can_be_read_from(tmp_path, bad):
    path = write(tmp_path / "a.jsonl", '{"en": "a", "de": "b"}\n' + bad + "\n")
    with rejects("line 2", field=path):
        list(Corpus(jsonl=path).pairs("en", "de"))


NOT_TEXT = [({"en": ["One", "Two"], "de": [1, 2]}, "row 0 with the columns de, en")]
NOT_TEXT += [({"translation": [{"en": "One", "de": "Eins"}, None]}, "row 1: blank sentence")]


@pytest.mark.parametrize(("rows", "word"), NOT_TEXT)
def test_datasets_with_columns_of_other_values(tmp_path, rows, word):
    Dataset.from_dict(rows).to_parquet(str(tmp_path / "train.parquet"))
    with rejects(word):
        list(Corpus(dataset=str(tmp_path)).pairs("en", "de"))


def test_control_tokens_in_training_text_are_text(tmp_path, tokenizer):
    corpus = {"tsv": write(tmp_path / "a.tsv", "the <pad> dog </s>\tder <s> Hund </s>\n")}
    plain = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", pad_token="<pad>")
    assert plain("</s>")["input_ids"][0] == 2  # saved before tokenizers took control tokens for text
    row = prepared(plain, tmp_path / "cache", corpus)[0]
    for ids in (row["input_ids"], row["labels"]):
        assert ids[-1] == 2 and min(ids[:-1]) > 2


def test_unknown_tokens_are_reported(tmp_path, corpus, tokenizer, caplog):
    """Once for a data set that is prepared, with the side; not for what the tokenizer knows."""
    words = train_tokenizer((text for pair in corpus["train"] for text in pair[:2]), "word", 2000)
    foreign = {"tsv": write(tmp_path / "a.tsv", "the dog sleeps\tсобака спит\n" * 20)}
    prepared(words, tmp_path / "cache", foreign)
    assert "66.7% of the target tokens" in caplog.text and "source tokens" not in caplog.text
    caplog.clear()
    prepared(words, tmp_path / "cache", foreign)
    prepared(tokenizer, tmp_path / "cache", {"generated": "train", "size": 30})
    assert "unknown" not in caplog.text


def test_python_tokenizers_are_told_apart_by_what_they_do():
    first, again, more = ByT5Tokenizer(), ByT5Tokenizer(), ByT5Tokenizer(extra_ids=120)
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(again) != tokenizer_fingerprint(more)
    pair = Sentence("a </s>"), Sentence("<pad>")
    row, *_ = tokenize_pairs([pair], {}, (first, first), ShardSettings("en", "de"))
    assert row["source_length"] == [7] and row["target_length"] == [6]


def test_long_pairs_are_truncated_on_demand(tmp_path):
    write(tmp_path / "a.en", "a b c d e f\na b\n"), write(tmp_path / "a.de", "f e d c b a\nb a\n")
    tokenizer = train_tokenizer(["a b c d e f"], "word", 20)
    corpus = {"source": str(tmp_path / "a.en"), "target": str(tmp_path / "a.de")}
    prepare = partial(prepared, tokenizer, tmp_path / "data", corpus, max_source_length=4, max_target_length=3)
    assert len(prepare()) == 1
    data = prepare(on_long="truncate", keep_text=True)
    assert data["source_length"][:] == [4, 3] and data["target_length"][:] == [3, 3]
    assert tokenizer.convert_ids_to_tokens(data[0]["input_ids"]) == ["▁a", "▁b", "▁c", "</s>"]
    assert tokenizer.convert_ids_to_tokens(data[0]["labels"]) == ["▁f", "▁e", "</s>"]
    assert data[0]["source"] == "a b c d e f"


def test_data_prepared_by_earlier_versions_is_found():
    """Fields that were removed or added later do not change the identity of a corpus that does not use them."""
    unset = ["tsv", "jsonl", "lcsts", "min_score", "dataset", "config", "revision", "generated", "size"]
    expected = {"source": "a.en", "target": "a.de", "split": "train", "seed": 1}
    expected |= dict.fromkeys([*unset, "source_column", "target_column"])
    assert Corpus(source="a.en", target="a.de").identity() == expected
