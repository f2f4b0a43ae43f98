"""Contents of an `EncoderDecoderCache`: projected memories of the sources, and states of recurrences."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, StaticLayer

from .kernels_linear_attention import fold_words
from .kernels_shared import Mask, on_cpu
from .user_errors import UserError


MEMORY = "matrix_memory"  # the state of linear attention


def spread_over_beams(states: Tensor, decoder_rows: int) -> Tensor:
    """Repeat a tensor per source, `(num_sources, ..)`, for the consecutive decoder rows of each source."""
    beams = decoder_rows // max(states.shape[0], 1)
    return states if beams <= 1 else states.repeat_interleave(beams, dim=0)


def concat_rows(first: Tensor, second: Tensor, padding: float = 0) -> Tensor:
    """Return the rows of two tensors; where their other sizes differ, `padding` fills up the smaller ones."""
    if first.shape[1:] == second.shape[1:]:
        return torch.cat([first, second])
    joined = first.new_full((first.shape[0] + second.shape[0], *map(max, first.shape[1:], second.shape[1:])), padding)
    joined[(slice(first.shape[0]), *map(slice, first.shape[1:]))] = first
    joined[(slice(first.shape[0], None), *map(slice, second.shape[1:]))] = second
    return joined


class GrowingLayer(DynamicLayer):
    """Base class of growing layers with tensors by name, whose first axis are rows."""

    # Replaces each tensor by a function of it and of the same tensors of further layers.
    map_tensors: Callable[..., None]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map_tensors(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_tensors(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map_tensors(lambda tensor: tensor[indices.to(tensor.device)])

    def concat(self, other: "GrowingLayer") -> None:
        self.map_tensors(concat_rows, other)

    def reset(self) -> None:
        # Dropped, not zeroed as in transformers before 5.20: the next source has its own length.
        self.keys = self.values = None
        self.is_initialized = False


class SourceMemoryLayer(GrowingLayer):
    """Projected memories of a decoder layer by name, with a row per source; `keys` and `values` are `"encoder"`."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: dict[str, tuple[Tensor, Tensor]] = {}

    def store(self, name: str, keys: Tensor, values: Tensor) -> None:
        """Store a memory's projections; a name may end in a slash and a layout."""
        keys, values = keys.contiguous(), values.contiguous()  # a matmul of all heads would copy them at each step
        self.memories[name] = (keys, values)
        if name == "encoder":
            self.dtype, self.device = keys.dtype, keys.device
            self.keys, self.values = keys, values
            self.is_initialized = True

    def map_tensors(self, change: Callable[..., Tensor], *others: Any) -> None:
        for name in self.memories:
            pairs = [layer.memories[name] for layer in (self, *others)]
            keys, values = (change(*tensors) for tensors in zip(*pairs, strict=True))
            self.memories[name] = (keys, values)
        self.keys, self.values = self.memories.get("encoder", (None, None))

    def reset(self) -> None:
        super().reset()
        self.memories = {}


class SourceMemoryCache(DynamicCache):
    """
    The cross-attention part of a growing cache: the memories of each decoder layer, and what all layers share by name,
    the kernel `masks` of the memories and `vectors` of the sources, with a copy for each row of the decoder. This has
    `beams` consecutive rows for each source, which attention folds into queries. Beams move only within their source.
    """

    layers: list[SourceMemoryLayer]  # type: ignore[assignment]  # of one kind

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = [SourceMemoryLayer() for _ in range(num_layers)]
        self.beams = 1
        self.forget_shared()

    def forget_shared(self) -> None:
        self.masks: dict[str, Tensor | None] = {}
        self.vectors: dict[str, Tensor] = {}

    def reset(self) -> None:
        super().reset()
        self.forget_shared()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let decoder row `i` read the memories of row `beam_idx[i]`."""
        stored = next((keys for layer in self.layers for keys, _ in layer.memories.values()), None)
        if stored is None:
            return self.forget_shared()  # rows cannot be assigned to sources
        rows, num_sources = beam_idx.to(stored.device), stored.shape[0]
        sources = rows.div(self.beams, rounding_mode="floor")
        if rows.shape[0] == num_sources * self.beams:
            own = torch.arange(rows.shape[0], device=rows.device).div(self.beams, rounding_mode="floor")
            if not on_cpu(rows):  # as in beam search; to ask an accelerator would mean to wait for it
                torch._assert_async((sources == own).all(), "A row moved to another source.")
                return
            if torch.equal(sources, own):
                return
        if torch.equal(sources[:: self.beams].repeat_interleave(self.beams), sources):  # still one row for each source
            sources = sources[:: self.beams]
        else:
            self.beams = 1
        for layer in self.layers:
            layer.reorder_cache(sources)
        for name, mask in self.masks.items():
            if mask is not None and mask.shape[0] == num_sources:
                self.masks[name] = mask.index_select(0, sources.to(mask.device))
        self.vectors = {name: vector.index_select(0, rows.to(vector.device)) for name, vector in self.vectors.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.beams *= repeats
        self.vectors = {name: vector.repeat_interleave(repeats, dim=0) for name, vector in self.vectors.items()}

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def concat(self, other: "SourceMemoryCache") -> None:
        """Add the sources of another cache with as many beams."""
        for layer, further in zip(self.layers, other.layers, strict=True):
            layer.concat(further)
        self.forget_shared()


def source_memories(cache: Cache | None) -> SourceMemoryCache | None:
    """Return the part of a cache with the memories of the sources; foreign caches have none."""
    cross = getattr(cache, "cross_attention_cache", None)
    return cross if isinstance(cross, SourceMemoryCache) else None


def cached_vector(cache: Any, name: str, compute: Callable[[], Tensor], decoder_rows: int) -> Tensor:
    """Return `compute()`, `(num_sources, ..)`, repeated over beams to `(decoder_rows, ..)` and cached under `name`."""
    sources = source_memories(cache)
    vectors = {} if sources is None else sources.vectors
    if name not in vectors or vectors[name].shape[0] != decoder_rows:
        vectors[name] = spread_over_beams(compute(), decoder_rows)
    return vectors[name]


def read_source_memory(
    name: str,
    layer_idx: int | None,
    project_memory: Callable[[Tensor], tuple[Tensor, Tensor]],
    key_value_states: Tensor,
    attention_mask: Mask,
    cache: Cache | None,
    decoder_rows: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """
    Return keys, values and kernel mask of a memory, which `project_memory` projects at the first step of a generation:
    `(num_sources, num_heads, key_length, ..)`. Then they are cached under `name`, in static caches only `"encoder"`.
    """
    sources = source_memories(cache)
    if not isinstance(cache, EncoderDecoderCache) or layer_idx is None or (sources is None and name != "encoder"):
        return *project_memory(key_value_states), attention_mask
    layer: Any = cache.cross_attention_cache.layers[layer_idx]
    if sources is not None:
        if name not in layer.memories:
            layer.store(name, *project_memory(key_value_states))
            sources.beams = decoder_rows // key_value_states.shape[0]
            cache.is_updated[layer_idx] = True
        return *layer.memories[name], attention_mask
    # A static (or foreign) cache has one row for each row of the decoder.
    if attention_mask is not None:
        attention_mask = spread_over_beams(attention_mask, decoder_rows)
    if not cache.is_updated.get(layer_idx):
        key, value = (spread_over_beams(part, decoder_rows) for part in project_memory(key_value_states))
        if isinstance(layer, StaticLayer) and layer.max_cache_len != key.shape[2]:
            # Positions after the memory would be attended too. The cache has another size, or is filled a second time.
            layer.max_cache_len, layer.is_initialized = key.shape[2], False
        cache.cross_attention_cache.update(key, value, layer_idx)
        cache.is_updated[layer_idx] = True
    return layer.keys, layer.values, attention_mask


class RecurrentStates:
    """
    Base class of the recurrent cache layers: named states of shape `(batch_size, ...)`, keys and values.
    `update_states` takes the states after every new step, `(batch_size, steps, ...)`, and stores the last one; while
    the past is recorded it stores all (assisted decoding rolls back with `crop`). Layers without keys count the steps.
    `words` were stored by `read_words` and are not in the state `MEMORY` yet.
    """

    _layer_type: str | None = "recnmt_recurrent"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start_states()

    def start_states(self, recording: bool = False) -> None:
        """Forget all states."""
        self.states: dict[str, Tensor] = {}
        self.history: dict[str, Tensor] = {}
        self.words: dict[str, Tensor] = {}
        self.steps_seen: int | Tensor = 0
        self.recording = recording
        self.first_recorded = 0  # steps seen when recording began

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]  # of a cache layer
        self.start_states(self.recording)

    def get_state(self, name: str = "state") -> Tensor | None:
        return self.states.get(name)

    def update_states(self, **new_states: Tensor) -> None:
        """Append steps; each tensor is `(batch_size, steps, ...)`."""
        for name, steps in new_states.items():
            if self.recording:
                past = self.history.get(name, self.states[name][:, None] if name in self.states else None)
                self.history[name] = steps if past is None else torch.cat([past, steps], dim=1)
            # A view would store the states of all steps, and compiled graphs would differ by its offset.
            last = steps[:, -1]
            self.store_state(name, last if steps.shape[1] == 1 else last.clone(memory_format=torch.contiguous_format))
        first = next(iter(self.states))  # another recurrence of the same layer counts the same steps
        if first in new_states:
            self.steps_seen += new_states[first].shape[1]

    def store_state(self, name: str, state: Tensor) -> None:
        self.states[name] = state.contiguous()

    def fold_words(self, at_least: int = 1) -> None:
        """Write the words into the memory if there are at least so many."""
        if self.words and self.words["total"].shape[2] > at_least:  # the first word is zero
            self.store_state(MEMORY, fold_words(self.get_state(MEMORY), **self.words))
            self.words = {}

    def activate_past_recording(self) -> None:
        if not self.recording:
            self.recording = True
            self.first_recorded = int(self.steps_seen)  # a copy: the tensor of a static layer changes

    def roll_back(self, steps: int) -> None:
        """Forget the last `steps` steps; all of them only if recording began before the first one."""
        if steps == 0 or not self.states:
            return
        if not self.recording or self.steps_seen - self.first_recorded < steps:
            raise UserError(f"{steps} steps to undo were not recorded. Call activate_past_recording() before them.")
        if steps == self.steps_seen:
            self.start_states(self.recording)
            return
        for name, past in self.history.items():
            self.history[name] = past[:, :-steps]
            self.store_state(name, self.history[name][:, -1])
        self.words = {name: part[:, :, :-steps] for name, part in self.words.items()}
        self.steps_seen -= steps


class RecurrentStateLayer(RecurrentStates, GrowingLayer):
    """A growing cache layer with recurrent states, and with keys if the decoder layer attends its own words."""

    def update_states(self, **new_states: Tensor) -> None:
        super().update_states(**new_states)
        if not self.is_initialized:
            first = next(iter(new_states.values()))
            self.lazy_initialization(first, first)

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]  # a tensor in exported graphs
        return super().get_seq_length() or self.steps_seen

    def map_tensors(self, change: Callable[..., Tensor], *others: Any) -> None:
        for name in ("states", "history", "words"):
            parts = [getattr(layer, name) for layer in (self, *others)]
            setattr(self, name, {key: change(*(part[key] for part in parts)) for key in parts[0]})
        if self.has_keys:
            self.keys = change(self.keys, *(other.keys for other in others))
            self.values = change(self.values, *(other.values for other in others))

    def concat(self, other: Any) -> None:
        for layer in (self, other):  # they may have stored different numbers of words
            layer.fold_words()
        super().concat(other)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, as transformers counts them; a positive value is a new length."""
        remove = self.get_seq_length() - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        if remove > 0:
            if self.has_keys:
                self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]  # type: ignore[index]
            self.roll_back(int(remove))

    @property
    def has_keys(self) -> bool:
        return self.is_initialized and self.keys is not None and self.keys.numel() > 0


class StaticRecurrentStateLayer(RecurrentStates, StaticLayer):
    """A [`RecurrentStateLayer`] for `StaticCache`, which writes states in place."""

    def start_states(self, recording: bool = False) -> None:
        super().start_states(recording)
        self.steps_seen = torch.tensor(0)  # an int would make a compiled graph for every number

    def store_state(self, name: str, state: Tensor) -> None:
        stored = self.states.get(name)
        if stored is not None and stored.shape == state.shape:
            stored.copy_(state)
            return
        self.states[name] = state.clone()
        self.steps_seen = torch.as_tensor(self.steps_seen, device=state.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.states[name])
            torch._dynamo.mark_static_address(self.steps_seen)

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]  # transformers' own returns tensors too
        return super().get_seq_length() if self.is_initialized else self.steps_seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for state in self.states.values():
            state.copy_(state.index_select(0, beam_idx.to(state.device)))


def recurrent_layer(cache: Cache | None, layer_idx: int = 0) -> RecurrentStates | None:
    """Return the recurrent layer of a decoder's own cache, or `None` without one; some caches raise a `UserError`."""
    if cache is None:
        return None
    layers = self_attention_cache(cache).layers
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not hasattr(layer, "update_states"):  # remote code has its own copies of these classes
        raise UserError(
            f"This {type(cache).__name__} cannot store recurrent states. Omit it, or create its caches with "
            "config=model.config.get_text_config(decoder=True). Prefix tuning is not supported; use LoRA.",
            field="cache",
        )
    return layer  # type: ignore[return-value]


def self_attention_cache(cache: Cache) -> Cache:
    """Return the decoder's own part of a cache."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def complete_cache(cache: Cache | None, layer_types: Sequence[str] | None, num_layers: int) -> None:
    """Give a growing cache what it lacks: the decoder's recurrent layers, and while it is empty, source memories."""
    if cache is None or source_memories(cache) is not None:
        return
    own, cross = self_attention_cache(cache), getattr(cache, "cross_attention_cache", None)
    if layer_types is not None and isinstance(own, DynamicCache):
        own.layers += [DYNAMIC_LAYER_TYPE_MAPPING[kind]() for kind in layer_types[len(own.layers) :]]
    if isinstance(cross, DynamicCache) and not cross.get_seq_length():
        cache.cross_attention_cache = SourceMemoryCache(num_layers)  # type: ignore[attr-defined]  # of a pair


def parts_of(cache: EncoderDecoderCache) -> list[Any]:
    """Return the layers of a cache, but as one part those of an attention that has [`concat`] itself."""
    both = (cache.self_attention_cache, cache.cross_attention_cache)
    return [part for side in both for part in ([side] if hasattr(side, "concat") else side.layers)]


def can_concat(cache: Any) -> bool:
    """Return whether [`concat`] can add rows to a cache. Remote code has its own copies of the classes."""
    return isinstance(cache, EncoderDecoderCache) and all(
        type(part) is DynamicLayer or hasattr(part, "concat") for part in parts_of(cache)
    )


def concat(cache: EncoderDecoderCache, other: EncoderDecoderCache) -> None:
    """Add the rows of another cache with as many tokens of the target."""
    for part, further in zip(parts_of(cache), parts_of(other), strict=True):
        if hasattr(part, "concat"):
            part.concat(further)
        elif part.is_initialized:
            part.keys, part.values = concat_rows(part.keys, further.keys), concat_rows(part.values, further.values)
