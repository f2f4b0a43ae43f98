"""
What the encoder hands to the decoder, and what models return.

A model declares what it returns beside the usual fields once, as fields of its encoder's or its decoder's output class:
memories, which the decoder reads, and extra outputs, which show what the model did. Both reach the outputs of the bare
and of the generating model under the same names.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
)
from transformers.utils import ModelOutput

from .user_errors import UserError


# -- memories ----------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """
    Something of a source that the decoder reads, one row for each source, however many beams translate it.

    Attributes:
        states (`torch.Tensor` of shape `(num_sources, length, d)` or `(num_sources, d)`).
        attention_mask (`torch.Tensor` of shape `(num_sources, length)`, *optional*): 1 keeps; `None`: all is real.
        mask (`torch.Tensor`, *optional*): The same as the attention kernels want it; see
            [`~.seq2seq_stacks.Seq2SeqDecoder.prepare_mask`].
    """

    states: torch.Tensor
    attention_mask: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class Memories(dict[str, Memory]):
    """
    The memories of a batch by name. `"encoder"` is the one that every decoder layer's `encoder_attn` reads.

    Layers get them as positional tensors ([`flatten`], [`unflatten`]): reentrant gradient checkpointing follows no
    gradient into anything else.
    """

    def __missing__(self, name: str) -> Memory:
        raise UserError(
            f"encoder_outputs lacks {name}_hidden_state, which the decoder attends. Remedy: pass the output of this "
            "model's own get_encoder() as it came."
        )

    def flatten(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(tensor for memory in self.values() for tensor in memory)

    @classmethod
    def unflatten(cls, names: Iterable[str], tensors: Sequence[torch.Tensor | None]) -> "Memories":
        given: Any = tensors
        return cls((name, Memory(*given[3 * i : 3 * i + 3])) for i, name in enumerate(names))


def memory_states(name: str) -> dict[str, str]:
    """Metadata of the field of an encoder's output that holds the states of the memory `name`."""
    return {"memory": name, "part": "states"}


def memory_mask(name: str) -> dict[str, str]:
    """Metadata of the field of an encoder's output that holds this memory's mask, 1 where its states are real."""
    return {"memory": name, "part": "attention_mask"}


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Seq2SeqEncoderOutput(BaseModelOutput):
    """
    An encoder's output. Subclasses add memories ([`memory_states`], [`memory_mask`]), which the decoder receives again
    from `generate`, once per source; and extra outputs, tuples with an entry for each layer.

    Attributes:
        memory_parts (tuple of `str` triples): Field, memory and part of each declared field; compiled code cannot read
            them off the fields themselves. Set for the output class of every model's encoder ([`find_memories`]).
    """

    memory_parts: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    @classmethod
    def find_memories(cls) -> None:
        """Sets `memory_parts` from the metadata of the fields."""
        declared = [(each.name, each.metadata) for each in fields(cls) if "memory" in each.metadata]
        cls.memory_parts = tuple((name, found["memory"], found["part"]) for name, found in declared)

    @classmethod
    def rebuild(cls, value: Any) -> "Seq2SeqEncoderOutput":
        """
        An instance of this class from another output, a mapping, or a tuple, so that no memory is lost on the way.

        A tuple with as many entries as there are fields is read in their order. A shorter one (`return_dict=False`
        leaves out what is empty) does not say which fields it has: its tensors are the last states and the memories in
        the order of their fields; what is left goes to the other fields, hidden states first.
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
        """The declared memories that this output has; the last states are `"encoder"`, whose mask is the source's."""
        parts: dict[str, dict[str, Any]] = {"encoder": {"states": self.last_hidden_state}}
        for name, memory, part in self.memory_parts:
            value = getattr(self, name)
            if value is not None:
                parts.setdefault(memory, {})[part] = value
        return Memories((name, Memory(**found)) for name, found in parts.items() if "states" in found)


@dataclass
class Seq2SeqDecoderOutput(BaseModelOutputWithPastAndCrossAttentions):
    """A decoder's output. Subclasses add extra outputs, tuples with an entry for each layer that has them."""


@dataclass
class Seq2SeqTranslationOutput(Seq2SeqLMOutput):
    """
    [`~transformers.modeling_outputs.Seq2SeqLMOutput`], and:

    Args:
        auxiliary_loss (`torch.Tensor`, *optional*): What the model added to the loss of its predictions.
    """

    auxiliary_loss: torch.Tensor | None = None


def extra_fields(output_class: type) -> list[Any]:
    """The fields that an encoder's or decoder's output class adds to those of transformers."""
    usual = {each.name for each in fields(BaseModelOutputWithPastAndCrossAttentions)}  # those of an encoder among them
    return [each for each in fields(output_class) if each.name not in usual]


def with_extra_outputs(base: type, parts: Sequence[type], name: str, module: str) -> type:
    """
    A class of outputs: those of `base`, and what the encoder's and the decoder's output classes add.

    Args:
        base (`type`): [`~transformers.modeling_outputs.Seq2SeqModelOutput`] or [`Seq2SeqTranslationOutput`].
        parts (sequence of `type`): Output classes of encoder and decoder.
        name, module (`str`): Of the new class, which can be imported by them: pickling looks it up.
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


def joined_with_extras(
    usual_fields: Callable[..., dict[str, Any]], output_class: type, names: Sequence[str]
) -> Callable[..., Any]:
    """
    A method that makes an output from others and carries their extra outputs over.

    Args:
        usual_fields: A method that gives the output's usual fields; its arguments are those of the new method, outputs
            among them.
        output_class (`type`): Has these fields and `names`.
        names (sequence of `str`): Of the extra outputs.
    """

    def joined(self: Any, *args: Any) -> Any:
        extra = dict.fromkeys(names)
        for given in args:
            for name in names if isinstance(given, ModelOutput) else ():
                value = getattr(given, name, None)
                if value is not None and not (isinstance(value, tuple) and not value):  # () where nothing was recorded
                    extra[name] = value
        return output_class(**usual_fields(self, *args), **extra)

    return joined
