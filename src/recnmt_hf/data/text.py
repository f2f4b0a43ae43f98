"""Read sentence pairs from plain or compressed text, TSV and JSON lines."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast

from .._languages import key_of_language
from .._plain_text import is_blank
from ..errors import MissingFileError, UserError
from ..models.user_errors import masked, remember_secrets
from ..options import check_value
from .files import open_output
from .records import ParsedSentence


class SentencePair(NamedTuple):
    """A source sentence, with its dependency tree if the corpus has them, and its translation."""

    source: str | ParsedSentence
    target: str


# Of texts, or of sentences whose `str` is their text.
Row = TypeVar("Row", bound=tuple[Any, ...])
# Ways to handle pairs with an empty side, and pairs that are too long.
ON_EMPTY, ON_LONG = ("error", "skip"), ("skip", "truncate")
# First bytes of compressed files. A file of pzstd begins with a frame to skip.
GZIP, ZSTD = re.compile(rb"\x1f\x8b"), re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
# Limit of a line. Without it, a device such as /dev/zero would fill the memory with an endless line.
MAX_LINE_BYTES = 2**24


def tsv(rows: Iterable[Iterable[str]]) -> str:
    """Return rows as lines of tab-separated cells."""
    return "".join("\t".join(row) + "\n" for row in rows)


def write_results(results: Iterable[Any], table: Iterable[Iterable[str]], path: Path) -> None:
    """Write the objects of a dataclass to `path`, a JSON file, and their table to the TSV file beside it."""
    with open_output(path) as file:
        json.dump([asdict(result) for result in results], file, indent=1, ensure_ascii=False)
    with open_output(path.with_suffix(".tsv")) as file:
        file.write(tsv(table))


@contextmanager
def open_bytes(path: str | Path | None) -> Iterator[IO[bytes]]:
    """
    Open a file or a URL to read, decompressed if its first bytes are those of gzip or Zstandard. Pipes, devices and
    standard input (`None`) are read like files. `UserError` if it is missing, a folder, or cannot be read.
    """
    opened: Any
    if path is None:
        opened = getattr(sys.stdin, "buffer", sys.stdin)
        if opened is None:
            raise UserError("Standard input is closed.")
        if not hasattr(opened, "peek"):  # standard input of an interactive shell
            content = opened.read()
            opened = io.BufferedReader(io.BytesIO(content if isinstance(content, bytes) else content.encode()))
        opened = nullcontext(opened)  # it stays open
    elif is_url(path):
        opened = open_url(str(path))
    else:
        try:
            opened = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError as error:
            raise MissingFileError(f"{path} does not exist.", field=path) from error
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}).", field=path) from error
    with opened as file:
        start = file.peek(4)[:4]
        if GZIP.match(start):
            with gzip.open(file) as decompressed:
                yield cast(IO[bytes], decompressed)
        elif ZSTD.match(start):
            import pyarrow as pa

            # pyarrow's streams are raw files in all but name.
            raw = cast(io.RawIOBase, pa.CompressedInputStream(pa.PythonFile(file), "zstd"))
            with io.BufferedReader(raw) as decompressed_zstd:
                yield cast(IO[bytes], decompressed_zstd)
        else:
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
        raise UserError(f"{public} cannot be read ({first_line(error)}).", field=public) from cause


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_plain_file(path: str | Path) -> bool:
    """Return whether a path is that of a local regular file that is not compressed."""
    if is_url(path) or not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        start = file.read(4)
    return not (GZIP.match(start) or ZSTD.match(start))


def read_lines(path: str | Path | None, strip: str | None = None) -> Iterator[str]:
    """
    Yield the lines of a file of UTF-8 text that [`open_bytes`] opens, without line ends. The characters `strip`, by
    default all kinds of space, are removed at both ends of a line, and so is a byte order mark. Only line feeds end a
    line, not the other line ends of Unicode. `UserError` if a line is not UTF-8 or too long, or a compressed file is
    truncated.
    """
    name, number, line = "standard input" if path is None else masked(str(path)), 0, b""
    with open_bytes(path) as file:
        try:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
                if len(line) == MAX_LINE_BYTES:
                    raise UserError(f"{name}, line {number}: more than {MAX_LINE_BYTES:,} bytes.", field=name)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield line.decode().strip(strip)
        except UnicodeDecodeError as error:
            raise not_utf8_error(error, name, number, line) from error
        except (EOFError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            raise UserError(f"{name} is truncated or damaged after line {number} ({error}).", field=name) from error


def not_utf8_error(error: UnicodeDecodeError, name: str, number: int, line: bytes) -> UserError:
    """Return the error for a line of a file that is not UTF-8."""
    wide = number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "UTF-16" if wide else "LATIN1"
    return UserError(
        f"{name}, line {number}: not UTF-8 ({error.reason}). Run e.g. `iconv -f {encoding} -t UTF-8`.", field=name
    )


def lines_of_bytes(content: bytes, name: str, first: int) -> list[str]:
    """
    Return the lines of a part of a file as [`read_lines`] does, much faster. `content` has whole lines, the first of
    which has the number `first`, from 1, in the file `name`.
    """
    content = content.removeprefix(codecs.BOM_UTF8) if first == 1 else content
    if len(content) >= MAX_LINE_BYTES:
        for number, line in enumerate(content.split(b"\n"), start=first):
            if len(line) >= MAX_LINE_BYTES:
                raise UserError(f"{name}, line {number}: more than {MAX_LINE_BYTES:,} bytes.", field=name)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start)
        raise not_utf8_error(error, name, first + number, content.split(b"\n")[number]) from error
    return [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []


def read_parallel(source: str | Path, target: str | Path, on_empty: str = "error") -> Iterator[SentencePair]:
    """
    Yield pairs from two line-aligned files, UTF-8 text, plain or compressed, one sentence per line. `on_empty` is the
    treatment of a pair with a blank side: `"error"` or `"skip"`. `UserError` for such a pair, with file and line, for
    different numbers of lines, and for empty files.
    """
    return (SentencePair(*row) for row in read_aligned([source, target], on_empty))


def read_aligned(
    paths: Sequence[str | Path], on_empty: str = "error", lines: Sequence[Iterator[Any]] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield rows of any number of files, as [`read_parallel`]. `lines` are iterators over files that are open."""

    def rows() -> Iterator[tuple[int, tuple[Any, ...]]]:
        sides: Sequence[Iterator[Any]] = [read_lines(path) for path in paths] if lines is None else lines
        for number, row in enumerate(zip_longest(*sides), start=1):
            if None in row:
                ends = zip(row, sides, strict=True)
                first, *counts = (number - (line is None) + sum(1 for _ in side) for line, side in ends)
                path, count = next(pair for pair in zip(paths[1:], counts, strict=True) if pair[1] != first)
                raise UserError(f"{paths[0]} has {first} lines, but {path} has {count}.")
            yield number, row

    return skip_blank_pairs(rows(), [str(path) for path in paths], on_empty)


def skip_blank_pairs(
    pairs: Iterable[tuple[int, Row]], places: Sequence[str], on_empty: str, unit: str = "line"
) -> Iterator[Row]:
    """
    Yield the pairs (or longer rows) without a blank side from numbers of lines (or another `unit`) with pairs.
    `places` are the names of the files of all sides.
    """
    check_value("on_empty", on_empty, Literal[ON_EMPTY])
    is_empty = True
    for number, pair in pairs:
        is_empty = False
        blank = [place for place, text in zip(places, pair, strict=True) if is_blank(str(text))]
        if not blank:
            yield pair
        elif on_empty == "error":
            raise blank_error(blank[0], number, unit)
    if is_empty:
        files = " and ".join(dict.fromkeys(places))
        raise UserError(f"{files} contains no sentence pairs.", field=files)


def blank_error(place: str, number: int, unit: str = "line") -> UserError:
    """Return the error for a pair with a blank side in the file `place`."""
    return UserError(
        f"{place}, {unit} {number}: blank sentence. Remove the pair from both sides, or skip such pairs with on_empty: "
        'skip (recipe) or on_empty="skip" (Python).',
        field=place,
    )


def read_tsv(path: str | Path) -> Iterator[tuple[int, SentencePair]]:
    """Yield line numbers and pairs from a file whose lines have a source and a target, separated by a tab."""
    place = masked(str(path))
    for number, line in enumerate(read_lines(path, "\r\n"), start=1):
        fields = [part.strip() for part in line.split("\t")] if line else ["", ""]
        if len(fields) != 2:
            raise UserError(
                f"{place}, line {number}: got {len(fields)} fields. Write source and target, separated by one tab.",
                field=place,
            )
        yield number, SentencePair(*fields)


def read_jsonl(
    path: str | Path, source_key: str, target_key: str, read_source: Callable[[Any, str], Any] | None = None
) -> Iterator[tuple[int, SentencePair]]:
    """
    Yield line numbers and pairs from JSON lines: `{"translation": {"en": .., "de": ..}}` as in `datasets`, or
    `{"en": .., "de": ..}`. `read_source` reads the source from an object, instead of `source_key`, with its place for
    messages. `UserError` for a line that is not a JSON object with text under both keys.
    """
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
        except UserError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(
                f"{place}: expected a JSON object with text for {source_key!r} and {target_key!r} ({error}).",
                field=name,
            ) from error
        yield number, pair


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write UTF-8 text with [`~recnmt_hf.data.files.open_output`]."""
    with open_output(path) as file:
        file.writelines(f"{line}\n" for line in lines)
