"""
The Transformer whose encoder stacks recurrent and self-attention layers (Hao et al., 2019, "Towards Better Modeling
Hierarchical Structure for Self-Attention with Ordered Neurons", EMNLP).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.utils.output_capturing import OutputRecorder

from .configuration_onlstm_transformer import ONLSTMTransformerConfig
from .kernels_cpu_matmuls import fast_linear, project
from .kernels_onlstm_transformer import ONLSTMSteps, spread
from .kernels_shared import Mask, allowed, graph_operator, is_exporting, is_plain, on_cpu, scan_steps, wide_type
from .modeling_nmt_transformer import NMTTransformerDecoder, NMTTransformerEncoder, NMTTransformerPreTrainedModel
from .recurrent_layers import MaskedRNN, RecurrentEncoderLayer, inverse, left_aligned, reversed_order, take
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Initialization, is_loaded
from .seq2seq_outputs import Seq2SeqEncoderOutput
from .seq2seq_stacks import TokenAndPositionInput
from .sequence_pairs import SequencePairClassification
from .transformer_layers import TransformerSublayers


@dataclass
class ONLSTMTransformerEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of the encoder; the decoder reads `last_hidden_state` ("Final" in the paper's table 3).

    Args:
        recurrent_hidden_state (`torch.Tensor` of shape `(batch_size, source_length, d_model)`, *optional*):
            H_RNN, the states of the top recurrent layer ("HO"), if it is below other layers.
        attention_hidden_state (`torch.Tensor` of shape `(batch_size, source_length, d_model)`, *optional*):
            With a short-cut: H_SAN, the states of the top attention layer before it is added ("HS").
        master_gate_distances (tuple of `torch.Tensor` of shape `(batch_size, source_length, directions)`, *optional*):
            With `output_attentions=True`, for each ON-LSTM layer: the share of the memory that a word closes, 1 - mean
            of its master forget gate (Shen et al., 2019, section 5.2), the forward direction first; 0 at padding.
    """

    recurrent_hidden_state: Tensor | None = None
    attention_hidden_state: Tensor | None = None
    master_gate_distances: tuple[Tensor, ...] | None = None


@graph_operator(lambda gates, weight, chunk_size: [((*gates.shape[:2], weight.shape[1]), gates.dtype)])
def on_lstm_reference(gates: Tensor, weight: Tensor, *, chunk_size: int) -> list[Tensor]:
    """
    An ON-LSTM step by step (Eqs. 3-9; Shen et al., 2019), from zero states:

        f, i, o = sigmoid(W x + U h + b),   c^ = tanh(W x + U h + b),   each with its own W, U, b, as in an LSTM
        f~ = cumax(W x + U h + b),   i~ = 1 - cumax(W x + U h + b),   w = f~ * i~
        c' = (f w + f~ - w) c + (i w + i~ - w) c^,   h' = o tanh(c')

    cumax is the cumulative sum of a softmax. f~ rises to 1, i~ falls to 0: the last chunk is never written.
    `gates` are W x + b in the order f, i, o, c^, f~, i~, `(length, batch_size, 4 * hidden_size + 2 * n)`, `weight` U.
    Return a list with the states `(length, batch_size, hidden_size)`.
    """
    size = weight.shape[1]
    wide = wide_type(gates.dtype)

    def step(carry: Sequence[Tensor], inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        state, cell = carry
        step_gates = (inputs + nn.functional.linear(state, weight)).to(wide)
        forget, write, out = torch.sigmoid(step_gates[:, : 3 * size]).split(size, dim=-1)
        candidate = torch.tanh(step_gates[:, 3 * size : 4 * size])
        upper, lower = (cumax(scores) for scores in step_gates[:, 4 * size :].chunk(2, dim=-1))
        upper, lower = spread(upper, chunk_size), spread(1 - lower, chunk_size)
        overlap = upper * lower
        cell = (forget * overlap + upper - overlap) * cell + (write * overlap + lower - overlap) * candidate
        state = (out * torch.tanh(cell)).to(state.dtype)
        return [state, cell], [state]

    # Two tensors: an exported scan mixes up carried ones that share their memory.
    start = [gates.new_zeros(gates.shape[1], size), gates.new_zeros(gates.shape[1], size, dtype=wide)]
    return scan_steps(step, start, gates)


def cumax(scores: Tensor) -> Tensor:
    """Return the cumulative sums of a softmax; the last one is 1."""
    sums = torch.softmax(scores, dim=-1).cumsum(dim=-1)
    return torch.cat([sums[..., :-1], torch.ones_like(sums[..., -1:])], dim=-1)


class ONLSTMLayer(nn.Module):
    """The parameters of an ON-LSTM in one direction, and [`on_lstm_reference`] with them."""

    def __init__(self, chunk_size: int, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden_size, self.chunk_size = hidden_size, chunk_size
        self.sizes = [hidden_size] * 4 + [hidden_size // chunk_size] * 2  # f, i, o, c^, f~, i~
        self.weight_ih = nn.Parameter(torch.empty(sum(self.sizes), input_size))
        self.weight_hh = nn.Parameter(torch.empty(sum(self.sizes), hidden_size))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))

    def initialize(self, start: Initialization) -> None:
        """Start each recurrent gate orthogonal, unless a distribution is set, and biases at 0, those of f at 1."""
        start.matrix_(self.weight_ih)
        if start.is_set:
            start.matrix_(self.weight_hh)
        elif not is_loaded(self.weight_hh):
            for gate in self.weight_hh.split(self.sizes):
                init.orthogonal_(gate)
        if not is_loaded(self.bias):
            init.zeros_(self.bias)
            init.ones_(self.bias[: self.hidden_size])

    def forward(self, inputs: Tensor, initial_state: Any = None, measured: Any = None) -> Tensor:
        """
        Map inputs `(batch_size, length, input_size)` to states `(batch_size, length, hidden_size)`; with the states
        `measured` of left-aligned inputs, return 1 - mean of f~ for every word, `(batch_size, length)`.
        """
        if measured is None:
            gates = fast_linear(inputs.transpose(0, 1), self.weight_ih, self.bias)
            return on_lstm_reference(gates, self.weight_hh, chunk_size=self.chunk_size)[0].transpose(0, 1)
        # Here, since offloaded weights are loaded for `forward` alone.
        previous = torch.cat([torch.zeros_like(measured[:, :1]), measured[:, :-1]], dim=1)
        rows = slice(4 * self.hidden_size, 4 * self.hidden_size + self.sizes[4])
        scores = nn.functional.linear(inputs, self.weight_ih[rows], self.bias[rows])
        scores = scores + nn.functional.linear(previous.to(inputs.dtype), self.weight_hh[rows])
        return 1 - cumax(scores.to(wide_type(scores.dtype))).mean(dim=-1)


class ONLSTM(MaskedRNN):
    """
    A one- or two-directional ON-LSTM with a masked carry, from zero states. It runs as [`ONLSTMSteps`], both directions
    in one call and, on the CPU, over real words alone; as [`on_lstm_reference`] also in exported graphs.
    """

    def __init__(self, chunk_size: int, input_size: int, hidden_size: int, bidirectional: bool = False):
        super().__init__(partial(ONLSTMLayer, chunk_size), input_size, hidden_size, bidirectional)
        self.chunk_size = chunk_size
        self.input_layers: Any = None  # of a quantized copy: the matmul of each direction's inputs

    def forward(self, inputs: Tensor, attention_mask: Mask = None, initial_states: Any = None) -> tuple[Tensor, Tensor]:
        """Compute what [`MaskedRNN`] computes; `initial_states` are not supported."""
        layers = [self.forward_rnn] if self.backward_rnn is None else [self.forward_rnn, self.backward_rnn]
        if is_exporting() or not allowed() or not all(is_plain(layer, ONLSTMLayer) for layer in layers):
            return super().forward(inputs, attention_mask)
        weights = [tensor for layer in layers for tensor in (layer.weight_ih, layer.bias, layer.weight_hh)]
        if self.input_layers is not None:
            inputs = torch.cat([project(layer, inputs) for layer in self.input_layers], dim=-1)
            weights = [tensor for layer in layers for tensor in (None, None, layer.weight_hh)]
        return tuple(packed_states(inputs, attention_mask, *weights, chunk_size=self.chunk_size))


def packed_shapes(inputs: Tensor, attention_mask: Mask, *weights: Tensor, chunk_size: int) -> Any:
    width, dtype = len(weights) // 3 * weights[2].shape[1], weights[2].dtype
    return [((*inputs.shape[:2], width), dtype), ((inputs.shape[0], width), dtype)]


@graph_operator(packed_shapes)
def packed_states(inputs: Tensor, attention_mask: Mask, *weights: Any, chunk_size: int) -> list[Tensor]:
    """
    Return all and last states of an [`ONLSTM`]; `weights` are input weight, bias, recurrent weight of each direction.
    Without input weights and biases, `inputs` are already mapped to the gates of all directions, side by side.
    """
    size = weights[2].shape[1]
    directions = [weights[start : start + 3] for start in range(0, len(weights), 3)]
    batch_size, length = inputs.shape[:2]
    places, ends, counts = pack(attention_mask, batch_size, length, inputs.device)
    places = places[: len(directions)]
    # Values at padding (NaN included) must not reach the gradients of real words; on the CPU they are not read.
    padding = None if attention_mask is None or on_cpu(inputs) else attention_mask[:, :, None] == 0
    if padding is not None:
        inputs = inputs.masked_fill(padding, 0.0)
    sides = [inputs] * len(directions) if weights[0] is not None else inputs.chunk(len(directions), dim=-1)
    # Then columns are read in order, without indices.
    is_full = padding is None and counts == [batch_size] * length
    if is_full:
        ordered = [side.transpose(0, 1).flatten(0, 1) for side in (sides[0], *(side.flip(1) for side in sides[1:]))]
    else:
        ordered = [side.flatten(0, 1)[place] for side, place in zip(sides, places, strict=True)]
    packed = inputs.new_zeros(len(directions), 0, size)
    if counts:  # not only padding
        tensors = [tensor for words, weight in zip(ordered, directions, strict=True) for tensor in (words, *weight)]
        packed = ONLSTMSteps.apply(counts, chunk_size, *tensors)[0]
    if is_full:
        packed = packed.view(len(directions), length, batch_size, size).transpose(1, 2)
        states = packed.squeeze(0) if len(directions) == 1 else torch.cat([packed[0], packed[1].flip(1)], dim=-1)
    else:
        rows = torch.cat([place * len(directions) + index for index, place in enumerate(places)])
        states = packed.new_zeros(batch_size * length * len(directions), size)
        states = states.index_copy_(0, rows, packed.flatten(0, 1))
        states = states.view(batch_size, length, len(directions) * size)
    if padding is not None:
        states = states.masked_fill(padding, 0.0)
    sides_and_ends = zip(states.split(size, dim=-1), ends, strict=False)
    return [states, torch.cat([take(side, end[:, None])[:, 0] for side, end in sides_and_ends], dim=-1)]


def pack(
    attention_mask: Mask, batch_size: int, length: int, device: torch.device
) -> tuple[list[Tensor], tuple[Tensor, Tensor], list[int]]:
    """
    Return for both directions the words' places in the order of reading and the column of every row's last word; and
    how many sentences have each step. On the CPU longer sentences come first, without padding; elsewhere it follows
    the words of its sentence, to avoid waiting for the device.
    """
    rows, steps = torch.arange(batch_size, device=device), torch.arange(length, device=device)
    if attention_mask is None:
        places = [(columns[:, None] + rows * length).flatten() for columns in (steps, steps.flip(0))]
        return places, (torch.full_like(rows, length - 1), torch.zeros_like(rows)), [batch_size] * length
    order, lengths = left_aligned(attention_mask), (attention_mask != 0).sum(dim=1)
    mirrored = order.gather(1, reversed_order(lengths, length))
    ends = (order.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0], order[:, 0])
    places = [columns + rows[:, None] * length for columns in (order, mirrored)]
    if not on_cpu(attention_mask):
        return [place.t().flatten() for place in places], ends, [batch_size] * length
    by_length = torch.argsort(lengths, descending=True, stable=True)
    is_real = steps[:, None] < lengths[by_length]
    counts = [count for count in is_real.sum(dim=1).tolist() if count]
    return [place[by_length].t()[is_real] for place in places], ends, counts


class MasterGateDistances(nn.Identity):
    """Marks the distances of a layer, so that transformers records them."""


class StackedRecurrentLayer(RecurrentEncoderLayer):
    """An LSTM or ON-LSTM layer of the encoder, with `rnn_ffn` below a feed-forward block."""

    def __init__(self, config: ONLSTMTransformerConfig, kind: str):
        sizes = (config.d_model, config.rnn_hidden_size, config.rnn_bidirectional)
        rnn = ONLSTM(config.onlstm_chunk_size, *sizes) if kind == "onlstm" else MaskedRNN(kind, *sizes)
        super().__init__(config, rnn)
        self.feed_forward = TransformerSublayers(config, config.encoder_ffn_dim) if config.rnn_ffn else None
        self.distances = MasterGateDistances() if kind == "onlstm" else None

    def forward(
        self, hidden_states: Tensor, kernel_mask: Mask = None, token_mask: Mask = None, **kwargs: Any
    ) -> Tensor:
        outputs = super().forward(hidden_states, kernel_mask, token_mask)
        if self.distances is not None and kwargs.get("output_master_gate_distances"):
            self.distances(self.measure_distances(hidden_states, token_mask))
        return outputs if self.feed_forward is None else self.feed_forward.feed_forward(outputs)

    def measure_distances(self, hidden_states: Tensor, token_mask: Mask) -> Tensor:
        """Return the distances of all words `(batch_size, length, directions)`, 0 at padding."""
        inputs = self.rnn_layer_norm(hidden_states) if self.normalize_before else hidden_states
        if token_mask is None:
            token_mask = inputs.new_ones(inputs.shape[:2])
        states = self.rnn(inputs, token_mask)[0].split(self.rnn.hidden_size, dim=-1)
        order = left_aligned(token_mask)
        mirrored = order.gather(1, reversed_order((token_mask != 0).sum(dim=1), inputs.shape[1]))
        distances = []
        layers = (self.rnn.forward_rnn, self.rnn.backward_rnn)
        for layer, side, places in zip(layers, states, (order, mirrored), strict=False):
            aligned = layer(take(inputs, places), measured=take(side, places))
            distances.append(take(aligned[:, :, None], inverse(places)))
        return torch.cat(distances, dim=-1).masked_fill(token_mask[:, :, None] == 0, 0.0)


class ONLSTMTransformerPreTrainedModel(NMTTransformerPreTrainedModel):
    """Base class of the ONLSTMTransformer models: configuration, initialization and loading."""

    config: ONLSTMTransformerConfig
    _no_split_modules = ["TransformerEncoderLayer", "TransformerDecoderLayer", "StackedRecurrentLayer"]


class ONLSTMTransformerEncoder(ONLSTMTransformerPreTrainedModel, NMTTransformerEncoder):
    """Recurrent and self-attention layers in any order; usable alone through `get_encoder()`."""

    output_class = ONLSTMTransformerEncoderOutput
    _can_record_outputs = {
        **NMTTransformerEncoder._can_record_outputs,
        "master_gate_distances": OutputRecorder(MasterGateDistances),
    }

    def build_input(self, config: Any) -> nn.Module:
        if config.starts_recurrent and not config.rnn_input_position_embeddings:
            return TokenAndPositionInput(config, "none")  # the recurrence knows the order
        return super().build_input(config)

    def build_layer(self, config: Any, index: int) -> nn.Module:
        kind = config.encoder_layer_types[index]
        return super().build_layer(config, index) if kind == "attention" else StackedRecurrentLayer(config, kind)

    def finish(
        self, states: list[Tensor], embeddings: Tensor, token_mask: Mask, **kwargs: Any
    ) -> ONLSTMTransformerEncoderOutput:
        """Add the short-cut, H_RNN + H_SAN (Eq. 10), without a norm, before the last norm of a pre-norm stack."""
        kinds = self.config.encoder_layer_types
        tops = [index for index, kind in enumerate(kinds, start=1) if kind != "attention"][-1:]
        recurrent = states[tops[0]] if tops and tops[0] < len(kinds) else None
        attention = None
        if self.config.encoder_shortcut:
            attention = states[-1]
            states = [*states[:-1], states[self.config.shortcut_layer] + attention]
        outputs: Any = super().finish(states, embeddings, token_mask)
        outputs.recurrent_hidden_state, outputs.attention_hidden_state = recurrent, attention
        return outputs


class ONLSTMTransformerModel(ONLSTMTransformerPreTrainedModel, Seq2SeqModelBase):
    """The hybrid of recurrent and self-attention layers, without an output layer (Hao et al., 2019)."""

    encoder_class = ONLSTMTransformerEncoder
    decoder_class = NMTTransformerDecoder


class ONLSTMTransformerForConditionalGeneration(
    ONLSTMTransformerPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin
):
    """The hybrid of recurrent and attention layers with its output layer: `generate` translates, `labels` train."""

    model_class = ONLSTMTransformerModel


class ONLSTMTransformerForSequencePairClassification(ONLSTMTransformerPreTrainedModel, SequencePairClassification):
    """The encoder with a classifier of sentence pairs (logical inference, section 4.4), of the presets `logic_...`."""

    encoder_class = ONLSTMTransformerEncoder


ONLSTMTransformerForSequencePairClassification.register_code("AutoModelForSequenceClassification")

__all__ = [
    "ONLSTMTransformerForConditionalGeneration",
    "ONLSTMTransformerForSequencePairClassification",
    "ONLSTMTransformerModel",
    "ONLSTMTransformerPreTrainedModel",
]
