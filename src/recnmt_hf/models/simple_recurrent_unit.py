"""The simple recurrent unit, a light recurrence whose matmuls need no earlier state (Lei et al., 2018)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .kernels_shared import graph_operator, scan_steps
from .seq2seq_loading import Initialization


class SimpleRecurrentUnit(nn.Module):
    """
    Lei et al. (2018), "Simple Recurrent Units for Highly Parallelizable Recurrence", Eqs. 1-4, in one direction:

        f_t = sigmoid(W_f x_t + v_f * c_{t-1} + b_f)          c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t)
        r_t = sigmoid(W_r x_t + v_r * c_{t-1} + b_r)          h_t = r_t * c_t + (1 - r_t) * x_t

    One matmul over all words serves all gates; from step to step only channels are multiplied. If state and input
    differ in width, a projection replaces the x_t of h_t. The methods are those of
    [`~.recurrent_layers.RecurrentLayer`].
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
        """See [`~.recurrent_layers.RecurrentLayer`]."""
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


def memory_shapes(gates: Tensor, memory: Tensor, gate_weight: Tensor) -> Any:
    """Return shapes and types of the outputs of all steps."""
    return [((gates.shape[0], *memory.shape), gates.dtype)] * 2


@graph_operator(memory_shapes)
def unit_memories(gates: Tensor, memory: Tensor, gate_weight: Tensor) -> list[Tensor]:
    """
    Return c after and before every word from `gates` `[W_f x + b_f; W x]`, `(length, batch_size, 2 * hidden_size)`, and
    c before the first one; `v_f` is the first row of `gate_weight`.
    """

    def step(carry: Sequence[Tensor], row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        score, value = row.chunk(2, -1)
        forget = torch.sigmoid(torch.addcmul(score, gate_weight[0], carry[0]))
        memory = torch.lerp(value, carry[0], forget)
        return [memory], [memory, carry[0]]

    return scan_steps(step, [memory], gates)
