"""Reading sentence pairs: plain or gzipped text, TSV, JSON lines, and any translation set of `datasets`."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from .._plain_text import is_blank
from ..models.user_errors import MissingFileError, UserError


class SentencePair(NamedTuple):
    """A source sentence and its translation."""

    source: str
    target: str


def open_text(path: str | Path) -> IO[str]:
    """
    A UTF-8 text file, gzipped or not (told by its first bytes, not its name).

    Raises:
        FileNotFoundError: There is no such file; the message names the folder's likely candidates.
    """
    path = Path(path)
    if not path.is_file():
        near = sorted(other.name for other in path.parent.glob("*"))[:8] if path.parent.is_dir() else []
        hint = f" {path.parent} holds: {', '.join(near)}." if near else f" The folder {path.parent} does not exist."
        raise MissingFileError(f"There is no file {path}.{hint} Remedy: correct the path.")
    binary = path.open("rb")
    compressed = binary.read(2) == b"\x1f\x8b"
    binary.seek(0)
    return io.TextIOWrapper(gzip.open(binary) if compressed else binary, encoding="utf-8-sig", newline="\n")


def read_lines(path: str | Path, strip: str | None = None) -> Iterator[str]:
    """
    The lines of a text file, without line ends and surrounding spaces (or without the characters `strip` alone).

    Raises:
        ValueError: A line is not UTF-8, or a gzip file is cut short; the message names file and line.
    """
    number = 0
    with open_text(path) as file:
        try:
            for line in file:
                number += 1
                yield line.strip(strip)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, near line {number + 1}: not UTF-8 ({error.reason}). Remedy: convert the file, e.g. with "
                "`iconv -f LATIN1 -t UTF-8`."
            ) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path}: the compressed file ends early or is damaged, after line {number}. Remedy: copy or compress "
                "it again."
            ) from error


def read_parallel(source: str | Path, target: str | Path, on_empty: str = "error") -> Iterator[SentencePair]:
    """
    Pairs from two line-aligned files.

    Args:
        source, target (`str` or `Path`): Plain or gzipped UTF-8 text, one sentence per line.
        on_empty (`str`, *optional*, defaults to `"error"`): What to do with a pair of which a side is empty:
            `"error"` or `"skip"`.

    Raises:
        ValueError: The files have different numbers of lines, a side is empty, or there is no line at all; the
            message names file and line.
    """
    check_empty_choice(on_empty)
    lines_of = [read_lines(source), read_lines(target)]
    count = 0
    end = object()
    while True:
        left, right = (next(lines, end) for lines in lines_of)
        if left is end and right is end:
            break
        count += 1
        if left is end or right is end:
            shorter, longer = (source, target) if left is end else (target, source)
            rest = 1 + sum(1 for _ in lines_of[1 if left is end else 0])
            raise UserError(
                f"{shorter} has {count - 1} lines, {longer} has {count - 1 + rest}. Remedy: the files must be aligned "
                "line by line; look for the first pair that does not match."
            )
        if not is_blank(left) and not is_blank(right):
            yield SentencePair(left, right)
        elif on_empty == "error":
            raise empty_line(source if is_blank(left) else target, count)
    if count == 0:
        raise UserError(f"{source} and {target} are empty. Remedy: give files with at least one sentence pair.")


def check_empty_choice(on_empty: str) -> None:
    if on_empty not in ("error", "skip"):
        raise UserError(f'on_empty={on_empty!r} is not allowed; it must be "error" or "skip".')


def empty_line(path: str | Path, number: int) -> ValueError:
    return UserError(
        f"{path}, line {number}: an empty sentence. Remedy: remove the pair from both files, or allow it to be left "
        'out with on_empty: skip (recipe) or on_empty="skip".'
    )


def read_tsv(path: str | Path, on_empty: str = "error") -> Iterator[SentencePair]:
    """
    Pairs from a file with source and target separated by a tab.

    Raises:
        ValueError: A line has not exactly two fields, or one is empty; the message names file and line.
    """
    check_empty_choice(on_empty)
    count = 0
    for count, line in enumerate(read_lines(path, "\r\n"), start=1):
        fields = [part.strip() for part in line.split("\t")]
        if len(fields) != 2 and line:
            raise UserError(
                f"{path}, line {count}: {len(fields)} tab-separated fields, 2 are needed (source, target). Remedy: "
                "correct the line; text must not hold tabs."
            )
        if len(fields) == 2 and not any(map(is_blank, fields)):
            yield SentencePair(*fields)
        elif on_empty == "error":
            raise empty_line(path, count)
    if count == 0:
        raise UserError(f"{path} is empty. Remedy: give a file with at least one sentence pair.")


def read_jsonl(path: str | Path, source_lang: str, target_lang: str, on_empty: str = "error") -> Iterator[SentencePair]:
    """
    Pairs from JSON lines: `{"translation": {"en": .., "de": ..}}` as `datasets` has them, or `{"en": .., "de": ..}`.

    Raises:
        ValueError: A line is no JSON object or lacks a language; the message names file and line.
    """
    check_empty_choice(on_empty)
    count = 0
    for count, line in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(line)
            record = record.get("translation", record)
            pair = SentencePair(record[source_lang].strip(), record[target_lang].strip())
            "".join(pair).encode()  # JSON can write half a character, which no tokenizer takes
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {count}: no JSON object with {source_lang!r} and {target_lang!r} ({error}). Remedy: "
                f'write lines like {{"{source_lang}": "..", "{target_lang}": ".."}}.'
            ) from error
        if not any(map(is_blank, pair)):
            yield pair
        elif on_empty == "error":
            raise empty_line(path, count)
    if count == 0:
        raise UserError(f"{path} is empty. Remedy: give a file with at least one sentence pair.")


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Writes UTF-8 text, gzipped when the name ends in `.gz`, creating folders on the way."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
