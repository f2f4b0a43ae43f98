"""
The Transformer with recurrent positional embeddings (Chen et al., 2019, "Recurrent Positional Embedding for Neural
Machine Translation", EMNLP).

The input of each side is split by channels: one part of every word's embedding gets its position embedding as usual,
the other is the input of a recurrence, whose states represent the position of a word in its sentence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import OutputRecorder

from .configuration_rpe_transformer import RPETransformerConfig
from .kernels_cpu_matmuls import project
from .kernels_shared import Mask, dropout, graph_operator, is_plain, scan_steps
from .modeling_nmt_transformer import NMTTransformerDecoder, NMTTransformerEncoder, NMTTransformerPreTrainedModel
from .recurrent_layers import CachedRecurrence, MaskedRNN, RecurrentLayer, carry_shapes, cell_step
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Initialization, is_loaded
from .seq2seq_outputs import Seq2SeqDecoderOutput, Seq2SeqEncoderOutput
from .seq2seq_stacks import TokenAndPositionInput
from .transformer_layers import TransformerStack


@dataclass
class RPETransformerEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of the encoder.

    Args:
        source_recurrent_positions (tuple of one `torch.Tensor` of shape `(batch_size, source_length, rpe_dim)`,
            *optional*): With `output_attentions=True`: R of Eq. 6, before dropout.
    """

    source_recurrent_positions: tuple[Tensor, ...] | None = None


@dataclass
class RPETransformerDecoderOutput(Seq2SeqDecoderOutput):
    """
    Output of the decoder.

    Args:
        target_recurrent_positions (tuple of one `torch.Tensor` of shape `(batch_size, target_length, rpe_dim)`,
            *optional*): With `output_attentions=True`: R of Eq. 6, before dropout.
    """

    target_recurrent_positions: tuple[Tensor, ...] | None = None


class ProjectedRecurrentLayer(RecurrentLayer):
    """Eq. 6 literally: `r_j = tanh(W_r RNN(x_j, r_{j-1}) + b_r)` is carried to the next step and is the output."""

    has_kernel = False
    read_layers: tuple[str, ...] = ("out_proj",)  # `quantize_model` spares it

    def __init__(self, cell: str, input_size: int, hidden_size: int):
        super().__init__(cell, input_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def run_steps(self, gates: Tensor, carry: list[Tensor]) -> list[Tensor]:
        recurrent = (self.weight_hh_l0, self.bias_hh_l0)
        if is_plain(self.out_proj, nn.Linear):
            return projected_states(gates, *recurrent, self.out_proj.weight, self.out_proj.bias, *carry, cell=self.cell)
        return run_projected_steps(self.cell, gates, *recurrent, self.out_proj, carry)


def run_projected_steps(
    cell: str, gates: Tensor, weight: Tensor, bias: Tensor, out_proj: Callable[[Tensor], Tensor], carry: list[Tensor]
) -> list[Tensor]:
    """Run the steps of a [`ProjectedRecurrentLayer`] with its recurrent weight and bias."""

    def step(carry: Sequence[Tensor], gate: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        state, *rest = cell_step(cell, carry, gate, weight, bias)
        states = [torch.tanh(out_proj(state)), *rest]
        return states, states

    return scan_steps(step, carry, gates)


@graph_operator(lambda gates, *tensors, cell: carry_shapes(gates, tensors[4:]))
def projected_states(gates: Tensor, *tensors: Tensor, cell: str) -> list[Tensor]:
    """Run [`run_projected_steps`] with recurrent weight and bias, those of the projection, and the carry."""
    weight, bias, out_weight, out_bias, *carry = tensors
    project_out = partial(nn.functional.linear, weight=out_weight, bias=out_bias)
    return run_projected_steps(cell, gates, weight, bias, project_out, carry)


class SimpleRecurrentUnit(nn.Module):
    """
    Lei et al. (2018), "Simple Recurrent Units for Highly Parallelizable Recurrence", Eqs. 1-4, in one direction:

        f_t = sigmoid(W_f x_t + v_f * c_{t-1} + b_f)          c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t)
        r_t = sigmoid(W_r x_t + v_r * c_{t-1} + b_r)          h_t = r_t * c_t + (1 - r_t) * x_t

    If state and input differ in width, a projection replaces the x_t of h_t. Methods as those of [`RecurrentLayer`].
    """

    # h is the output, c is carried.
    state_names = ("state", "memory")

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.parts = 3 if input_size == hidden_size else 4  # forget gate, reset gate, W x, and x itself
        self.in_proj = nn.Linear(input_size, self.parts * hidden_size, bias=False)
        self.gate_weight = nn.Parameter(torch.zeros(2, hidden_size))  # v_f, v_r
        self.gate_bias = nn.Parameter(torch.zeros(2, hidden_size))  # b_f, b_r

    def initialize(self, start: Initialization) -> None:
        init.zeros_(self.gate_weight)
        init.zeros_(self.gate_bias)

    def forward(self, inputs: Tensor, *initial: Tensor | None, with_all: bool = False) -> Any:
        """Args as for [`RecurrentLayer`]."""
        states = self.steps(inputs, [state for state in initial if state is not None])
        return states if with_all else states[0]

    def steps(self, inputs: Tensor, initial: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return h and c after every word; `initial` are h, which has no effect, and c, zero by default."""
        forget, reset, value, *rest = self.in_proj(inputs).transpose(0, 1).chunk(self.parts, -1)
        skipped = rest[0] if rest else inputs.transpose(0, 1)
        memory = initial[1] if len(initial) > 1 else torch.zeros_like(value[0])
        gates = torch.cat([forget + self.gate_bias[0], value], dim=-1)
        memories, previous = unit_memories(gates, memory.to(gates.dtype), self.gate_weight)
        reset = torch.sigmoid(torch.addcmul(reset + self.gate_bias[1], self.gate_weight[1], previous))
        states = torch.lerp(skipped.to(memories.dtype), memories, reset)
        return [states.transpose(0, 1), memories.transpose(0, 1)]


@graph_operator(lambda gates, memory, gate_weight: [((gates.shape[0], *memory.shape), gates.dtype)] * 2)
def unit_memories(gates: Tensor, memory: Tensor, gate_weight: Tensor) -> list[Tensor]:
    """Return c after and before every word from `[W_f x + b_f; W x]`, c before the first one, and the weight of v_f."""

    def step(carry: Sequence[Tensor], row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        score, value = row.chunk(2, -1)
        forget = torch.sigmoid(torch.addcmul(score, gate_weight[0], carry[0]))
        memory = torch.lerp(value, carry[0], forget)
        return [memory], [memory, carry[0]]

    return scan_steps(step, [memory], gates)


class RecurrentPositions(nn.Module):
    """
    Recurrent positional embeddings R of one side, from its share x^r of the words' embeddings (Eq. 6):

        source   f_j = RNN(x^r_j, f_{j-1}),  b_j = RNN(x^r_j, b_{j+1}),   r_j = tanh(W_r [f_j; b_j] + b_r)
        target   s_j = RNN(x^r_j, s_{j-1}),                               r_j = tanh(W_r s_j + b_r)

    With `rpe_recurrence="projected"` r_{j-1} replaces s_{j-1}, on both sides ([`ProjectedRecurrentLayer`]).
    """

    def __init__(self, config: RPETransformerConfig, side: str):
        super().__init__()
        width, projected = config.rpe_dim, config.rpe_recurrence == "projected"
        cell: str | Callable[[int, int], Any] = config.rpe_cell
        if projected:
            cell = partial(ProjectedRecurrentLayer, config.rpe_cell)
        elif config.rpe_cell == "sru":
            cell = SimpleRecurrentUnit
        self.continues = side == "decoder"  # from word to word: the cache stores its state
        if self.continues:
            self.recurrence: nn.Module = CachedRecurrence(cell, width, width)
        else:  # two directions of half the width, unless r recurs
            self.recurrence = MaskedRNN(cell, width, width if projected else width // 2, bidirectional=not projected)
        self.out_proj = None if projected else nn.Linear(width, width)

    def forward(self, embeddings: Tensor, attention_mask: Mask, cache: Cache | None) -> Tensor:
        """Map embeddings of new words to R, both `(batch_size, length, rpe_dim)`; the mask includes earlier words."""
        if self.continues:
            states = self.recurrence(embeddings, attention_mask, cache)
        else:
            states = self.recurrence(embeddings, attention_mask)[0]
        return states if self.out_proj is None else torch.tanh(project(self.out_proj, states))


class RecurrentPositionInput(TokenAndPositionInput):
    """
    The input of a stack from P (the first `d_model - rpe_dim` channels of the embeddings, plus positions of that width)
    and R (the recurrence over the other channels), instead of embeddings plus positions (Eqs. 7-11):

        RPEHead   T_j = [p_j; r_j]
        MPRHead   M_j = [p_j^1; r_j^1; ..; p_j^H; r_j^H], both cut into H equal slices

    `side` is `"encoder"` or `"decoder"`.
    """

    def __init__(self, config: RPETransformerConfig, side: str):
        plain = config.d_model - config.rpe_dim
        has_positions = plain > 0 and getattr(config, f"{side}_position_embeddings")
        super().__init__(config, config.position_embedding_type if has_positions else "none", plain)
        self.sizes = (plain, config.rpe_dim)
        self.slices = getattr(config, f"{side}_attention_heads") if config.rpe_type == "mprhead" else 1
        self.recurrent_positions = RecurrentPositions(config, side) if config.has_recurrence(side) else None

    def forward(
        self,
        embeddings: Tensor,
        attention_mask: Mask = None,
        offset: int | Tensor = 0,
        cache: Cache | None = None,
        add_positions: bool = True,
    ) -> Tensor:
        plain, recurrent = embeddings.split(self.sizes, dim=-1)
        if add_positions:
            plain = self.with_positions(plain, attention_mask, offset)
            if self.recurrent_positions is not None:
                recurrent = self.recurrent_positions(recurrent, attention_mask, cache)
        parts = [part.unflatten(-1, (self.slices, part.shape[-1] // self.slices)) for part in (plain, recurrent)]
        return dropout(torch.cat(parts, dim=-1).flatten(-2), self.dropout, self.training)


class TypedProjection(nn.Module):
    """Queries, keys or values whose first heads project P, and the last ones R (`rpe_head_partition="typed"`)."""

    def __init__(self, plain: int, recurrent: int):
        super().__init__()
        self.plain_proj = nn.Linear(plain, plain)
        self.recurrent_proj = nn.Linear(recurrent, recurrent)

    def forward(self, states: Tensor) -> Tensor:
        plain, recurrent = states.split((self.plain_proj.in_features, self.recurrent_proj.in_features), dim=-1)
        return torch.cat([project(self.plain_proj, plain), project(self.recurrent_proj, recurrent)], dim=-1)


class SlicedProjection(nn.Module):
    """Queries, keys or values where each head projects its own d_k channels (`rpe_head_partition="slice"`)."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_dim, head_dim))
        self.bias = nn.Parameter(torch.empty(heads * head_dim))

    def initialize(self, start: Initialization) -> None:
        init.zeros_(self.bias)
        if not is_loaded(self.weight):  # its views do not have this mark
            for matrix in self.weight:
                start.matrix_(matrix)

    def forward(self, states: Tensor) -> Tensor:
        heads, head_dim, _ = self.weight.shape
        slices = states.reshape(-1, heads, head_dim).transpose(0, 1)
        projected = torch.bmm(slices, self.weight.transpose(1, 2)).transpose(0, 1)
        return projected.reshape(*states.shape[:-1], heads * head_dim) + self.bias


class RPETransformerPreTrainedModel(NMTTransformerPreTrainedModel):
    """Base class of the RPETransformer models: configuration, initialization and loading."""

    config: RPETransformerConfig


class RecurrentPositionStack(RPETransformerPreTrainedModel, TransformerStack):
    """A stack whose input is split."""

    def build_input(self, config: RPETransformerConfig) -> nn.Module:
        if config.splits_input(self.side):
            return RecurrentPositionInput(config, self.side)
        return super().build_input(config)

    def build_layer(self, config: Any, index: int) -> nn.Module:
        layer: Any = super().build_layer(config, index)
        if index > 0 or config.rpe_head_partition == "none" or not config.splits_input(self.side):
            return layer
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            if config.rpe_head_partition == "slice":
                setattr(attention, name, SlicedProjection(attention.num_heads, attention.head_dim))
            elif config.rpe_dim < config.d_model:  # with recurrent heads alone there is one type
                setattr(attention, name, TypedProjection(config.d_model - config.rpe_dim, config.rpe_dim))
        return layer


class RPETransformerEncoder(RecurrentPositionStack, NMTTransformerEncoder):
    """Transformer encoder with recurrent positional embeddings; usable alone through `get_encoder()`."""

    output_class = RPETransformerEncoderOutput
    _can_record_outputs = {
        **NMTTransformerEncoder._can_record_outputs,
        "source_recurrent_positions": OutputRecorder(RecurrentPositions),
    }


class RPETransformerDecoder(RecurrentPositionStack, NMTTransformerDecoder):
    """Transformer decoder with recurrent positional embeddings; each new word costs one step of the recurrence."""

    output_class = RPETransformerDecoderOutput
    _can_record_outputs = {
        **NMTTransformerDecoder._can_record_outputs,
        "target_recurrent_positions": OutputRecorder(RecurrentPositions),
    }


class RPETransformerModel(RPETransformerPreTrainedModel, Seq2SeqModelBase):
    """The Transformer with recurrent positional embeddings, without an output layer (Chen et al., 2019)."""

    encoder_class = RPETransformerEncoder
    decoder_class = RPETransformerDecoder


class RPETransformerForConditionalGeneration(
    RPETransformerPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin
):
    """The Transformer with recurrent positions and its output layer: `generate` translates, `labels` train."""

    model_class = RPETransformerModel


__all__ = ["RPETransformerForConditionalGeneration", "RPETransformerModel", "RPETransformerPreTrainedModel"]
