"""Vectors of whole sentences from a frozen encoder, for probing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..inference.batching import batches_by_tokens
from ..inference.translator import Translator
from ..models.user_errors import UserError


def states_of(output: Any, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Names and vectors `(batch_size, dim)` of an encoder's output: `last`, the state of the last real position;
    `average`, the mean of all real ones; a vector per source under its memory's name (`global`); of a second memory of
    states likewise `recurrence last` and `recurrence average`.
    """
    memories = output.memories() if hasattr(output, "memories") else None
    found = {"encoder": (output.last_hidden_state, attention_mask)}
    for name, memory in {} if memories is None else memories.items():
        if name != "encoder":
            found[name] = (memory.states, memory.token_mask)
    for name, (states, mask) in found.items():
        if states.dim() == 2:
            yield name, states
            continue
        real = states.new_ones(states.shape[:2]) if mask is None else mask.to(states.dtype)
        positions = torch.arange(states.shape[1], device=states.device)
        last = (positions * (real > 0)).argmax(dim=1)
        prefix = "" if name == "encoder" else f"{name} "
        yield f"{prefix}last", states[torch.arange(len(states), device=states.device), last]
        yield f"{prefix}average", (states * real[..., None]).sum(dim=1) / real.sum(dim=1, keepdim=True)


def sentence_states(
    translator: Translator, sources: Sequence[Sequence[int]], max_tokens: int = 4096
) -> dict[str, torch.Tensor]:
    """
    The vectors of [`states_of`] for sentences, each of shape `(len(sources), dim)`, float32, on the CPU; arguments and
    errors as of [`vectors_by_name`].
    """
    return vectors_by_name(translator, sources, lambda output, _, mask: states_of(output, mask), max_tokens)


def vectors_by_name(
    translator: Translator,
    sources: Sequence[Sequence[int]],
    read: Callable[[Any, torch.Tensor, torch.Tensor], Iterable[tuple[str, torch.Tensor]]],
    max_tokens: int,
) -> dict[str, torch.Tensor]:
    """
    Vectors that a model's encoder gives for sentences, each of shape `(len(sources), dim)`, float32, on the CPU.

    Args:
        translator ([`Translator`]): Its model stays as it is, without dropout.
        sources (sequence of sequences of `int`): Token ids.
        read (`Callable`): Names and vectors `(batch_size, dim)` of the encoder's output, token ids and their mask.
        max_tokens (`int`): Of a batch, padding included.

    Raises:
        ValueError: There is no sentence.
    """
    if not sources:
        raise UserError("There is no sentence. Remedy: give at least one.")
    by_name: dict[str, torch.Tensor] = {}
    for batch in batches_by_tokens([len(ids) for ids in sources], max_tokens):
        encoded = translator.backend.encode([sources[i] for i in batch])
        for name, vectors in read(*encoded):
            if name not in by_name:
                by_name[name] = torch.empty(len(sources), vectors.shape[-1])
            by_name[name][batch] = vectors.float().cpu()
    return by_name
