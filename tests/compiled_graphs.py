"""Counts the graphs that `torch.compile` makes, of the zoo's models and of transformers' MarianMT beside them."""

import functools
from unittest import mock

import pytest
import torch
from packaging import version
from torch._dynamo.utils import counters
from transformers import MarianConfig, MarianMTModel


VOCABULARY = 37
# Twelve lengths of sources and of targets, equal ones, the shortest, and rising and falling ones among them.
ALL_LENGTHS = ((7, 5), (9, 4), (3, 8), (12, 11), (5, 5), (15, 13), (2, 2), (6, 14), (14, 3), (4, 9), (11, 6), (8, 10))
# Without targets of two tokens, for which torch makes a graph of its own: the labels are shifted in shared code.
MOST_LENGTHS = tuple(lengths for lengths in ALL_LENGTHS if lengths != (2, 2))
# The first ones, without equal lengths, for which torch makes further graphs.
FEW_LENGTHS = ALL_LENGTHS[:4]

needs_compiler = pytest.mark.skipif(
    version.parse(torch.__version__) < version.parse("2.8"),
    reason="torch 2.6 and 2.7 cannot follow transformers' own wrappers, not MarianMT's either",
)


class GraphCounter:
    """A backend that counts graphs and runs them as they are, without a kernel to make."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward

    @classmethod
    def start(cls):
        """A new counter, with nothing compiled before it."""
        torch._dynamo.reset()
        counters.clear()
        return cls()

    def counts(self):
        """Graphs and graph breaks."""
        return self.graphs, sum(counters["graph_break"].values())


def batches(with_mask=True, lengths=ALL_LENGTHS, larger=1):
    """
    A batch of each length; that at the place `larger` has more sentences. If it is the second one, lengths and number
    of sentences change together, which takes one graph less than if they change one after the other.
    """
    for place, (source, target) in enumerate(lengths):
        rows, draws = 5 if place == larger else 3, torch.Generator().manual_seed(place)
        ids, labels = (torch.randint(4, VOCABULARY, (rows, each), generator=draws) for each in (source, target))
        batch = {"input_ids": ids, "labels": labels}
        if with_mask:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1, -1] = 0
            labels[1, -1] = -100
        yield batch


def gradients_of(model, run, **inputs):
    """The loss and the gradient of every parameter that has one."""
    torch.manual_seed(3)  # of models that draw noise in training
    model.zero_grad()
    loss = run(**inputs).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def count_training(model, with_mask=True, inputs=None, backend=None, lengths=ALL_LENGTHS, larger=1, **settings):
    """Graphs and breaks of forward and backward passes over lengths, which must give what eager mode gives."""
    counter = GraphCounter.start()
    compiled = torch.compile(model, backend=backend or counter, fullgraph=True, **settings)
    for batch in batches(with_mask, lengths, larger):
        found = gradients_of(model, compiled, **batch, **(inputs or {}))
        expected = gradients_of(model, model, **batch, **(inputs or {}))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-7)
    return counter.counts()


def count_generation(model, static=False, lengths=ALL_LENGTHS, **settings):
    """
    Graphs and breaks of greedy generation with a growing or a static cache, after prompts of all lengths, which must
    give the tokens of eager mode.
    """
    generation = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 1}
    generation |= {"cache_implementation": "static"} if static else {}
    inputs = batches(lengths=lengths, larger=6)
    given = [{**batch, "decoder_input_ids": batch.pop("labels").clamp(min=0)} for batch in inputs]
    expected = [model.generate(**each, **generation) for each in given]
    counter = GraphCounter.start()
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True, **settings)
    try:
        # Beyond this number of graphs fullgraph=True fails, MarianMT too.
        with mock.patch("torch._dynamo.config.recompile_limit", 64):
            for each, tokens in zip(given, expected, strict=True):
                assert torch.equal(model.generate(**each, **generation), tokens)
    finally:
        del model.forward
    return counter.counts()


def marian():
    """MarianMT of the size of the contract's models, without dropout."""
    sizes = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        dropout=0.0,
        **sizes,
    )
    torch.manual_seed(5)
    model = MarianMTModel(config).double()
    model.generation_config.update(eos_token_id=2, forced_eos_token_id=None)
    return model


@functools.cache
def graphs_of_marian(what, *args, **settings):
    """Return the count of a function of this file for MarianMT."""
    model = marian()
    graphs, breaks = what(model.train() if what is count_training else model.eval(), *args, **settings)
    assert breaks == 0
    return graphs
