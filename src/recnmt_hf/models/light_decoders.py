"""
Recurrences in place of the decoder's self-attention, which need constant memory and time per word: the simpler simple
recurrent unit (SSRU; Kim et al., 2019, "From Research to Production and Back: Ludicrously Fast Neural Machine
Translation", WNGT) and average attention (Zhang, Xiong and Su, 2018, "Accelerating Neural Transformer via an Average
Attention Network", ACL). They read the token mask of the new words; their states are in at least float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from .configuration_nmt_transformer import NMTTransformerConfig
from .decoder_cache import recurrent_layer
from .kernels_cpu_matmuls import project
from .kernels_shared import CustomGradient, Mask, allowed, dropout, graph_operator, is_exporting, scan_steps, wide_type
from .kernels_triton import runs_triton, sample, with_gradients
from .kernels_triton_light_decoders import run_scan
from .seq2seq_loading import Initialization, is_loaded


def linear_scan_reference(decay: Tensor, values: Tensor, initial: Tensor) -> Tensor:
    """Compute `c_t = decay_t * c_{t-1} + values_t` `(batch_size, length, d)` from `initial` `(batch_size, d)`."""

    def step(carry: Any, decay: Tensor, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        state = decay * carry[0] + values
        return [state], [state]

    return scan_steps(step, [initial], decay.transpose(0, 1), values.transpose(0, 1))[0].transpose(0, 1)


class LinearScan(CustomGradient):
    """[`linear_scan_reference`] with a backward pass that is a linear recurrence from right to left."""

    @staticmethod
    def forward(decay: Tensor, values: Tensor, initial: Tensor) -> Tensor:
        if runs_triton("SSRU", example, decay, values, initial):
            return run_scan(decay, values, initial)
        states, state = torch.empty_like(values), initial
        for t in range(values.shape[1]):
            state = torch.addcmul(values[:, t], decay[:, t], state, out=states[:, t])
        return states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        decay, _, initial = inputs
        ctx.save_for_backward(decay, initial, output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        decay, initial, states = ctx.saved_tensors
        # The gradient of c_t is its own one plus decay_{t+1} times that of c_{t+1}.
        following = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], dim=1)
        total = LinearScan.apply(following.flip(1), grad_output.flip(1), torch.zeros_like(initial)).flip(1)
        previous = torch.cat([initial[:, None], states[:, :-1]], dim=1)
        return total * previous, total, total[:, 0] * decay[:, 0]


@graph_operator(lambda decay, values, initial: [(values.shape, values.dtype)])
def linear_scan(decay: Tensor, values: Tensor, initial: Tensor) -> list[Tensor]:
    """Compute [`linear_scan_reference`] by [`LinearScan`], or step by step with `RECNMT_FAST_PATHS=0`."""
    if is_exporting() or not allowed():
        return [linear_scan_reference(decay, values, initial)]
    return [LinearScan.apply(decay, values, initial)]


def example(*place: Any) -> list[Tensor]:
    """Return the results and gradients of a small scan for `runs_triton`."""
    inputs = [sample(*place, *shape) for shape in ((2, 5, 12), (2, 5, 12), (2, 12))]
    return with_gradients(linear_scan(*inputs), inputs)


class SimplerSimpleRecurrentUnit(nn.Module):
    """
    SSRU, in the form of Marian (`transformer-decoder-autoreg: rnn`, `dec-cell: ssru`):

        f_t = sigmoid(W_f x_t + b_f),   c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t),   o_t = relu(c_t)

    The state is c, from zeros. With `decoder_recurrence_projection` the output is `W_o o_t + b_o`;
    `decoder_recurrence_dropout` drops the same channels of x in all steps.
    """

    def __init__(self, config: NMTTransformerConfig, layer_idx: int | None):
        super().__init__()
        width = config.d_model
        self.layer_idx = layer_idx
        self.dropout = config.decoder_recurrence_dropout
        self.in_proj = nn.Linear(width, 2 * width, bias=False)  # W, W_f
        self.forget_bias = nn.Parameter(torch.zeros(width))
        self.out_proj = nn.Linear(width, width) if config.decoder_recurrence_projection else None

    def initialize(self, start: Initialization) -> None:
        init.zeros_(self.forget_bias)
        if not is_loaded(self.in_proj.weight):  # its views do not have this mark
            for matrix in self.in_proj.weight.chunk(2):
                start.matrix_(matrix)

    def forward(
        self, hidden_states: Tensor, attention_mask: Mask = None, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Run over new words `(batch_size, length, d_model)`; padding, 0 in `attention_mask`, keeps the state."""
        inputs, dtype = hidden_states, hidden_states.dtype
        if self.training and self.dropout:
            inputs = inputs * dropout(torch.ones_like(inputs[:, :1]), self.dropout, self.training)
        mapped = project(self.in_proj, inputs)
        wide = wide_type(mapped.dtype)
        value, forget = mapped.to(wide).chunk(2, dim=-1)
        forget = torch.sigmoid(forget + self.forget_bias.to(wide))
        value = value - forget * value
        if attention_mask is not None:
            padding = attention_mask[:, :, None] == 0
            forget, value = forget.masked_fill(padding, 1.0), value.masked_fill(padding, 0.0)
        layer = None if self.layer_idx is None else recurrent_layer(cache, self.layer_idx)
        memory = None if layer is None else layer.get_state("ssru_memory")
        memories = linear_scan(forget, value, torch.zeros_like(value[:, 0]) if memory is None else memory)[0]
        if layer is not None:
            layer.update_states(ssru_memory=memories)
        outputs = torch.relu(memories).to(dtype)
        return outputs if self.out_proj is None else project(self.out_proj, outputs), None


class AverageAttention(nn.Module):
    """
    Average attention (Zhang et al., 2018, Eqs. 1-4): the mean of all words so far, then a gate.

        a_j = 1/j sum_{k<=j} x_k,   g_j = FFN(a_j)
        [i_j; f_j] = sigmoid(W [x_j; g_j] + b),   h_j = i_j * x_j + f_j * g_j

    Without `aan_ffn` g is a. `aan_gate="separate"` computes `i_j = sigmoid(W_i x_j + b_i)` and `f_j = sigmoid(W_f g_j +
    b_f)`, as Marian does; `"none"` outputs g.
    """

    def __init__(self, config: NMTTransformerConfig, layer_idx: int | None):
        super().__init__()
        width = config.d_model
        self.layer_idx = layer_idx
        self.fc1 = self.fc2 = None
        if config.aan_ffn:
            inner = config.aan_ffn_dim if config.aan_ffn_layers > 1 else width
            self.activation_fn, self.activation_dropout = ACT2FN[config.aan_activation], config.activation_dropout
            self.fc1 = nn.Linear(width, inner)
            self.fc2 = nn.Linear(inner, width) if config.aan_ffn_layers > 1 else None
        self.gate_type = config.aan_gate
        if self.gate_type == "joint":
            self.gate = nn.Linear(2 * width, 2 * width)
        elif self.gate_type == "separate":
            self.input_gate, self.forget_gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, hidden_states: Tensor, attention_mask: Mask = None, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Run over new words `(batch_size, length, d_model)`; padding, 0 in `attention_mask`, is not averaged."""
        wide = hidden_states.to(wide_type(hidden_states.dtype))  # for the sums of many words
        counted = torch.ones_like(wide[:, :, :1])
        if attention_mask is not None:
            padding = attention_mask[:, :, None] == 0
            wide, counted = wide.masked_fill(padding, 0.0), counted.masked_fill(padding, 0.0)
        sums, counts = wide.cumsum(dim=1), counted.cumsum(dim=1)
        layer = None if self.layer_idx is None else recurrent_layer(cache, self.layer_idx)
        if layer is not None:
            earlier_sum, earlier_count = layer.get_state("aan_sum"), layer.get_state("aan_count")
            if earlier_sum is not None and earlier_count is not None:
                sums, counts = sums + earlier_sum[:, None], counts + earlier_count[:, None]
            layer.update_states(aan_sum=sums, aan_count=counts)
        averages = (sums / counts.clamp(min=1)).to(hidden_states.dtype)
        if self.fc1 is not None:
            averages = project(self.fc1, averages, self.activation_fn)
            averages = dropout(averages, self.activation_dropout, self.training)
            averages = averages if self.fc2 is None else project(self.fc2, averages)
        if self.gate_type == "none":
            return averages, None
        if self.gate_type == "joint":
            gates = project(self.gate, torch.cat([hidden_states, averages], dim=-1))
            of_input, of_average = gates.chunk(2, dim=-1)
        else:
            of_input, of_average = project(self.input_gate, hidden_states), project(self.forget_gate, averages)
        return torch.sigmoid(of_input) * hidden_states + torch.sigmoid(of_average) * averages, None
