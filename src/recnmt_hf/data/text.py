"""Reading sentence pairs: plain or gzipped text, TSV, JSON lines, and the files of LCSTS."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from .._plain_text import is_blank
from ..models.user_errors import MissingFileError, UserError
from .files import open_output


class SentencePair(NamedTuple):
    """A source sentence and its translation."""

    source: str
    target: str


STANDARD_INPUT = "standard input"
# Bytes of a line. A device such as /dev/zero would fill the memory with one that never ends.
MOST_BYTES = 2**24


class _Rejoined(io.RawIOBase):
    """A stream of which the first bytes have been read already; pipes cannot be wound back."""

    def __init__(self, head: bytes, rest: io.BufferedReader):
        self.head, self.rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data, self.head = self.head[: len(buffer)], self.head[len(buffer) :]
        data = data or self.rest.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_bytes(path: str | Path | None) -> Iterator[IO[bytes]]:
    """
    A file's bytes, unpacked where they are gzipped (recognised by its first bytes, not its name). Pipes, devices and
    `None`, standard input, are read as any file.

    Raises:
        FileNotFoundError: There is no such file; the message names the folder's likely candidates.
        ValueError: It is a folder or cannot be read.
    """
    opened: AbstractContextManager[Any]
    if path is None:
        if sys.stdin is None:
            raise UserError("Standard input is closed. Remedy: name a file, or give text through a pipe.")
        # It stays open; an interactive shell's own may have no bytes.
        opened = nullcontext(getattr(sys.stdin, "buffer", None) or io.BytesIO(sys.stdin.read().encode()))
    else:
        if not str(path):
            raise UserError("The name of the file to read is empty. Remedy: name a file.")
        path = Path(path)
        try:
            opened = path.open("rb")
        except FileNotFoundError as error:
            raise missing(path) from error
        except IsADirectoryError as error:
            raise UserError(f"{path} is a folder. Remedy: name a file in it.") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read ({reason}). Remedy: correct its path or permissions.") from error
    with opened as binary:
        head = binary.read(2)
        with io.BufferedReader(_Rejoined(head, binary), 2**16) as whole:
            if head == b"\x1f\x8b":
                with gzip.open(whole) as unpacked:
                    yield cast(IO[bytes], unpacked)
            else:
                yield whole


@contextmanager
def open_text(path: str | Path | None) -> Iterator[io.TextIOWrapper]:
    """The text of a UTF-8 file, as [`open_bytes`] reads it; lines end at line feeds alone."""
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n") as text:
        yield text


def missing(path: Path) -> MissingFileError:
    if path.is_symlink():
        return MissingFileError(
            f"{path} is a link to {os.readlink(path)}, which is not there. Remedy: correct the link."
        )
    near = sorted(other.name for other in path.parent.glob("[!.]*"))[:8] if path.parent.is_dir() else []
    hint = f" {path.parent.absolute()} holds: {', '.join(near)}." if near else ""
    if not path.parent.is_dir():
        hint = f" The folder {path.parent} does not exist."
    return MissingFileError(f"There is no file {path}.{hint} Remedy: correct the path.")


def read_lines(path: str | Path | None, strip: str | None = None) -> Iterator[str]:
    """
    The lines of a text file, without line ends and surrounding spaces (or without the characters `strip` alone).

    Lines end at line feeds alone, whatever else Unicode takes for a line's end; a byte order mark is left out.

    Args:
        path (`str` or `Path`, *optional*): Plain or gzipped UTF-8 text, a pipe, or `None`: standard input.
        strip (`str`, *optional*): Characters to take away at both ends; `None`: all kinds of space.

    Raises:
        ValueError: A line is not UTF-8 or too long, or a gzip file is cut short; the message names file and line.
    """
    name, number = STANDARD_INPUT if path is None else path, 0
    with open_bytes(path) as file:
        try:
            for number, line in enumerate(iter(partial(file.readline, MOST_BYTES), b""), start=1):
                if len(line) == MOST_BYTES:
                    raise UserError(
                        f"{name}, line {number}: the line has more than {MOST_BYTES:,} bytes. Remedy: give text with a "
                        "sentence on each line."
                    )
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield line.decode().strip(strip)
        except UnicodeDecodeError as error:
            wide = number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            raise UserError(
                f"{name}, line {number}: not UTF-8 ({error.reason}). Remedy: convert the file, e.g. with "
                f"`iconv -f {'UTF-16' if wide else 'LATIN1'} -t UTF-8`."
            ) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{name}: the compressed file ends early or is damaged, after line {number}. Remedy: copy or compress "
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
    while True:
        left, right = (next(lines, None) for lines in lines_of)
        if left is None and right is None:
            break
        count += 1
        if left is None or right is None:
            shorter, longer = (source, target) if left is None else (target, source)
            rest = 1 + sum(1 for _ in lines_of[1 if left is None else 0])
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
    `source_lang` and `target_lang` are the keys; other names than those of languages will do.

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


# A document of LCSTS, its parts, and where a text begins and ends.
LCSTS_TAG = re.compile(r"<(/?)(doc|summary|short_text|human_label)\b[^>]*>")


def read_lcsts(path: str | Path, min_score: int | None = None, on_empty: str = "error") -> Iterator[SentencePair]:
    """
    Short texts and their summaries from a part of LCSTS (Hu et al., 2015) in its own format: `<doc id=..>` with
    `<summary>` and `<short_text>`, in parts II and III also `<human_label>`, from 1 (irrelevant) to 5 (relevant).

    Args:
        path (`str` or `Path`): `PART_I.txt`, `PART_II.txt` or `PART_III.txt`, plain or gzipped.
        min_score (`int`, *optional*): Documents with a lower label are left out; those without a label stay.
        on_empty (`str`, *optional*, defaults to `"error"`): As for [`read_parallel`].

    Raises:
        ValueError: A document lacks one of the texts or does not end, or there is none; the message names file and
            line.
    """
    check_empty_choice(on_empty)
    found: dict[str, str] = {}
    place, count, start, number = "", 0, 0, 0
    for number, line in enumerate(read_lines(path), start=1):
        end = 0
        for tag in (*LCSTS_TAG.finditer(line), None):
            if place:
                found[place] = found.get(place, "") + line[end : tag.start() if tag else None].strip()
            if tag is None:
                continue
            end, closes, name = tag.end(), bool(tag[1]), tag[2]
            place = "" if closes or name == "doc" else name
            if name == "doc" and bool(start) is not closes:
                raise UserError(
                    f"{path}, line {number}: {tag[0]} where {'no document is open' if closes else 'one is open still'}."
                    " Remedy: copy the file again."
                )
            if name == "doc" and not closes:
                start = number
            elif name == "doc":
                count += 1
                pair = lcsts_pair(found, min_score, f"{path}, line {start}")
                found, start = {}, 0
                if pair is None:
                    continue
                if not any(map(is_blank, pair)):
                    yield pair
                elif on_empty == "error":
                    raise empty_line(path, number)
    if start or not count:
        what = f"the document of line {start} does not end" if start else "there is no document (<doc id=..>)"
        raise UserError(f"{path}, line {number}: {what}. Remedy: give a part of LCSTS as it is distributed.")


def lcsts_pair(found: Mapping[str, str], min_score: int | None, place: str) -> SentencePair | None:
    """The texts of a document; `None` where its label is too low."""
    missing_parts = [name for name in ("short_text", "summary") if name not in found]
    if missing_parts:
        raise UserError(f"{place}: the document has no <{missing_parts[0]}>. Remedy: copy the file again.")
    label = found.get("human_label")
    if min_score is not None and label is not None:
        if not label.isdecimal():
            raise UserError(f"{place}: <human_label> is {label[:20]!r}, no number. Remedy: copy the file again.")
        if int(label) < min_score:
            return None
    return SentencePair(found["short_text"], found["summary"])


def write_lines(path: str | Path, lines: Iterable[str], inputs: Iterable[str | Path | None] = ()) -> None:
    """Writes UTF-8 text as [`~recnmt_hf.data.files.open_output`] does."""
    with open_output(path, inputs) as file:
        file.writelines(f"{line}\n" for line in lines)
