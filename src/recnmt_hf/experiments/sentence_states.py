"""Vectors of whole sentences from a frozen encoder, for probing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import UserError
from ..inference.batching import batches_by_tokens
from ..inference.translator import Translator


def states_of(output: Any, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield names and vectors `(batch_size, dim)` of an encoder's output: `last`, the state of the last token; `average`,
    the mean over tokens; a memory of one vector per source under its name (`global`); and of another memory of states
    `recurrence last` and `recurrence average`.
    """
    memories = output.memories() if hasattr(output, "memories") else {}
    others = {name: (memory.states, memory.token_mask) for name, memory in memories.items() if name != "encoder"}
    for name, (states, mask) in {"encoder": (output.last_hidden_state, attention_mask), **others}.items():
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
    Return the vectors of [`states_of`] for sentences, each of shape `(len(sources), dim)`, float32, on the CPU.
    Arguments and errors are those of [`vectors_by_name`].
    """
    return vectors_by_name(translator, sources, lambda output, _, mask: states_of(output, mask), max_tokens)


def vectors_by_name(
    translator: Translator,
    sources: Sequence[Sequence[int]],
    read: Callable[[Any, torch.Tensor, torch.Tensor], Iterable[tuple[str, torch.Tensor]]],
    max_tokens: int,
) -> dict[str, torch.Tensor]:
    """
    Return vectors of a model's encoder for sentences (token ids), each of shape `(len(sources), dim)`, float32, on the
    CPU. `read` yields names and vectors `(batch_size, dim)` from the encoder's output, token ids and mask. `max_tokens`
    limits a batch, including padding.
    """
    if not sources:
        raise UserError("probe.no_sentences")
    by_name: dict[str, torch.Tensor] = {}
    for batch in batches_by_tokens([len(ids) for ids in sources], max_tokens):
        encoded = translator.backend.encode([sources[i] for i in batch])
        for name, vectors in read(*encoded):
            if name not in by_name:
                by_name[name] = torch.empty(len(sources), vectors.shape[-1])
            by_name[name][batch] = vectors.float().cpu()
    return by_name
