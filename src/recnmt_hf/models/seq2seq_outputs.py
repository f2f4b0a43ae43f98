"""
Memories that the encoder passes to the decoder, the names of the cache, and output classes. Those of encoder and
decoder declare memories and extra outputs, which also reach the outputs of the bare and of the generating model.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput

from .user_errors import UserError


class Memory(NamedTuple):
    """
    States that the decoder reads, one row per source, `(num_sources, length, d)` or `(num_sources, d)`; their token
    mask `(num_sources, length)`, or `None` if all are real, and the kernel mask.
    """

    states: Tensor
    token_mask: Tensor | None = None
    kernel_mask: Tensor | None = None


class Memories(dict[str, Memory]):
    """The memories of a batch by name. Every decoder layer's `encoder_attn` reads `"encoder"`."""

    def with_states(self, states: Iterable[Tensor]) -> "Memories":
        """Return a copy of the memories with these states."""
        pairs = zip(self.items(), states, strict=True)
        return Memories((name, memory._replace(states=new)) for (name, memory), new in pairs)


def memory_states(name: str) -> dict[str, str]:
    """Return the metadata that declares a field of an encoder's output to be the states of the memory `name`."""
    return {"memory": name, "part": "states"}


def memory_mask(name: str) -> dict[str, str]:
    """Return the metadata that declares a field of an encoder's output to be the token mask of the memory `name`."""
    return {"memory": name, "part": "token_mask"}


# The field of outputs that contains the cache; transformers renamed it in 5.24.
CACHE = "cache" if any(field.name == "cache" for field in fields(Seq2SeqLMOutput)) else "past_key_values"


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """
    Let a `forward` with an argument `cache` take it as `past_key_values` too, its name before transformers 5.24. A
    cache under any other name raises a `UserError`: translations without it would be wrong.
    """

    @functools.wraps(forward)
    def call(*args: Any, past_key_values: Cache | None = None, **kwargs: Any) -> Any:
        if past_key_values is not None and kwargs.get("cache") is None:
            kwargs["cache"] = past_key_values
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
    """Output of an encoder. Subclasses add memories ([`memory_states`], [`memory_mask`]) and extra outputs."""

    memory_parts: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    @classmethod
    def find_memories(cls) -> None:
        """Set `memory_parts` (field, memory, part) from the fields, whose metadata compiled code cannot read."""
        declared = [(field.name, field.metadata) for field in fields(cls) if "memory" in field.metadata]
        cls.memory_parts = tuple((name, metadata["memory"], metadata["part"]) for name, metadata in declared)

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
        tensors = ["last_hidden_state", *(name for name, *_ in cls.memory_parts)]
        layers = [name for name in names if name not in tensors]
        by_type: dict[str, Any] = dict(zip(tensors, (v for v in value if isinstance(v, Tensor)), strict=False))
        by_type.update(zip(layers, (v for v in value if isinstance(v, (tuple, list))), strict=False))
        return cls(**by_type)

    def memories(self) -> Memories:
        """Return the declared memories; the last states are `"encoder"`."""
        parts: dict[str, dict[str, Any]] = {"encoder": {"states": self.last_hidden_state}}
        for name, memory, part in self.memory_parts:
            value = getattr(self, name)
            if value is not None:
                parts.setdefault(memory, {})[part] = value
        return Memories((name, Memory(**values)) for name, values in parts.items() if "states" in values)


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
