"""Vectors of whole sentences from a frozen encoder, and the training of probes on them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from recnmt_hf import Translator
from recnmt_hf.data.batching import batches_by_tokens
from recnmt_hf.data.files import open_output
from recnmt_hf.models.recurrent_layers import masked_mean
from recnmt_hf.models.seq2seq_outputs import Memory
from recnmt_hf.models.sequence_pairs import last_states
from recnmt_hf.options import MOST_SEED, Range, option


@dataclass
class ProbeOptions:
    """Training of a probe: Adam on frozen, standardized vectors, until the validation score no longer rises."""

    epochs: Annotated[int, Range(least=1, most=10_000)] = option(50, "maximum passes over the training examples")
    patience: Annotated[int, Range(least=1)] = option(3, "evaluations without a better score before training stops")
    batch_size: Annotated[int, Range(least=1)] = option(64, "sentences per batch")
    learning_rate: Annotated[float, Range(above=0)] = option(1e-3, "learning rate of Adam")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "seed of initial weights, dropout and batches")


def states_of(output: Any, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield names and vectors `(batch_size, dim)` of an encoder's output: `last`, the state of the last token; `average`,
    the mean over tokens; a memory of one vector per source under its name (`global`); and of another memory of states
    `recurrence last` and `recurrence average`.
    """
    memories = output.memories() if hasattr(output, "memories") else {}
    for name, (states, mask, _) in {**memories, "encoder": Memory(output.last_hidden_state, attention_mask)}.items():
        prefix = "" if name == "encoder" else f"{name} "
        if states.dim() == 2:
            yield name, states
        else:
            yield f"{prefix}last", last_states(states, mask)
            yield f"{prefix}average", masked_mean(states, mask)


def vectors_by_name(
    translator: Translator,
    sentences: Sequence[str],
    read: Callable[[Any, torch.Tensor, torch.Tensor], Iterable[tuple[str, torch.Tensor]]],
    place: str = "Sentence {}",
    max_tokens: int = 4096,
) -> dict[str, torch.Tensor]:
    """
    Return vectors of a model's encoder for sentences, each of shape `(len(sentences), dim)`, float32, on the CPU.
    `read` yields names and vectors `(batch_size, dim)` from the encoder's output, token ids and mask; `place` names a
    sentence by its number in messages; `max_tokens` limits a batch, including padding. Exit with a message if there are
    no sentences, or one has no known token, or more than the model has positions.
    """
    if not sentences:
        raise SystemExit("There are no sentences to probe")
    sources, limit = [translator.encode_source(sentence) for sentence in sentences], translator.backend.limits.source
    for number, source in enumerate(sources, start=1):
        if translator.codec.is_empty(source):
            raise SystemExit(f"{place.format(number)}: the source has no word of the model's vocabulary")
        if limit is not None and len(source) > limit:
            raise SystemExit(f"{place.format(number)} has {len(source)} tokens; the model's maximum is {limit}")
    by_name: dict[str, torch.Tensor] = {}
    for batch in batches_by_tokens([len(ids) for ids in sources], max_tokens):
        for name, vectors in read(*translator.backend.encode([sources[i] for i in batch])):
            if name not in by_name:
                by_name[name] = torch.empty(len(sources), vectors.shape[-1])
            by_name[name][batch] = vectors.float().cpu()
    return by_name


def train_with_early_stopping(
    probe: nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    score: Callable[[], float],
    count: int,
    options: ProbeOptions,
    every: int = 1,
    weight_decay: float = 0.0,
) -> tuple[float, int, int]:
    """
    Train a probe with Adam until its validation `score`, computed after `every` passes, no longer rises, and load its
    best weights. `loss` is that of a batch of indices below `count`. Return the best score, the number of passes until
    then, and that of all passes.
    """
    optimizer = torch.optim.Adam(probe.parameters(), lr=options.learning_rate, weight_decay=weight_decay)
    order = torch.Generator().manual_seed(options.seed)
    best, best_epoch, weights = float("-inf"), 0, copy.deepcopy(probe.state_dict())
    epoch = epochs_without_gain = 0
    while epoch < options.epochs and epochs_without_gain < options.patience:
        for _ in range(min(every, options.epochs - epoch)):
            for batch in torch.randperm(count, generator=order).split(options.batch_size):
                optimizer.zero_grad()
                loss(batch).backward()
                optimizer.step()
            epoch += 1
        epochs_without_gain += 1
        if (value := score()) > best:
            best, best_epoch, weights, epochs_without_gain = value, epoch, copy.deepcopy(probe.state_dict()), 0
    probe.load_state_dict(weights)
    return best, best_epoch, epoch


def optional_output(path: str | None, inputs: Sequence[str]) -> AbstractContextManager[Any]:
    """Open an output file as [`~recnmt_hf.data.files.open_output`] does; without a path return `None` in its place."""
    return nullcontext() if path is None else open_output(path, inputs)
