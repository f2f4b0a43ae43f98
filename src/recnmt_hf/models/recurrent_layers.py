"""Recurrent layers over padded batches whose results do not depend on the padding."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .kernels_shared import dropout, graph_operator, is_exporting, project, without_autocast
from .seq2seq_loading import Initialization


# Gates of each cell, in torch's order.
CELLS = {"rnn": 1, "gru": 3, "lstm": 4}


def scan_steps(
    step: Callable[[Sequence[torch.Tensor], torch.Tensor], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    carry: Sequence[torch.Tensor],
    inputs: torch.Tensor,
) -> list[torch.Tensor]:
    """
    Run a recurrence as a loop; in an exported graph as one operator, so that the number of steps stays free.

    Args:
        step (callable): Maps the carry and one of `inputs` to the next carry and the outputs of the step.
        carry (sequence of `torch.Tensor`): Before the first step.
        inputs (`torch.Tensor` of shape `(steps, ..)`).

    Returns:
        The outputs of all steps, each of shape `(steps, ..)`.
    """
    if is_exporting():
        from torch._higher_order_ops.scan import scan

        def traced(carry: list[torch.Tensor], each: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            following, outputs = step(carry, each)
            # The carried state and the output must not be the same tensor.
            return list(following), [output.clone() for output in outputs]

        return scan(traced, list(carry), inputs)[1]
    rows: list[Sequence[torch.Tensor]] = []
    for each in inputs.unbind(0):
        carry, outputs = step(carry, each)
        rows.append(outputs)
    return [torch.stack(column) for column in zip(*rows, strict=True)]


class RecurrentLayer(nn.Module):
    """
    A recurrent layer in one direction, with the parameters and results of `nn.RNN` (tanh), `nn.GRU` or `nn.LSTM`. Those
    classes can be neither compiled into one graph nor exported with free lengths.
    """

    def __init__(self, cell: str, input_size: int, hidden_size: int):
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"There is no recurrent cell {cell!r}; choose one of {', '.join(sorted(CELLS))}.")
        self.cell = cell
        self.input_size = input_size
        self.hidden_size = hidden_size
        rows = CELLS[cell] * hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.empty(rows, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(rows, hidden_size))
        self.bias_ih_l0 = nn.Parameter(torch.empty(rows))
        self.bias_hh_l0 = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the names of what is carried from step to step; the first is the output."""
        return ("state", "memory") if self.cell == "lstm" else ("state",)

    def reset_parameters(self) -> None:
        """Initialise as torch's layers do; models initialise theirs by `initialize`."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def initialize(self, start: Initialization) -> None:
        start.recurrent_(self)

    def extra_repr(self) -> str:
        return f"{self.cell}, {self.input_size}, {self.hidden_size}"

    def forward(self, inputs: torch.Tensor, *initial: torch.Tensor | None, with_all: bool = False) -> Any:
        """
        Return the states `(batch_size, length, hidden_size)` of `inputs` `(batch_size, length, input_size)`, or with
        `with_all` the list of [`steps`]. `initial` are states before the first word, `(batch_size, hidden_size)`;
        `None`: zeros.
        """
        if with_all:
            return self.steps(inputs, [state for state in initial if state is not None])
        state = initial[0] if initial else None
        if state is None:
            state = inputs.new_zeros(inputs.shape[0], self.hidden_size)
        if is_exporting():
            return self.steps(inputs, (state,))[0]
        weights = (self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0)
        settings: dict[str, Any] = {"cell": self.cell, "training": self.training}
        if self.cell == "lstm" and inputs.device.type == "cpu":
            # Its kernel takes no mixture of types, which autocast would make.
            with without_autocast(inputs.device):
                wide = self.weight_hh_l0.dtype
                return layer_states(inputs.to(wide), state.to(wide), *weights, **settings)[0]
        return layer_states(inputs, state, *weights, **settings)[0]

    def steps(self, inputs: torch.Tensor, initial: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """
        Run step by step; `initial` are states `(batch_size, hidden_size)` in the order of `state_names`, missing ones
        are zero. Return for each of `state_names` its values after every step, `(batch_size, length, hidden_size)`.
        """
        gates = nn.functional.linear(inputs.transpose(0, 1), self.weight_ih_l0, self.bias_ih_l0)
        zeros = [inputs.new_zeros(inputs.shape[0], self.hidden_size) for _ in self.state_names[len(initial) :]]
        return [states.transpose(0, 1) for states in self.run_steps(gates, [*initial, *zeros])]

    def run_steps(self, gates: torch.Tensor, carry: list[torch.Tensor]) -> list[torch.Tensor]:
        """
        Run all steps from the input's part of the gates `(length, batch_size, gates * hidden_size)` and the carry.
        """
        return cell_states(gates, self.weight_hh_l0, self.bias_hh_l0, *carry, cell=self.cell)


def layer_shapes(inputs: torch.Tensor, state: torch.Tensor, *rest: torch.Tensor, **settings: Any) -> Any:
    return [((*inputs.shape[:2], state.shape[-1]), state.dtype)]


@graph_operator(layer_shapes)
def layer_states(
    inputs: torch.Tensor, state: torch.Tensor, *weights: torch.Tensor, cell: str, training: bool
) -> list[torch.Tensor]:
    """
    Run a layer of [`RecurrentLayer`] by torch's kernel; `state` is `(batch_size, hidden_size)`, `weights` are the
    layer's parameters in their order. Return a list with the states.
    """
    state = state[None].contiguous()
    # weights, biases, layers, dropout, training, bidirectional, batch first
    kernel_settings: Any = (list(weights), True, 1, 0.0, training, False, True)
    if cell == "lstm":
        return [torch.lstm(inputs, (state, torch.zeros_like(state)), *kernel_settings)[0]]
    return [(torch.gru if cell == "gru" else torch.rnn_tanh)(inputs, state, *kernel_settings)[0]]


def cell_step(
    cell: str, carry: Sequence[torch.Tensor], gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> list[torch.Tensor]:
    """Run one step from the carry and the input's part of all gates `(batch_size, gates * hidden_size)`."""
    recurrent = nn.functional.linear(carry[0], weight, bias)
    if cell == "rnn":
        return [torch.tanh(gate + recurrent)]
    if cell == "gru":
        (reset, update, new), (of_reset, of_update, of_new) = gate.chunk(3, -1), recurrent.chunk(3, -1)
        update = torch.sigmoid(update + of_update)
        new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        return [(1 - update) * new + update * carry[0]]
    into, forget, new, out = (gate + recurrent).chunk(4, -1)
    memory = torch.sigmoid(forget) * carry[1] + torch.sigmoid(into) * torch.tanh(new)
    return [torch.sigmoid(out) * torch.tanh(memory), memory]


def cell_shapes(gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *carry: torch.Tensor, cell: str) -> Any:
    return [((gates.shape[0], *each.shape), torch.promote_types(gates.dtype, each.dtype)) for each in carry]


@graph_operator(cell_shapes)
def cell_states(
    gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *carry: torch.Tensor, cell: str
) -> list[torch.Tensor]:
    """Return all that a cell carries after each step, `(length, batch_size, hidden_size)`; see [`cell_step`]."""

    def step(carry: Sequence[torch.Tensor], gate: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        following = cell_step(cell, carry, gate, weight, bias)
        return following, following

    return scan_steps(step, carry, gates)


def build_recurrent_layer(cell: str | Callable[[int, int], Any], input_size: int, hidden_size: int) -> Any:
    """
    Return a recurrent layer of one direction: `cell` is `"rnn"`, `"gru"`, `"lstm"`, or a class with the methods of
    [`RecurrentLayer`] that is made from the widths of input and state.
    """
    return RecurrentLayer(cell, input_size, hidden_size) if isinstance(cell, str) else cell(input_size, hidden_size)


def masked_mean(states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """
    Return the mean of states `(batch_size, length, d)` over real tokens, `(batch_size, d)`; zeros for a row without
    any. The mask has the shape `(batch_size, length)`, 1 keeps.
    """
    if attention_mask is None:
        return states.mean(dim=1)
    total = states.masked_fill(attention_mask[:, :, None] == 0, 0.0).sum(dim=1)
    # Half precision does not count beyond some hundred.
    wide = torch.float64 if states.dtype == torch.float64 else torch.float32
    count = (attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    return (total.to(wide) / count).to(states.dtype)


def left_aligned(attention_mask: torch.Tensor) -> torch.Tensor:
    """
    Return for each row of a mask `(batch_size, length)` the order of columns that puts real tokens first, in their
    order, and padding last.
    """
    real = attention_mask != 0
    seen = real.cumsum(dim=1)  # a count, not a sort: graphs of other engines have none that is stable
    columns = torch.arange(real.shape[1], device=real.device)
    return inverse(torch.where(real, seen - 1, seen[:, -1:] + columns - seen))


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the order `(batch_size, length)` that undoes `order`."""
    columns = torch.arange(order.shape[1], device=order.device)
    return torch.empty_like(order).scatter(1, order, columns.expand_as(order))


def reversed_order(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """Return the order that reverses the first `lengths[b]` columns of each row; it is its own inverse."""
    columns = torch.arange(length, device=lengths.device)[None, :]
    mirrored = lengths[:, None] - 1 - columns
    return torch.where(mirrored >= 0, mirrored, columns)


def take(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the columns of `(batch_size, length, d)` in the order `(batch_size, length)`."""
    return states.gather(1, order[:, :, None].expand(-1, -1, states.shape[2]))


class MaskedRNN(nn.Module):
    """
    A one- or two-directional recurrent layer with a masked carry: `state = m new + (1 - m) old`.

    The forward direction runs over the left-aligned batch, the backward direction over a copy reversed within each
    sentence, so that it starts at the last real token. This equals packed sequences, needs no lengths on the host, and
    takes padding on either side. Outputs at padding are zero. `cell` is that of [`build_recurrent_layer`].

    Example:

    ```python
    >>> import torch
    >>> from recnmt_hf.layers import MaskedRNN
    >>> rnn = MaskedRNN("gru", input_size=32, hidden_size=64, bidirectional=True)
    >>> mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    >>> states, last = rnn(torch.randn(2, 5, 32), mask)
    >>> states.shape, last.shape
    (torch.Size([2, 5, 128]), torch.Size([2, 128]))

    ```
    """

    def __init__(
        self, cell: str | Callable[[int, int], Any], input_size: int, hidden_size: int, bidirectional: bool = False
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.forward_rnn = build_recurrent_layer(cell, input_size, hidden_size)
        self.backward_rnn = build_recurrent_layer(cell, input_size, hidden_size) if bidirectional else None

    def forward(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        initial_states: tuple[torch.Tensor | None, ...] = (None, None),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            inputs (`torch.Tensor` of shape `(batch_size, length, input_size)`).
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
            initial_states (pair of `torch.Tensor` of shape `(batch_size, hidden_size)`, *optional*): Before the first
                step of each direction; `None`: zeros.

        Returns:
            The states `(batch_size, length, hidden_size or 2 * hidden_size)`, forward states first, and the last state
            of each direction, `(batch_size, hidden_size or 2 * hidden_size)`; zeros for a row without real tokens.
        """
        if attention_mask is None:
            outputs = [self.forward_rnn(inputs, initial_states[0])]
            last = [outputs[0][:, -1]]
            if self.backward_rnn is not None:
                outputs.append(self.backward_rnn(inputs.flip(1), initial_states[1]).flip(1))
                last.append(outputs[1][:, 0])
            return torch.cat(outputs, dim=-1), torch.cat(last, dim=-1)
        order = left_aligned(attention_mask)
        lengths = (attention_mask != 0).sum(dim=1)
        aligned = take(inputs, order)
        # Zeroed padding: whatever stands there (NaN included) must not reach the matmuls of real rows' gradients.
        real = torch.arange(inputs.shape[1], device=inputs.device)[None, :] < lengths[:, None]
        aligned = aligned.masked_fill(~real[:, :, None], 0.0)
        outputs = [self.forward_rnn(aligned, initial_states[0])]
        if self.backward_rnn is not None:
            mirror = reversed_order(lengths, inputs.shape[1])
            outputs.append(take(self.backward_rnn(take(aligned, mirror), initial_states[1]), mirror))
        states = torch.cat(outputs, dim=-1).masked_fill(~real[:, :, None], 0.0)
        ends = take(states, (lengths - 1).clamp(min=0)[:, None])[:, 0]
        if self.backward_rnn is not None:
            ends = torch.cat([ends[:, : self.hidden_size], states[:, 0, self.hidden_size :]], dim=-1)
        return take(states, inverse(order)), ends


class RecurrentEncoderLayer(GradientCheckpointingLayer):
    """
    A recurrent layer with the residual and norm of the Transformer: `LN(x + Drop(W_p [forward(x); backward(x)] +
    b_p))`, or pre-norm `x + Drop(W_p [..](LN(x)) + b_p)`. `cell` is a name as in [`MaskedRNN`], or a callable that
    makes a masked recurrence from the widths of input and state and whether it has two directions.
    """

    def __init__(
        self,
        cell: str | Callable[[int, int, bool], Any],
        d_model: int,
        hidden_size: int,
        bidirectional: bool,
        dropout: float,
        layer_norm_eps: float,
        normalize_before: bool,
    ):
        super().__init__()
        self.dropout = dropout
        self.normalize_before = normalize_before
        build: Any = partial(MaskedRNN, cell) if isinstance(cell, str) else cell
        self.rnn = build(d_model, hidden_size, bidirectional)
        self.out_proj = nn.Linear((1 + bidirectional) * hidden_size, d_model)
        self.rnn_layer_norm = nn.LayerNorm(d_model, eps=layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        kernel_mask: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Run over `(batch_size, length, d_model)`; `token_mask` `(batch_size, length)`, 1 keeps; `kernel_mask` is unused.
        """
        inputs = self.rnn_layer_norm(hidden_states) if self.normalize_before else hidden_states
        outputs = dropout(project(self.out_proj, self.rnn(inputs, token_mask)[0]), self.dropout, self.training)
        outputs = hidden_states + outputs
        return outputs if self.normalize_before else self.rnn_layer_norm(outputs)
