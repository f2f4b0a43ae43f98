"""
Cache layers for what transformers' own do not hold: encoder memories that all beams share, and recurrent states.

Both stand in an ordinary `EncoderDecoderCache` under the name `past_key_values`.
"""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer


class BeamMoves:
    """
    Whether a reordering keeps every decoder row with its source. All layers of a cache ask it one after the other with
    the same rows; the first one looks, and each may take over another's look once, so that what is told is never older
    than one reordering of the cache.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.group = 0
        self.stay = False
        self.told: set[int] = set()

    def stay_within_sources(self, layer: "SourceMemoryLayer", rows: torch.LongTensor, group: int) -> bool:
        """
        Args:
            layer ([`SourceMemoryLayer`]): Who asks.
            rows (`torch.LongTensor` of shape `(decoder_rows,)`): Row `i` becomes what row `rows[i]` was.
            group (`int`): Consecutive rows of one source.
        """
        if self.rows is not rows or self.group != group or id(layer) in self.told:
            own = torch.arange(rows.shape[0], device=rows.device).div(group, rounding_mode="floor")
            self.stay = torch.equal(rows.div(group, rounding_mode="floor"), own)
            self.rows, self.group, self.told = rows, group, set()
        self.told.add(id(layer))
        return self.stay


class SourceMemoryLayer(DynamicLayer):
    """
    Projected encoder memories of one decoder layer, one row per *source*, however many beams translate it.

    `keys` and `values` hold the memory of the encoder, `(num_sources, num_heads, source_length, head_dim)`; further
    memories stand under their names in `memories`. The decoder has `num_sources * g` rows, `g` consecutive rows for
    each source (as generation expands them); attention folds the `g` rows into the queries of their source. Since
    beams move only within their source, reordering them touches nothing here.

    Args:
        moves ([`BeamMoves`], *optional*): Shared by the layers of a cache.
    """

    def __init__(self, moves: BeamMoves | None = None, **kwargs):
        super().__init__(**kwargs)
        self.moves = moves or BeamMoves()
        self.memories: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.masks: dict[str, torch.Tensor | None] = {}
        self.decoder_rows = 0

    def store(
        self,
        name: str,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_rows: int,
    ) -> None:
        """
        Keeps a memory's projections and its prepared mask; `name="encoder"` is what `keys` and `values` show. Behind a
        slash a name says how the memory is laid out; all layouts have one mask, that of the first.
        """
        self.memories[name] = (keys, values)
        self.masks.setdefault(memory_of(name), attention_mask)
        self.decoder_rows = decoder_rows
        if name == "encoder":
            self.dtype, self.device = keys.dtype, keys.device
            self.keys, self.values = keys, values
            self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.store("encoder", key_states, value_states, None, key_states.shape[0])
        return self.keys, self.values

    def reset(self) -> None:
        # Dropped, not zeroed (as releases before 5.20 do with growing layers): the next source has its own length.
        self.keys = self.values = None
        self.is_initialized = False
        self.memories, self.masks, self.decoder_rows = {}, {}, 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            self.take_rows(beam_idx.to(self.keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        # Each source then serves `repeats` times as many consecutive rows.
        self.decoder_rows *= repeats

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        rows = torch.arange(self.decoder_rows, device=self.keys.device)
        self.take_rows(rows[indices.to(self.keys.device)])

    def take_rows(self, rows: torch.LongTensor) -> None:
        """Makes decoder row `i` read the memory that row `rows[i]` has read."""
        num_sources = self.keys.shape[0]
        group = max(self.decoder_rows // num_sources, 1)
        if rows.shape[0] == self.decoder_rows and self.moves.stay_within_sources(self, rows, group):
            return
        source_of_row = torch.div(rows, group, rounding_mode="floor")
        for name, (keys, values) in self.memories.items():
            self.memories[name] = (keys.index_select(0, source_of_row), values.index_select(0, source_of_row))
        for name, mask in self.masks.items():
            if mask is not None and mask.shape[0] == num_sources:
                self.masks[name] = mask.index_select(0, source_of_row)
        self.keys, self.values = self.memories["encoder"]
        self.decoder_rows = rows.shape[0]

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        if self.is_initialized:
            self.memories = {name: (k.to(device), v.to(device)) for name, (k, v) in self.memories.items()}
            self.masks = {name: None if m is None else m.to(device) for name, m in self.masks.items()}
            self.keys, self.values = self.memories["encoder"]


def memory_of(name: str) -> str:
    """The memory that a name stands for, whatever its layout."""
    return name.partition("/")[0]


def use_source_memory(past_key_values: Cache | None, num_layers: int) -> None:
    """
    Replaces empty, growing cross-attention layers by [`SourceMemoryLayer`], and makes those that a cache without a
    configuration lacks; other layers stay as they are.

    Args:
        num_layers (`int`): Layers of the decoder that keep a memory.
    """
    if not isinstance(past_key_values, EncoderDecoderCache):
        return
    cache = past_key_values.cross_attention_cache
    layers = cache.layers
    if layers and (isinstance(layers[0], SourceMemoryLayer) or layers[0].is_initialized):
        return
    moves = BeamMoves()
    for i, layer in enumerate(layers):
        # Exactly the growing layers (recurrent ones included): static ones have fixed addresses to keep.
        if isinstance(layer, DynamicLayer) and not layer.is_initialized:
            layers[i] = SourceMemoryLayer(moves)
    if isinstance(cache, DynamicCache):
        layers += [SourceMemoryLayer(moves) for _ in range(num_layers - len(layers))]


class RecurrentStates:
    """
    What both recurrent cache layers share: named states of shape `(batch_size, ...)` beside keys and values.

    `update_states` takes the states after *each* of the new steps, `(batch_size, steps, ...)`; the last one is kept,
    and all of them while the past is recorded (assisted decoding rolls back with `crop`).
    """

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
        self.states[name] = state

    def activate_past_recording(self) -> None:
        if not self.recording:
            self.recording = True
            self.first_recorded = self.steps_seen
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
            self.states, self.history, self.steps_seen = {}, {}, 0
            return
        for name, past in self.history.items():
            self.history[name] = past[:, :-steps]
            self.keep(name, self.history[name][:, -1])
        self.steps_seen -= steps

    def map_states(self, change) -> None:
        for name, state in self.states.items():
            self.states[name] = change(state)
        self.history = {name: change(past) for name, past in self.history.items()}


class RecurrentStateLayer(RecurrentStates, DynamicLayer):
    """
    A growing cache layer with recurrent states, and keys and values where the layer also attends.

    Its length is that of its keys, or the number of steps whose states it has seen where it has none.
    """

    _layer_type = "recnmt_recurrent"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.start_states()

    def update_states(self, **new_states: torch.Tensor) -> None:
        super().update_states(**new_states)
        if not self.is_initialized:
            first = next(iter(new_states.values()))
            self.lazy_initialization(first, first)

    def get_seq_length(self) -> int:
        return super().get_seq_length() or self.steps_seen

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        recording = self.recording
        self.start_states()
        self.recording = recording

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.has_keys:
            super().reorder_cache(beam_idx)
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
        if self.has_keys and remove:
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

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__(max_cache_len=max_cache_len, **kwargs)
        self.start_states()

    def start_states(self) -> None:
        super().start_states()
        self.steps_seen = torch.tensor(0)  # a number would be compiled into the graph, each one anew

    def keep(self, name: str, state: torch.Tensor) -> None:
        held = self.states.get(name)
        if held is None or held.shape != state.shape:
            held = state.clone()
            self.steps_seen = self.steps_seen.to(state.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(held)
                torch._dynamo.mark_static_address(self.steps_seen)
            self.states[name] = held
        else:
            held.copy_(state)

    def get_seq_length(self) -> int | torch.Tensor:
        return super().get_seq_length() if self.is_initialized else self.steps_seen

    def reset(self) -> None:
        super().reset()
        recording = self.recording
        self.start_states()
        self.recording = recording

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            super().reorder_cache(beam_idx)
        for state in self.states.values():
            state.copy_(state.index_select(0, beam_idx.to(state.device)))


def recurrent_layer(past_key_values: Cache | None, layer_idx: int = 0) -> RecurrentStates | None:
    """
    The recurrent layer of a decoder's own cache; `None` where there is no cache, or one with no place for it. A growing
    cache that was made without a configuration gets its layer here.
    """
    if past_key_values is None:
        return None
    cache = past_key_values
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layers = cache.layers
    if isinstance(cache, DynamicCache) and len(layers) <= layer_idx:
        layers += [DynamicLayer() for _ in range(layer_idx - len(layers))]
        layers.append(RecurrentStateLayer())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    return layer if hasattr(layer, "update_states") else None
