"""
Inputs of models that read dependency trees: `dependency_heads`, the position of each token's head (-1: none), and
`dependency_relations`, the id of its relation to the head.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from .._bounded_reading import read_small_text
from .._loading_errors import optional_file
from .._plain_text import encode_plain
from ..errors import UserError
from .files import open_output
from .records import ParsedSentence, Tokens, TokenTree


# Names of the inputs, with their values at padding.
HEADS, RELATIONS = "dependency_heads", "dependency_relations"
TREE_INPUTS = {HEADS: -1, RELATIONS: 0}
# File in a model's folder with the names of the relations.
RELATIONS_FILE = "relations.json"
# Names of unknown relations (id 0), and of the relation between the pieces of a word.
UNKNOWN, PIECE = "<unk>", "<piece>"
# Limit of the relations of the training data (Bastings et al., 2017, code).
MOST_RELATIONS = 100


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
    def count(
        cls, sentences: Iterable[str | ParsedSentence], subtypes: bool = False, most: int = MOST_RELATIONS
    ) -> Relations:
        """Return the `most` most frequent relations of sentences; those without a tree are skipped."""
        counts: Counter[str] = Counter()
        for sentence in sentences:
            if isinstance(sentence, ParsedSentence):
                counts.update(name if subtypes else main_type(name) for name in sentence.relations)
        names = sorted(counts.keys() - {UNKNOWN, PIECE}, key=lambda name: (-counts[name], name))
        return cls((UNKNOWN, *names[:most], PIECE), subtypes)

    @classmethod
    def load(cls, path: str | Path, **kwargs: Any) -> Relations | None:
        """Load the relations of a model, with the arguments of `from_pretrained`; `None` without `relations.json`."""
        file = optional_file(path, RELATIONS_FILE, **kwargs)
        if file is None:
            return None
        try:
            content = json.loads(read_small_text(file))
            names, subtypes = tuple(content["relations"]), content["subtypes"]
            is_valid = (names[0], names[-1]) == (UNKNOWN, PIECE) and len(set(names)) == len(names)
        except (ValueError, KeyError, TypeError, IndexError):
            is_valid = False
        if not is_valid:
            raise UserError(f"{path}/{RELATIONS_FILE} is damaged.", field=path)
        return cls(names, subtypes)

    def save(self, folder: str | Path) -> None:
        """Write `relations.json` into the folder of a model or a tokenizer."""
        with open_output(Path(folder) / RELATIONS_FILE) as file:
            content = {"relations": self.names, "subtypes": self.subtypes}
            json.dump(content, file, ensure_ascii=False, indent=1)

    def __len__(self) -> int:
        return len(self.names)


def main_type(relation: str) -> str:
    """Return a relation without its subtype: `nsubj` of `nsubj:pass`."""
    return relation.partition(":")[0] or relation


class TreeEncoder:
    """
    Encodes sentences with their trees for a model.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the source, a fast one, which knows the words of tokens.
        relations ([`Relations`]): Names of the relations.
        subwords (`str`, *optional*, defaults to `"first_piece"`): A word of several tokens. `"first_piece"`: its first
            token has the word's edge, to the first token of the head, and the others depend on that one with the
            relation `<piece>`. `"all_pieces"`: all of its tokens have the word's edge.
        root (`str`, *optional*, defaults to `"none"`): `"token"`: the head of a root is the last control token, i.e.
            the end of the sentence. `"none"`: a root has no head.

    Control tokens have no head. A slow tokenizer fails at the first sentence.
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
        return [
            self.map_tree(ids, encoded.word_ids(row), sentence)
            for row, (ids, sentence) in enumerate(zip(encoded["input_ids"], sentences, strict=True))
        ]

    def map_tree(self, ids: list[int], words: Sequence[int | None], sentence: ParsedSentence) -> Tokens:
        """Map the tree over the words of a sentence to its tokens; `words` is the index of each token's word."""
        first: dict[int, int] = {}
        for position, word in enumerate(words):
            if word is not None:
                first.setdefault(word, position)
        controls = [position for position, word in enumerate(words) if word is None]
        root = controls[-1] if controls and self.root == "token" else -1
        heads, relations = [], []
        for position, word in enumerate(words):
            head, relation = -1, 0
            if word is not None and self.subwords == "first_piece" and position != first[word]:
                head, relation = first[word], self.ids[PIECE]
            elif word is not None:
                number = sentence.heads[word]
                head = first.get(number - 1, -1) if number else root
                name = sentence.relations[word]
                relation = self.ids.get(name if self.relations.subtypes else main_type(name), 0) if head >= 0 else 0
            heads.append(head)
            relations.append(relation)
        return Tokens(ids, TokenTree(heads, relations))

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
    """
    `DataCollatorForSeq2Seq` that also pads `dependency_heads` and `dependency_relations`, if the features have them, on
    the side on which the tokenizer pads.
    """

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        if HEADS not in features[0]:
            return super().__call__(features, return_tensors)
        columns = {name: [feature[name] for feature in features] for name in TREE_INPUTS}
        rest = [{name: value for name, value in row.items() if name not in TREE_INPUTS} for row in features]
        batch = super().__call__(rest, return_tensors)
        left = self.tokenizer.padding_side == "left"
        batch.update(pad_tree_columns(columns, batch["input_ids"].shape[1], left))
        return batch
