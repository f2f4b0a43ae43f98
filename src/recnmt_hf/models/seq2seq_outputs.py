"""Memories that the encoder passes to the decoder, the names of the cache, and output classes with extra outputs."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput

from .kernels_shared import Mask
from .user_errors import UserError


class Memory(NamedTuple):
    """States that the decoder reads, with one row per source, and their masks, `None` if all states are real."""

    states: Tensor  # (num_sources, length, d) or (num_sources, d)
    token_mask: Mask = None  # (num_sources, length)
    kernel_mask: Mask = None


# The memories of a batch by name. Every decoder layer's `encoder_attn` reads `"encoder"`.
Memories = dict[str, Memory]
# The field of outputs that contains the cache; transformers renamed it in 5.24.
CACHE = "cache" if any(field.name == "cache" for field in fields(Seq2SeqLMOutput)) else "past_key_values"


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a `forward` take the argument `cache` as `past_key_values` too, its name before transformers 5.24."""

    @functools.wraps(forward)
    def call(*args: Any, past_key_values: Cache | None = None, **kwargs: Any) -> Any:
        if past_key_values is not None and kwargs.get("cache") is None:
            kwargs["cache"] = past_key_values
        # Translations without the cache would be wrong.
        if unknown := [name for name, value in kwargs.items() if name != "cache" and isinstance(value, Cache)]:
            raise UserError(
                f"{unknown[0]} is not an argument for a cache; use cache. If you did not pass {unknown[0]}, install "
                "an older version of transformers.",
                field=unknown[0],
            )
        return forward(*args, **kwargs)

    return call


def declares(names: Sequence[str], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` whose signature, which Trainers and `generate` read, has these optional arguments too."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    signature = inspect.signature(forward)
    *own, rest = signature.parameters.values()
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    call.__signature__ = signature.replace(parameters=[*own, *added, rest])  # type: ignore[attr-defined]
    return call


@dataclass
class Seq2SeqEncoderOutput(BaseModelOutput):
    """Output of an encoder. Subclasses add extra outputs; `memory_fields` names those that are further memories."""

    # The fields of a memory's states and, if it has one, of its token mask, by the name of the memory.
    memory_fields: ClassVar[dict[str, tuple[str, ...]]] = {}

    @classmethod
    def rebuild(cls, value: Any) -> "Seq2SeqEncoderOutput":
        """Return an instance made from another output, a mapping, or a tuple, perhaps without the empty fields."""
        if type(value) is cls:
            return value
        names = [field.name for field in fields(cls)]
        if hasattr(value, "keys"):
            return cls(**{name: value[name] for name in names if name in value})
        if len(value) == len(names):
            return cls(*value)
        tensors = ["last_hidden_state", *(name for memory in cls.memory_fields.values() for name in memory)]
        layers = [name for name in names if name not in tensors]
        by_type: dict[str, Any] = dict(zip(tensors, (v for v in value if isinstance(v, Tensor)), strict=False))
        by_type.update(zip(layers, (v for v in value if isinstance(v, (tuple, list))), strict=False))
        return cls(**by_type)

    def memories(self) -> Memories:
        """Return the memories; the last states are `"encoder"`."""
        last: Any = self.last_hidden_state
        memories = {"encoder": Memory(last)}
        for name, memory in self.memory_fields.items():
            states, *mask = (getattr(self, field) for field in memory)
            if states is not None:
                memories[name] = Memory(states, *mask)
        return memories


@dataclass
class Seq2SeqDecoderOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Output of a decoder. Subclasses add extra outputs, tuples with an entry per layer that has them."""


@dataclass
class Seq2SeqTranslationOutput(Seq2SeqLMOutput):
    """[`~transformers.modeling_outputs.Seq2SeqLMOutput`] with the `auxiliary_loss` that the model added to its loss."""

    auxiliary_loss: Tensor | None = None


def extra_fields(output_class: type) -> list[Any]:
    """Return the fields that an output class adds to those of transformers."""
    usual = {field.name for field in fields(BaseModelOutputWithPastAndCrossAttentions)}  # includes those of encoders
    return [field for field in fields(output_class) if field.name not in usual]


def with_extra_outputs(base: type, parts: Sequence[type], name: str, module: str) -> type:
    """Make an output class `module.name` with the fields of `base` and the extra fields of the classes `parts`."""
    extra = [(item.name, item.type, field(default=None)) for part in parts for item in extra_fields(part)]
    if not extra:
        return base
    sources = " ".join(f"[`{part.__name__}`]" for part in parts if extra_fields(part))
    described = {"__doc__": f"[`{base.__name__}`] with the extra outputs of {sources}."}
    output_class = make_dataclass(name, extra, bases=(base,), namespace=described)
    output_class.__module__, output_class.__qualname__ = module, name
    if module in sys.modules:
        setattr(sys.modules[module], name, output_class)
    return output_class


def extra_values(names: Sequence[str], *outputs: Any) -> dict[str, Any]:
    """Return the extra outputs `names` of these outputs; `None` or `()` means not recorded."""
    values = dict.fromkeys(names)
    for output in outputs:
        for name in names:
            value = getattr(output, name, None)
            if value is not None and not (isinstance(value, tuple) and not value):
                values[name] = value
    return values
