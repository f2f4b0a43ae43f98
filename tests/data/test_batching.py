"""Batches by tokens: within budget, complete, a function of seed and epoch."""

import numpy as np
import pytest
from user_errors import rejects

from recnmt_hf.data.batching import BatchLimits, TokenBatchSampler


LENGTHS = np.random.default_rng(0).integers(1, 60, size=(997, 2))
SOURCE, TARGET = LENGTHS[:, 0], LENGTHS[:, 1]


def sampler(**more):
    return TokenBatchSampler(SOURCE, TARGET, **{"max_tokens": 600, "seed": 1, **more})


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("limits", [{}, {"max_sentences": 7}, {"max_squared_tokens": 5000}, {"multiple": 8}])
def test_budget_and_completeness(processes, limits):
    made = sampler(num_processes=processes, **limits)
    count = len(made)
    for epoch in (0, 1, 5):
        made.set_epoch(epoch)
        batches = list(made)
        assert sorted(i for batch in batches for i in batch) == list(range(len(SOURCE)))
        assert len(batches) == len(made) == count and count % processes == 0
        for batch in batches:
            assert len(batch) * SOURCE[batch].max() <= 600 and len(batch) * TARGET[batch].max() <= 600
            assert len(batch) <= limits.get("max_sentences", 10**9)
            if len(batch) > 1 and "max_squared_tokens" in limits:
                assert len(batch) * SOURCE[batch].max() ** 2 <= 5000


def test_pure_function_of_seed_and_epoch():
    def order(seed, epoch):
        made = sampler(seed=seed)
        made.set_epoch(epoch)
        return list(made)

    assert order(1, 3) == order(1, 3)
    assert order(1, 3) != order(1, 4) != order(2, 4)


def test_sentences_of_equal_length_change_groups():
    lengths = np.random.default_rng(1).integers(3, 9, size=2000)
    made = TokenBatchSampler(lengths, lengths, max_tokens=200, seed=1)
    first = {frozenset(batch) for batch in made}
    made.set_epoch(1)
    assert len(first & {frozenset(batch) for batch in made}) < len(first) / 20


def test_a_sentence_beyond_the_budget_stands_alone():
    assert list(TokenBatchSampler([5, 900, 5], max_tokens=100, shuffle=False)) == [[0, 2], [1]]
    assert list(TokenBatchSampler([900, 901], max_tokens=100, shuffle=False)) == [[0], [1]]


def test_fewer_sentences_than_processes():
    for lengths, processes in (([], 1), ([3], 2)):
        with rejects("too few"):
            TokenBatchSampler(lengths, max_tokens=10, num_processes=processes)


@pytest.mark.parametrize("processes, filled", [(2, 6), (4, 8), (5, 5)])
def test_batches_of_one_sentence_fill_up_for_all_processes(processes, filled):
    batches = list(TokenBatchSampler([5] * 5, max_tokens=5, num_processes=processes))
    assert len(batches) == filled and {tuple(batch) for batch in batches} == {(i,) for i in range(5)}


def cut_one_by_one(order, sources, targets, limits):
    """The batches of sorted sentences, by looking at each sentence alone: a slow reference."""
    batches, start, longest = [], 0, (0, 0)
    for place, index in enumerate(order):
        new = max(longest[0], sources[index]), max(longest[1], targets[index])
        count = place - start + 1
        full = count * max(new) > limits.max_tokens
        full |= limits.max_sentences is not None and count > limits.max_sentences
        full |= limits.max_squared_tokens is not None and count * new[0] ** 2 > limits.max_squared_tokens
        if full and count > 1:
            size = place - start
            end = place - size % limits.multiple if size > limits.multiple else place
            batches.append(order[start:end].tolist())
            rest = order[end:place].tolist()  # as if the batch began with them
            return [*batches, *cut_one_by_one(np.array([*rest, *order[place:]]), sources, targets, limits)]
        longest = new
    return [*batches, order[start:].tolist()]


def test_cuts_of_runs_are_those_of_single_sentences():
    rng = np.random.default_rng(1)
    for _ in range(200):
        size, most = int(rng.integers(1, 300)), int(rng.integers(2, 70))
        sources, targets = rng.integers(1, most, size), rng.integers(1, most, size)
        sentences, squared = (rng.choice([None, int(rng.integers(1, most))]) for most in (20, 9000))
        limits = BatchLimits(int(rng.integers(1, 600)), sentences, squared, int(rng.integers(1, 9)))
        made = TokenBatchSampler(sources, targets, shuffle=False, **vars(limits))
        order = np.lexsort((targets, sources))
        assert list(made) == cut_one_by_one(order, sources, targets, limits)
