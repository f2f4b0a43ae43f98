"""Files of prepared data: shards of token ids in Arrow's format, their records, and the manifest, with checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from .files import naming
from .prepared import count_equal
from .tokenizer_pair import TokenizerPair


# Version of the files.
FORMAT = 1
MANIFEST = "manifest.json"
# Settings of a preparation that has begun.
PLAN = "plan.json"
SHARDS = "shards"
# Ends of the names of shards, and of those with duplicates, whose keys are a further column.
SHARD, RAW = ".arrow", ".raw.arrow"
# Entry of manifests and records.
CHECKSUM = "checksum"


@dataclass
class ShardRecord:
    """A finished shard, as the manifest describes it."""

    name: str
    corpus: int
    read: int  # pairs
    pairs: int = 0  # that were written
    removed: dict[str, int] = field(default_factory=dict)  # by reason
    source_tokens: int = 0
    target_tokens: int = 0
    unknown_tokens: int = 0
    bytes: int = 0
    sha256: str = ""


def path_of(record: ShardRecord, folder: Path, is_raw: bool) -> Path:
    """Return the file of a shard."""
    return folder / f"{record.name}{RAW if is_raw else SHARD}"


def count_tokens(table: pa.RecordBatch, record: ShardRecord, tokenizers: TokenizerPair) -> None:
    """Count the pairs and tokens of a shard in its record."""
    record.pairs = len(table)
    sides = [table[name].flatten() for name in ("input_ids", "labels")]
    record.source_tokens, record.target_tokens = map(len, sides)
    ids = [tokenizer.unk_token_id for tokenizer in tokenizers]
    counts = [count_equal(side, id) for side, id in zip(sides, ids, strict=True) if id is not None]
    record.unknown_tokens = sum(counts)


def save_table(table: pa.RecordBatch, record: ShardRecord, path: Path) -> None:
    """Write a table as an Arrow file, and note size and checksum in its record."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)
    content = sink.getvalue()
    record.bytes, record.sha256 = content.size, hashlib.sha256(content).hexdigest()
    write(path, content)


def write(path: Path, content: Any) -> None:
    """Replace a file atomically, also if another process writes the same one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with naming(path), open(partial, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def open_table(path: Path) -> pa.RecordBatch:
    """Return the table in an Arrow file, which is not copied into memory."""
    return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping for JSON with its checksum."""
    text = json.dumps(content, sort_keys=True)
    return {**content, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def read_signed(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a JSON file without its checksum; `None` if the file is missing or was altered."""
    content = read_json(path) or {}
    checksum = content.pop(CHECKSUM, None)  # files of versions before 0.3 have none
    return content if content and checksum in (None, signed(content)[CHECKSUM]) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a JSON file; `None` if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
