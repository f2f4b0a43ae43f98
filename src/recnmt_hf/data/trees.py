"""
Sentences with dependency trees, from CoNLL-U files or columns of a corpus. Heads are numbered as in CoNLL-U: words are
counted from 1, and 0 is the head of a root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
# Digits of a HEAD. A line has fewer words than a number with more.
MOST_DIGITS = 9


def read_conllu(path: str | Path) -> Iterator[tuple[int, ParsedSentence]]:
    """
    Yield the sentences of the CoNLL-U file `path`, plain or compressed, with the number of their first line. Ranges of
    words (`1-2`) and empty nodes (`3.1`) are skipped.

    Raises:
        UserError: A line has not ten columns, words are not numbered 1, 2, 3, ..., a head is not a number or beyond the
            sentence, or the heads form a cycle; the message names file and line.
    """
    name = masked(str(path))
    rows: list[tuple[int, list[str]]] = []
    for number, line in enumerate(chain(read_lines(path, "\r\n"), [""]), start=1):
        place = f"{name}, line {number}"
        if line.startswith("#"):
            continue
        if not line.strip():
            if rows:
                words = [row[FORM].strip() for _, row in rows]
                heads, relations = [int(row[HEAD]) for _, row in rows], [row[RELATION] for _, row in rows]
                with errors_at(f"{name}, line {rows[0][0]}"):
                    sentence = ParsedSentence(words, heads, relations)
                yield rows[0][0], sentence
                rows = []
            continue
        row = line.split("\t")
        if len(row) != CONLLU_COLUMNS:
            raise UserError(
                f"got {len(row)} columns. Write the ten columns of CoNLL-U, separated by tabs.", field=place
            )
        if "-" in row[ID] or "." in row[ID]:
            continue
        if row[ID] != str(len(rows) + 1):
            raise UserError(
                f"the word has the ID {short_repr(row[ID])}, expected {len(rows) + 1}. Number the words of a sentence "
                "1, 2, 3, ..., and separate sentences by a blank line.",
                field=place,
            )
        if not row[HEAD].isdecimal() or len(row[HEAD]) > MOST_DIGITS:
            raise UserError(
                f"the HEAD {short_repr(row[HEAD])} is not the number of a word. Parse the file; the HEAD of a root "
                "is 0.",
                field=place,
            )
        rows.append((number, row))


@contextmanager
def errors_at(place: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Report errors about a tree with its place in a file; `names` are those of the lists there."""
    try:
        yield
    except UserError as error:
        name = error.field and (names or {}).get(error.field, error.field)
        raise UserError(error.message, field=f"{place}: {name}" if name else place) from error


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
        if sentence is None:
            raise UserError(f"the tree is missing, because {trees_name} has fewer trees.", field=f"{name}, line {line}")
        parsed = sentence.with_text(source)
        if parsed is None:
            counts = f"{len(source.split())} words, but the tree ({trees_name}, line {row}) has"
            raise UserError(f"{counts} {len(str(sentence).split())}.", field=f"{name}, line {line}")
        yield parsed
    if (rest := next(sentences, None)) is not None:
        raise UserError(f"{name} has only {line} lines.", field=f"{trees_name}, line {rest[0]}")


def sentence_of_columns(record: Mapping[str, Any], place: str) -> ParsedSentence:
    """Return the sentence in the columns `source_tokens`, `source_heads` and `source_relations` of a row."""
    missing = [name for name in COLUMNS if (record or {}).get(name) is None]
    if missing:
        raise UserError(
            f"{short_repr(missing[0])} is missing. A corpus with tree_columns needs the columns {', '.join(COLUMNS)}.",
            field=place,
        )
    with errors_at(place, dict(zip(("words", "heads", "relations"), COLUMNS, strict=True))):
        return ParsedSentence(*(record[name] for name in COLUMNS))


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
