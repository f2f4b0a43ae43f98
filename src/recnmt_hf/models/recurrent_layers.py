"""Recurrent layers over padded batches whose results do not depend on the padding."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .decoder_cache import recurrent_layer
from .kernels_cpu_matmuls import project
from .kernels_shared import Mask, dropout, graph_operator, is_exporting, on_cpu, scan_steps, wide_type, with_autocast
from .seq2seq_loading import Initialization


# cuDNN copies parameters that are not in one piece; those of a layer are small.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")

# Gates of each cell, in torch's order.
CELLS = {"rnn": 1, "gru": 3, "lstm": 4}


class RecurrentLayer(nn.Module):
    """`nn.RNN` (tanh), `nn.GRU` or `nn.LSTM` in one direction, which can be compiled and exported with free lengths."""

    has_kernel = True

    def __init__(self, cell: str, input_size: int, hidden_size: int):
        super().__init__()
        self.cell, self.input_size, self.hidden_size = cell, input_size, hidden_size
        rows = CELLS[cell] * hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.empty(rows, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(rows, hidden_size))
        self.bias_ih_l0 = nn.Parameter(torch.empty(rows))
        self.bias_hh_l0 = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the names of the carried states; the first is the output."""
        return ("state", "memory") if self.cell == "lstm" else ("state",)

    def reset_parameters(self) -> None:
        """Initialize as torch's layers do; models initialize theirs by `initialize`."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def initialize(self, start: Initialization) -> None:
        start.recurrent_(self)

    def forward(self, inputs: Tensor, *initial: Tensor | None, with_all: bool = False) -> Any:
        """
        Return the states `(batch_size, length, hidden_size)` of `inputs` `(batch_size, length, input_size)`, or with
        `with_all` the list of [`steps`]. `initial` are the states before the first word; `None`: zeros.
        """
        given = [state for state in initial if state is not None]
        if with_all or is_exporting() or not self.has_kernel:
            states = self.steps(inputs, given)
            return states if with_all else states[0]
        state = given[0] if given else inputs.new_zeros(inputs.shape[0], self.hidden_size)
        weights = (self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0)
        settings: dict[str, Any] = {"cell": self.cell, "training": self.training}
        if self.cell == "lstm" and on_cpu(inputs):
            # Its kernel takes no mixture of types, which autocast would make.
            with with_autocast(inputs.device, None):
                wide = self.weight_hh_l0.dtype
                return layer_states(inputs.to(wide), state.to(wide), *weights, **settings)[0]
        return layer_states(inputs, state, *weights, **settings)[0]

    def steps(self, inputs: Tensor, initial: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the values of each of `state_names` after every step; missing `initial` ones are zero."""
        gates = nn.functional.linear(inputs.transpose(0, 1), self.weight_ih_l0, self.bias_ih_l0)
        zeros = [inputs.new_zeros(inputs.shape[0], self.hidden_size) for _ in self.state_names[len(initial) :]]
        return [states.transpose(0, 1) for states in self.run_steps(gates, [*initial, *zeros])]

    def run_steps(self, gates: Tensor, carry: list[Tensor]) -> list[Tensor]:
        """Run all steps from the input's part of the gates `(length, batch_size, gates * hidden_size)`."""
        return cell_states(gates, self.weight_hh_l0, self.bias_hh_l0, *carry, cell=self.cell)


@graph_operator(lambda inputs, state, *rest, **settings: [((*inputs.shape[:2], state.shape[-1]), state.dtype)])
def layer_states(inputs: Tensor, state: Tensor, *weights: Tensor, cell: str, training: bool) -> list[Tensor]:
    """Run a [`RecurrentLayer`] by torch's kernel from `state` `(batch_size, hidden_size)` and its parameters."""
    state = state[None].contiguous()
    # cuDNN has no backward pass outside of training, which without dropout is the same.
    training = training or torch.is_grad_enabled()
    # weights, biases, layers, dropout, training, bidirectional, batch first
    kernel_settings: Any = (list(weights), True, 1, 0.0, training, False, True)
    if cell == "lstm":
        return [torch.lstm(inputs, (state, torch.zeros_like(state)), *kernel_settings)[0]]
    return [(torch.gru if cell == "gru" else torch.rnn_tanh)(inputs, state, *kernel_settings)[0]]


def cell_step(cell: str, carry: Sequence[Tensor], gate: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Run one step from the carry and the input's part of all gates `(batch_size, gates * hidden_size)`."""
    recurrent = nn.functional.linear(carry[0], weight, bias)
    if cell == "rnn":
        return [torch.tanh(gate + recurrent)]
    if cell == "gru":
        (reset, update, new), (of_reset, of_update, of_new) = gate.chunk(3, -1), recurrent.chunk(3, -1)
        update = torch.sigmoid(update + of_update)
        new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        return [(1 - update) * new + update * carry[0]]
    write, forget, new, out = (gate + recurrent).chunk(4, -1)
    memory = torch.sigmoid(forget) * carry[1] + torch.sigmoid(write) * torch.tanh(new)
    return [torch.sigmoid(out) * torch.tanh(memory), memory]


def carry_shapes(gates: Tensor, carry: Sequence[Tensor]) -> Any:
    """Return shapes and types of the carry after all steps."""
    return [((gates.shape[0], *state.shape), torch.promote_types(gates.dtype, state.dtype)) for state in carry]


@graph_operator(lambda gates, weight, bias, *carry, cell: carry_shapes(gates, carry))
def cell_states(gates: Tensor, weight: Tensor, bias: Tensor, *carry: Tensor, cell: str) -> list[Tensor]:
    """Return the carry of [`cell_step`] after each step, `(length, batch_size, hidden_size)`."""

    def step(carry: Sequence[Tensor], gate: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        states = cell_step(cell, carry, gate, weight, bias)
        return states, states

    return scan_steps(step, carry, gates)


def build_recurrent_layer(cell: str | Callable[[int, int], Any], input_size: int, hidden_size: int) -> Any:
    """Return a layer of the cell `"rnn"`, `"gru"` or `"lstm"`, or of a class with the methods of [`RecurrentLayer`]."""
    return RecurrentLayer(cell, input_size, hidden_size) if isinstance(cell, str) else cell(input_size, hidden_size)


def masked_mean(states: Tensor, attention_mask: Mask) -> Tensor:
    """Return the mean of states `(batch_size, length, d)` over real tokens; zeros for a row without any."""
    if attention_mask is None:
        return states.mean(dim=1)
    total = states.masked_fill(attention_mask[:, :, None] == 0, 0.0).sum(dim=1)
    count = (attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    return (total.to(wide_type(states.dtype)) / count).to(states.dtype)  # half precision cannot hold the count


def left_aligned(attention_mask: Tensor) -> Tensor:
    """Return the order of columns that moves the padding of each row of a mask `(batch_size, length)` to its end."""
    real = attention_mask != 0
    count = real.cumsum(dim=1)  # not a sort: graphs of other engines have no stable one
    columns = torch.arange(real.shape[1], device=real.device)
    return inverse(torch.where(real, count - 1, count[:, -1:] + columns - count))


def inverse(order: Tensor) -> Tensor:
    """Return the order `(batch_size, length)` that undoes `order`."""
    columns = torch.arange(order.shape[1], device=order.device)
    return torch.empty_like(order).scatter(1, order, columns.expand_as(order))


def reversed_order(lengths: Tensor, length: int) -> Tensor:
    """Return the order that reverses the first `lengths[b]` columns of each row; it is its own inverse."""
    columns = torch.arange(length, device=lengths.device)[None, :]
    mirrored = lengths[:, None] - 1 - columns
    return torch.where(mirrored >= 0, mirrored, columns)


def take(states: Tensor, order: Tensor) -> Tensor:
    """Return the columns of `(batch_size, length, d)` in the order `(batch_size, length)`."""
    rows = order + states.shape[1] * torch.arange(states.shape[0], device=order.device)[:, None]
    # Whole rows: gather would look up every number.
    return states.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, order.shape)


class MaskedRNN(nn.Module):
    """
    A recurrent layer, one- or two-directional (`bidirectional`), with a masked carry: `state = m new + (1 - m) old`.

    The forward direction runs over the left-aligned batch, the backward direction over a copy reversed within each
    sentence. This equals packed sequences, needs no lengths on the host, and allows padding on either side. Outputs at
    padding are zero. [`build_recurrent_layer`] explains `cell`, `input_size` and `hidden_size`.
    """

    def __init__(
        self, cell: str | Callable[[int, int], Any], input_size: int, hidden_size: int, bidirectional: bool = False
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.forward_rnn = build_recurrent_layer(cell, input_size, hidden_size)
        self.backward_rnn = build_recurrent_layer(cell, input_size, hidden_size) if bidirectional else None

    def forward(
        self, inputs: Tensor, attention_mask: Mask = None, initial_states: tuple[Tensor | None, ...] = (None, None)
    ) -> tuple[Tensor, Tensor]:
        """
        Run over inputs `(batch_size, length, input_size)` with a mask `(batch_size, length)`, 1 keeps, from initial
        states of each direction, zeros by default. Return all states, forward ones first, and the last ones of both
        directions, zeros for a row without real tokens.
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
        # Zero the padding: its values (NaN included) must not reach the matmuls of real rows' gradients.
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


class CachedRecurrence(nn.Module):
    """
    A recurrence over a decoder's words, from zeros or the states in the cache, where it stores the new ones. Padding,
    on either side, does not change the state. The arguments are those of [`build_recurrent_layer`].
    """

    def __init__(self, cell: str | Callable[[int, int], Any], input_size: int, hidden_size: int):
        super().__init__()
        self.rnn = build_recurrent_layer(cell, input_size, hidden_size)
        self.state_names = self.rnn.state_names  # adapters replace the layer

    def forward(self, inputs: Tensor, attention_mask: Mask = None, cache: Cache | None = None) -> Tensor:
        """
        Return the states `(batch_size, length, hidden_size)` of new words `(batch_size, length, input_size)` with a
        mask `(batch_size, seen + length)`.
        """
        layer, names = recurrent_layer(cache), self.state_names
        initial: list[Tensor] = []
        if layer is not None and layer.get_state(names[0]) is not None:
            initial = [layer.states[name] for name in names]
        if attention_mask is not None:
            attention_mask = attention_mask[:, -inputs.shape[1] :]
            inputs = take(inputs.masked_fill(attention_mask[:, :, None] == 0, 0.0), left_aligned(attention_mask))
        if layer is not None and len(names) > 1:
            states = self.rnn(inputs, *initial, with_all=True)
        else:
            states = [self.rnn(inputs, *initial)]
        if attention_mask is not None:
            count, following, states = (attention_mask != 0).cumsum(dim=1), states, []
            for index, steps in enumerate(following):
                first = initial[index] if index < len(initial) else torch.zeros_like(steps[:, 0])
                states.append(take(torch.cat([first[:, None].to(steps.dtype), steps], dim=1), count))
        if layer is not None:
            layer.update_states(**dict(zip(names, states, strict=True)))
        return states[0]


class RecurrentEncoderLayer(GradientCheckpointingLayer):
    """`LN(x + Drop(W_p [forward(x); backward(x)] + b_p))`, or pre-norm `x + Drop(W_p [..](LN(x)) + b_p)`."""

    def __init__(self, config: PreTrainedConfig, rnn: MaskedRNN):
        super().__init__()
        self.dropout, self.normalize_before = config.dropout, config.normalize_before
        self.rnn = rnn
        self.out_proj = nn.Linear((1 if rnn.backward_rnn is None else 2) * rnn.hidden_size, config.d_model)
        self.rnn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, kernel_mask: Mask = None, token_mask: Mask = None, **kwargs: Any
    ) -> Tensor:
        """Run over `(batch_size, length, d_model)`; `token_mask` `(batch_size, length)`: 1 keeps."""
        inputs = self.rnn_layer_norm(hidden_states) if self.normalize_before else hidden_states
        outputs = dropout(project(self.out_proj, self.rnn(inputs, token_mask)[0]), self.dropout, self.training)
        outputs = hidden_states + outputs
        return outputs if self.normalize_before else self.rnn_layer_norm(outputs)


class MultiColumn(nn.Module):
    """A column of recurrent layers on the words, merged with another encoder's states (Chen et al., 2018)."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        width = config.d_model
        self.layers = nn.ModuleList()
        for _ in range(config.multi_column_rnn_layers):
            rnn = MaskedRNN(config.recurrence_cell, width, width, bidirectional=True)
            self.layers.append(RecurrentEncoderLayer(config, rnn))
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.normalize_before else None
        self.merge = nn.Linear(2 * width, width) if config.multi_column_merge == "concat" else None

    def forward(self, words: Tensor, encoded: Tensor, attention_mask: Mask) -> Tensor:
        """Merge word embeddings and the other encoder's states, both `(batch_size, source_length, d_model)`."""
        states = words
        for layer in self.layers:
            states = layer(states, token_mask=attention_mask)
        if self.layer_norm is not None:
            states = self.layer_norm(states)
        return encoded + states if self.merge is None else self.merge(torch.cat([encoded, states], dim=-1))
