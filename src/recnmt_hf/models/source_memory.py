"""Cache layers of an ordinary `EncoderDecoderCache` with the projected memories of the sources, one row per source."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, StaticLayer


class BeamMoves:
    """Checks whether a reordering keeps every decoder row with its source, once for all layers of a cache."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.group = 0
        self.stay = False
        self.answered: set[int] = set()

    def stay_within_sources(self, layer: "SourceMemoryLayer", rows: torch.Tensor, group: int) -> bool:
        """Check `rows` `(decoder_rows,)`, where row `i` becomes a copy of row `rows[i]`, in groups of `group` rows."""
        if self.rows is not rows or self.group != group or id(layer) in self.answered:
            own = torch.arange(rows.shape[0], device=rows.device).div(group, rounding_mode="floor")
            sources = rows.div(group, rounding_mode="floor")
            if rows.device.type != "cpu":  # as in beam search; to ask an accelerator would mean to wait for it
                torch._assert_async((sources == own).all(), "A row moved to another source.")
            self.stay = rows.device.type != "cpu" or torch.equal(sources, own)
            self.rows, self.group, self.answered = rows, group, set()
        self.answered.add(id(layer))
        return self.stay


class SourceMemoryLayer(DynamicLayer):
    """
    Projected memories of one decoder layer by name; `keys` and `values` are `"encoder"`, `(num_sources, num_heads,
    source_length, head_dim)`. The decoder has `num_sources * g` rows, `g` consecutive ones for each source, which
    attention folds into queries. Beams move only within their source, so that reordering changes nothing here. The
    first layer of a cache also keeps by name what all layers share: masks and vectors of the sources in `shared`
    ([`cached_value`]), with one copy of a vector per row in `spread` ([`cached_vector`]).
    """

    def __init__(self, moves: BeamMoves | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.moves = moves or BeamMoves()
        self.memories: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shared: dict[str, torch.Tensor | None] = {}
        self.spread: dict[str, torch.Tensor] = {}
        self.decoder_rows = 0

    def store(self, name: str, keys: torch.Tensor, values: torch.Tensor, decoder_rows: int) -> None:
        """Store a memory's projections; a name may end in a slash and a layout."""
        keys, values = keys.contiguous(), values.contiguous()  # a matmul of all heads would copy them at each step
        self.memories[name] = (keys, values)
        self.decoder_rows = decoder_rows
        if name == "encoder":
            self.dtype, self.device = keys.dtype, keys.device
            self.keys, self.values = keys, values
            self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.store("encoder", key_states, value_states, key_states.shape[0])
        return self.keys, self.values

    def reset(self) -> None:
        # Dropped, not zeroed as in transformers before 5.20: the next source has its own length.
        self.keys = self.values = None
        self.is_initialized = False
        self.memories, self.shared, self.spread, self.decoder_rows = {}, {}, {}, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.keys is None:
            # Without a memory, rows cannot be assigned to sources: masks and vectors are prepared again.
            self.shared, self.spread = {}, {}
        else:
            self.take_rows(beam_idx.to(self.keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        # Each source then serves `repeats` times as many consecutive rows.
        self.decoder_rows *= repeats

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def take_rows(self, rows: torch.Tensor) -> None:
        """Let decoder row `i` read the memory of row `rows[i]`."""
        num_sources = self.memories["encoder"][0].shape[0]
        group = max(self.decoder_rows // num_sources, 1)
        if rows.shape[0] == self.decoder_rows and self.moves.stay_within_sources(self, rows, group):
            return
        sources = torch.div(rows, group, rounding_mode="floor")
        if torch.equal(sources[::group].repeat_interleave(group), sources):  # still one row for each source
            sources = sources[::group]
        for name, (keys, values) in self.memories.items():
            self.memories[name] = (keys.index_select(0, sources), values.index_select(0, sources))
        for name, item in self.shared.items():
            if item is not None and item.shape[0] == num_sources:  # a mask may have one row for all
                self.shared[name] = item.index_select(0, sources)
        self.spread = {}
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
            self.shared = {name: None if item is None else item.to(device) for name, item in self.shared.items()}
            self.spread = {}
            self.keys, self.values = self.memories["encoder"]


def use_source_memory(cache: Cache | None, num_layers: int) -> None:
    """Replace empty, growing cross-attention layers by [`SourceMemoryLayer`], and add missing ones to `num_layers`."""
    if not isinstance(cache, EncoderDecoderCache):
        return
    cross = cache.cross_attention_cache
    layers = cross.layers
    if layers and (isinstance(layers[0], SourceMemoryLayer) or getattr(layers[0], "is_initialized", False)):
        return
    moves = BeamMoves()
    for i, layer in enumerate(layers):
        # Only growing layers (recurrent ones included): static ones must keep their addresses.
        if isinstance(layer, DynamicLayer) and not layer.is_initialized:
            layers[i] = SourceMemoryLayer(moves)
    if isinstance(cross, DynamicCache):
        layers += [SourceMemoryLayer(moves) for _ in range(num_layers - len(layers))]


def spread_over_beams(states: torch.Tensor, decoder_rows: int) -> torch.Tensor:
    """Repeat a tensor per source, `(num_sources, ..)`, for the consecutive decoder rows of each source."""
    beams = decoder_rows // max(states.shape[0], 1)
    return states if beams <= 1 else states.repeat_interleave(beams, dim=0)


def one_row_per_source(attention_mask: torch.Tensor | None, num_sources: int) -> torch.Tensor | None:
    """Return a mask `(rows, ..)` that may have been repeated for beams with one row for each source."""
    if attention_mask is None or attention_mask.shape[0] == num_sources:
        return attention_mask
    return attention_mask[:: max(attention_mask.shape[0] // num_sources, 1)]


def first_source_layer(cache: Cache | None) -> SourceMemoryLayer | None:
    """Return the cache layer with the masks and vectors that all layers share, or `None`."""
    cross = getattr(cache, "cross_attention_cache", None)
    layer = cross.layers[0] if cross is not None and cross.layers else None
    return layer if isinstance(layer, SourceMemoryLayer) else None


def cached_value(cache: Cache | None, name: str, compute: Callable[[], Any]) -> Any:
    """Return `compute()`, one row per source or `None`: computed in the first step and cached under `name`."""
    layer = first_source_layer(cache)
    if layer is None:
        return compute()
    if name not in layer.shared:
        layer.shared[name] = compute()
    return layer.shared[name]


def cached_vector(
    cache: Cache | None, name: str, compute: Callable[[], torch.Tensor], decoder_rows: int
) -> torch.Tensor:
    """Return `compute()`, `(num_sources, ..)`, repeated over beams to `(decoder_rows, ..)` and cached under `name`."""
    layer, vector = first_source_layer(cache), cached_value(cache, name, compute)
    if layer is None:
        return spread_over_beams(vector, decoder_rows)
    # Rows of a source have the same vector, so that moves of beams within it change nothing.
    if name not in layer.spread or layer.spread[name].shape[0] != decoder_rows:
        layer.spread[name] = spread_over_beams(vector, decoder_rows)
    return layer.spread[name]


def read_source_memory(
    name: str,
    layer_idx: int | None,
    project_memory: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    key_value_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    decoder_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """
    Return keys, values and kernel mask of a memory, which `project_memory` projects at the first step of a generation:
    `(num_sources, num_heads, key_length, ..)`. Then they are cached under `name`, in static caches only `"encoder"`.
    """
    if not isinstance(cache, EncoderDecoderCache) or layer_idx is None:
        return *project_memory(key_value_states), attention_mask
    cross = cache.cross_attention_cache
    layer = cross.layers[layer_idx]
    if isinstance(layer, SourceMemoryLayer):
        if name not in layer.memories:
            key, value = project_memory(key_value_states)
            layer.store(name, key, value, decoder_rows)
            cache.is_updated[layer_idx] = True
        return *layer.memories[name], attention_mask
    if name != "encoder":
        return *project_memory(key_value_states), attention_mask
    # A static (or foreign) cache has one row for each row of the decoder.
    if attention_mask is not None:
        attention_mask = spread_over_beams(attention_mask, decoder_rows)
    if cache.is_updated.get(layer_idx):
        return layer.keys, layer.values, attention_mask  # type: ignore[union-attr, return-value]  # filled before
    key, value = project_memory(key_value_states)
    key, value = spread_over_beams(key, decoder_rows), spread_over_beams(value, decoder_rows)
    if isinstance(layer, StaticLayer) and layer.max_cache_len != key.shape[2]:
        # Positions after the memory would be attended too. The cache has another size, or is filled for a second time.
        layer.max_cache_len, layer.is_initialized = key.shape[2], False
    key, value = cross.update(key, value, layer_idx)
    cache.is_updated[layer_idx] = True
    return key, value, attention_mask


def self_attention_cache(cache: Cache) -> Cache:
    """Return the decoder's own part of a cache."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def fill_cache(cache: Cache | None, layer_types: Sequence[str] | None) -> None:
    """Add the decoder's recurrent layers to a growing cache that was made without a configuration."""
    own = None if cache is None else self_attention_cache(cache)
    if layer_types is not None and isinstance(own, DynamicCache):
        own.layers += [DYNAMIC_LAYER_TYPE_MAPPING[kind]() for kind in layer_types[len(own.layers) :]]
