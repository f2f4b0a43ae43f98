"""Layers of an `EncoderDecoderCache` that store the states of recurrences in the decoder."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from .source_memory import self_attention_cache
from .user_errors import UserError


class RecurrentStates:
    """
    Base class of the recurrent cache layers: named states of shape `(batch_size, ...)`, keys and values.

    `update_states` takes the states after every new step, `(batch_size, steps, ...)`, and stores the last one; while
    the past is recorded it stores all (assisted decoding rolls back with `crop`). A layer that attends takes its length
    from its keys, whichever is written first; any other layer has no keys and counts the steps.
    """

    attends = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start_states()

    def start_states(self, recording: bool = False) -> None:
        """Forget all states."""
        self.states: dict[str, torch.Tensor] = {}
        self.history: dict[str, torch.Tensor] = {}
        self.steps_seen: int | torch.Tensor = 0
        self.recording = recording
        self.first_recorded = 0  # steps seen when recording began

    def get_state(self, name: str = "state") -> torch.Tensor | None:
        """Return the state `name` after the last step, or `None` before the first."""
        return self.states.get(name)

    def update_states(self, **new_states: torch.Tensor) -> None:
        """Append steps; each tensor is `(batch_size, steps, ...)`."""
        for name, steps in new_states.items():
            self.store_state(name, steps[:, -1])
            if self.recording:
                past = self.history.get(name)
                self.history[name] = steps if past is None else torch.cat([past, steps], dim=1)
        first = next(iter(self.states))  # another recurrence of the same layer counts the same steps
        if first in new_states:
            self.steps_seen += new_states[first].shape[1]

    def store_state(self, name: str, state: torch.Tensor) -> None:
        # A view would store the states of all steps, and compiled graphs would differ by its offset.
        self.states[name] = state.clone(memory_format=torch.contiguous_format)

    def activate_past_recording(self) -> None:
        if not self.recording:
            self.recording = True
            self.first_recorded = int(self.steps_seen)  # a copy: the tensor of a static layer changes
            self.history = {name: state[:, None].clone() for name, state in self.states.items()}

    def roll_back(self, steps: int) -> None:
        """Forget the last `steps` steps; all of them only if recording began before the first one."""
        if steps == 0 or not self.states:
            return
        if not self.recording or self.steps_seen - self.first_recorded < steps:
            raise UserError("cache.past_not_recorded", steps=steps)
        if steps == self.steps_seen:
            self.start_states(self.recording)
            return
        for name, past in self.history.items():
            self.history[name] = past[:, :-steps]
            self.store_state(name, self.history[name][:, -1])
        self.steps_seen -= steps


class RecurrentStateLayer(RecurrentStates, DynamicLayer):
    """A growing cache layer with recurrent states, and with keys if it attends."""

    _layer_type = "recnmt_recurrent"

    def update_states(self, **new_states: torch.Tensor) -> None:
        super().update_states(**new_states)
        if not self.is_initialized:
            first = next(iter(new_states.values()))
            self.lazy_initialization(first, first)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # a tensor in exported graphs
        length = super().get_seq_length()
        return length if self.attends else length or self.steps_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, 0  # of keys: states are not attended

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.start_states(self.recording)

    def map_states(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change all states, keys and values."""
        self.states = {name: change(state) for name, state in self.states.items()}
        self.history = {name: change(past) for name, past in self.history.items()}
        if self.has_keys:
            self.keys, self.values = change(self.keys), change(self.values)  # type: ignore[arg-type]  # not None here

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.map_states(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_states(lambda state: state[indices.to(state.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, as transformers counts them; a positive value is a new length."""
        remove = self.get_seq_length() - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        remove = max(remove, 0)
        if self.keys is not None and self.values is not None and self.has_keys and remove:
            self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]
        self.roll_back(int(remove))

    def offload(self) -> None:
        self.map_states(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self.map_states(lambda state: state.to(self.device, non_blocking=True))

    @property
    def has_keys(self) -> bool:
        return self.is_initialized and self.keys is not None and self.keys.numel() > 0


class StaticRecurrentStateLayer(RecurrentStates, StaticLayer):
    """A [`RecurrentStateLayer`] for `StaticCache`, which writes states in place."""

    _layer_type = "recnmt_recurrent"

    def start_states(self, recording: bool = False) -> None:
        super().start_states(recording)
        self.steps_seen = torch.tensor(0)  # an int would make a compiled graph for every number

    def store_state(self, name: str, state: torch.Tensor) -> None:
        stored = self.states.get(name)
        if stored is not None and stored.shape == state.shape:
            stored.copy_(state)
            return
        self.states[name] = state.clone()
        self.steps_seen = torch.as_tensor(self.steps_seen, device=state.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.states[name])
            torch._dynamo.mark_static_address(self.steps_seen)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # transformers' own returns tensors too
        return super().get_seq_length() if self.attends or self.is_initialized else self.steps_seen

    def reset(self) -> None:
        super().reset()
        self.start_states(self.recording)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.is_initialized:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for state in self.states.values():
            state.copy_(state.index_select(0, beam_idx.to(state.device)))


class RecurrentAttentionLayer(RecurrentStateLayer):
    """[`RecurrentStateLayer`] of a decoder layer that also attends its own keys."""

    _layer_type = "recnmt_recurrent_attention"
    attends = True


class StaticRecurrentAttentionLayer(StaticRecurrentStateLayer):
    """A [`RecurrentAttentionLayer`] for `StaticCache`."""

    _layer_type = "recnmt_recurrent_attention"
    attends = True


def recurrent_layer(cache: Cache | None, layer_idx: int = 0) -> RecurrentStates | None:
    """Return the recurrent layer of a decoder's own cache, or `None` without one; some caches raise a `UserError`."""
    if cache is None:
        return None
    layers = self_attention_cache(cache).layers
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not hasattr(layer, "update_states"):  # remote code has its own copies of these classes
        raise UserError("cache.no_recurrent_state", field="cache", kind=type(cache).__name__)
    return layer  # type: ignore[return-value]
