"""
Dependency trees, read from CoNLL-U files or columns of a corpus, and the inputs of models: `dependency_heads`, the
position of each token's head (-1: none), and `dependency_relations`, the id of its relation to the head.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from .._loading_errors import explained_loading, optional_file, read_small_text
from .._plain_text import encode_plain, is_blank
from ..errors import UserError, short_repr
from ..models.user_errors import masked
from .files import open_output
from .records import ParsedSentence, Tokens, TokenTree
from .text import read_lines


# Columns (or JSON keys) of a corpus with trees: lists of words, numbers and texts.
COLUMNS = ("source_tokens", "source_heads", "source_relations")
# Number of columns of a line of CoNLL-U, and the places of ID, FORM, HEAD and DEPREL.
CONLLU_COLUMNS, ID, FORM, HEAD, RELATION = 10, 0, 1, 6, 7
# Names of the inputs, with their values at padding.
HEADS, RELATIONS = "dependency_heads", "dependency_relations"
TREE_INPUTS = {HEADS: -1, RELATIONS: 0}
RELATIONS_FILE = "relations.json"  # in a model's folder, with the names of the relations
# Names of unknown relations (id 0), and of the relation between the pieces of a word.
UNKNOWN, PIECE = "<unk>", "<piece>"


def read_conllu(path: str | Path) -> Iterator[tuple[int, ParsedSentence]]:
    """
    Yield the sentences of the CoNLL-U file `path`, plain or compressed, with the number of their first line. Ranges of
    words (`1-2`) and empty nodes (`3.1`) are skipped.

    Raises:
        UserError: A line has not ten columns, words are not numbered 1, 2, 3, ..., a head is not a number or beyond the
            sentence, or the heads form a cycle; the message names file and line.
    """
    name, first, rows = masked(str(path)), 0, list[tuple[str, int, str]]()
    for number, line in enumerate(chain(read_lines(path, "\r\n"), [""]), start=1):
        row = line.split("\t")
        if not line.strip():
            if rows:
                yield first, parsed_at(f"{name}, line {first}", *map(list, zip(*rows, strict=True)))
            rows = []
        elif line.startswith("#") or (len(row) == CONLLU_COLUMNS and {"-", "."} & {*row[ID]}):
            continue
        elif len(row) != CONLLU_COLUMNS or row[ID] != str(len(rows) + 1) or not row[HEAD].isdecimal():
            expected = f"a blank line or word {len(rows) + 1} in ten tab-separated columns, with the number of its head"
            raise UserError(f"expected {expected}, got {short_repr(line)}.", field=f"{name}, line {number}")
        else:
            first = first if rows else number
            rows.append((row[FORM].strip(), int(row[HEAD]), row[RELATION]))


def parsed_at(place: str, *lists: Any) -> ParsedSentence:
    """Return a parsed sentence; errors name its place in a file."""
    try:
        return ParsedSentence(*lists)
    except UserError as error:
        raise UserError(error.message, field=place) from error


def attach_trees(lines: Iterable[str], text: str | Path | None, trees: str | Path) -> Iterator[str | ParsedSentence]:
    """Yield lines of the file `text` (`None`: standard input) with a tree of `trees` for each that is not blank."""
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


def columns_of_trees(trees: Iterable[ParsedSentence | None]) -> dict[str, list[Any]]:
    """Return these columns for the trees of sources, with `None` for a source without one."""
    rows = [tree and (tree.words, tree.heads, tree.relations) for tree in trees]
    return {name: [row and list(row[number]) for row in rows] for number, name in enumerate(COLUMNS)}


def sentences_of_columns(texts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return the sentences of a prepared dataset: texts, or parsed sentences where the columns have a tree."""
    if COLUMNS[0] not in columns:
        return list(texts)
    rows = zip(texts, *(columns[name] for name in COLUMNS), strict=True)
    return [text if row[0] is None else ParsedSentence(*row) for text, *row in rows]


def tree_options(config: Any) -> dict[str, str] | None:
    """Return the arguments of [`TreeEncoder`] in a model's configuration, or `None` if it reads no dependency trees."""
    return getattr(config, "tree_options", None)  # transformers' own configurations have no such field


@dataclass(frozen=True)
class Relations:
    """
    Vocabulary of relations: the name of each id. `<unk>` has id 0 and the last id is that of `<piece>`.

    Args:
        names (`tuple[str, ...]`): The names.
        subtypes (`bool`, *optional*, defaults to `False`): Whether `nsubj:pass` differs from `nsubj`.
    """

    names: tuple[str, ...]
    subtypes: bool = False

    @classmethod
    def count(cls, sentences: Iterable[str | ParsedSentence], subtypes: bool = False, most: int = 100) -> Relations:
        """Return the most frequent relations, by default as many as Bastings et al. (2017); a text has none."""
        parsed = (sentence for sentence in sentences if isinstance(sentence, ParsedSentence))
        counts = Counter(name if subtypes else main_type(name) for tree in parsed for name in tree.relations)
        names = sorted(counts.keys() - {UNKNOWN, PIECE}, key=lambda name: (-counts[name], name))
        return cls((UNKNOWN, *names[:most], PIECE), subtypes)

    @classmethod
    def load(cls, path: str | Path, **kwargs: Any) -> Relations | None:
        """Load the relations of a model, with the arguments of `from_pretrained`; `None` without `relations.json`."""
        if (file := optional_file(path, RELATIONS_FILE, **kwargs)) is None:
            return None
        with explained_loading(path, f"{RELATIONS_FILE} of"):
            content = json.loads(read_small_text(file))
            return cls(tuple(content["relations"]), content["subtypes"])

    def save(self, folder: str | Path) -> None:
        """Write `relations.json` into the folder of a model or a tokenizer."""
        with open_output(Path(folder) / RELATIONS_FILE) as file:
            json.dump({"relations": self.names, "subtypes": self.subtypes}, file, ensure_ascii=False, indent=1)

    def __len__(self) -> int:
        return len(self.names)


def main_type(relation: str) -> str:
    """Return a relation without its subtype: `nsubj` of `nsubj:pass`."""
    return relation.partition(":")[0] or relation


class TreeEncoder:
    """
    Encodes sentences with their trees for a model. Control tokens have no head.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the source, a fast one, which knows the words of tokens.
        relations ([`Relations`]): Names of the relations.
        subwords (`str`, *optional*, defaults to `"first_piece"`): A word of several tokens. `"first_piece"`: its first
            token has the word's edge, to the first token of the head, and the others depend on that one with the
            relation `<piece>`. `"all_pieces"`: all of its tokens have the word's edge.
        root (`str`, *optional*, defaults to `"none"`): `"token"`: the head of a root is the last control token, i.e.
            the end of the sentence. `"none"`: a root has no head.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        relations: Relations,
        subwords: str = "first_piece",
        root: str = "none",
    ):
        self.tokenizer, self.relations, self.subwords, self.root = tokenizer, relations, subwords, root
        self.ids = {name: id for id, name in enumerate(relations.names)}

    def __call__(self, sentences: Sequence[ParsedSentence]) -> list[Tokens]:
        """Return the tokens of sentences with their edges. Words without tokens are left out, as are edges to them."""
        if not sentences:
            return []
        words: Any = [list(sentence.words) for sentence in sentences]
        encoded = encode_plain(self.tokenizer, words, is_split_into_words=True)
        rows = zip(encoded["input_ids"], sentences, strict=True)
        return [Tokens(ids, self.map_tree(encoded.word_ids(row), tree)) for row, (ids, tree) in enumerate(rows)]

    def map_tree(self, words: Sequence[int | None], sentence: ParsedSentence) -> TokenTree:
        """Map the tree over the words of a sentence to its tokens; `words` is the index of each token's word."""
        last = {word: position for position, word in enumerate(words)}
        root = last.get(None, -1) if self.root == "token" else -1
        first = {word: position for position, word in reversed(list(enumerate(words))) if word is not None}
        heads, relations = [-1] * len(words), [0] * len(words)
        for position, word in enumerate(words):
            if word is not None and self.subwords == "first_piece" and position != first[word]:
                heads[position], relations[position] = first[word], self.ids[PIECE]
            elif word is not None:
                number, name = sentence.heads[word], sentence.relations[word]
                heads[position] = first.get(number - 1, -1) if number else root
                if heads[position] >= 0:
                    relations[position] = self.ids.get(name if self.relations.subtypes else main_type(name), 0)
        return TokenTree(heads, relations)

    def fingerprint(self) -> list[Any]:
        """Return settings that identify the encoding of trees."""
        return [list(self.relations.names), self.relations.subtypes, self.subwords, self.root]


def tree_columns(rows: Sequence[Tokens]) -> dict[str, list[list[int]]]:
    """Return the columns `dependency_heads` and `dependency_relations` of tokens, some perhaps without a tree."""
    return {
        HEADS: [[-1] * len(row) if row.tree is None else row.tree.heads for row in rows],
        RELATIONS: [[0] * len(row) if row.tree is None else row.tree.relations for row in rows],
    }


def pad_tree_columns(
    columns: Mapping[str, Sequence[Sequence[int]]], width: int, left: bool = False
) -> dict[str, torch.Tensor]:
    """Return the columns of [`tree_columns`] as padded tensors `(rows, width)`; on the left, heads are shifted."""
    padded = {}
    for name, fill in TREE_INPUTS.items():
        rows = []
        for row in columns[name]:
            space = [fill] * (width - len(row))
            if left and name == HEADS:
                row = [head + len(space) if head >= 0 else head for head in row]
            rows.append([*space, *row] if left else [*row, *space])
        padded[name] = torch.tensor(rows, dtype=torch.long)
    return padded


class TreeCollator(DataCollatorForSeq2Seq):
    """`DataCollatorForSeq2Seq` that also pads `dependency_heads` and `dependency_relations`, if there are any."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        if HEADS not in features[0]:
            return super().__call__(features, return_tensors)
        columns = {name: [feature[name] for feature in features] for name in TREE_INPUTS}
        rest = [{name: value for name, value in row.items() if name not in TREE_INPUTS} for row in features]
        batch = super().__call__(rest, return_tensors)
        width, left = batch["input_ids"].shape[1], self.tokenizer.padding_side == "left"
        return batch | pad_tree_columns(columns, width, left)
