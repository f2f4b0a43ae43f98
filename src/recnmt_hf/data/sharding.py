"""
Prepare training data once, in shards of token ids. A shard comes from a fixed number of consecutive lines (or rows) of
one corpus and depends on nothing else. So shards are the same for any number of processes and machines, and an
interrupted preparation continues with missing ones.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import UserError
from .corpora import Corpus
from .files import digest_of, digest_of_file, lock
from .prepared import (
    LENGTHS,
    TOKENIZED_AT_ONCE,
    TOKENS,
    ShardSettings,
    batched,
    in_processes,
    tokenize_pairs,
    tokenizer_fingerprint,
    warn_about_unknown,
)
from .records import Sentence
from .sharded import FORMAT, MANIFEST, SHARD, SHARDS, ShardRecord, read_json, read_signed, sign, write
from .text import decode_lines, is_plain_file, skip_blank_pairs
from .tokenizer_pair import TokenizerPair
from .tree_inputs import TreeEncoder


PLAN = "plan.json"  # settings of a preparation that has begun
CHUNK = 2**24  # bytes that are read at once to find the ends of lines

Pairs = list[tuple[Sentence, ...]]


class Block(NamedTuple):
    """The lines or rows of a shard: ranges of bytes of both files, which each process reads itself, or the pairs."""

    name: str
    corpus: int
    first: int  # line or row, from 1
    content: tuple[tuple[int, int], ...] | Pairs


def blocks_of(corpus: Corpus, number: int, settings: ShardSettings) -> Iterator[Block]:
    """Yield the blocks of a corpus, which has a number in the recipe. `UserError` if it cannot be read."""
    size, files = settings.shard_size, plain_files(corpus)
    if files:
        (sources, source_ends), (targets, target_ends) = (line_ends(path, size) for path in files)
        if sources != targets:
            raise UserError(f"{files[0]} has {sources} lines, but {files[1]} has {targets}.")
        contents: Any = zip(pairwise([0, *source_ends]), pairwise([0, *target_ends]), strict=True)
    else:  # one process has to read the rows
        rows = corpus.rows(settings.source_lang, settings.target_lang, settings.on_empty, tags=False, streaming=True)
        contents = batched(rows, size)
    for block, content in enumerate(contents):
        yield Block(f"{number:03d}-{block:06d}", number, block * size + 1, content)


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
        lines, pairs = self.read(block)
        record, removed, tables = ShardRecord(block.name, block.corpus, lines), Counter(empty=lines), []
        for batch in batched(pairs, TOKENIZED_AT_ONCE):
            removed["empty"] -= len(batch)
            tables.append(self.table(batch, self.corpora[block.corpus], removed))
        record.removed = {reason: count for reason, count in sorted(removed.items()) if count}
        if tables:
            record.save(pa.Table.from_batches(tables), self.path(record.name), self.tokenizers)
        write(self.folder / f"{record.name}.json", json.dumps(sign(asdict(record))).encode())
        return record

    def read(self, block: Block) -> tuple[int, Iterator[tuple[Sentence, ...]]]:
        """Return the number of lines of a block, and its pairs without those with a blank side."""
        if isinstance(block.content, list):
            return len(block.content), iter(block.content)
        files, sides = plain_files(self.corpora[block.corpus]), []
        for path, (start, end) in zip(files, block.content, strict=True):
            with open(path, "rb") as file:
                file.seek(start)
                lines = decode_lines(file.read(end - start), path, block.first).removesuffix("\n").split("\n")
            sides.append([line.strip() for line in lines])
        rows = enumerate(zip(*sides, strict=True), block.first)
        pairs = skip_blank_pairs(rows, files, self.settings.on_empty, may_be_empty=True)
        return len(sides[0]), (tuple(map(Sentence, pair)) for pair in pairs)

    def table(self, pairs: Pairs, corpus: Corpus, removed: Counter[str]) -> pa.RecordBatch:
        """Return the table of pairs, and count those that are removed."""
        settings = self.settings
        languages = settings.source_lang, settings.target_lang
        pairs, codes = list(map(corpus.tagged, pairs)), corpus.language_columns(*languages, self.tokenizers)
        links = any(each.alignments for each in self.corpora)  # all shards have the same columns
        columns, fit, is_alike = tokenize_pairs(pairs, codes, self.tokenizers, settings, self.trees, links)
        removed["too long"] += int((~fit).sum())
        removed["length ratio"] += int((fit & ~is_alike).sum())
        small = [name for name, own in zip(TOKENS, self.tokenizers, strict=True) if len(own) <= 2**16]
        types = {name: pa.list_(pa.uint16() if name in small else pa.int32()) for name in sorted(columns)}
        table = {name: pa.array(columns[name], kind) for name, kind in types.items() if name not in LENGTHS}
        return pa.record_batch(table).filter(pa.array(fit & is_alike))

    def path(self, name: str) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{name}{SHARD}"

    def is_made(self, block: Block) -> bool:
        """Return whether a block has an intact record and shard."""
        content, path = read_signed(self.folder / f"{block.name}.json"), self.path(block.name)
        if content is None or not content["pairs"]:
            return content is not None
        return path.is_file() and digest_of_file(path) == content["sha256"]


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
    output, folder = Path(output), Path(output) / SHARDS
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
            raise UserError(f"{output} has data prepared with other {changed}. Use another folder.", field=output)
    if (finished := read_signed(output / MANIFEST)) is not None:
        remove_leftovers(output)
        return finished
    folder.mkdir(parents=True, exist_ok=True)
    maker, names = ShardMaker(corpora, tokenizers, settings, folder, trees), list[str]()

    def missing() -> Iterator[tuple[Block]]:
        for number, corpus in enumerate(corpora):
            for block in blocks_of(corpus, number, settings):
                names.append(block.name)
                if read_signed(output / MANIFEST) is not None:  # another part has finished the data
                    return
                if len(names) % part[1] == part[0] % part[1] and not maker.is_made(block):
                    yield (block,)

    with lock(output / f".part-{part[0]}-of-{part[1]}.lock", field=output):
        write(output / PLAN, json.dumps(plan, indent=1, ensure_ascii=False).encode())
        for record in in_processes(maker.make, missing(), workers):
            on_shard(record)
        with lock(output / ".manifest.lock", 3600):  # parts may end at the same time
            manifest = read_signed(output / MANIFEST) or finish(plan, names, output, maker)
            if manifest is not None:
                remove_leftovers(output)
            return manifest


def finish(plan: Mapping[str, Any], names: Sequence[str], output: Path, maker: ShardMaker) -> dict[str, Any] | None:
    """Write the manifest. Return it, or `None` if shards are missing."""
    found = [read_signed(maker.folder / f"{name}.json") for name in names]
    records = [ShardRecord(**record) for record in found if record is not None]
    if len(records) < len(names):
        return None
    shards = [asdict(record) for record in records]
    names = ("read", "pairs", "source_tokens", "target_tokens", "unknown_tokens")
    totals: dict[str, Any] = {name: sum(shard[name] for shard in shards) for name in names}
    removed = Counter[str]()
    for record in records:
        removed.update(record.removed)
    manifest = {**plan, **totals, "removed": dict(sorted(removed.items())), "shards": shards}
    if not manifest["pairs"]:
        raise UserError(f"All {manifest['read']} pairs for {output} were removed ({manifest['removed']}).")
    warn_about_unknown(manifest["unknown_tokens"], manifest["source_tokens"] + manifest["target_tokens"])
    write(output / MANIFEST, json.dumps(sign(manifest), indent=1, ensure_ascii=False).encode())
    return manifest


def remove_leftovers(output: Path) -> None:
    """Delete the files that a finished preparation does not need."""
    for path in (*(output / SHARDS).glob("*"), output / PLAN):
        if path.suffix != SHARD:
            path.unlink(missing_ok=True)
