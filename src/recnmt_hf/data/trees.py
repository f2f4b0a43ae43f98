"""
Sentences with dependency trees, from CoNLL-U files or columns of a corpus. Heads are numbered as in CoNLL-U: words are
counted from 1, and 0 is the head of a root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from .._plain_text import is_blank
from ..errors import UserError, short_repr
from ..models.user_errors import masked
from .records import ParsedSentence
from .text import read_lines


# Columns (or JSON keys) of a corpus with trees: lists of words, numbers and texts.
COLUMNS = ("source_tokens", "source_heads", "source_relations")
# Columns of a line of CoNLL-U, and the places of ID, FORM, HEAD and DEPREL.
CONLLU_COLUMNS = 10
ID, FORM, HEAD, RELATION = 0, 1, 6, 7


def read_conllu(path: str | Path) -> Iterator[tuple[int, ParsedSentence]]:
    """
    Yield the sentences of the CoNLL-U file `path`, plain or compressed, with the number of their first line. Ranges of
    words (`1-2`) and empty nodes (`3.1`) are skipped.

    Raises:
        UserError: A line has not ten columns, words are not numbered 1, 2, 3, ..., a head is not a number or beyond the
            sentence, or the heads form a cycle; the message names file and line.
    """
    name, first = masked(str(path)), 0
    rows: list[list[str]] = []
    for number, line in enumerate(chain(read_lines(path, "\r\n"), [""]), start=1):
        row = line.split("\t")
        if not line.strip():
            if rows:
                words, relations = [row[FORM].strip() for row in rows], [row[RELATION] for row in rows]
                yield first, parsed_at(f"{name}, line {first}", words, [int(row[HEAD]) for row in rows], relations)
            rows = []
        elif line.startswith("#") or (len(row) == CONLLU_COLUMNS and {"-", "."} & {*row[ID]}):
            continue
        elif len(row) != CONLLU_COLUMNS or row[ID] != str(len(rows) + 1) or not row[HEAD].isdecimal():
            raise UserError(
                f"expected word {len(rows) + 1} of a sentence in ten columns separated by tabs, with the number of its "
                f"head, got {short_repr(line)}. A blank line ends a sentence.",
                field=f"{name}, line {number}",
            )
        else:
            first = first if rows else number
            rows.append(row)


def parsed_at(place: str, *lists: Any) -> ParsedSentence:
    """Return a parsed sentence; errors name its place in a file."""
    try:
        return ParsedSentence(*lists)
    except UserError as error:
        raise UserError(error.message, field=place) from error


def attach_trees(lines: Iterable[str], text: str | Path | None, trees: str | Path) -> Iterator[str | ParsedSentence]:
    """
    Yield lines from the file `text` (`None`: standard input), words separated by spaces, with their trees from the
    CoNLL-U file `trees`, which has one sentence for each line that is not blank. The words are those of the text.
    `UserError` as for [`read_conllu`], and for a line and its tree with different numbers of words, or different
    numbers of lines and trees.
    """
    name, trees_name = "standard input" if text is None else masked(str(text)), masked(str(trees))
    sentences, line = read_conllu(trees), 0
    for line, source in enumerate(lines, start=1):
        if is_blank(source):
            yield source
            continue
        row, sentence = next(sentences, (0, None))
        parsed = None if sentence is None else sentence.with_text(source)
        if parsed is None:
            count = len(str(sentence or "").split())
            tree = f"{count} in its tree ({trees_name}, line {row})" if count else f"no tree in {trees_name}"
            raise UserError(f"{len(source.split())} words, but {tree}.", field=f"{name}, line {line}")
        yield parsed
    if (rest := next(sentences, None)) is not None:
        raise UserError(f"{name} has only {line} lines.", field=f"{trees_name}, line {rest[0]}")


def sentence_of_columns(record: Mapping[str, Any], place: str) -> ParsedSentence:
    """Return the sentence in the columns `source_tokens`, `source_heads` and `source_relations` of a row."""
    return parsed_at(place, *((record or {}).get(name) for name in COLUMNS))


def columns_of_tree(tree: ParsedSentence | None) -> dict[str, Any]:
    """Return the columns of a source's tree, `None` without one."""
    values = [None] * len(COLUMNS) if tree is None else map(list, (tree.words, tree.heads, tree.relations))
    return dict(zip(COLUMNS, values, strict=True))


def sentences_of_columns(texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return the sentences of a prepared dataset: texts, or parsed sentences where the columns have a tree."""
    if COLUMNS[0] not in columns:
        return list(texts)
    rows = zip(texts, *(columns[name] for name in COLUMNS), strict=True)
    return [text if row[0] is None else ParsedSentence(*row) for text, *row in rows]
