"""Searches that wait with their last sentences, and continue together with those of another batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.utils import ModelOutput

from .batching import join
from .search import GreedySearch, ModelRows


# A search waits when it has at most this many rows, and this share of a batch's tokens.
FEW_ROWS, SMALL_SHARE = 64, 1 / 8
# Those that wait have together at most this share of a batch's tokens, so that they do not need much memory.
WAITING_SHARE = 1 / 2


class Waiting:
    """
    Runs the searches of several batches. A step takes nearly as long for a few rows as for many, so a search with few
    rows left waits until another one reaches its length: from there on both are one batch of at most `max_tokens`
    source tokens, padding and beams included.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.searches: dict[int, GreedySearch] = {}  # those that wait, by length
        self.found: dict[int, torch.Tensor] = {}  # hypotheses by the number of the sentence, over all batches
        self.sentences = 0
        self.is_over = False  # whether all batches have started

    def run(self, search: GreedySearch) -> None:
        """Run a new search until it is finished or waits."""
        search.numbers = [self.sentences + number for number in search.numbers]
        self.sentences += len(search.numbers)
        search.found = self.found
        self.resume(search, search.first_logits())

    def finish(self) -> list[torch.Tensor]:
        """Finish all searches. Return tokens `(hypotheses, length)` for each sentence in the order of the batches."""
        self.is_over = True
        while self.searches:
            search = self.searches.pop(min(self.searches))
            self.resume(search, search.next_logits())
        return [self.found[number] for number in range(self.sentences)]

    def resume(self, search: GreedySearch, logits: torch.Tensor) -> None:
        """Continue a search until it is finished or waits."""
        while search.advance(logits):
            other = self.searches.get(search.length)
            if other is not None and tokens_of(search, other) <= self.max_tokens:
                search = join_searches(search, self.searches.pop(search.length))
            if not self.is_over and self.may_wait(search):
                self.searches[search.length] = search
                return
            logits = search.next_logits()

    def may_wait(self, search: GreedySearch) -> bool:
        """Return whether a search is small enough to wait, beside those that wait already."""
        return (
            len(search.numbers) * search.beams <= FEW_ROWS
            and search.length not in self.searches
            and tokens_of(search) <= SMALL_SHARE * self.max_tokens
            and tokens_of(search, *self.searches.values()) <= WAITING_SHARE * self.max_tokens
            and can_join(search)
        )


def tokens_of(*searches: GreedySearch) -> int:
    """Return the number of source tokens of one batch of these searches, padding and beams included."""
    widths = [search.rows.inputs["attention_mask"].shape[1] for search in searches]  # type: ignore[union-attr]
    return max(widths) * sum(len(search.numbers) * search.beams for search in searches)


def can_join(search: GreedySearch) -> bool:
    """Return whether rows can be added to a search: its cache has only known layers, and no rule is for a batch."""
    cache: Any = search.rows.cache if type(search.rows) is ModelRows else None
    if search.config.early_stopping == "never" or not isinstance(cache, EncoderDecoderCache):
        return False
    parts = cache.self_attention_cache, cache.cross_attention_cache
    return all(type(part) is DynamicCache and all(map(is_known, part.layers)) for part in parts)


def is_known(layer: Any) -> bool:
    """Return whether rows can be added to a cache layer. Models with remote code have their own copies of classes."""
    is_own = hasattr(layer, "memories") or hasattr(layer, "update_states")
    return type(layer) is DynamicLayer or (is_own and isinstance(layer, DynamicLayer))


def join_searches(first: GreedySearch, second: GreedySearch) -> GreedySearch:
    """Add the sentences of one search to the other, which has the same length, and return that."""
    if first.running.shape[-1] < second.running.shape[-1]:
        first, second = second, first  # its rules hold up to its own maximum length; sentences have their own, too
    for name in first.state:
        setattr(first, name, join(getattr(first, name), getattr(second, name), first.padding))
    for part, other in zip(first.parts_of_sentences(), second.parts_of_sentences(), strict=True):
        part.add_sentences(other)
    first.numbers = first.numbers + second.numbers
    join_rows(first.rows, second.rows)
    return first


def join_rows(first: Any, second: Any) -> None:
    """Add the rows of `second` to those of `first`, with their caches and sources."""
    for part in ("self_attention_cache", "cross_attention_cache"):
        layers = [getattr(rows.cache, part).layers for rows in (first, second)]
        for layer, other in zip(*layers, strict=True):
            join_layers(layer, other)
    first.inputs = {name: join_values(value, second.inputs[name]) for name, value in first.inputs.items()}
    first.rows, first.sentences = first.rows + second.rows, first.sentences + second.sentences


def join_layers(layer: Any, other: Any) -> None:
    """Add the rows of one cache layer to another."""
    if hasattr(layer, "memories"):
        rows = layer.decoder_rows + other.decoder_rows
        for name, (keys, values) in layer.memories.items():
            new_keys, new_values = other.memories[name]
            layer.store(name, join(keys, new_keys), join(values, new_values), rows)
        layer.shared, layer.spread = {}, {}  # the next step makes them from the inputs, as the first one did
        return
    if layer.keys is not None:
        layer.keys, layer.values = join(layer.keys, other.keys), join(layer.values, other.values)
    if hasattr(layer, "states"):
        layer.states = {name: join(state, other.states[name]) for name, state in layer.states.items()}


def join_values(first: Any, second: Any) -> Any:
    """Add the rows of a model's input to those of another."""
    if isinstance(first, ModelOutput):
        return type(first)(**{name: join_values(value, second[name]) for name, value in first.items()})
    return join(first, second)
