"""Base classes of encoders and decoders. Subclasses override `run` (the layers) and `finish` (the output)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import source_mask
from .configuration_seq2seq import Seq2SeqConfig
from .decoder_cache import SourceMemoryCache, complete_cache, source_memories
from .kernels_shared import Mask, dropout, is_exporting
from .seq2seq_loading import Initialization, Seq2SeqPreTrainedModel
from .seq2seq_outputs import CACHE, Memories, Memory, Seq2SeqDecoderOutput, Seq2SeqEncoderOutput, declares, takes_cache
from .user_errors import UserError


def sinusoid_table(num_positions: int, dim: int, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """
    Return sinusoids `(num_positions, dim)` (Vaswani et al., 2017, section 3.5) of the frequencies `10000^(-2k / dim)`
    (`"tensor2tensor"`: `10000^(-2k / (dim - 2))`): sines before cosines, or interleaved as in the paper.
    """
    position = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None]
    frequency = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    last = max(dim - 2, 1) if kind == "tensor2tensor" else dim
    angle = position * torch.exp(frequency * (-math.log(10000.0) / last))
    parts = [angle.sin(), angle.cos()]
    table = torch.stack(parts, dim=-1).flatten(1) if kind == "sinusoidal" else torch.cat(parts, dim=-1)
    return table.to(dtype)


class PositionEmbedding(nn.Module):
    """Positions, looked up in a trained table (`"learned"`) or in fixed sinusoids, a buffer outside the state dict."""

    table: Tensor

    def __init__(self, num_positions: int, dim: int, kind: str):
        super().__init__()
        self.kind = kind
        if kind == "learned":
            self.weight = nn.Parameter(torch.empty(num_positions, dim))
            return
        # The default type and device are those of the weights, also while `from_pretrained(dtype=...)` builds a model.
        table = sinusoid_table(num_positions, dim, kind, torch.get_default_dtype())
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def initialize(self, start: Initialization) -> None:
        if self.kind == "learned":
            start.table_(self.weight)
        else:
            init.copy_(self.table, self.compute_table())

    def compute_table(self) -> Tensor:
        rows, dim = self.table.shape
        return sinusoid_table(rows, dim, self.kind, self.table.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A table widened from another type would lack half of its digits.
        dtype = None if self.kind == "learned" else self.table.dtype
        super()._apply(fn, recurse)
        if dtype is not None and self.table.dtype != dtype and self.table.device.type != "meta":
            self.table.copy_(self.compute_table())
        return self

    def forward(self, length: int, offset: int | Tensor = 0, position_ids: Tensor | None = None) -> Tensor:
        """
        Return rows `(length, dim)` from `offset` on, or `(batch_size, length, dim)` for given positions; raises
        `UserError` when a sequence is longer than the table.
        """
        table = self.weight if self.kind == "learned" else self.table
        if position_ids is not None:
            return nn.functional.embedding(position_ids, table)
        # Static caches keep their length on the device; an exported graph is free of it.
        if isinstance(offset, Tensor) or is_exporting():
            return nn.functional.embedding(torch.arange(length, device=table.device) + offset, table)
        check_length(offset + length, table.shape[0])
        return table[offset : offset + length]


def check_length(length: int, limit: int) -> None:
    """Raise a `UserError` for too long a sequence, but not in an exported graph, whose lengths it would bound."""
    if not is_exporting() and length > limit:
        field = "max_position_embeddings"
        raise UserError(f"A sequence of {length} tokens exceeds {field}={limit}.", field=field)


class TokenAndPositionInput(nn.Module):
    """Adds positions `position_kind` of width `channels` to embeddings, with dropout (Vaswani et al., 2017, 3.5)."""

    def __init__(self, config: Seq2SeqConfig, position_kind: str, channels: int | None = None):
        super().__init__()
        self.max_positions = config.max_position_embeddings
        self.dropout = config.dropout
        channels = config.d_model if channels is None else channels
        has_positions = position_kind != "none"
        self.embed_positions = PositionEmbedding(self.max_positions, channels, position_kind) if has_positions else None

    def forward(
        self,
        embeddings: Tensor,
        attention_mask: Mask = None,
        offset: int | Tensor = 0,
        cache: Cache | None = None,
        add_positions: bool = True,
    ) -> Tensor:
        """Map scaled embeddings; positions count real tokens of `(batch_size, seen + length)`, or from `offset`."""
        states = self.with_positions(embeddings, attention_mask, offset) if add_positions else embeddings
        return dropout(states, self.dropout, self.training)

    def with_positions(self, embeddings: Tensor, attention_mask: Any, offset: int | Tensor) -> Tensor:
        """Return embeddings `(batch_size, length, channels)` plus positions, if the model has them."""
        if self.embed_positions is None:
            return embeddings
        length, position_ids = embeddings.shape[1], None
        if attention_mask is not None and attention_mask.dim() == 2:
            check_length(attention_mask.shape[1], self.max_positions)
            position_ids = (attention_mask.long().cumsum(dim=-1) - 1).clamp_(min=0)[:, -length:]
        return embeddings + self.embed_positions(length, offset, position_ids).to(embeddings.dtype)


def records_states(choice: bool | int | list[int] | None) -> bool:
    """Return whether the value of `output_hidden_states` requests states, as the index 0 does."""
    return choice is not None and choice is not False


def select_hidden_states(states: list[Tensor], last: Any, choice: bool | int | list[int] | None) -> Any:
    """Return an output's `hidden_states` by the value of `output_hidden_states`, with `last` as the last one."""
    if choice is None or choice is False:
        return None
    outputs = (*states[:-1], last)
    if choice is True:
        return outputs
    indices = {index % len(outputs) for index in ([choice] if isinstance(choice, int) else choice)}
    return tuple(state if index in indices else None for index, state in enumerate(outputs))


def recording_extra_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a stack's `forward` record all its extra outputs where attentions are requested."""

    @functools.wraps(forward)
    def recording(self: "Seq2SeqStack", *args: Any, **kwargs: Any) -> Any:
        if kwargs.setdefault("output_attentions", self.config.output_attentions):
            kwargs.update({f"output_{name}": True for name in self._can_record_outputs or ()})
        return forward(self, *args, **kwargs)

    return recording


class Seq2SeqStack(Seq2SeqPreTrainedModel):
    """Base class of encoder and decoder. A subclass ends its `__init__` with `self.post_init()`."""

    main_input_name = "input_ids"

    def __init__(self, config: Seq2SeqConfig, vocab_size: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, config.pad_token_id)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_input = self.build_input(config)
        self.layer_norm: nn.Module | None = None  # after the last layer of a pre-norm stack
        self.gradient_checkpointing = False

    def build_input(self, config: Any) -> nn.Module:
        """Return the module that computes the input of the first layer; it is called like [`TokenAndPositionInput`]."""
        return TokenAndPositionInput(config, "none")

    def embeddings(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return scaled embeddings `(batch_size, length, d_model)`. Raises `UserError` for missing ids."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("Pass either token ids or embeddings (input_ids or inputs_embeds).", field="input_ids")
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return embeddings if self.embed_scale == 1.0 else embeddings * self.embed_scale


def mask_of_each(layers: nn.ModuleList, mask: Any) -> list[Any]:
    """Return the mask of each layer."""
    return mask if isinstance(mask, list) else [mask] * len(layers)


class Seq2SeqEncoder(Seq2SeqStack):
    """Base class of all encoders. A subclass has `layers`, or overrides `run`."""

    output_class: type[Seq2SeqEncoderOutput] = Seq2SeqEncoderOutput
    source_inputs: tuple[str, ...] = ()  # inputs of `run` in addition to token ids (or embeddings) and their mask
    layers: nn.ModuleList

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "source_inputs" in vars(cls):
            cls.forward = declares(cls.source_inputs, cls.forward)  # type: ignore[method-assign]

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config, config.vocab_size)

    def build_mask(self, states: Tensor, token_mask: Mask) -> Any:
        """Return the kernel mask of the layers, or one of each, for states `(batch_size, source_length, d_model)`."""
        return None

    @recording_extra_outputs
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Mask = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqEncoderOutput:
        """Args as for [`~.seq2seq_base.Seq2SeqModelBase`]."""
        embeddings = self.embeddings(input_ids, inputs_embeds)
        states = self.run(self.embed_input(embeddings, attention_mask), attention_mask, **kwargs)
        outputs = self.finish(states, embeddings, attention_mask, **kwargs)
        choice = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        outputs.hidden_states = select_hidden_states(states, outputs.last_hidden_state, choice)
        return outputs

    def run(self, hidden_states: Tensor, token_mask: Mask, **kwargs: Any) -> list[Tensor]:
        """Run all layers over their input `(batch_size, source_length, d_model)`; return the input and each output."""
        kernel_mask = self.build_mask(hidden_states, token_mask)
        states = [hidden_states]
        for layer, mask in zip(self.layers, mask_of_each(self.layers, kernel_mask), strict=True):
            states.append(layer(states[-1], mask, token_mask, **kwargs))
        return states

    def finish(self, states: list[Tensor], embeddings: Tensor, token_mask: Mask, **kwargs: Any) -> Seq2SeqEncoderOutput:
        """Return the output from the states of `run` and the scaled embeddings without positions and dropout."""
        last = states[-1] if self.layer_norm is None else self.layer_norm(states[-1])
        return self.output_class(last_hidden_state=last)


class Seq2SeqDecoder(Seq2SeqStack):
    """Base class of all decoders. `attended` is the field of the model's output for the weights of `encoder_attn`."""

    output_class: type[Seq2SeqDecoderOutput] = Seq2SeqDecoderOutput
    attended = "cross_attentions"
    layers: nn.ModuleList

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config, config.decoder_vocab_size)

    def source_attention(self, layer: int) -> nn.Module:
        """Return a layer's attention to the source; its weights are its `head_weights`, or its second output."""
        return self.layers[layer].encoder_attn  # type: ignore[return-value]

    def build_mask(self, states: Tensor, token_mask: Mask, cache: Cache | None) -> Any:
        """Return the kernel mask of the layers, or one of each, for words `(batch_size, target_length, d_model)`."""
        return None

    def prepare_mask(self, states: Tensor, token_mask: Mask) -> Tensor | None:
        """Return the kernel mask of a memory `(num_sources, length, d)` from its token mask `(num_sources, length)`."""
        return source_mask(self.config, states, token_mask)

    @takes_cache
    @recording_extra_outputs
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Mask = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Mask = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        memories: Memories | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqDecoderOutput:
        """
        Args:
            input_ids, attention_mask, inputs_embeds, cache, use_cache: Those of [`Seq2SeqModelBase`].
            encoder_hidden_states, encoder_attention_mask: The memory `"encoder"`, `(num_sources, source_length, d)`,
                and its token mask, where `memories` does not have it. `batch_size` is a multiple of `num_sources`.
            memories (`dict[str, Memory]`, *optional*): The memories that the decoder reads, one row per source.
        """
        embeddings = self.embeddings(input_ids, inputs_embeds)
        cache = self.prepare_cache(cache, use_cache)
        seen = cache.get_seq_length() if cache is not None else 0
        if isinstance(seen, Tensor):
            seen = seen.clone()  # a static layer counts up in place
        memories = dict(memories or {})
        if encoder_hidden_states is not None:
            memories["encoder"] = Memory(encoder_hidden_states, encoder_attention_mask)
        memories = self.prepare_memories(memories, cache)
        # Before the input's own states are written, which a cache might count as words seen.
        kernel_mask = self.build_mask(embeddings, attention_mask, cache)
        if attention_mask is not None and attention_mask.dim() != 2:
            attention_mask = None  # a static cache's mask of queries and keys, without padding
        hidden_states = self.embed_input(embeddings, attention_mask, seen, cache)
        if cache is not None:
            kwargs["query_offset"] = seen  # type: ignore[typeddict-unknown-key]  # for the attention's own functions
        states = self.run(hidden_states, kernel_mask, attention_mask, memories, cache, **kwargs)
        last = self.finish(states, memories, cache)
        choice = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        named: dict[str, Any] = {CACHE: cache, "hidden_states": select_hidden_states(states, last, choice)}
        return self.output_class(last_hidden_state=last, **named)

    def run(
        self,
        hidden_states: Tensor,
        kernel_mask: Any,
        token_mask: Mask,
        memories: Memories,
        cache: Cache | None,
        **kwargs: Any,
    ) -> list[Tensor]:
        """Run all layers over `(batch_size, target_length, d_model)`; return the input and all outputs."""
        states = [hidden_states]
        for layer, mask in zip(self.layers, mask_of_each(self.layers, kernel_mask), strict=True):
            states.append(layer(states[-1], mask, memories, cache=cache, **kwargs))
        return states

    def finish(self, states: list[Tensor], memories: Memories, cache: Cache | None) -> Tensor:
        """Return the last states `(batch_size, target_length, d_model)`, which the output matrix reads."""
        return states[-1] if self.layer_norm is None else self.layer_norm(states[-1])

    def prepare_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the cache, created if none is given; cross-attention layers store one row per source."""
        if cache is None and use_cache:
            own = DynamicCache(config=self.config.get_text_config(decoder=True))
            cache = EncoderDecoderCache(own, SourceMemoryCache(self.config.decoder_layers))
        complete_cache(cache, self.config.cache_layer_types(), self.config.decoder_layers)
        return cache

    def prepare_memories(self, memories: Memories, cache: Cache | None) -> Memories:
        """Return the memories with one row per source and with their kernel masks, which a cache keeps."""
        prepared, sources = {}, source_memories(cache)
        masks: dict[str, Tensor | None] = {} if sources is None else sources.masks
        for name, (states, token_mask, _) in memories.items():
            if token_mask is not None and token_mask.shape[0] != states.shape[0]:  # repeated for beams
                token_mask = token_mask[:: max(token_mask.shape[0] // states.shape[0], 1)]
            if name not in masks:
                masks[name] = self.prepare_mask(states, token_mask)
            prepared[name] = Memory(states, token_mask, masks[name])
        return prepared
