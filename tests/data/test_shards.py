"""Data in shards: the same for any number of processes, equal to data in memory, complete, and checked."""

import gzip
import json
import re
import shutil
import subprocess
import time
from collections import Counter
from itertools import islice

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from user_errors import rejects

from recnmt_hf import GCNRNMTConfig
from recnmt_hf.data.batching import BatchLimits, TokenBatchSampler
from recnmt_hf.data.corpora import Corpus
from recnmt_hf.data.files import lock
from recnmt_hf.data.prepared import ShardSettings, prepare_dataset
from recnmt_hf.data.sharded import Mixture, PooledBatchSampler, ShardedDataset
from recnmt_hf.data.sharding import (
    ShardMaker,
    line_ends,
    prepare_shards,
)
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.data.tokenizer_pair import TokenizerPair
from recnmt_hf.data.tree_inputs import Relations, TreeEncoder, tree_options


LIMITS = BatchLimits(300)
SIZE = 37  # of shards: no divisor of the corpus


def settings(**more):
    return ShardSettings("en", "de", **{"shard_size": SIZE, **more})


@pytest.fixture(scope="module")
def files(corpus, tmp_path_factory):
    """600 pairs, of which some have an empty side and some are long."""
    folder = tmp_path_factory.mktemp("text")
    pairs = [[pair.en, pair.de] for pair in corpus["train"]]
    pairs[5][0] = pairs[41][1] = pairs[599][0] = " \u200b "
    pairs[100][0] = " ".join(pairs[100][0] for _ in range(9))
    for side, language in enumerate(("en", "de")):
        lines = [pair[side] + "\r" * (number % 7 == 0) for number, pair in enumerate(pairs)]
        text = "\n".join(lines).encode()
        (folder / f"text.{language}").write_bytes(b"\xef\xbb\xbf" + text)
        (folder / f"text.{language}.gz").write_bytes(gzip.compress(text + b"\n"))
        (folder / f"text.{language}.zst").write_bytes(pa.Codec("zstd").compress(text + b"\n", asbytes=True))
    return folder


@pytest.fixture(scope="module")
def tokenizers(tokenizer):
    return TokenizerPair(tokenizer)


def text_corpus(files, ending="", **more):
    return Corpus(source=files / f"text.en{ending}", target=files / f"text.de{ending}", **more)


def contents(folder):
    """The bytes of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def prepared(files, tokenizers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare_shards([text_corpus(files)], tokenizers, folder, settings(on_empty="skip", max_source_length=60))
    return folder


@pytest.fixture(scope="module")
def large(tokenizers, tmp_path_factory):
    """3,000 pairs in 30 shards of two corpora."""
    folder = tmp_path_factory.mktemp("large")
    corpora = [Corpus(generated="train", size=2000), Corpus(generated="validation", size=1000)]
    prepare_shards(corpora, tokenizers, folder, settings(shard_size=100))
    return folder


def interrupt(*args):
    raise KeyboardInterrupt


def test_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("recnmt_hf.data.sharding.CHUNK", 5)
    path = tmp_path / "text"
    for text in (b"", b"a", b"a\n", b"a\nbc\n\ndef\ng", b"a\nbc\n\ndef\ngh\n", b"\n" * 9):
        path.write_bytes(text)
        lines = text.splitlines(keepends=True)
        for every in (1, 2, 3, 10):
            count, ends = line_ends(str(path), every)
            parts = [b"".join(lines[start : start + every]) for start in range(0, len(lines), every)]
            assert count == len(lines)
            assert [text[start:end] for start, end in zip([0, *ends], ends, strict=False)] == parts


def test_same_files_for_any_number_of_processes(files, tokenizers, tmp_path):
    """Of workers, of machines with a part each, and after an interruption."""
    given = [text_corpus(files), Corpus(generated="train", size=100)]
    chosen = settings(on_empty="skip", max_source_length=60, max_length_ratio=3)
    whole, workers, parts, interrupted = (tmp_path / name for name in ("whole", "workers", "parts", "interrupted"))
    manifest = prepare_shards(given, tokenizers, whole, chosen)
    assert manifest["read"] == 700 and manifest["removed"]["empty"] == 3 and manifest["removed"]["too long"] >= 1
    prepare_shards(given, tokenizers, workers, chosen, workers=2)
    assert prepare_shards(given, tokenizers, parts, chosen, part=(3, 3)) is None
    assert prepare_shards(given, tokenizers, parts, chosen, part=(1, 3)) is None
    assert prepare_shards(given, tokenizers, parts, chosen, part=(2, 3)) == manifest

    made = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_at_fifth = lambda record: made.append(record.name) or len(made) < 5 or interrupt()  # noqa: E731
        prepare_shards(given, tokenizers, interrupted, chosen, on_shard=interrupt_at_fifth)
    (interrupted / "shards" / "000-000006.arrow.partial").write_bytes(b"half")
    first = made.copy()
    prepare_shards(given, tokenizers, interrupted, chosen, on_shard=lambda record: made.append(record.name))
    assert len(made) == len(set(made)) == len(manifest["shards"]) and made[:5] == first
    assert contents(whole) == contents(workers) == contents(parts) == contents(interrupted)


def test_damaged_leftovers_are_made_again(files, tokenizers, tmp_path):
    """Of a preparation that a crash of the machine interrupted, before and after its end."""
    chosen = settings(on_empty="skip")
    given, folder = [text_corpus(files)], tmp_path / "crashed"
    manifest = prepare_shards(given, tokenizers, tmp_path / "whole", chosen)
    prepare_shards(given, tokenizers, folder, chosen, part=(1, 2))
    empty, altered, truncated = sorted((folder / "shards").glob("*.json"))[:3]
    empty.write_text("")
    altered.write_text(altered.read_text().replace('"read": 37', '"read": 36'))
    shard = truncated.with_suffix(".arrow")
    shard.write_bytes(shard.read_bytes()[:-8])
    leftovers = {path: path.read_bytes() for path in (folder / "shards").glob("*.json")}
    assert prepare_shards(given, tokenizers, folder, chosen) == manifest
    for path, content in leftovers.items():
        path.write_bytes(content)
    assert prepare_shards(given, tokenizers, folder, chosen) == manifest
    assert contents(folder) == contents(tmp_path / "whole")


def test_one_preparation_at_a_time(files, tokenizers, tmp_path):
    with lock(tmp_path / ".part-1-of-1.lock"), rejects(field=str(tmp_path)):
        prepare_shards([text_corpus(files)], tokenizers, tmp_path, settings(on_empty="skip"))


@pytest.mark.slow
def test_killed_ten_times(files, tmp_path):
    """At random shards; its workers end too. Afterwards: the bytes of a preparation that nothing stopped."""
    texts = {side: str(files / f"text.{language}.gz") for side, language in (("source", "en"), ("target", "de"))}
    data = {"source_lang": "en", "target_lang": "de", "train": [texts] * 20, "on_empty": "skip", "shard_size": 50}
    recipe = {"data": {**data, "validation": {"generated": "validation"}}, "model": {"type": "nmt_transformer"}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command = ["recnmt", "prepare", str(tmp_path / "recipe.json"), "--output"]
    subprocess.run([*command, str(tmp_path / "whole"), "--workers", "1"], check=True, capture_output=True)
    rng, folder = np.random.default_rng(1), tmp_path / "killed"
    for kill in range(10):
        before = len(list(folder.glob("shards/*.json")))
        words = [*command, str(folder), "--workers", str(rng.integers(1, 4))]
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        while len(list(folder.glob("shards/*.json"))) < min(before + rng.integers(1, 20), 239):
            assert process.poll() is None, kill
            time.sleep(rng.uniform(0, 0.02))
        workers = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        assert not psutil.wait_procs(workers, timeout=30)[1]
    assert not (folder / "manifest.json").exists()
    subprocess.run([*command, str(folder), "--workers", "2"], check=True, capture_output=True)
    assert contents(folder) == contents(tmp_path / "whole")


TRUNCATED = {"max_source_length": 20, "max_target_length": 15, "on_long": "truncate"}


@pytest.mark.parametrize("options", [{}, TRUNCATED, {"max_source_length": 20, "max_length_ratio": 1.2}])
def test_equal_to_data_in_memory(files, tokenizers, tokenizer, tmp_path, options):
    options = {"on_empty": "skip", **options}
    memory = prepare_dataset([text_corpus(files)], "en", "de", tokenizer, tokenizer, tmp_path / "cache", **options)
    for ending in ("", ".gz", ".zst"):
        folder = tmp_path / f"shards{ending}"
        prepare_shards([text_corpus(files, ending)], tokenizers, folder, settings(**options))
        data = ShardedDataset(folder)
        assert [data[number] for number in range(len(data))] == list(memory.select_columns(["input_ids", "labels"]))


@pytest.mark.parametrize("processes", [1, 3])
def test_batches_of_one_pool_are_those_of_data_in_memory(prepared, processes):
    data = ShardedDataset(prepared)
    rows = [data[number] for number in range(len(data))]
    lengths = ([len(row[name]) for row in rows] for name in ("input_ids", "labels"))
    whole = TokenBatchSampler(*lengths, max_tokens=300, num_processes=processes, seed=3)
    pooled = PooledBatchSampler(data, LIMITS, num_processes=processes, seed=3)
    for epoch in (0, 1, 4):
        whole.set_epoch(epoch)
        pooled.set_epoch(epoch)
        assert list(whole) == list(pooled)
    assert len(whole) == len(pooled) and whole.tokens == pooled.tokens
    batch = next(iter(pooled))
    assert data.__getitems__(batch) == [rows[number] for number in batch]


@pytest.mark.parametrize("processes", [1, 2, 64])
def test_many_processes_share_an_epoch(large, processes):
    """As accelerate divides batches: equal steps, each pair once, within the limits; as many batches in each epoch."""
    data = ShardedDataset(large)
    sampler = PooledBatchSampler(data, LIMITS, num_processes=processes, pool=500)
    assert len(sampler.pools) == 6
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) and len(batches) % processes == 0
        assert sorted(row for batch in batches for row in batch) == list(range(len(data)))
        for batch in batches[::17]:
            rows = data.__getitems__(batch)
            assert len(batch) * max(len(row["input_ids"]) for row in rows) <= 300
        assert len(data.open_shards) <= 6
        epochs.append(batches)
    assert epochs[0] != epochs[1] != epochs[2]
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]


def test_skipped_pools_are_not_read(large, monkeypatch):
    data, read = ShardedDataset(large), []
    sampler, lengths = PooledBatchSampler(data, LIMITS, pool=500), data.lengths
    whole = list(sampler)
    monkeypatch.setattr(data, "lengths", lambda number: read.append(number) or lengths(number))
    for skipped in (0, 1, 200, len(whole) - 1):
        sampler.skipped, before = skipped, len(read)
        rest = list(islice(sampler, skipped, None))
        assert rest == whole[skipped:]
        needed = len(data.shards) if skipped < 100 else len(data.shards) - 1
        assert len(read) - before <= needed
    assert list(sampler) == whole  # the next epoch is whole


def test_mixtures(large):
    data = ShardedDataset(large, Mixture(weights=[0.5, 3]))
    sampler = PooledBatchSampler(data, LIMITS, pool=500)
    assert sampler.drawn_pairs() == [1000, 3000]
    reads = [row for batch in sampler for row in batch]
    assert len(set(reads)) == 4000  # each with an index of its own
    assert data.__getitems__([max(reads)]) == [data[max(reads) % 3000]] and sum(1 for _ in data) == 3000
    counts = Counter(row % 3000 for row in reads)
    assert {counts[row] for row in range(2000)} == {0, 1} and {counts[row] for row in range(2000, 3000)} == {3}
    assert Mixture(temperature=5).repeats([1600, 100]) == pytest.approx([1.0, 16**0.8])
    assert Mixture().repeats([5, 7]) == [1.0, 1.0]
    data.mixture = Mixture(weights=[0.0001, 0.0001])
    with rejects("leave no sentence pairs"):
        PooledBatchSampler(data, LIMITS)


def test_fractions_of_corpora_in_few_shards(tokenizers, tmp_path):
    """A fraction counts pairs, not shards, and is the same part in each epoch and for any number of processes."""
    corpora = [Corpus(generated="train", size=300), Corpus(generated="validation", size=100)]
    prepare_shards(corpora, tokenizers, tmp_path, settings())
    prepare_shards(corpora, tokenizers, tmp_path / "whole", settings(shard_size=1000))
    for folder in (tmp_path, tmp_path / "whole"):
        data = ShardedDataset(folder)
        for weights, counts in (([1, 0.4], [300, 40]), ([1, 1.5], [300, 150]), ([0.4, 2.25], [120, 225])):
            data.mixture = Mixture(weights=weights)
            sampler = PooledBatchSampler(data, LIMITS)
            assert sampler.drawn_pairs() == counts
            rows = sorted(row % 400 for batch in sampler for row in batch)
            assert [sum(row < 300 for row in rows), sum(row >= 300 for row in rows)] == counts
            assert set(Counter(rows[counts[0] :]).values()) <= {int(weights[1]), int(weights[1]) + 1}
            lengths = [len(data[row][name]) for row in rows for name in ("input_ids", "labels")]
            assert sampler.tokens == pytest.approx(sum(lengths), rel=0.05)
            sampler = PooledBatchSampler(data, LIMITS, num_processes=3)
            sampler.set_epoch(1)
            batches = list(sampler)
            assert sorted(row % 400 for batch in batches for row in batch) == rows and len(batches) == len(sampler)
        data.mixture = Mixture(temperature=1.5)
        assert PooledBatchSampler(data, LIMITS).drawn_pairs() == [300, 144]


def test_unknown_tokens_are_counted_and_reported(tmp_path, caplog):
    words = TokenizerPair(train_tokenizer(["the dog sleeps", "der Hund schläft"], "word", 50))
    (tmp_path / "a.tsv").write_text("the dog sleeps\tсобака спит\n" * 4)
    manifest = prepare_shards([Corpus(tsv=tmp_path / "a.tsv")], words, tmp_path / "out", settings(shard_size=2))
    assert manifest["pairs"] == 4 and manifest["unknown_tokens"] == 8
    assert "28.6% of the tokens are unknown to the tokenizer." in caplog.text


def test_links_and_trees(tokenizer, tmp_path):
    """Corpora with and without them: the columns are those of data in memory."""
    row = {"source_tokens": ["A", "dog", "sleeps"], "source_heads": [2, 3, 0], "target": "Ein Hund schläft"}
    row["source_relations"] = ["det", "nsubj", "root"]
    (tmp_path / "trees.jsonl").write_text(f"{json.dumps(row)}\n" * 50)
    for name, line in (("text.en", "A dog sleeps"), ("text.de", "Ein Hund schläft"), ("links", "0-0 1-1 2-2")):
        (tmp_path / name).write_text(f"{line}\n" * 50)
    files = {"source": tmp_path / "text.en", "target": tmp_path / "text.de"}
    trees = Corpus(jsonl=tmp_path / "trees.jsonl", tree_columns=True, target_column="target")
    relations = Relations(("<unk>", "det", "nsubj", "root", "<piece>"))
    encoder = TreeEncoder(tokenizer, relations, **tree_options(GCNRNMTConfig.from_preset("tiny", vocab_size=400)))
    links = Corpus(**files, alignments=tmp_path / "links")
    for other, options in ((links, {}), (trees, {"trees": encoder})):
        given, folder = [other, Corpus(**files)], tmp_path / f"{len(options)}"
        memory = prepare_dataset(given, "en", "de", tokenizer, tokenizer, tmp_path / "cache", **options)
        prepare_shards(given, TokenizerPair(tokenizer), folder, settings(), **options)
        data = ShardedDataset(folder)
        names = sorted(set(memory.column_names) - {"source_length", "target_length"})
        assert sorted(data.column_names) == names and len(names) > 2
        assert [data[row] for row in range(len(data))] == list(memory.select_columns(names))


def test_datasets_are_read_as_streams(tokenizers, tmp_path):
    rows = [{"en": f"A dog sees {number} cats.", "de": f"Ein Hund sieht {number} Katzen."} for number in range(90)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    corpus = Corpus(dataset="parquet", data_files=[str(tmp_path / "rows.parquet")])
    manifest = prepare_shards([corpus], tokenizers, tmp_path / "out", settings())
    assert manifest["pairs"] == 90 and len(manifest["shards"]) == 3
    matching = Corpus(dataset="parquet", data_files=str(tmp_path / "r*.parquet"))
    before = matching.fingerprint()
    pq.write_table(pa.Table.from_pylist(rows[:60]), tmp_path / "rows.parquet")
    assert matching.fingerprint() != before


def test_lines_that_cannot_be_used_are_named(tokenizers, tmp_path):
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    lines = [b"A dog sleeps."] * 80
    target.write_bytes(b"\n".join(lines))
    for content, words in (
        ([*lines[:50], b" ", *lines[51:]], "a.en, line 51: blank"),
        ([*lines[:60], b"caf\xe9", *lines[61:]], "a.en, line 61: not UTF-8"),
        (lines[:79], "a.en has 79 lines, but"),
        ([b"word " * 300] * 80, "were removed"),
    ):
        source.write_bytes(b"\n".join(content))
        with rejects(words):
            prepare_shards([Corpus(source=source, target=target)], tokenizers, tmp_path / words, settings())


def test_missing_truncated_and_altered_shards(prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    shard = folder / "shards" / "000-000002.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with rejects(field=str(shard)):
        ShardedDataset(folder)
    shard.write_bytes(content[:400] + bytes([content[400] ^ 1]) + content[401:])
    data = ShardedDataset(folder)
    with rejects(field=str(shard)):
        [data[number] for number in range(len(data))]
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        ShardedDataset(folder)
    path = folder / "manifest.json"
    for damaged in ("{", re.sub('"corpus": 0', '"corpus": 1', path.read_text(), count=1)):
        path.write_text(damaged)
        with rejects(field=str(path)):
            ShardedDataset(folder)
    path.unlink()
    with rejects("unfinished"):
        ShardedDataset(folder)


def test_a_folder_of_other_settings(prepared, files, tokenizers, tmp_path, monkeypatch):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    before = contents(folder)
    with rejects(field=str(folder)):
        prepare_shards([text_corpus(files)], tokenizers, folder, settings())
    assert contents(folder) == before
    same = [text_corpus(files)], tokenizers, folder, settings(on_empty="skip", max_source_length=60)
    (folder / "manifest.json").write_text("{")  # damaged, so it is made again
    prepare_shards(*same)
    assert contents(folder) == before
    monkeypatch.setattr(ShardMaker, "make", None)  # nothing is made again
    manifest = prepare_shards(*same)
    written = json.loads((folder / "manifest.json").read_text())
    assert manifest == {name: value for name, value in written.items() if name != "checksum"}
