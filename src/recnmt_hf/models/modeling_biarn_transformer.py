"""
The Transformer with a recurrence encoder (Hao et al., 2019, "Modeling Recurrence for Transformer", NAACL).

A second encoder reads the word embeddings; the decoder attends its states beside those of the Transformer encoder. The
parts stand in the order of the paper: recurrence over words (section 3.1, Eqs. 7-11), attentive recurrence (Eqs.
12-13), fusion in the decoder (section 3.2, Eqs. 14-19).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.output_capturing import OutputRecorder

from .attention import AbsorbingAttention, MultiHeadAttention, eager_attention_forward, masked_softmax, source_mask
from .configuration_biarn_transformer import BiARNTransformerConfig
from .fast_paths import allowed, dropout, is_plain
from .modeling_nmt_transformer import NMTTransformerEncoder, NMTTransformerPreTrainedModel, build_self_attention
from .recurrent_layers import (
    MaskedRNN,
    RecurrentEncoderLayer,
    is_exporting,
    masked_mean,
    reversed_order,
    scan_steps,
    take,
)
from .seq2seq_base import (
    Seq2SeqConditionalGeneration,
    Seq2SeqEncoderOutput,
    Seq2SeqModelBase,
    TransformerDecoderStack,
    embed,
    holds_masks,
)
from .transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer, TransformerSublayers
from .user_errors import UserError


CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class BiARNTransformerEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of both encoders. T are the steps of an ARN, or the source length of an RNN.

    Args:
        last_hidden_state (`torch.Tensor` of shape `(batch_size, source_length, d_model)`):
            H_e, the memory of the Transformer encoder; its input where `decoder_memory="recurrence"` leaves that out.
        recurrence_hidden_state (`torch.Tensor` of shape `(batch_size, T, d_model)`, *optional*):
            H_r, the memory of the recurrence encoder.
        recurrence_attention_mask (`torch.Tensor` of shape `(batch_size, T)`, *optional*):
            1 where H_r is real; `None` where all of it is.
        recurrence_hidden_states (tuple of `torch.Tensor` of shape `(batch_size, T, d_model)`, *optional*):
            With `output_hidden_states=True`: H_1 to H_r, the output of each layer of the recurrence encoder.
        recurrence_attentions (tuple of `torch.Tensor`, *optional*):
            With `output_attentions=True` and an ARN: for each layer `(batch_size, directions, num_heads, T, length)`,
            the attention of each step over the words (above the first layer: over the steps below). The backward
            direction's steps stand in the order of its states: it made the last one first.
    """

    recurrence_hidden_state: torch.Tensor | None = None
    recurrence_attention_mask: torch.Tensor | None = None
    recurrence_hidden_states: tuple[torch.Tensor, ...] | None = None
    recurrence_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class BiARNTransformerEvidence:
    """
    What the model outputs beside the usual fields: those of [`BiARNTransformerEncoderOutput`], and with
    `output_attentions=True`:

    Args:
        recurrence_cross_attentions (tuple of `torch.Tensor`, *optional*):
            `(batch_size, num_heads, target_length, T)` for each decoder layer that attends H_r. With
            `decoder_memory="recurrence"` these are all, and there are no `cross_attentions`.
        fusion_gates (tuple of `torch.Tensor`, *optional*):
            lambda of Eq. 18 for each of these layers under `fusion_type="gated_sum"`, `(batch_size, target_length,
            d_model or 1)`; 1 takes the Transformer encoder's side alone.
    """

    recurrence_hidden_state: torch.Tensor | None = None
    recurrence_attention_mask: torch.Tensor | None = None
    recurrence_hidden_states: tuple[torch.Tensor, ...] | None = None
    recurrence_attentions: tuple[torch.Tensor, ...] | None = None
    recurrence_cross_attentions: tuple[torch.Tensor, ...] | None = None
    fusion_gates: tuple[torch.Tensor, ...] | None = None


EVIDENCE = tuple(BiARNTransformerEvidence.__dataclass_fields__)


@dataclass
class BiARNTransformerModelOutput(BiARNTransformerEvidence, Seq2SeqModelOutput):
    """[`~transformers.modeling_outputs.Seq2SeqModelOutput`] with the fields of [`BiARNTransformerEvidence`]."""


@dataclass
class BiARNTransformerLMOutput(BiARNTransformerEvidence, Seq2SeqLMOutput):
    """[`~transformers.modeling_outputs.Seq2SeqLMOutput`] with the fields of [`BiARNTransformerEvidence`]."""


# -- recurrence encoder (section 3.1) ----------------------------------------------------------------------------------


class InitialState(nn.Module):
    """The state before the first step, from the mean of the layer's real inputs: `tanh(W mean + b)`, the mean, or 0."""

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        self.kind = config.recurrence_initial_state
        self.hidden_size = config.recurrence_hidden_size
        self.linear = nn.Linear(config.d_model, self.hidden_size) if self.kind == "mean_linear" else None

    def forward(self, mean: torch.Tensor) -> torch.Tensor:
        """`mean` `(batch_size, d_model)` to a state `(batch_size, hidden_size)` of the same type."""
        if self.kind == "zeros":
            return mean.new_zeros(mean.shape[0], self.hidden_size)
        return mean if self.linear is None else torch.tanh(self.linear(mean)).to(mean.dtype)


class Recurrence(nn.Module):
    """
    REC of Eq. 8, in one direction or two, each with parameters of its own, and their combination `W_p [f; b] + b_p`.

    With one direction there is nothing to combine: its states are projected only if they are not `d_model` wide.
    """

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        directions, width = config.recurrence_directions, config.recurrence_hidden_size
        self.initial_states = nn.ModuleList([InitialState(config) for _ in range(directions)])
        projected = config.recurrence_direction_combination == "project" and (
            directions == 2 or width != config.d_model
        )
        self.out_proj = nn.Linear(directions * width, config.d_model) if projected else nn.Identity()

    def forward(
        self, inputs: torch.Tensor, attention_mask: torch.Tensor | None, output_attentions: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        Args:
            inputs (`torch.Tensor` of shape `(batch_size, length, d_model)`).
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
            output_attentions (`bool`, *optional*): Whether to return an ARN's attentions.

        Returns:
            The states `(batch_size, T, d_model)`, their mask `(batch_size, T)` or `None`, and the attentions
            `(batch_size, directions, num_heads, T, length)` or `None`.
        """
        mean = masked_mean(inputs, attention_mask)
        initial_states = [first(mean) for first in self.initial_states]
        states, mask, attentions = self.run(inputs, attention_mask, initial_states, output_attentions)
        return self.out_proj(states), mask, attentions

    def run(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None,
        initial_states: list[torch.Tensor],
        output_attentions: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        raise NotImplementedError(f"{type(self).__name__} must say how it makes its steps")


class WordRecurrence(Recurrence):
    """
    A recurrent network over the words in one direction or both (Eqs. 9-11):

        f_j = GRU(x_j, f_{j-1}),   b_j = GRU(x_j, b_{j+1})
    """

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        self.rnn = MaskedRNN(
            config.recurrence_cell,
            config.d_model,
            config.recurrence_hidden_size,
            bidirectional=config.recurrence_directions == 2,
        )

    def run(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None,
        initial_states: list[torch.Tensor],
        output_attentions: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        return self.rnn(inputs, attention_mask, (*initial_states, None)[:2]), attention_mask, None


class AttentiveRecurrentDirection(nn.Module):
    """
    The parameters of one direction of an ARN, and one step of it (Eqs. 12-13):

        c_t = ATT(h_{t-1}, x),   h_t = GRU(c_t, h_{t-1})
    """

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        self.attn = MultiHeadAttention(
            config,
            config.d_model,
            config.encoder_attention_heads,
            config.attention_dropout,
            query_dim=config.recurrence_hidden_size,
            memory="source",
        )
        self.cell_class = CELLS[config.recurrence_cell]
        self.cell = self.cell_class(config.d_model, config.recurrence_hidden_size)

    @property
    def is_lstm(self) -> bool:
        return self.cell_class is nn.LSTMCell

    def forward(
        self, state: tuple[torch.Tensor, ...], inputs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """
        Args:
            state (tuple of `torch.Tensor` of shape `(batch_size, hidden_size)`): h, and c of an LSTM.
            inputs (`torch.Tensor` of shape `(batch_size, length, d_model)`).
            mask (`torch.BoolTensor` of shape `(batch_size, 1, 1, length)`, *optional*): `True` keeps.

        Returns:
            The next state, and the step's attention `(batch_size, num_heads, length)`.
        """
        attn = self.attn
        query = attn.split_heads(attn.q_proj(state[0][:, None]))
        keys, values = attn.project_memory(inputs)
        probability = attn.dropout if attn.training else 0.0
        context, weights = eager_attention_forward(attn, query, keys, values, mask, attn.scaling, probability)
        context = attn.out_proj(context.flatten(2))[:, 0]
        following = self.cell(context, state) if self.is_lstm else (self.cell(context, state[0]),)
        return following, weights[:, :, 0]

    def is_plain(self) -> bool:
        """Whether all parameters may be read instead of calling their modules (no adapters, hooks, quantization)."""
        attn = self.attn
        linears = (attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj)
        return (
            all(is_plain(linear, nn.Linear) for linear in linears)
            and is_plain(attn, MultiHeadAttention)
            and is_plain(self.cell, self.cell_class)
            and is_plain(self, AttentiveRecurrentDirection)
        )


class AttentiveRecurrence(Recurrence):
    """
    The attentive recurrent network (ARN, Eqs. 12-13): T steps of attention to all words, driven by the network's own
    state; the backward direction of a BiARN numbers its steps T, .., 1.

    The steps run as [`attentive_steps`]; [`attentive_steps_reference`] says the same plainly, and is taken with
    `RECNMT_FAST_PATHS=0` or where parameters are not plain (adapters, quantization).
    """

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        self.steps = config.recurrence_steps
        self.directions = nn.ModuleList(
            [AttentiveRecurrentDirection(config) for _ in range(config.recurrence_directions)]
        )

    def run(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None,
        initial_states: list[torch.Tensor],
        output_attentions: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        steps = inputs.shape[1] if self.steps is None else self.steps
        fast = allowed() and all(direction.is_plain() for direction in self.directions)
        fast = fast and not (self.steps is None and is_exporting())  # its loop has a number of turns
        run_steps = attentive_steps if fast else attentive_steps_reference
        states, attentions = run_steps(self.directions, inputs, attention_mask, initial_states, steps)
        # T = length: the steps beyond a sentence's own number are left out, and its numbering begins at its own end.
        mask = order = None
        if self.steps is None and attention_mask is not None:
            lengths = (attention_mask != 0).sum(dim=1)
            mask = (torch.arange(steps, device=inputs.device)[None, :] < lengths[:, None]).to(attention_mask.dtype)
            order = reversed_order(lengths, steps)
        directions = list(states)
        if len(directions) == 2:
            directions[1] = states[1].flip(1) if order is None else take(states[1], order)
        together = torch.cat(directions, dim=-1)
        if mask is not None:
            together = together.masked_fill(mask[:, :, None] == 0, 0.0)
        if not output_attentions:
            return together, mask, None
        weights = attentions.movedim(0, 3)  # (D, B, H, T, J)
        if len(weights) == 2:
            if order is None:
                backward = weights[1].flip(2)
            else:
                backward = weights[1].gather(2, order[:, None, :, None].expand_as(weights[1]))
            weights = torch.stack([weights[0], backward])
        return together, mask, weights.transpose(0, 1)


def attentive_steps_reference(
    directions: Sequence[AttentiveRecurrentDirection],
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    initial_states: Sequence[torch.Tensor],
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The steps of an ARN, one direction after the other, as the equations have them.

    Args:
        inputs (`torch.Tensor` of shape `(batch_size, length, d_model)`).
        attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
        initial_states (sequence of `torch.Tensor` of shape `(batch_size, hidden_size)`): One for each direction.
        steps (`int`): T.

    Returns:
        States `(directions, batch_size, T, hidden_size)` and attentions `(T, directions, batch_size, num_heads,
        length)`, in the order in which they were made.
    """
    mask = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
    all_states, all_attentions = [], []
    for direction, initial in zip(directions, initial_states, strict=True):

        def step(state: Sequence[torch.Tensor], _: torch.Tensor, direction: AttentiveRecurrentDirection = direction):
            state, weights = direction(tuple(state), inputs, mask)
            return state, (state[0], weights)

        state = (initial, torch.zeros_like(initial)) if direction.is_lstm else (initial,)
        states, attentions = scan_steps(step, state, inputs.new_zeros(steps))
        all_states.append(states.transpose(0, 1))
        all_attentions.append(attentions)
    return torch.stack(all_states), torch.stack(all_attentions, dim=1)


class SharedStepWeights(torch.autograd.Function):
    """
    The biases of a projection for all steps, and the place where its gradients are made.

    A projection used at T steps would collect its gradient in T products with few rows, each added to a matrix of the
    weights' size. Here the steps read the weights without a gradient; the gradients of their outputs arrive in this
    function's backward pass, all together, and one product with the collected inputs gives the same sum. It cannot be
    differentiated twice; with `RECNMT_FAST_PATHS=0` the steps can.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, bias: torch.Tensor, inputs: list[torch.Tensor], batch_size: int, steps: int
    ) -> torch.Tensor:
        ctx.inputs = inputs
        return bias.unsqueeze(-2).expand(steps, *bias.shape[:-1], batch_size, bias.shape[-1]).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        # Steps and batch become the rows of one product, for each direction where there are several.
        inputs = torch.stack(ctx.inputs, dim=-3).flatten(-3, -2)  # (.., T B, in)
        gradient = gradient.movedim(0, -3).flatten(-3, -2)  # (.., T B, out)
        return torch.matmul(gradient.transpose(-1, -2), inputs), gradient.sum(dim=-2), None, None, None


class StepProduct(torch.autograd.Function):
    """`states @ weight + bias` with weights that get their gradient elsewhere ([`SharedStepWeights`])."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return step_product(states, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        (weight,) = ctx.saved_tensors
        inner = torch.matmul(gradient, weight.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        return inner, None, gradient


def step_product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (torch.addmm if states.dim() == 2 else torch.baddbmm)(bias, states, weight)


class StepProjection:
    """
    A linear layer that is applied once a step, `x W^T + b`, to one direction or to all at once.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)` or `(directions, out_features, in_features)`).
        bias (`torch.Tensor` of shape `(out_features,)` or `(directions, out_features)`).
        batch_size, steps (`int`): Rows of each application, and how often it is applied.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, batch_size: int, steps: int):
        self.inputs: list[torch.Tensor] | None = None
        device = weight.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # Converted once, not at every step.
            weight, bias = (each.to(torch.get_autocast_dtype(device)) for each in (weight, bias))
        self.biases: Any = itertools.repeat(bias.unsqueeze(-2))
        if torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling():
            self.inputs = []
            self.biases = iter(SharedStepWeights.apply(weight, bias, self.inputs, batch_size, steps).unbind(0))
            weight = weight.detach()
        self.weight = weight.transpose(-1, -2)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`states` `(batch_size, in_features)` or `(directions, batch_size, in_features)`."""
        states = states.to(self.weight.dtype)
        if self.inputs is None:
            return step_product(states, self.weight, next(self.biases))
        self.inputs.append(states.detach())
        return StepProduct.apply(states, self.weight, next(self.biases))


def stacks_weights(device: torch.device) -> bool:
    """
    Whether both directions' weights are stacked for one batched product: where launches cost. On the CPU there is a
    product for each direction, because stacking the weights would copy them.
    """
    return device.type != "cpu"


def step_projection(
    linears: Sequence[tuple[torch.Tensor, torch.Tensor]], batch_size: int, steps: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Weights and biases of all directions as one function of their states `(directions, batch_size, in_features)`."""
    if not stacks_weights(linears[0][0].device):
        each = [StepProjection(weight, bias, batch_size, steps) for weight, bias in linears]
        return lambda states: torch.stack([apply(state) for apply, state in zip(each, states, strict=True)])
    return StepProjection(*(torch.stack(tensors) for tensors in zip(*linears, strict=True)), batch_size, steps)


# One step's reading: from queries (directions, batch_size, num_heads, head_dim) to the attention (directions,
# batch_size, num_heads, length) and the contexts (directions, batch_size, num_heads * head_dim).
Reading = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


# Words of a batch below which, on the CPU, reading the weights anew at every step costs more than the products.
FEWEST_WORDS = 384


def few_steps(steps: int, num_heads: int, inputs: torch.Tensor) -> bool:
    """
    Whether carrying T queries to the words `(batch_size, length, d_model)` costs less than carrying the words to keys
    and values: 2 T d (d + length num_heads) products for each direction against 2 length d^2.
    """
    batch_size, length, width = inputs.shape
    if steps * (width + length * num_heads) >= length * width:
        return False
    return inputs.device.type != "cpu" or torch.compiler.is_compiling() or batch_size * length >= FEWEST_WORDS


def reads_projected_words(
    attns: Sequence[MultiHeadAttention], inputs: torch.Tensor, attention_mask: torch.Tensor | None, steps: int
) -> Reading:
    """Attention to keys and values that are projected once, before the steps."""
    keys = torch.stack([a.split_heads(a.k_proj(inputs)).transpose(2, 3) for a in attns])  # (D, B, H, head_dim, J)
    values = torch.stack([a.split_heads(a.v_proj(inputs)) for a in attns])  # (D, B, H, J, head_dim)
    visible = None if attention_mask is None else (attention_mask != 0)[None, :, None, None, :]
    probability, training = attns[0].dropout, attns[0].training

    def read(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attention = masked_softmax(torch.matmul(query[:, :, :, None], keys), visible, values.dtype)
        attention = dropout(attention, probability, training)  # (D, B, H, 1, J)
        return attention[..., 0, :], torch.matmul(attention, values).flatten(2)

    return read


def reads_words(
    attns: Sequence[MultiHeadAttention], inputs: torch.Tensor, attention_mask: torch.Tensor | None, steps: int
) -> Reading:
    """
    The same attention without keys and values, for few steps: `q . (W_k x + b_k) = (W_k^T q) . x + q . b_k`, and
    `sum_j a_j (W_v x_j + b_v) = W_v sum_j a_j x_j + b_v sum_j a_j`. All heads of both directions read the words at
    once.
    """
    count, batch_size = len(attns), inputs.shape[0]
    heads, head_dim, width = attns[0].num_heads, attns[0].head_dim, attns[0].embed_dim
    rows = count * heads
    key_weights, value_weights = (
        torch.cat([linear.weight.view(heads, head_dim, width) for linear in linears])
        for linears in ([a.k_proj for a in attns], [a.v_proj for a in attns])
    )
    key_biases, value_biases = (
        torch.stack([linear.bias.view(1, heads, head_dim) for linear in linears])
        for linears in ([a.k_proj for a in attns], [a.v_proj for a in attns])
    )
    zeros = inputs.new_zeros
    to_words = StepProjection(key_weights.transpose(1, 2), zeros(rows, width), batch_size, steps)
    from_words = StepProjection(value_weights, zeros(rows, head_dim), batch_size, steps)
    words = inputs.to(to_words.weight.dtype)
    visible = None if attention_mask is None else (attention_mask != 0)[:, None, :]
    probability, training = attns[0].dropout, attns[0].training

    def by_direction(states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(1, (count, heads)).transpose(0, 1)

    def read(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = to_words(query.transpose(1, 2).flatten(0, 1)).transpose(0, 1)  # (B, D H, d)
        constant = (query * key_biases).sum(dim=-1).transpose(0, 1).flatten(1)
        scores = torch.matmul(wide, words.transpose(1, 2)) + constant[:, :, None]
        attention = masked_softmax(scores, visible, words.dtype)
        attention = dropout(attention, probability, training)  # (B, D H, J)
        context = from_words(torch.matmul(attention, words).transpose(0, 1))  # (D H, B, head_dim)
        context = context.unflatten(0, (count, heads)).transpose(1, 2)
        context = context + by_direction(attention.sum(dim=-1))[..., None] * value_biases
        return by_direction(attention), context.flatten(2)

    return read


def attentive_steps(
    directions: Sequence[AttentiveRecurrentDirection],
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    initial_states: Sequence[torch.Tensor],
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The same as [`attentive_steps_reference`] in fewer and larger operations: what the steps read of the inputs is
    prepared before them, once; a step makes both directions at once; the gradients of the weights are formed once,
    after all steps.
    """
    attns, cells = [d.attn for d in directions], [d.cell for d in directions]
    count, batch_size = len(attns), inputs.shape[0]
    heads, head_dim, scale = attns[0].num_heads, attns[0].head_dim, attns[0].scaling
    width, is_lstm = cells[0].hidden_size, directions[0].is_lstm

    # A graph is free of the length.
    few = not torch.compiler.is_compiling() and few_steps(steps, heads, inputs)
    reading = reads_words if few else reads_projected_words
    read = reading(attns, inputs, attention_mask, steps)
    query_of, context_of = (
        step_projection([(p.weight, p.bias) for p in linears], batch_size, steps)
        for linears in ([a.q_proj for a in attns], [a.out_proj for a in attns])
    )
    gates_of = step_projection([(c.weight_ih, c.bias_ih) for c in cells], batch_size, steps)
    recurrent_of = step_projection([(c.weight_hh, c.bias_hh) for c in cells], batch_size, steps)

    state = torch.stack(tuple(initial_states))  # (D, B, h)
    carry = torch.zeros_like(state) if is_lstm else None
    states, attentions = [], []
    for _ in range(steps):
        # c_t = ATT(h_{t-1}, x)
        attention, context = read(query_of(state).view(count, batch_size, heads, head_dim) * scale)
        attentions.append(attention)
        # h_t = GRU(c_t, h_{t-1})
        gates = gates_of(context_of(context))
        recurrent = recurrent_of(state)
        if is_lstm:
            into, forget, cell, out = (gates + recurrent).chunk(4, dim=-1)
            carry = torch.sigmoid(forget) * carry + torch.sigmoid(into) * torch.tanh(cell)
            state = (torch.sigmoid(out) * torch.tanh(carry)).to(state.dtype)
        else:
            reset, update = torch.sigmoid(gates[..., : 2 * width] + recurrent[..., : 2 * width]).chunk(2, dim=-1)
            new = torch.tanh(gates[..., 2 * width :] + reset * recurrent[..., 2 * width :])
            state = new + update * (state - new)
        states.append(state)
    return torch.stack(states, dim=2), torch.stack(attentions)


class RecurrenceEncoderLayer(TransformerSublayers):
    """
    A layer of the recurrence encoder (Eqs. 7-8):

        C_n = LN(Drop(REC(H_{n-1})) + H_{n-1}),   H_n = LN(Drop(FFN(C_n)) + C_n)

    The first layer has no residual connection around REC, whose T states are not those of the J words.
    """

    def __init__(self, config: BiARNTransformerConfig, is_first: bool):
        super().__init__(config, config.encoder_ffn_dim)
        self.is_first = is_first
        attentive = config.recurrence_encoder_type in ("arn", "biarn")
        self.recurrence = (AttentiveRecurrence if attentive else WordRecurrence)(config)
        self.recurrence_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, length, d_model)`).
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
            output_attentions (`bool`, *optional*): Whether to return the attentions of an ARN.

        Returns:
            H_n `(batch_size, T, d_model)`, its mask, and the attentions or `None`.
        """
        norm = self.recurrence_layer_norm
        inputs = self.before(hidden_states, norm)
        states, mask, attentions = self.recurrence(inputs, attention_mask, output_attentions)
        if self.is_first:
            states = dropout(states, self.dropout, self.training)
            states = states if self.normalize_before else norm(states)
        else:
            states = self.after(states, hidden_states, norm)
        return self.feed_forward(states), mask, attentions


class RecurrenceEncoder(nn.Module):
    """Layers of [`RecurrenceEncoderLayer`], with a norm after the last one in the pre-norm arrangement."""

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        count = config.recurrence_encoder_layers
        self.layers = nn.ModuleList([RecurrenceEncoderLayer(config, is_first=i == 0) for i in range(count)])
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, output_attentions: bool):
        """All layers' states and attentions, and the mask of the last one."""
        all_states, all_attentions = [], []
        for layer in self.layers:
            hidden_states, attention_mask, attentions = layer(hidden_states, attention_mask, output_attentions)
            all_states.append(hidden_states)
            all_attentions.append(attentions)
        if self.layer_norm is not None:
            all_states[-1] = self.layer_norm(hidden_states)
        return tuple(all_states), tuple(all_attentions), attention_mask


class MultiColumn(nn.Module):
    """
    A column of bidirectional recurrent layers on the word embeddings, merged with the Transformer encoder's states into
    one memory (the multi-column encoder of Chen et al., 2018, as the paper's table 4 compares it).
    """

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                RecurrentEncoderLayer(
                    config.recurrence_cell,
                    config.d_model,
                    config.d_model,
                    True,
                    config.dropout,
                    config.layer_norm_eps,
                    config.normalize_before,
                )
                for _ in range(config.multi_column_rnn_layers)
            ]
        )
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None
        concat = config.multi_column_merge == "concat"
        self.merge = nn.Linear(2 * config.d_model, config.d_model) if concat else None

    def forward(self, words: torch.Tensor, encoded: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Word embeddings and the Transformer encoder's states, both `(batch_size, source_length, d_model)`."""
        states = words
        for layer in self.layers:
            states = layer(states, attention_mask)
        if self.layer_norm is not None:
            states = self.layer_norm(states)
        return encoded + states if self.merge is None else self.merge(torch.cat([encoded, states], dim=-1))


# -- model -------------------------------------------------------------------------------------------------------------


class BiARNTransformerPreTrainedModel(NMTTransformerPreTrainedModel):
    config: BiARNTransformerConfig
    _no_split_modules = [
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
        "RecurrenceFusionDecoderLayer",
        "RecurrenceEncoderLayer",
        "RecurrentEncoderLayer",
    ]


class BiARNTransformerEncoder(BiARNTransformerPreTrainedModel, NMTTransformerEncoder):
    """Transformer encoder and recurrence encoder on the same embeddings; usable alone through `get_encoder()`."""

    output_class = BiARNTransformerEncoderOutput
    _can_record_outputs = {
        "hidden_states": TransformerEncoderLayer,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn"),
    }

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        if config.decoder_memory == "recurrence" and config.recurrence_source == "embeddings":
            # Nothing would read the Transformer encoder.
            self.layers, self.layer_norm = nn.ModuleList(), None
        self.multi_column = MultiColumn(config) if config.encoder_type == "multi_column" else None
        self.recurrence_encoder = RecurrenceEncoder(config) if config.recurrence_encoder_type is not None else None
        self.post_init()

    def encode(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs: Any,
    ) -> BiARNTransformerEncoderOutput:
        recurrent = self.multi_column is not None or self.recurrence_encoder is not None
        if recurrent and attention_mask is not None and attention_mask.dim() != 2:
            raise UserError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but recurrence needs to know which tokens "
                "are real. Remedy: give a mask of shape (batch_size, source_length), 1 for tokens and 0 for padding."
            )
        embeddings = embed(self.embed_tokens, input_ids, inputs_embeds)
        outputs = super().encode(None, attention_mask, embeddings, **kwargs)
        if not recurrent:
            return outputs
        words = None
        if self.multi_column is not None or self.config.recurrence_source == "embeddings":
            positions = self.config.recurrence_position_embeddings
            words = self.embed_input(embeddings, attention_mask, add_positions=positions)
        if self.multi_column is not None:
            outputs.last_hidden_state = self.multi_column(words, outputs.last_hidden_state, attention_mask)
        if self.recurrence_encoder is None:
            return outputs
        source = words if self.config.recurrence_source == "embeddings" else outputs.last_hidden_state
        wanted = bool(kwargs.get("output_attentions", self.config.output_attentions))
        states, attentions, mask = self.recurrence_encoder(source, attention_mask, wanted)
        outputs.recurrence_hidden_state = states[-1]
        outputs.recurrence_attention_mask = mask
        if kwargs.get("output_hidden_states", self.config.output_hidden_states):
            outputs.recurrence_hidden_states = states
        if attentions[0] is not None:
            outputs.recurrence_attentions = attentions
        return outputs


class FusionGate(nn.Module):
    """lambda = sigmoid(W [D; R] + b), Eq. 18: a weight for each channel or for each position."""

    def __init__(self, d_model: int, kind: str):
        super().__init__()
        self.linear = nn.Linear(2 * d_model, d_model if kind == "vector" else 1)

    def forward(self, attended: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(torch.cat([attended, recurrent], dim=-1)))


class RecurrenceFusionDecoderLayer(TransformerDecoderLayer):
    """
    A decoder layer that also attends H_r. With C the states after self-attention and D those after attention to H_e:

        stack      R = LN(Drop(ATT(D, H_r)) + D),   y = FFN sub-layer of R                           (Eqs. 14-15)
        gated sum  R = LN(Drop(ATT(C, H_r)) + C),   y = FFN sub-layer of lambda D + (1 - lambda) R   (Eqs. 16-19)
    """

    def __init__(self, config: BiARNTransformerConfig, self_attn: nn.Module, encoder_attn: nn.Module, layer_idx: int):
        super().__init__(config, self_attn, encoder_attn)
        self.recurrence_attn = AbsorbingAttention(
            config,
            config.d_model,
            config.decoder_attention_heads,
            config.attention_dropout,
            layer_idx=layer_idx,
            memory="recurrence",
        )
        self.recurrence_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        gated = config.fusion_type == "gated_sum"
        self.fusion_gate = FusionGate(config.d_model, config.fusion_gate) if gated else None

    def fuse(
        self,
        own: torch.Tensor,
        attended: torch.Tensor,
        recurrence: torch.Tensor,
        recurrence_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`recurrence` is H_r, `(num_sources, T, d_model)`, with the attention mask over it."""
        norm = self.recurrence_attn_layer_norm
        below = attended if self.fusion_gate is None else own
        output, _ = self.recurrence_attn(
            self.before(below, norm),
            key_value_states=recurrence,
            attention_mask=recurrence_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        recurrent = self.after(output, below, norm)
        if self.fusion_gate is None:
            return recurrent
        gate = self.fusion_gate(attended, recurrent)
        return gate * attended + (1 - gate) * recurrent


class BiARNTransformerDecoder(BiARNTransformerPreTrainedModel, TransformerDecoderStack):
    """Transformer decoder whose top layer, or every layer, also attends the recurrence states."""

    _can_record_outputs = {
        "hidden_states": TransformerDecoderLayer,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="encoder_attn"),
        "recurrence_cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="recurrence_attn"),
        "fusion_gates": OutputRecorder(FusionGate),
    }

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        self.post_init()

    def build_layer(self, config: BiARNTransformerConfig, index: int) -> nn.Module:
        heads = config.decoder_attention_heads
        self_attn = build_self_attention(config, heads, is_causal=True, layer_idx=index)
        encoder_attn = MultiHeadAttention(
            config, config.d_model, heads, config.attention_dropout, layer_idx=index, memory="encoder"
        )
        fuses = config.recurrence_encoder_type is not None and config.decoder_memory == "both"
        if fuses and (config.fusion_layers == "all" or index == config.decoder_layers - 1):
            return RecurrenceFusionDecoderLayer(config, self_attn, encoder_attn, index)
        return TransformerDecoderLayer(config, self_attn, encoder_attn)

    def prepare_memories(self, memories: tuple[torch.Tensor | None, ...], past_key_values: Cache | None):
        recurrence, mask = memories
        if recurrence is None or holds_masks(past_key_values):
            return recurrence, None
        return recurrence, source_mask(self.config, recurrence, mask)


class BiARNTransformerModel(BiARNTransformerPreTrainedModel, Seq2SeqModelBase):
    """The Transformer with a recurrence encoder, without an output layer (Hao et al., 2019)."""

    encoder_class = BiARNTransformerEncoder
    decoder_class = BiARNTransformerDecoder
    decoder_evidence = ("recurrence_cross_attentions", "fusion_gates")

    def memories(self, encoder_outputs: BiARNTransformerEncoderOutput) -> tuple[torch.Tensor | None, ...]:
        if self.config.recurrence_encoder_type is not None and encoder_outputs.recurrence_hidden_state is None:
            raise UserError(
                "encoder_outputs lacks recurrence_hidden_state, which the decoder attends. Remedy: pass the output of "
                "this model's own get_encoder() as it came."
            )
        return encoder_outputs.recurrence_hidden_state, encoder_outputs.recurrence_attention_mask

    def main_memory(
        self, encoder_outputs: BiARNTransformerEncoderOutput, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.config.decoder_memory == "recurrence":
            return self.memories(encoder_outputs)
        return super().main_memory(encoder_outputs, attention_mask)

    def join(self, encoder_outputs: Any, decoder_outputs: Any) -> BiARNTransformerModelOutput:
        evidence = {name: getattr(encoder_outputs, name, None) for name in EVIDENCE}
        for name in self.decoder_evidence:
            evidence[name] = getattr(decoder_outputs, name, None) or None  # nothing recorded: not an empty tuple
        joined = dict(super().join(encoder_outputs, decoder_outputs))
        if self.config.decoder_memory == "recurrence":
            # The decoder attends states of the recurrence: its weights are no links to words.
            evidence["recurrence_cross_attentions"] = joined.pop("cross_attentions", None)
            joined["cross_attentions"] = () if decoder_outputs.cross_attentions is not None else None
        return BiARNTransformerModelOutput(**joined, **evidence)


class BiARNTransformerForConditionalGeneration(
    BiARNTransformerPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin
):
    """
    The Transformer with a recurrence encoder and its output layer: `generate` translates, `labels` train.

    Example:

    ```python
    >>> import torch
    >>> from recnmt_hf import BiARNTransformerConfig, BiARNTransformerForConditionalGeneration
    >>> model = BiARNTransformerForConditionalGeneration(BiARNTransformerConfig.from_preset("tiny", vocab_size=100))
    >>> source = torch.tensor([[5, 6, 7, 2]])
    >>> encoded = model.get_encoder()(source, output_attentions=True)
    >>> encoded.recurrence_attentions[0].shape  # batch, directions, heads, steps, words
    torch.Size([1, 2, 4, 8, 4])

    ```
    """

    model_class = BiARNTransformerModel

    def lm_output(
        self, loss: torch.Tensor | None, logits: torch.Tensor | None, outputs: BiARNTransformerModelOutput
    ) -> BiARNTransformerLMOutput:
        evidence = {name: getattr(outputs, name, None) for name in EVIDENCE}
        return BiARNTransformerLMOutput(**super().lm_output(loss, logits, outputs), **evidence)


BiARNTransformerModel.register_for_auto_class("AutoModel")
BiARNTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = [
    "BiARNTransformerForConditionalGeneration",
    "BiARNTransformerModel",
    "BiARNTransformerPreTrainedModel",
]
