"""
Recurrences in the decoder: a module that continues from word to word, and the cache layers that keep its states in an
ordinary `EncoderDecoderCache` (`past_key_values`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from .recurrent_layers import build_recurrent_layer, left_aligned, take
from .source_memory import self_attention_cache
from .user_errors import UserError


class RecurrentStates:
    """
    Base class of both recurrent cache layers: named states of shape `(batch_size, ...)` beside keys and values.

    `update_states` takes the states after *each* of the new steps, `(batch_size, steps, ...)`; the last one is kept,
    and all of them while the past is recorded (assisted decoding rolls back with `crop`).

    A layer of the kind that attends counts its length by its keys alone, whether these or the states are written first;
    the other kind has no keys of its own, and counts the steps whose states it has seen.
    """

    attends = False
    states: dict[str, torch.Tensor]
    history: dict[str, torch.Tensor]
    steps_seen: int | torch.Tensor
    recording: bool

    def start_states(self) -> None:
        self.states, self.history = {}, {}
        self.steps_seen = 0
        self.recording = False
        self.first_recorded = 0  # steps seen when recording began

    def get_state(self, name: str = "state") -> torch.Tensor | None:
        """The state `name` after the last step seen, or `None` before the first."""
        return self.states.get(name)

    def update_states(self, **new_states: torch.Tensor) -> None:
        """Appends steps; each tensor is `(batch_size, steps, ...)`."""
        for name, steps in new_states.items():
            self.keep(name, steps[:, -1])
            if self.recording:
                past = self.history.get(name)
                self.history[name] = steps if past is None else torch.cat([past, steps], dim=1)
        self.steps_seen += next(iter(new_states.values())).shape[1]

    def keep(self, name: str, state: torch.Tensor) -> None:
        # A view would hold the states of all steps, and compiled graphs would differ by where it begins.
        self.states[name] = state.clone(memory_format=torch.contiguous_format)

    def activate_past_recording(self) -> None:
        if not self.recording:
            self.recording = True
            self.first_recorded = int(self.steps_seen)  # a tensor counts on
            self.history = {name: state[:, None].clone() for name, state in self.states.items()}

    def roll_back(self, steps: int) -> None:
        """Forgets the last `steps` steps; all of them, where recording began before the first one."""
        if steps == 0 or not self.states:
            return
        if not self.recording or self.steps_seen - self.first_recorded < steps:
            raise ValueError(
                f"Recurrent states cannot be rolled back by {steps} steps: their past was not recorded. Remedy: call "
                "activate_past_recording() on the cache before the steps that may be undone."
            )
        if steps == self.steps_seen:
            self.restart()
            return
        for name, past in self.history.items():
            self.history[name] = past[:, :-steps]
            self.keep(name, self.history[name][:, -1])
        self.steps_seen -= steps

    def restart(self) -> None:
        """Forgets all states; what is recorded goes on being recorded."""
        recording = self.recording
        self.start_states()
        self.recording = recording

    def map_states(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name, state in self.states.items():
            self.states[name] = change(state)
        self.history = {name: change(past) for name, past in self.history.items()}


class RecurrentStateLayer(RecurrentStates, DynamicLayer):
    """A growing cache layer with recurrent states; where it has keys too, these are moved and cut with them."""

    _layer_type = "recnmt_recurrent"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start_states()

    def update_states(self, **new_states: torch.Tensor) -> None:
        super().update_states(**new_states)
        if not self.is_initialized:
            first = next(iter(new_states.values()))
            self.lazy_initialization(first, first)

    def get_seq_length(self) -> int:
        length = super().get_seq_length()
        return length if self.attends else length or int(self.steps_seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, 0  # of keys: states are not attended

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.restart()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.has_keys:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # indices of any class
        self.map_states(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.has_keys:
            super().batch_repeat_interleave(repeats)
        self.map_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.has_keys:
            super().batch_select_indices(indices)
        self.map_states(lambda state: state[indices.to(state.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; negative counts, as transformers passes them (positive: the length to keep)."""
        remove = self.get_seq_length() - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        remove = max(remove, 0)
        if self.keys is not None and self.values is not None and self.has_keys and remove:
            self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]
        self.roll_back(remove)

    def offload(self) -> None:
        super().offload()
        self.map_states(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self.map_states(lambda state: state.to(self.device, non_blocking=True))

    @property
    def has_keys(self) -> bool:
        return self.is_initialized and self.keys is not None and self.keys.numel() > 0


class StaticRecurrentStateLayer(RecurrentStates, StaticLayer):
    """The fixed-address twin of [`RecurrentStateLayer`] for `StaticCache`; states are written in place."""

    _layer_type = "recnmt_recurrent"

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len=max_cache_len, **kwargs)
        self.start_states()

    def start_states(self) -> None:
        super().start_states()
        self.steps_seen = torch.tensor(0)  # each number would be compiled into a graph of its own

    def keep(self, name: str, state: torch.Tensor) -> None:
        held = self.states.get(name)
        if held is None or held.shape != state.shape:
            held = state.clone()
            self.steps_seen = torch.as_tensor(self.steps_seen, device=state.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(held)
                torch._dynamo.mark_static_address(self.steps_seen)
            self.states[name] = held
        else:
            held.copy_(state)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # as transformers' own, which says int
        return super().get_seq_length() if self.attends or self.is_initialized else self.steps_seen

    def reset(self) -> None:
        super().reset()
        self.restart()

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
    """The fixed-address twin of [`RecurrentAttentionLayer`]."""

    _layer_type = "recnmt_recurrent_attention"
    attends = True


def recurrent_layer(past_key_values: Cache | None, layer_idx: int = 0) -> RecurrentStates | None:
    """
    The recurrent layer of a decoder's own cache; `None` where there is no cache.

    Raises:
        UserError: The cache has no place for recurrent states, as that of prefix tuning.
    """
    if past_key_values is None:
        return None
    layers = self_attention_cache(past_key_values).layers
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not hasattr(layer, "update_states"):  # of any copy of these classes: those of remote code are others
        raise UserError(
            f"This {type(past_key_values).__name__} has no place for the decoder's recurrent state. Prefix tuning of a "
            "model with a recurrent decoder is not supported. Remedy: use another adapter, such as LoRA or prompt "
            "tuning; else leave past_key_values out, or make its caches with "
            "config=model.config.get_text_config(decoder=True)."
        )
    return layer  # type: ignore[return-value]


class CachedRecurrence(nn.Module):
    """
    A recurrence over a decoder's words that continues where an earlier call stopped: the cache stores its states.
    Padding, on either side, leaves the state as it is.

    Args:
        cell (`str` or class): As in [`build_recurrent_layer`].
        input_size, hidden_size (`int`): Widths of input and state.
        name (`str`, *optional*): Under which the states are kept, where a decoder has several recurrences.
        layer_idx (`int`, *optional*, defaults to 0): The cache layer that keeps them.
    """

    def __init__(
        self,
        cell: str | Callable[[int, int], Any],
        input_size: int,
        hidden_size: int,
        name: str = "",
        layer_idx: int = 0,
    ):
        super().__init__()
        self.rnn = build_recurrent_layer(cell, input_size, hidden_size)
        self.layer_idx = layer_idx
        self.names = [f"{name}_{part}" if name else part for part in self.rnn.state_names]

    def forward(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        initial_state: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """
        Args:
            inputs (`torch.Tensor` of shape `(batch_size, length, input_size)`): Of the new words.
            attention_mask (`torch.Tensor` of shape `(batch_size, seen + length)`, *optional*): 1 keeps.
            past_key_values (`Cache`, *optional*): Holds the state after the words seen, and gets the new ones.
            initial_state (callable, *optional*): Makes the state before the first word, `(batch_size, hidden_size)`.
                `None`: zeros.

        Returns:
            The states `(batch_size, length, hidden_size)`.
        """
        layer = recurrent_layer(past_key_values, self.layer_idx)
        initial: list[torch.Tensor] = []
        if layer is not None and layer.get_state(self.names[0]) is not None:
            initial = [layer.states[name] for name in self.names]
        elif initial_state is not None:
            initial = [initial_state()]
        if attention_mask is not None:
            attention_mask = attention_mask[:, -inputs.shape[1] :]
        states = self.run(inputs, attention_mask, initial, with_all=layer is not None)
        if layer is not None:
            layer.update_states(**dict(zip(self.names, states, strict=True)))
        return states[0]

    def run(
        self, inputs: torch.Tensor, attention_mask: torch.Tensor | None, initial: list[torch.Tensor], with_all: bool
    ) -> list[torch.Tensor]:
        """Return the state after each word (`with_all`: all carried states); words with mask 0 do not change it."""
        order = None
        if attention_mask is not None:
            order = left_aligned(attention_mask)
            inputs = take(inputs.masked_fill(attention_mask[:, :, None] == 0, 0.0), order)
        if with_all and len(self.names) > 1:
            states = self.rnn(inputs, *initial, with_all=True)
        else:
            states = [self.rnn(inputs, *initial)]
        if attention_mask is None:
            return states
        count = (attention_mask != 0).cumsum(dim=1)
        carried = []
        for part, after in enumerate(states):
            before = initial[part] if part < len(initial) else torch.zeros_like(after[:, 0])
            carried.append(take(torch.cat([before[:, None].to(after.dtype), after], dim=1), count))
        return carried
