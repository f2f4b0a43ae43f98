"""
BPE dropout (Provilkov et al., 2020, "BPE-Dropout: Simple and Effective Subword Regularization"): in training, each
merge of a word is left out with some probability, so that a model reads different segmentations of the same word.

`tokenizers` has it too, but cannot be seeded, so that a resumed run would differ from an uninterrupted one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError


# Number of random segmentations that a word has, among which one is drawn for each occurrence.
VARIANTS = 64
# Number of segmentations that are remembered.
REMEMBERED = 2**18
# Number of pairs on which a tokenizer is checked.
CHECKED = 500
# The mark before a word.
SPACE = "▁"
SIDES = ("input_ids", "labels")
UNSUPPORTED = "tokenizer.dropout is only supported by tokenizers of kind bpe."


class Resegmenter:
    """Divides words of token ids of a fast BPE tokenizer anew; each merge is left out with probability `dropout`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = {} if backend is None else json.loads(backend.to_str())["model"]
        if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise UserError(UNSUPPORTED, field="tokenizer.dropout")
        self.dropout = dropout
        self.ids: dict[str, int] = model["vocab"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        self.ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        # Bytes, unknown symbols, control tokens and tags are no text, and stay as they are.
        symbols = {left + right for left, right in self.ranks} | {symbol for symbol in self.ids if len(symbol) == 1}
        fixed = tokenizer.added_tokens_decoder
        self.texts = {id: symbol for symbol, id in self.ids.items() if symbol in symbols and id not in fixed}

    def __call__(self, ids: Sequence[int], seed: str, dropout: float | None = None) -> list[int]:
        """Return token ids of the same text; the seed draws the segmentation of each word."""
        rng = random.Random(seed)
        result: list[int] = []
        word = ""
        for id in [*ids, None]:
            text = None if id is None else self.texts.get(id)
            if word and (text is None or text.startswith(SPACE)):
                rate = self.dropout if dropout is None else dropout
                result += segmentation(self, word, rng.randrange(VARIANTS), rate)
                word = ""
            if text is not None:
                word += text
            elif id is not None:
                result.append(id)
        return result


@lru_cache(REMEMBERED)
def segmentation(resegmenter: Resegmenter, word: str, variant: int, dropout: float) -> list[int]:
    """Return the ids of a word: merge its symbols by rank, and leave out merges at random, anew in each round."""
    rng = random.Random(f"{word}-{variant}")
    symbols = list(word)
    while len(symbols) > 1:
        found = [
            (rank, place)
            for place, pair in enumerate(pairwise(symbols))
            if (rank := resegmenter.ranks.get(pair)) is not None and (dropout == 0 or rng.random() >= dropout)
        ]
        if not found:
            break
        _, place = min(found)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    return [resegmenter.ids[symbol] for symbol in symbols]


class ResegmentedDataset(Dataset[dict[str, Any]]):
    """
    A prepared dataset, with `input_ids` and `labels`, whose pairs have other segmentations in each epoch. Seed, epoch
    and row decide the segmentation. A side that would have more than `longest` tokens keeps the one it has.
    """

    def __init__(self, data: Any, resegmenters: tuple[Resegmenter, Resegmenter], seed: int, longest: int | None = None):
        self.data, self.resegmenters, self.seed, self.longest = data, resegmenters, seed, longest
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers of a loader read it too

    def __len__(self) -> int:
        return len(self.data)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the segmentations."""
        self.epoch.fill_(epoch)

    def check(self) -> None:
        """Raise `UserError` if without dropout words would be divided differently than by the tokenizers."""
        rows = self.data.__getitems__(list(range(min(len(self.data), CHECKED))))
        for name, resegmenter in zip(SIDES, self.resegmenters, strict=True):
            if any(resegmenter(row[name], "", 0.0) != list(row[name]) for row in rows):
                raise UserError(UNSUPPORTED, field="tokenizer.dropout")

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        rows = [dict(row) for row in self.data.__getitems__(indices)]
        for index, row in zip(indices, rows, strict=True):
            for name, resegmenter in zip(SIDES, self.resegmenters, strict=True):
                ids = resegmenter(row[name], f"{name}-{self.seed}-{int(self.epoch)}-{index}")
                if self.longest is None or len(ids) <= self.longest:
                    row[name] = ids
        return rows
