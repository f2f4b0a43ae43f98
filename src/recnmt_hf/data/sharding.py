"""
Prepare training data once, in shards: files of token ids that training reads piece by piece.

A shard comes from a fixed number of consecutive lines (or rows) of one corpus and depends on nothing else. So shards
are the same for any number of processes and machines, and an interrupted preparation continues with missing ones.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import compress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .._interrupts import end_with_parent
from .._plain_text import is_blank
from ..errors import UserError
from .corpora import Corpus
from .files import digest_of, digest_of_file, lock, open_output
from .prepared import count_equal, tokenize_pairs, tokenizer_fingerprint, warn_about_unknown
from .shard_blocks import (
    KEY_BYTES,
    Block,
    ShardSettings,
    are_in_languages,
    blocks_of,
    first_occurrences,
    keys_of,
    plain_files,
    read_keys,
)
from .sharded import (
    FORMAT,
    MANIFEST,
    PLAN,
    RAW,
    SHARD,
    SHARDS,
    ShardRecord,
    open_table,
    path_of,
    read_json,
    read_signed,
    save_table,
    signed,
    write,
)
from .text import blank_error, decode_lines
from .tokenizer_pair import TokenizerPair
from .tree_inputs import TreeEncoder


# Column of the keys of duplicates.
KEYS = "key"
# Sums over shards in the manifest.
TOTALS = ("read", "pairs", "source_tokens", "target_tokens", "unknown_tokens")
# Sentences that are tokenized at once; the encodings of a whole shard would take gigabytes.
TOKENIZED_AT_ONCE = 2000


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
        settings, corpus = self.settings, self.corpora[block.corpus]
        removed: Counter[str] = Counter()
        columns = self.texts_of(block, removed)
        if any(each.alignments for each in self.corpora):  # all shards have the same columns
            columns.setdefault("alignment", [None] * len(columns["source"]))
        record = ShardRecord(block.name, block.corpus, len(columns["source"]) + removed["empty"])
        if settings.min_language_score is not None:
            languages = corpus.languages(settings.source_lang, settings.target_lang)
            fits = are_in_languages(columns, languages, settings.min_language_score)
            columns = keep_rows(columns, fits, "language", removed)
        codes = corpus.language_columns(settings.source_lang, settings.target_lang, self.tokenizers)
        columns |= {name: [code] * len(columns["source"]) for name, code in codes.items() if columns["source"]}
        for side, tag in (("source", corpus.source_tag), ("target", corpus.target_tag)):
            if tag is not None:
                columns[side] = [f"{tag} {text}" for text in columns[side]]
        keys = keys_of(columns, settings.deduplicate) if settings.deduplicate else None
        tokens = self.tokenize(columns)
        lengths = [np.fromiter(map(len, tokens[name]), np.int64) for name in ("input_ids", "labels")]
        fits = (lengths[0] <= settings.max_source_length) & (lengths[1] <= settings.max_target_length)
        tokens = keep_rows(tokens, fits, "too long", removed)
        if settings.max_length_ratio is not None:
            kept = [side[fits] for side in lengths]
            is_alike = np.maximum(*kept) <= float(settings.max_length_ratio) * np.minimum(*kept)
            tokens = keep_rows(tokens, is_alike, "length ratio", removed)
            fits[fits] = is_alike
        record.removed = {reason: count for reason, count in sorted(removed.items()) if count}
        self.save(record, tokens, None if keys is None else keys[fits])
        return record

    def texts_of(self, block: Block, removed: Counter[str]) -> dict[str, list[Any]]:
        """Return the columns of a block, without tags and without pairs that have an empty side."""
        if block.columns is not None:
            return dict(block.columns)
        files = plain_files(self.corpora[block.corpus])
        assert files is not None
        sides = []
        for path, (start, end) in zip(files, block.ranges, strict=True):
            with open(path, "rb") as file:
                file.seek(start)
                text = decode_lines(file.read(end - start), path, block.first).removesuffix("\n")
            sides.append([line.strip() for line in text.split("\n")])
        has_text = np.array([not any(map(is_blank, pair)) for pair in zip(*sides, strict=True)])
        if self.settings.on_empty == "error" and not has_text.all():
            first = int(has_text.argmin())
            place = next(path for path, side in zip(files, sides, strict=True) if is_blank(side[first]))
            raise blank_error(place, block.first + first)
        return keep_rows(dict(zip(("source", "target"), sides, strict=True)), has_text, "empty", removed)

    def tokenize(self, columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the token ids of texts, with the columns of links and trees."""
        source, target = self.tokenizers
        limits = (self.settings.max_source_length, self.settings.max_target_length)
        most = limits if self.settings.on_long == "truncate" else None
        tokens: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for start in range(0, max(len(columns["source"]), 1), TOKENIZED_AT_ONCE):
            batch = {name: values[start : start + TOKENIZED_AT_ONCE] for name, values in columns.items()}
            made = tokenize_pairs(batch, source, target, most, self.trees)
            for name in made.keys() - {"source_length", "target_length"}:
                tokens.setdefault(name, []).extend(made[name])
        return tokens

    def save(self, record: ShardRecord, tokens: Mapping[str, list[Any]], keys: np.ndarray | None) -> None:
        """Write the token ids of a shard and its record, with `keys` those of duplicates too."""
        sides = {"input_ids": self.tokenizers.source, "labels": self.tokenizers.target}
        columns = {}
        for name, values in sorted(tokens.items()):
            kind = pa.uint16() if name in sides and len(sides[name]) <= 2**16 else pa.int32()
            columns[name] = pa.array(values, pa.list_(kind))
        if keys is not None:
            content = [None, pa.py_buffer(keys.tobytes())]
            columns[KEYS] = pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), len(keys), content)
        table = pa.record_batch(columns)
        count_tokens(table, record, self.tokenizers)
        if record.pairs:
            save_table(table, record, path_of(record, self.folder, keys is not None))
        write(self.folder / f"{record.name}.json", json.dumps(signed(asdict(record))).encode())

    def is_made(self, block: Block) -> bool:
        """Return whether a block has an intact record and shard."""
        content = read_signed(self.folder / f"{block.name}.json")
        if content is None or not content["pairs"]:
            return content is not None
        path = path_of(ShardRecord(**content), self.folder, self.settings.deduplicate is not None)
        return path.is_file() and digest_of_file(path) == content["sha256"]


def keep_rows(
    columns: Mapping[str, list[Any]], fits: np.ndarray, reason: str, removed: Counter[str]
) -> dict[str, list[Any]]:
    """Return the rows that fit, and count the others."""
    count = int(len(fits) - fits.sum())
    removed[reason] += count
    return {name: list(compress(values, fits)) for name, values in columns.items()} if count else dict(columns)


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

    def missing() -> Iterator[Block]:
        for number, corpus in enumerate(corpora):
            for block in blocks_of(corpus, number, settings):
                names.append(block.name)
                if read_signed(output / MANIFEST) is not None:  # another part has finished the data
                    return
                if len(names) % part[1] == part[0] % part[1] and not maker.is_made(block):
                    yield block

    with lock(output / f".part-{part[0]}-of-{part[1]}.lock", field=output):
        if finished is None:
            with open_output(output / PLAN) as file:
                json.dump(plan, file, indent=1, ensure_ascii=False)
        for record in make_shards(maker, missing(), workers):
            on_shard(record)
        with lock(output / ".manifest.lock", 3600):  # parts may end at the same time
            return finish(plan, names, output, tokenizers)


def leftovers(folder: Path) -> list[Path]:
    """Return the files that a finished preparation does not need."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if path.suffix != SHARD or path.name.endswith(RAW)]


def finish(
    plan: Mapping[str, Any], names: Sequence[str], output: Path, tokenizers: TokenizerPair
) -> dict[str, Any] | None:
    """Remove duplicates, if asked for, and write the manifest. Return it, or `None` if shards are missing."""
    folder = output / SHARDS
    manifest = read_signed(output / MANIFEST)
    if manifest is None:
        found = [read_signed(folder / f"{name}.json") for name in names]
        records = [ShardRecord(**record) for record in found if record is not None]
        if len(records) < len(names):
            return None
        if plan["settings"]["deduplicate"]:
            remove_duplicates(records, folder, tokenizers)
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
    for path in leftovers(folder):
        path.unlink()
    (output / PLAN).unlink(missing_ok=True)
    return manifest


def make_shards(maker: ShardMaker, blocks: Iterator[Block], workers: int) -> Iterator[ShardRecord]:
    """Make the shards of blocks with several processes, and yield the record of each when it is finished."""
    if workers == 1:
        yield from map(maker.make, blocks)
        return
    # As `datasets` does. Forked processes start at once, and use no threads of libraries.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(maker, os.getpid()))
    pending: set[Future[ShardRecord]] = set()
    try:
        for block in blocks:
            pending.add(pool.submit(make_in_worker, block))
            if len(pending) >= 2 * workers:  # blocks with columns take memory
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        pool.shutdown(cancel_futures=True)


worker_maker: list[ShardMaker] = []


def start_worker(maker: ShardMaker, parent: int) -> None:
    """Keep what makes shards in a worker process, whose tokenizers have one thread."""
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker_maker.append(maker)


def make_in_worker(block: Block) -> ShardRecord:
    """Make a shard in a worker process."""
    return worker_maker[0].make(block)


def count_tokens(table: pa.RecordBatch, record: ShardRecord, tokenizers: TokenizerPair) -> None:
    """Count the pairs and tokens of a shard in its record."""
    record.pairs = len(table)
    sides = [table[name].flatten() for name in ("input_ids", "labels")]
    record.source_tokens, record.target_tokens = map(len, sides)
    unknown = zip(sides, [tokenizer.unk_token_id for tokenizer in tokenizers], strict=True)
    record.unknown_tokens = sum(count_equal(side, id) for side, id in unknown if id is not None)


def remove_duplicates(records: Sequence[ShardRecord], folder: Path, tokenizers: TokenizerPair) -> None:
    """Write shards without the pairs that occurred before, in their order. An interrupted removal is repeated."""
    own = [record for record in records if record.pairs]

    def keys_in(number: int) -> np.ndarray:
        column = open_table(path_of(own[number], folder, is_raw=True))[KEYS]
        return read_keys(column.buffers()[1])

    firsts = first_occurrences([record.pairs for record in own], keys_in)
    for record, is_first in zip(own, firsts, strict=True):
        table = open_table(path_of(record, folder, is_raw=True))
        record.removed["duplicate"] = int(len(is_first) - is_first.sum())
        names = [name for name in table.schema.names if name != KEYS]
        table = table.select(names).filter(pa.array(is_first))
        count_tokens(table, record, tokenizers)
        if record.pairs:
            save_table(table, record, path_of(record, folder, is_raw=False))
        else:
            record.bytes, record.sha256 = 0, ""
