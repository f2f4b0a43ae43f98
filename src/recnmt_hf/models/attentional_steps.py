"""
The steps of a recurrent decoder with additive attention (Zhang et al., 2018, Eqs. 2-5, 13), fast; the plain reference
stands with the model.
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from .attention import masked_softmax
from .custom_gradients import CustomGradient, final_gradients
from .fast_paths import wide_linear
from .graph_operators import graph_operator, is_exporting
from .recurrent_layers import scan_steps
from .step_matmuls import StepMatmuls, gru_step, gru_step_backward, without_autocast


class StepWeights(NamedTuple):
    """The parameters that the steps read; `word_weight` and `word_bias` are `None` for RNNsearch."""

    word_weight: Any  # (3 d, d) of the first GRU's state
    word_bias: torch.Tensor | None  # (3 d,)
    query_weight: torch.Tensor  # (d, d)
    score: torch.Tensor  # (d,)
    context_weight: torch.Tensor  # (3 d, d) of the second GRU's state
    context_bias: torch.Tensor  # (3 d,)
    gate_bias: torch.Tensor  # (3 d,) of the second GRU's input


def run_steps(
    recurrence: Any,
    words: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The same as [`run_steps_reference`] with all that can leave the loop outside it: the words' part of the gates is one
    matmul for all steps; keys and values are given. What remains of a step are two or three matmuls with the state,
    the attention's scores, and the elements of the gates. In training the backward pass is written out
    ([`AttentionalSteps`]): gradients of the weights are formed once after all steps, and nothing of the size steps x
    source_length x d_model is kept.

    Returns:
        States `(batch_size, target_length, d_model)` and weights `(batch_size, 1, target_length, source_length)`.
    """
    width, cell = state.shape[-1], recurrence.context_cell
    if recurrence.is_conditional:
        first = recurrence.word_cell
        gates = wide_linear(words.transpose(0, 1), first.weight_ih, first.bias_ih)
    else:
        first = None
        gates = wide_linear(words.transpose(0, 1), cell.weight_ih[:, :width])
    weights = StepWeights(
        None if first is None else first.weight_hh,
        None if first is None else first.bias_hh,
        recurrence.attention.q_proj.weight,
        recurrence.attention.score.weight[0],
        cell.weight_hh,
        cell.bias_hh,
        cell.bias_ih,
    )
    # Under autocast the state and its gates stay in the parameters' type; only matmuls are made in the lower one.
    dtype = cell.weight_hh.dtype
    gates, keys, state = gates.to(dtype), keys.to(dtype), state.to(dtype)
    of_gates = values[..., : 3 * width].to(dtype)
    kept = None if kept is None else (kept != 0).t()[:, :, None]
    states, attention = attentional_states(gates, keys, of_gates, visible, state, kept, *weights)
    return states.transpose(0, 1), attention.transpose(0, 1)[:, None]


def attentional_shapes(gates: torch.Tensor, keys: torch.Tensor, *rest: torch.Tensor | None) -> Any:
    steps, rows = gates.shape[:2]
    return [((steps, rows, keys.shape[2]), keys.dtype), ((steps, rows, keys.shape[1]), keys.dtype)]


@graph_operator(attentional_shapes)
def attentional_states(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """States and attention of all steps; the arguments are those of [`AttentionalSteps`]."""
    if torch.is_grad_enabled() and not is_exporting():
        return list(AttentionalSteps.apply(KeptSteps(), *tensors))
    gates, keys, values, visible, state, kept, *weights = tensors
    found = steps_forward(gates, keys, values, visible, state, kept, StepWeights(*weights))  # type: ignore[arg-type]
    return list(found)


def attend(query: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor | None, score: torch.Tensor) -> torch.Tensor:
    """
    Weights of additive attention.

    Args:
        query (`torch.Tensor` of shape `(num_sources * g, d)`): `W s`.
        keys (`torch.Tensor` of shape `(num_sources, source_length, d)`): `U h_i + b`.

    Returns:
        `torch.Tensor` of shape `(num_sources, g, source_length)`.
    """
    sources, _, width = keys.shape
    energies = query.view(sources, -1, 1, width) + keys[:, None]
    return masked_softmax(torch.matmul(energies.tanh_(), score), visible, keys.dtype)


def step_matmuls(weights: StepWeights, steps: int) -> tuple[Any, StepMatmuls, StepMatmuls]:
    """Of the first GRU's state (`None` for RNNsearch), of the query, and of the second GRU's state."""
    return (
        None if weights.word_weight is None else StepMatmuls(weights.word_weight, weights.word_bias, steps),
        StepMatmuls(weights.query_weight, calls=steps),
        StepMatmuls(weights.context_weight, weights.context_bias, steps),
    )


def steps_forward(
    gates: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    kept: torch.Tensor | None,
    weights: StepWeights,
    saved: list[tuple[torch.Tensor | None, ...]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    All steps without gradients.

    Args:
        gates (`torch.Tensor` of shape `(steps, batch_size, 3 * d)`): The words' part of the (first) GRU's gates.
        keys, values (`torch.Tensor` of shape `(num_sources, source_length, d)` and `(.., 3 * d)`).
        kept (`torch.BoolTensor` of shape `(steps, batch_size, 1)`, *optional*).
        saved (`list`, *optional*): Filled with what [`AttentionalSteps`] needs of each step.

    Returns:
        States `(steps, batch_size, d)` and attention weights `(steps, batch_size, source_length)`.
    """
    _, length, width = keys.shape
    is_conditional = weights.word_weight is not None
    of_word, of_query, of_context = step_matmuls(weights, gates.shape[0])
    states, attentions = [], []

    def advance(gate: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first: tuple[torch.Tensor | None, ...] = (None, None, None)
        middle = state
        if is_conditional:
            recurrent = of_word(state)
            middle, both, new = gru_step(gate, recurrent, state)
            first = (both, new, recurrent[:, 2 * width :].clone() if saved is not None else None)
        query = of_query(middle)
        attention = attend(query, keys, visible, weights.score)
        read = torch.matmul(attention, values).view(-1, 3 * width) + weights.gate_bias
        recurrent = of_context(middle)
        following, both, new = gru_step(read if is_conditional else read + gate, recurrent, middle)
        if saved is not None:
            saved.append((state, middle, query, *first, both, new, recurrent[:, 2 * width :].clone()))
        return following, attention.view(-1, length)

    def one_step(carry: Sequence[torch.Tensor], given: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        following, attention = advance(given[:, : 3 * width], carry[0])
        if kept is not None:
            following = torch.where(given[:, 3 * width :] != 0, following, carry[0])
        return [following], [following, attention]

    with without_autocast(keys.device):
        if is_exporting():  # any number of steps
            given = gates if kept is None else torch.cat([gates, kept.to(gates.dtype)], dim=-1)
            every_state, every_attention = scan_steps(one_step, [state], given)
            return every_state, every_attention
        for j, gate in enumerate(gates.unbind(0)):
            following, attention = advance(gate, state)
            state = following if kept is None else torch.where(kept[j], following, state)
            states.append(state)
            attentions.append(attention)
    return torch.stack(states), torch.stack(attentions)


class KeptSteps:
    """What [`steps_forward`] saved of each step: too many tensors to return them."""

    tensors: tuple[torch.Tensor | None, ...] = ()


class AttentionalSteps(CustomGradient):
    """[`steps_forward`] with its backward pass, which recomputes the attention's energies. Not differentiable twice."""

    @staticmethod
    def forward(
        saved: KeptSteps,
        gates: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor | None,
        state: torch.Tensor,
        kept: torch.Tensor | None,
        *weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps: list[tuple[torch.Tensor | None, ...]] = []
        found = steps_forward(gates, keys, values, visible, state, kept, StepWeights(*weights), steps)  # type: ignore[arg-type]
        saved.tensors = tuple(part for step in steps for part in step)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        saved, gates, keys, values, visible, state, kept, *weights = inputs
        device = keys.device.type
        is_low = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ctx.autocast_dtype = torch.get_autocast_dtype(device) if is_low else None
        ctx.has_steps = bool(saved.tensors)
        parts = saved.tensors if ctx.has_steps else (gates, visible, state)
        ctx.save_for_backward(keys, values, kept, output[1], *weights, *parts)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], saved: KeptSteps, *inputs: Any) -> Any:
        return super().vmap(info, in_dims, KeptSteps(), *inputs)  # of several samples: the backward pass repeats them

    @staticmethod
    def backward(ctx: Any, grad_states: torch.Tensor, grad_attention: torch.Tensor) -> Any:
        compute = functools.partial(AttentionalSteps.gradients, ctx.autocast_dtype, ctx.has_steps)
        with without_autocast(grad_states.device):
            return None, *final_gradients(compute, grad_states, grad_attention, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        autocast_dtype: torch.dtype | None,
        has_steps: bool,
        grad_states: torch.Tensor,
        grad_attention: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: torch.Tensor | None,
        attention: torch.Tensor,
        *rest: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        weights, parts, count = StepWeights(*rest[:7]), rest[7:], len(attention)
        device = keys.device.type
        with nullcontext() if autocast_dtype is None else torch.autocast(device, autocast_dtype):
            of_word, of_query, of_context = step_matmuls(weights, count)
            steps: list[Any] = []
            if not has_steps:
                gates, visible, state = parts
                steps_forward(gates, keys, values, visible, state, kept, weights, steps)
        if has_steps:
            size = len(parts) // count
            steps = [parts[j * size : (j + 1) * size] for j in range(count)]
        sources, length, width = keys.shape
        rows = grad_states.shape[1]
        group = rows // sources
        is_conditional = weights.word_weight is not None
        new = grad_states.new_empty
        grad_gates = new(count, rows, 3 * width)
        grad_first: Any = new(count, rows, 3 * width) if is_conditional else None  # of its recurrent part
        grad_read, grad_second = new(count, rows, 3 * width), new(count, rows, 3 * width)
        grad_queries = new(count, rows, width)
        squares = torch.zeros_like(keys)  # sum over steps of (gradient of the score) * tanh^2
        grad_scores_total = keys.new_zeros(sources, length)
        grad_score_vector = torch.zeros_like(weights.score)
        transposed = values.transpose(1, 2)
        gradient = torch.zeros_like(grad_states[0])
        for j in reversed(range(count)):
            state, middle, query, both1, new1, inner1, both2, new2, inner2 = steps[j]
            gradient = gradient + grad_states[j]
            held = None
            if kept is not None:
                held = gradient.masked_fill(kept[j], 0.0)
                gradient = gradient.masked_fill(~kept[j], 0.0)
            # s_j = GRU(a_j, s~_j)
            grad_middle = gru_step_backward(gradient, middle, both2, new2, inner2, grad_read[j], grad_second[j])
            grad_middle += of_context.backward(grad_second[j])
            # the softmax over e_ij
            weight = attention[j].view(sources, group, length)
            grad_weight = torch.matmul(grad_read[j].view(sources, group, -1), transposed)
            grad_weight += grad_attention[j].view(sources, group, length)
            grad_score = weight * (grad_weight - (weight * grad_weight).sum(dim=-1, keepdim=True))  # (S, g, n)
            # e_ij = v^T tanh(q_j + k_i): d tanh = 1 - tanh^2
            energies = (query.view(sources, group, 1, width) + keys[:, None]).tanh_()  # (S, g, n, d)
            row = grad_score.reshape(rows, 1, length)
            grad_score_vector += torch.matmul(row, energies.view(rows, length, width)).sum(dim=(0, 1))
            energies.square_()
            inner = torch.matmul(row, energies.view(rows, length, width))[:, 0]
            torch.mul(row.sum(dim=-1) - inner, weights.score, out=grad_queries[j])
            if group == 1:
                squares.addcmul_(grad_score.view(sources, length, 1), energies[:, 0])
            else:
                squares += (grad_score[..., None] * energies).sum(dim=1)
            grad_scores_total += grad_score.sum(dim=1)
            grad_middle += of_query.backward(grad_queries[j])
            # s~_j = GRU(y_{j-1}, s_{j-1})
            if is_conditional:
                gradient = gru_step_backward(grad_middle, state, both1, new1, inner1, grad_gates[j], grad_first[j])
                gradient += of_word.backward(grad_first[j])
            else:
                gradient = grad_middle
            if held is not None:
                gradient += held
        grad_keys = (grad_scores_total[:, :, None] - squares) * weights.score
        # All steps' part of the weights in one matmul each.
        middles = torch.stack([step[1] for step in steps])
        if is_conditional:
            grad_word_weight = of_word.weight_gradient(grad_first, torch.stack([step[0] for step in steps]))
            grad_word_bias = grad_first.sum(dim=(0, 1))
        else:
            grad_gates, grad_word_weight, grad_word_bias = grad_read, None, None
        by_source = attention.view(count, sources, group, length).permute(1, 3, 0, 2).flatten(2)  # (S, n, T g)
        grad_reads = grad_read.view(count, sources, group, -1).transpose(0, 1).flatten(1, 2)
        return (
            grad_gates,
            grad_keys,
            torch.matmul(by_source, grad_reads),
            None,
            gradient,
            None,
            grad_word_weight,
            grad_word_bias,
            of_query.weight_gradient(grad_queries, middles),
            grad_score_vector,
            of_context.weight_gradient(grad_second, middles),
            grad_second.sum(dim=(0, 1)),
            grad_read.sum(dim=(0, 1)),
        )
