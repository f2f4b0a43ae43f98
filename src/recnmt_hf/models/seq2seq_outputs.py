"""
Memories that the encoder passes to the decoder, and output classes of the models.

A model declares what it returns beside the usual fields once, as fields of its encoder's or its decoder's output class:
memories, which the decoder reads, and extra outputs, which show what the model did. Both reach the outputs of the bare
and of the generating model under the same names.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput

from .user_errors import UserError


# -- memories ----------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """
    States of a source that the decoder reads, one row per source: `states` `(num_sources, length, d)` or `(num_sources,
    d)`, `token_mask` `(num_sources, length)`, 1 keeps (`None`: all are real), and `kernel_mask`, the same as the
    attention kernels expect it ([`~.seq2seq_stacks.Seq2SeqDecoder.prepare_mask`]).
    """

    states: torch.Tensor
    token_mask: torch.Tensor | None = None
    kernel_mask: torch.Tensor | None = None


class Memories(dict[str, Memory]):
    """The memories of a batch by name. `"encoder"` is the one that every decoder layer's `encoder_attn` reads."""

    def __missing__(self, name: str) -> Memory:
        raise UserError(
            f"encoder_outputs lacks {name}_hidden_state, which the decoder attends. Remedy: pass the output of this "
            "model's own get_encoder() as it came."
        )

    def with_states(self, states: Iterable[torch.Tensor]) -> "Memories":
        """Return the memories with these states in place of their own."""
        pairs = zip(self.items(), states, strict=True)
        return Memories((name, memory._replace(states=own)) for (name, memory), own in pairs)


def memory_states(name: str) -> dict[str, str]:
    """Return the metadata that declares a field of an encoder's output to be the states of the memory `name`."""
    return {"memory": name, "part": "states"}


def memory_mask(name: str) -> dict[str, str]:
    """Return the metadata that declares a field of an encoder's output to be the token mask of the memory `name`."""
    return {"memory": name, "part": "token_mask"}


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Seq2SeqEncoderOutput(BaseModelOutput):
    """
    Output of an encoder. Subclasses add memories ([`memory_states`], [`memory_mask`]), which the decoder reads, and
    extra outputs, tuples with an entry for each layer.
    """

    memory_parts: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    @classmethod
    def find_memories(cls) -> None:
        """Set `memory_parts` (field, memory, part) from the fields, whose metadata compiled code cannot read."""
        declared = [(each.name, each.metadata) for each in fields(cls) if "memory" in each.metadata]
        cls.memory_parts = tuple((name, found["memory"], found["part"]) for name, found in declared)

    @classmethod
    def rebuild(cls, value: Any) -> "Seq2SeqEncoderOutput":
        """
        Return an instance of this class made from another output, a mapping, or a tuple. A tuple shorter than the
        fields (`return_dict=False` omits empty ones) is read by type: tensors are the last states and memories, tuples
        the rest.
        """
        if type(value) is cls:
            return value
        own = fields(cls)
        if hasattr(value, "keys"):
            return cls(**{each.name: value[each.name] for each in own if each.name in value})
        values = list(value)
        if len(values) == len(own):
            return cls(*values)
        tensors = [each.name for each in own if each.name == "last_hidden_state" or "memory" in each.metadata]
        layers = [each.name for each in own if each.name not in tensors]
        named: dict[str, Any] = dict(
            zip(tensors, (one for one in values if isinstance(one, torch.Tensor)), strict=False)
        )
        named.update(zip(layers, (one for one in values if isinstance(one, (tuple, list))), strict=False))
        return cls(**named)

    def memories(self) -> Memories:
        """Return the declared memories; the last states are `"encoder"`."""
        parts: dict[str, dict[str, Any]] = {"encoder": {"states": self.last_hidden_state}}
        for name, memory, part in self.memory_parts:
            value = getattr(self, name)
            if value is not None:
                parts.setdefault(memory, {})[part] = value
        return Memories((name, Memory(**found)) for name, found in parts.items() if "states" in found)


@dataclass
class Seq2SeqDecoderOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Output of a decoder. Subclasses add extra outputs, tuples with an entry for each layer that has them."""


@dataclass
class Seq2SeqTranslationOutput(Seq2SeqLMOutput):
    """[`~transformers.modeling_outputs.Seq2SeqLMOutput`] with the `auxiliary_loss` that the model added to its loss."""

    auxiliary_loss: torch.Tensor | None = None


def extra_fields(output_class: type) -> list[Any]:
    """Return the fields that an output class adds to those of transformers."""
    usual = {each.name for each in fields(BaseModelOutputWithPastAndCrossAttentions)}  # those of an encoder among them
    return [each for each in fields(output_class) if each.name not in usual]


def with_extra_outputs(base: type, parts: Sequence[type], name: str, module: str) -> type:
    """
    Make an output class with the fields of `base` and the extra fields of the classes `parts`. It can be imported from
    `module` under `name`, for pickling.
    """
    extra = [each for part in parts for each in extra_fields(part)]
    if not extra:
        return base
    described = " ".join(f"[`{part.__name__}`]" for part in parts if extra_fields(part))
    made = make_dataclass(
        name,
        [(each.name, each.type, field(default=None)) for each in extra],
        bases=(base,),
        namespace={"__doc__": f"[`{base.__name__}`] with the extra outputs of {described}."},
    )
    made.__module__, made.__qualname__ = module, name
    if module in sys.modules:
        setattr(sys.modules[module], name, made)
    return made


def extra_values(names: Sequence[str], *outputs: Any) -> dict[str, Any]:
    """Return the extra outputs `names` of these outputs; `None` or `()` means not recorded."""
    found = dict.fromkeys(names)
    for output in outputs:
        for name in names:
            value = getattr(output, name, None)
            if value is not None and not (isinstance(value, tuple) and not value):
                found[name] = value
    return found
