"""Read sentence pairs from plain or compressed text, TSV and JSON lines."""

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

from .._plain_text import is_blank
from ..errors import UserError, shorten
from ..models.user_errors import masked, remember_secrets
from ..options import check_value
from .files import open_output
from .languages import key_of_language
from .records import ParsedSentence


class SentencePair(NamedTuple):
    """A source sentence, with its dependency tree if the corpus has them, and its translation."""

    source: str | ParsedSentence
    target: str


Row = TypeVar("Row", bound=tuple[Any, ...])  # of texts, or of sentences whose `str` is their text
# Ways to handle pairs with an empty side, and pairs that are too long.
ON_EMPTY, ON_LONG = ("error", "skip"), ("skip", "truncate")
# First bytes of compressed files. A file of pzstd begins with a frame to skip.
GZIP, ZSTD = re.compile(rb"\x1f\x8b"), re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
# Limit of a line. Without it, a device such as /dev/zero would fill the memory with an endless line.
MAX_LINE_BYTES = 2**24


def tsv(rows: Iterable[Iterable[str]]) -> str:
    """Return rows as lines of tab-separated cells."""
    return "".join("\t".join(row) + "\n" for row in rows)


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write UTF-8 text with [`~recnmt_hf.data.files.open_output`]."""
    with open_output(path) as file:
        file.writelines(f"{line}\n" for line in lines)


@contextmanager
def open_bytes(path: str | Path | None) -> Iterator[IO[bytes]]:
    """Open a file, a URL or standard input (`None`) to read; gzip and Zstandard are decompressed."""
    with ExitStack() as stack:
        if path is None:
            stream: Any = sys.stdin.buffer  # it stays open
            file = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
        elif is_url(path):
            file = stack.enter_context(open_url(str(path)))
        else:
            file = stack.enter_context(open(path, "rb"))
        start = file.peek(4)[:4]
        if GZIP.match(start):
            file = stack.enter_context(gzip.open(file))
        elif ZSTD.match(start):
            import pyarrow as pa

            file = stack.enter_context(io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), "zstd")))
        yield file


def is_url(path: str | Path) -> bool:
    """Return whether a path is a URL for `fsspec`, such as `s3://bucket/train.en.zst`."""
    return "://" in str(path)


def open_url(url: str) -> IO[bytes]:
    """Open a URL to read with `fsspec`. `UserError`, which does not show its secrets, if this is not possible."""
    from fsspec.core import url_to_fs

    remember_secrets(url)
    try:
        system, path = url_to_fs(url)  # `fsspec.open` takes the ? of a query for a pattern
        file = io.BufferedReader(system.open(path, "rb"))
        file.peek(1)  # some protocols connect only now
        return file
    except Exception as error:  # of many kinds; packages for the protocol may be missing
        public = masked(url)
        cause = error if public == url else None  # the text of the cause may have the secrets
        raise UserError(f"{public} cannot be read ({shorten(str(error))}).", field=public) from cause


def is_plain_file(path: str | Path) -> bool:
    """Return whether a path is that of a local regular file that is not compressed."""
    if is_url(path) or not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(4)
    return not (GZIP.match(start) or ZSTD.match(start))


def read_lines(path: str | Path | None, strip: str | None = None) -> Iterator[str]:
    """
    Yield the lines of UTF-8 text that [`open_bytes`] opens, without the characters `strip` (by default all kinds of
    space) at both ends. Only line feeds end a line. `UserError` names the first line that cannot be read.
    """
    name, number = "standard input" if path is None else masked(str(path)), 0
    with open_bytes(path) as file:
        try:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
                yield decode_lines(line, name, number).strip(strip)
        except (EOFError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            raise UserError(f"{name} is truncated or damaged after line {number} ({error}).", field=name) from error


def decode_lines(content: bytes, name: str, first: int) -> str:
    """Return the text of whole lines of the file `name`, the first of which has the number `first`, from 1."""
    content = content.removeprefix(codecs.BOM_UTF8) if first == 1 else content
    if len(content) >= MAX_LINE_BYTES:
        for number, line in enumerate(content.split(b"\n"), start=first):
            if len(line) >= MAX_LINE_BYTES - 1:
                raise UserError(f"{name}, line {number}: more than {MAX_LINE_BYTES:,} bytes.", field=name)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        number = first + content.count(b"\n", 0, error.start)
        raise UserError(f"{name}, line {number}: not UTF-8 ({error.reason}).", field=name) from error


def read_aligned(
    paths: Sequence[str | Path], on_empty: str = "error", lines: Sequence[Iterator[Any]] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield rows of line-aligned files, or of `lines`; `on_empty` (`"error"` or `"skip"`) is for blank sides."""
    sides: Sequence[Iterator[Any]] = [read_lines(path) for path in paths] if lines is None else lines
    return skip_blank_pairs(side_by_side(paths, sides), [str(path) for path in paths], on_empty)


def side_by_side(names: Sequence[str | Path], sides: Sequence[Iterator[Any]]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the lines of several files with their number; `UserError` if a file (of these names) has fewer lines."""
    for number, row in enumerate(zip_longest(*sides), start=1):
        if None in row:
            counts = [number - (line is None) + sum(1 for _ in side) for line, side in zip(row, sides, strict=True)]
            path, count = next(pair for pair in zip(names, counts, strict=True) if pair[1] != counts[0])
            raise UserError(f"{names[0]} has {counts[0]} lines, but {path} has {count}.")
        yield number, row


def skip_blank_pairs(
    pairs: Iterable[tuple[int, Row]],
    places: Sequence[str],
    on_empty: str,
    unit: str = "line",
    may_be_empty: bool = False,
) -> Iterator[Row]:
    """Yield rows without a blank side from their numbers and rows; `places` name the files of all sides."""
    check_value("on_empty", on_empty, Literal[ON_EMPTY])
    for number, pair in pairs:
        blank = [place for place, text in zip(places, pair, strict=True) if is_blank(str(text))]
        if not blank:
            may_be_empty = True
            yield pair
        elif on_empty == "error":
            remedy = "Remove the pair from both sides, or skip such pairs with on_empty: skip"
            raise UserError(f"{blank[0]}, {unit} {number}: blank sentence. {remedy}.", field=blank[0])
    if not may_be_empty:
        raise UserError(f"No sentence pairs in {' and '.join(dict.fromkeys(places))}.", field=places[0])


def read_tsv(path: str | Path) -> Iterator[tuple[int, SentencePair]]:
    """Yield line numbers and pairs from a file whose lines have a source and a target, separated by a tab."""
    place = masked(str(path))
    for number, line in enumerate(read_lines(path, "\r\n"), start=1):
        fields = [part.strip() for part in line.split("\t")] if line else ["", ""]
        if len(fields) != 2:
            remedy = "Write source and target, separated by one tab"
            raise UserError(f"{place}, line {number}: got {len(fields)} fields. {remedy}.", field=place)
        yield number, SentencePair(*fields)


def read_jsonl(
    path: str | Path, source_key: str, target_key: str, read_source: Callable[[Any, str], Any] | None = None
) -> Iterator[tuple[int, SentencePair]]:
    """Yield line numbers and pairs of JSON lines, `{"en": .., "de": ..}` or in `translation`, as in `datasets`."""
    name = masked(str(path))
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{name}, line {number}"
        try:
            whole = json.loads(line)
            record = whole.get("translation", whole)
            keys = [key_of_language(key, tuple(record)) for key in (source_key, target_key)]
            source = record[keys[0]].strip() if read_source is None else read_source(whole, place)
            pair = SentencePair(source, record[keys[1]].strip())
            "".join(map(str, pair)).encode()  # JSON may contain unpaired surrogates, which tokenizers reject
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            text = f"{place}: expected a JSON object with text for {source_key!r} and {target_key!r} ({error})."
            raise UserError(text, field=name) from error
        yield number, pair
