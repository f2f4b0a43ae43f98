"""
Fast paths of the BiARN Transformer (Hao et al., 2019): the steps of an attentive recurrent network (Eqs. 12-13) and
attention to few positions. References: `modeling_biarn_transformer.py` and [`~.attention.MultiHeadAttention`].
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .attention import MultiHeadAttention, masked_softmax, visible_positions
from .decoder_cache import read_source_memory, source_memories
from .kernels_cpu_matmuls import fast_product, takes_onednn
from .kernels_shared import (
    CustomGradient,
    Mask,
    OnceDifferentiable,
    autocast_dtype,
    dropout,
    enabled,
    final_gradients,
    graph_operator,
    is_plain,
    on_cpu,
)
from .kernels_triton_gru import gru_step


Pair = tuple[Tensor, Tensor]


class DirectionWeights(NamedTuple):
    """Weight and bias of the projections of one direction's attention, and of the two halves of its cell."""

    query: Pair
    key: Pair
    value: Pair
    output: Pair
    cell_input: Pair
    cell_state: Pair

    @classmethod
    def of(cls, direction: Any) -> "DirectionWeights":
        """Return the parameters of an [`~.modeling_biarn_transformer.AttentiveRecurrentDirection`]."""
        attn, cell = direction.attn, direction.cell
        pairs = [(linear.weight, linear.bias) for linear in (attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj)]
        pairs += [(cell.weight_ih, cell.bias_ih), (cell.weight_hh, cell.bias_hh)]
        return cls(*pairs)


Directions = Sequence[DirectionWeights]


class SharedStepWeights(CustomGradient):
    """
    The biases of a projection for all steps. Its backward pass makes the gradients of weight and bias by one matmul
    with the collected inputs, instead of T matmuls with few rows: the steps read the weights without a gradient.
    """

    @staticmethod
    def forward(weight: Tensor, bias: Tensor, inputs: SimpleNamespace, batch_size: int, steps: int) -> Tensor:
        return bias.unsqueeze(-2).expand(steps, *bias.shape[:-1], batch_size, bias.shape[-1]).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.inputs = inputs[2].steps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *final_gradients(SharedStepWeights.gradients, gradient, *ctx.inputs), None, None, None

    @staticmethod
    def gradients(gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        # Steps and batch become the rows of one matmul, or of one for each direction.
        rows = torch.stack(inputs, dim=-3).flatten(-3, -2)  # (.., T B, in)
        gradient = gradient.movedim(0, -3).flatten(-3, -2)  # (.., T B, out)
        return step_matmul(gradient.transpose(-1, -2), rows), gradient.sum(dim=-2)


class StepProduct(OnceDifferentiable):
    """`states @ weight + bias`, where [`SharedStepWeights`] makes the gradient of the weight."""

    @staticmethod
    def forward(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if states.dim() == 2 and not torch.is_grad_enabled() and takes_onednn(states, weight):
            return fast_product(states, weight).add_(bias)
        return (torch.addmm if states.dim() == 2 else torch.baddbmm)(bias, states, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        return step_matmul(gradient, weight.mT) if ctx.needs_input_grad[0] else None, None, gradient


def step_matmul(left: Tensor, right: Tensor) -> Tensor:
    return fast_product(left, right) if left.dim() == 2 else torch.matmul(left, right)


class StepProjection:
    """A linear layer applied once a step to `batch_size` rows, of one direction or with a stacked weight of all."""

    def __init__(self, weight: Tensor, bias: Tensor, batch_size: int, steps: int):
        self.inputs: SimpleNamespace | None = None  # `steps`; the transforms of `torch.func` would copy a plain list
        low = autocast_dtype(weight.device)
        if low is not None:  # convert once, not at every step
            weight, bias = weight.to(low), bias.to(low)
        self.biases: Any = itertools.repeat(bias.unsqueeze(-2))
        if torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling():
            self.inputs = SimpleNamespace(steps=[])
            self.biases = iter(SharedStepWeights.apply(weight, bias, self.inputs, batch_size, steps).unbind(0))
            weight = weight.detach()
        self.weight = weight.transpose(-1, -2)

    def __call__(self, states: Tensor) -> Tensor:
        """Project states `(batch_size, in_features)` or `(directions, batch_size, in_features)`."""
        states = states.to(self.weight.dtype)
        if self.inputs is None:
            return StepProduct.forward(states, self.weight, next(self.biases))
        self.inputs.steps.append(states.detach())
        return StepProduct.apply(states, self.weight, next(self.biases))


def step_projection(linears: Sequence[Pair], batch_size: int, steps: int) -> Callable[[Tensor], Tensor]:
    """Return all directions' projections as one function of states `(directions, batch_size, in_features)`."""
    if on_cpu(linears[0][0]):  # one batched matmul is not faster
        projections = [StepProjection(weight, bias, batch_size, steps) for weight, bias in linears]
        return lambda states: torch.stack([apply(state) for apply, state in zip(projections, states, strict=True)])
    weight, bias = (torch.stack(tensors) for tensors in zip(*linears, strict=True))
    return StepProjection(weight, bias, batch_size, steps)


# Words of a batch below which, on the CPU, reading the weights again at every step costs more than the matmuls.
FEWEST_WORDS = 384


def few_steps(steps: int, num_heads: int, inputs: Tensor) -> bool:
    """Return whether projecting T queries to the words is less work than projecting the words to keys and values."""
    batch_size, length, width = inputs.shape
    if steps * (width + length * num_heads) >= length * width:
        return False
    return not on_cpu(inputs) or torch.compiler.is_compiling() or batch_size * length >= FEWEST_WORDS


Drop = Callable[[Tensor], Tensor]  # of one step's attention
# Maps one step's queries (directions, batch_size, num_heads, head_dim) to the attention (directions, batch_size,
# num_heads, length) and the contexts (directions, batch_size, num_heads * head_dim).
Reading = Callable[[Tensor], tuple[Tensor, Tensor]]


def reads_projected_words(
    directions: Directions, inputs: Tensor, attention_mask: Mask, num_heads: int, drop: Drop, steps: int
) -> Reading:
    """Return attention to keys and values that are projected once, before the steps."""

    def project(pair: Pair) -> Tensor:
        return nn.functional.linear(inputs, *pair).unflatten(-1, (num_heads, -1)).transpose(1, 2)

    keys = torch.stack([project(weights.key).transpose(2, 3) for weights in directions])  # (D, B, H, head_dim, J)
    values = torch.stack([project(weights.value) for weights in directions])  # (D, B, H, J, head_dim)
    visible = None if attention_mask is None else (attention_mask != 0)[None, :, None, None, :]

    def read(query: Tensor) -> tuple[Tensor, Tensor]:
        attention = drop(masked_softmax(torch.matmul(query[:, :, :, None], keys), visible, values.dtype))
        return attention[..., 0, :], torch.matmul(attention, values).flatten(2)  # attention (D, B, H, 1, J)

    return read


def reads_words(
    directions: Directions, inputs: Tensor, attention_mask: Mask, num_heads: int, drop: Drop, steps: int
) -> Reading:
    """
    Return the same attention without keys and values, for few steps: `q . (W_k x + b_k) = (W_k^T q) . x + q . b_k`, and
    `sum_j a_j (W_v x_j + b_v) = W_v sum_j a_j x_j + b_v sum_j a_j`. All heads of both directions read the words at
    once.
    """
    count, (batch_size, _, width) = len(directions), inputs.shape
    heads, head_dim = num_heads, width // num_heads
    rows = count * heads
    pairs = [[weights.key for weights in directions], [weights.value for weights in directions]]
    key_weights, value_weights = (torch.cat([one.view(heads, head_dim, width) for one, _ in side]) for side in pairs)
    key_biases, value_biases = (torch.stack([one.view(1, heads, head_dim) for _, one in side]) for side in pairs)
    zeros = inputs.new_zeros
    to_words = StepProjection(key_weights.transpose(1, 2), zeros(rows, width), batch_size, steps)
    from_words = StepProjection(value_weights, zeros(rows, head_dim), batch_size, steps)
    words = inputs.to(to_words.weight.dtype)
    visible = None if attention_mask is None else (attention_mask != 0)[:, None, :]

    def by_direction(states: Tensor) -> Tensor:
        return states.unflatten(1, (count, heads)).transpose(0, 1)

    def read(query: Tensor) -> tuple[Tensor, Tensor]:
        wide = to_words(query.transpose(1, 2).flatten(0, 1)).transpose(0, 1)  # (B, D H, d)
        constant = (query * key_biases).sum(dim=-1).transpose(0, 1).flatten(1)
        scores = torch.matmul(wide, words.transpose(1, 2)) + constant[:, :, None]
        attention = drop(masked_softmax(scores, visible, words.dtype))  # (B, D H, J)
        context = from_words(torch.matmul(attention, words).transpose(0, 1))  # (D H, B, head_dim)
        context = context.unflatten(0, (count, heads)).transpose(1, 2)
        context = context + by_direction(attention.sum(dim=-1))[..., None] * value_biases
        return by_direction(attention), context.flatten(2)

    return read


def attentive_steps(
    directions: Sequence[Any], inputs: Tensor, attention_mask: Mask, initial_states: Sequence[Tensor], steps: int | None
) -> tuple[Tensor, Tensor]:
    """
    Compute [`~.modeling_biarn_transformer.attentive_steps_reference`] in fewer and larger operations: the inputs are
    prepared once, a step makes both directions, and the gradients of the weights are formed after all steps.
    """
    attn, is_lstm = directions[0].attn, directions[0].is_lstm
    weights = [DirectionWeights.of(direction) for direction in directions]
    if steps is not None or not torch.compiler.is_compiling():
        count = inputs.shape[1] if steps is None else steps
        drop = partial(dropout, p=attn.dropout, training=attn.training)
        return run_steps(weights, inputs, attention_mask, initial_states, count, attn.num_heads, drop, is_lstm)
    factors = None
    if attn.training and attn.dropout > 0.0:
        batch_size, length = inputs.shape[:2]
        ones = inputs.new_ones(length, len(directions), batch_size, attn.num_heads, 1, length)
        factors = nn.functional.dropout(ones, attn.dropout)
    parameters = [tensor for direction in weights for pair in direction for tensor in pair]
    tensors = (inputs, attention_mask, factors, *initial_states, *parameters)
    return tuple(run_word_steps(*tensors, num_heads=attn.num_heads, is_lstm=is_lstm))


def word_step_shapes(inputs: Tensor, mask: Any, factors: Any, *tensors: Tensor, num_heads: int, is_lstm: bool) -> Any:
    (batch_size, length, _), count, initial = inputs.shape, len(tensors) // 13, tensors[0]
    attention_shape = (length, count, batch_size, num_heads, length)
    return [((count, batch_size, length, initial.shape[1]), initial.dtype), (attention_shape, inputs.dtype)]


@graph_operator(word_step_shapes)
def run_word_steps(
    inputs: Tensor, attention_mask: Mask, factors: Tensor | None, *tensors: Tensor, num_heads: int, is_lstm: bool
) -> list[Tensor]:
    """Run [`run_steps`] with a step for each word, from the dropout's `factors`, initial states, and all weights."""
    count = len(tensors) // 13
    pairs = list(zip(tensors[count::2], tensors[count + 1 :: 2], strict=True))
    weights = [DirectionWeights(*pairs[start : start + 6]) for start in range(0, len(pairs), 6)]
    step_factors = iter(()) if factors is None else iter(factors)

    def drop(attention: Tensor) -> Tensor:
        return attention if factors is None else attention * next(step_factors)

    return list(run_steps(weights, inputs, attention_mask, tensors[:count], inputs.shape[1], num_heads, drop, is_lstm))


def run_steps(
    directions: Directions,
    inputs: Tensor,
    attention_mask: Mask,
    initial_states: Sequence[Tensor],
    steps: int,
    num_heads: int,
    drop: Drop,
    is_lstm: bool,
) -> tuple[Tensor, Tensor]:
    """Run [`attentive_steps`] with the parameters of each direction."""
    count, (batch_size, _, embed_dim) = len(directions), inputs.shape
    head_dim = embed_dim // num_heads
    # A graph is free of the length.
    few = not torch.compiler.is_compiling() and few_steps(steps, num_heads, inputs)
    reading = reads_words if few else reads_projected_words
    read = reading(directions, inputs, attention_mask, num_heads, drop, steps)
    to_query, to_context, to_gates, to_recurrent = (
        step_projection([getattr(weights, name) for weights in directions], batch_size, steps)
        for name in ("query", "output", "cell_input", "cell_state")
    )

    state = torch.stack(tuple(initial_states))  # (D, B, h)
    carry = torch.zeros_like(state)  # of an LSTM
    states, attentions = [], []
    for _ in range(steps):
        # c_t = ATT(h_{t-1}, x)
        attention, context = read(to_query(state).view(count, batch_size, num_heads, head_dim) * head_dim**-0.5)
        attentions.append(attention)
        # h_t = GRU(c_t, h_{t-1})
        gates = to_gates(to_context(context))
        recurrent = to_recurrent(state)
        if is_lstm:
            write, forget, cell, out = (gates + recurrent).chunk(4, dim=-1)
            carry = torch.sigmoid(forget) * carry + torch.sigmoid(write) * torch.tanh(cell)
            state = (torch.sigmoid(out) * torch.tanh(carry)).to(state.dtype)
        else:
            state = gru_step(gates, recurrent, state)
        states.append(state)
    return torch.stack(states, dim=2), torch.stack(attentions)


def few_positions(length: int, num_heads: int, width: int, queries: int | None) -> bool:
    """
    Return whether [`AbsorbingAttention`] projects a memory to the queries: `2 num_heads length width` multiplications
    for each query and `2 length width^2` for each source, instead of `2 width^2` for each query. `queries` of a source
    are `None` where the memory serves further steps; fewer than five times the length measured slower.
    """
    return 8 * num_heads * length <= width and (queries is None or queries >= 5 * length)


class AbsorbingAttention(MultiHeadAttention):
    """
    Cross-attention to a memory of few positions. Where these are far fewer than the queries, the projections of the
    queries and of the output are applied to the memory, once per source, instead of to every query:

        (W_q x + b_q) . k_j = x . (W_q^T k_j) + b_q . k_j,     W_o sum_j a_j v_j = sum_j a_j (W_o v_j)   (for each head)

    The parameters and the results are those of [`MultiHeadAttention`].
    """

    read_layers: tuple[str, ...] = ("q_proj", "out_proj")

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        attention_mask: Mask = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.absorbs(hidden_states, key_value_states, cache):
            return super().forward(hidden_states, key_value_states, attention_mask, cache, **kwargs)
        batch_size, query_length, width = hidden_states.shape
        name, project = f"{self.memory}/absorbed", self.absorb_memory
        key, value, attention_mask = read_source_memory(
            name, self.layer_idx, project, key_value_states, attention_mask, cache, batch_size
        )
        query = hidden_states.reshape(key.shape[0], -1, width)
        scores = torch.baddbmm(key[:, -1:], query, key[:, :-1]).unflatten(2, (self.num_heads, -1))
        # The mask's own axes for heads and queries have one element each.
        weights = masked_softmax(scores, visible_positions(self, attention_mask, scores), value.dtype)
        weights = dropout(weights, self.dropout, self.training)  # (num_sources, queries, num_heads, key_length)
        output = torch.baddbmm(self.out_proj.bias.to(value.dtype), weights.flatten(2), value)
        weights = weights.unflatten(1, (-1, query_length)).flatten(0, 1).transpose(1, 2)
        return output.view(batch_size, query_length, self.embed_dim), weights

    def absorbs(self, hidden_states: Tensor, key_value_states: Tensor, cache: Cache | None) -> bool:
        """Return whether the memory is short enough, and used often enough, to be projected instead of the queries."""
        if not (on_cpu(hidden_states) and enabled()):
            return False
        sources, length = key_value_states.shape[:2]
        queries = None if cache is not None else hidden_states.shape[0] // sources * hidden_states.shape[1]
        return (
            few_positions(length, self.num_heads, self.embed_dim, queries)
            and self.config._attn_implementation in ("sdpa", "eager")
            and all(is_plain(self.get_submodule(name), nn.Linear) for name in self.read_layers)
            and (cache is None or (source_memories(cache) is not None and self.layer_idx is not None))
        )

    def absorb_memory(self, key_value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, whose last row is the share of the queries' bias, and values, of all heads side by side."""
        key, value = self.project_memory(key_value_states)  # (num_sources, H, J, D)
        key = key * self.scaling
        by_head = (self.num_heads, self.head_dim)
        wide = torch.einsum("shjd,hdm->smhj", key, self.q_proj.weight.unflatten(0, by_head)).flatten(2)
        constant = torch.matmul(key, self.q_proj.bias.view(*by_head, 1).to(key.dtype)).flatten(1)[:, None]
        value = torch.einsum("shjd,mhd->shjm", value, self.out_proj.weight.unflatten(1, by_head)).flatten(1, 2)
        return torch.cat([wide, constant.to(wide.dtype)], dim=1), value
