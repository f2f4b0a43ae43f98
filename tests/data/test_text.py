"""Reading pairs: what is right is read, what is wrong is named with file and line."""

import gzip
import json

import pytest
from datasets import Dataset, DatasetDict, Features, Translation

from recnmt_hf.data.corpora import Corpus, load_pairs, prepare_dataset
from recnmt_hf.data.text import SentencePair, read_parallel


def write(path, text, encoding="utf-8"):
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding=encoding) as file:
            file.write(text)
    else:
        path.write_text(text, encoding=encoding)
    return str(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_parallel_files(tmp_path, suffix):
    source = write(tmp_path / f"a.en{suffix}", "One.\n Two. \nThree\u2028still three.\n")
    target = write(tmp_path / f"a.de{suffix}", "Eins.\nZwei.\nDrei.")
    assert list(read_parallel(source, target)) == [
        SentencePair("One.", "Eins."),
        SentencePair("Two.", "Zwei."),
        SentencePair("Three\u2028still three.", "Drei."),
    ]


def test_ragged_files_are_counted(tmp_path):
    source, target = write(tmp_path / "a.en", "1\n2\n3\n4\n"), write(tmp_path / "a.de", "1\n2\n")
    with pytest.raises(ValueError, match=r"a\.de has 2 lines, .*a\.en has 4\. Remedy"):
        list(read_parallel(source, target))
    with pytest.raises(ValueError, match=r"a\.de has 2 lines, .*a\.en has 4\. Remedy"):
        list(read_parallel(target, source))


def test_missing_file_names_its_neighbours(tmp_path):
    write(tmp_path / "train.en", "x\n")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*train\.eng\. .* holds: train\.en\."):
        list(read_parallel(tmp_path / "train.eng", tmp_path / "train.en"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        list(read_parallel(tmp_path / "no" / "a", tmp_path / "no" / "b"))


def test_wrong_encoding_names_the_line(tmp_path):
    source = write(tmp_path / "a.en", "fine\n" * 3)
    target = write(tmp_path / "a.de", "gut\nschön\ngut\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"a\.de, line 2: not UTF-8 .*iconv"):
        list(read_parallel(source, target))


def test_empty_lines_are_refused_or_skipped(tmp_path):
    source, target = write(tmp_path / "a.en", "1\n\n3\n"), write(tmp_path / "a.de", "1\n2\n3\n")
    with pytest.raises(ValueError, match=r"a\.en, line 2: an empty sentence.*on_empty: skip"):
        list(read_parallel(source, target))
    assert [pair.source for pair in read_parallel(source, target, on_empty="skip")] == ["1", "3"]
    with pytest.raises(ValueError, match="on_empty='drop'"):
        list(read_parallel(source, target, on_empty="drop"))


def test_empty_and_cut_files(tmp_path):
    empty = write(tmp_path / "a.en", "")
    with pytest.raises(ValueError, match="are empty"):
        list(read_parallel(empty, empty))
    path = tmp_path / "b.gz"
    path.write_bytes(gzip.compress(b"a line of text\n" * 500)[:-20])
    with pytest.raises(ValueError, match=r"b\.gz: the compressed file ends early"):
        list(read_parallel(path, path))


def test_tsv(tmp_path):
    path = write(tmp_path / "a.tsv", "One\tEins\nTwo\tZwei\n")
    assert list(Corpus(tsv=path).pairs("en", "de")) == [SentencePair("One", "Eins"), SentencePair("Two", "Zwei")]
    write(tmp_path / "a.tsv", "One\tEins\nTwo\tZwei\tDrei\n")
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: 3 tab-separated fields, 2 are needed"):
        list(Corpus(tsv=path).pairs("en", "de"))


def test_marks_and_empty_fields(tmp_path):
    (tmp_path / "a.en").write_bytes("\ufeffHello\n".encode())
    assert next(read_parallel(tmp_path / "a.en", tmp_path / "a.en")).source == "Hello"
    path = write(tmp_path / "a.tsv", "\tDas\nOne\tEins\n")
    assert [p.source for p in Corpus(tsv=path).pairs("en", "de", "skip")] == ["One"]
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"text\n" * 99)[:-8] + b"\0" * 8)
    with pytest.raises(ValueError, match=r"bad\.gz: the compressed file ends early or is damaged"):
        list(read_parallel(tmp_path / "bad.gz", tmp_path / "bad.gz"))


def test_jsonl(tmp_path):
    lines = [{"translation": {"en": "One", "de": "Eins"}}, {"en": "Two", "de": "Zwei"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert list(Corpus(jsonl=path).pairs("de", "en")) == [SentencePair("Eins", "One"), SentencePair("Zwei", "Two")]
    for bad in ("{", '{"en": "x"}', "[]", '{"en": 1, "de": "x"}'):
        write(tmp_path / "a.jsonl", '{"en": "a", "de": "b"}\n' + bad + "\n")
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no JSON object with 'en' and 'de'"):
            list(Corpus(jsonl=path).pairs("en", "de"))


@pytest.fixture
def hub_format(tmp_path):
    """A translation set as the Hub has them: parquet files with a `translation` feature."""
    rows = {"translation": [{"en": "One", "de": "Eins"}, {"en": "Two", "de": "Zwei"}]}
    data = Dataset.from_dict(rows, features=Features({"translation": Translation(languages=["en", "de"])}))
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for split, part in DatasetDict({"train": data, "test": data.select([1])}).items():
        part.to_parquet(str(folder / "data" / f"{split}-00000-of-00001.parquet"))
    return folder


def test_datasets_translation_set(hub_format):
    corpus = Corpus(dataset=str(hub_format), split="train")
    assert list(corpus.pairs("de", "en")) == [SentencePair("Eins", "One"), SentencePair("Zwei", "Two")]
    assert len(list(Corpus(dataset=str(hub_format), split="train[:1]").pairs("en", "de"))) == 1
    with pytest.raises(ValueError, match=r"has no .fr., only en, de"):
        list(corpus.pairs("en", "fr"))
    with pytest.raises(ValueError, match=r"could not be loaded.*Remedy"):
        list(Corpus(dataset=str(hub_format), split="dev").pairs("en", "de"))


def test_corpus_says_exactly_one_thing():
    with pytest.raises(ValueError, match=r"exactly one of source.*this one has none"):
        Corpus()
    with pytest.raises(ValueError, match="this one has tsv, generated"):
        Corpus(tsv="a", generated="train")
    with pytest.raises(ValueError, match="needs both source and target"):
        Corpus(source="a")
    with pytest.raises(ValueError, match=r"no fields \['sourc'\]"):
        Corpus.from_any({"sourc": "a"})
    with pytest.raises(ValueError, match="English-German; en-fr was asked for"):
        list(load_pairs({"generated": "train"}, "en", "fr"))


def test_prepared_dataset_is_cached_filtered_and_keeps_text(tmp_path, tokenizer, monkeypatch):
    corpora = [{"generated": "validation", "size": 30}]

    def prepare(**more):
        return prepare_dataset(corpora, "en", "de", tokenizer, tokenizer, tmp_path / "cache", **more)

    data = prepare(keep_text=True)
    assert len(data) == 30 and set(data.column_names) == {
        "source",
        "target",
        "input_ids",
        "labels",
        "source_length",
        "target_length",
    }
    for row in data:
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == row["target"]
        assert row["labels"][-1] == tokenizer.eos_token_id and len(row["labels"]) == row["target_length"]
    monkeypatch.setattr("recnmt_hf.data.corpora.collect", lambda *a: pytest.fail("prepared twice"))
    assert prepare(keep_text=True)["labels"][:] == data["labels"][:]
    monkeypatch.undo()
    limit = sorted(data["target_length"][:])[15]
    short = prepare(max_target_length=limit)
    assert 0 < len(short) < 30 and max(short["target_length"][:]) <= limit
    with pytest.raises(ValueError, match="None of 30 sentence pairs is left after the length filters"):
        prepare(max_source_length=1)


def test_prepared_dataset_notices_changed_files(tmp_path, tokenizer):
    source, target = write(tmp_path / "a.en", "the dog\n"), write(tmp_path / "a.de", "der Hund\n")
    corpus = {"source": source, "target": target}

    def rows():
        return len(prepare_dataset(corpus, "en", "de", tokenizer, tokenizer, tmp_path / "cache"))

    assert rows() == 1
    write(tmp_path / "a.en", "the dog\nthe cat\n"), write(tmp_path / "a.de", "der Hund\ndie Katze\n")
    assert rows() == 2


def test_real_corpus_is_read(real_data, tokenizer, tmp_path):
    folder = real_data / "multi30k"
    corpus = Corpus(source=str(folder / "val.en.gz"), target=str(folder / "val.de.gz"))
    data = prepare_dataset(corpus, "en", "de", tokenizer, tokenizer, tmp_path, num_proc=2)
    assert len(data) == 1014
