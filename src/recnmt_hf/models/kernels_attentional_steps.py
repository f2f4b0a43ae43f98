"""
Fast path of recurrent decoders with additive attention: their steps (Zhang et al., 2018, Eqs. 2-5, 13). The plain
reference is in `modeling_rnmt.py`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .additive_attention import AttentionGradients, attend, tanh_, values_gradient
from .kernels_cpu_matmuls import StepMatmuls, fast_linear, project
from .kernels_shared import (
    Mask,
    OnceDifferentiable,
    autocast_dtype,
    graph_operator,
    is_exporting,
    scan_steps,
    wide_type,
    with_autocast,
)
from .kernels_triton import runs_triton, sample, with_gradients
from .kernels_triton_attentional_steps import run_backward, run_forward


# Most source positions of the Triton kernels.
LONGEST = 1024


class StepWeights(NamedTuple):
    """The parameters that the steps read; `word_weight` and `word_bias` are `None` for RNNsearch."""

    word_weight: Any  # (3 d, d) of the first GRU's state
    word_bias: Tensor | None  # (3 d,)
    query_weight: Tensor  # (d, d)
    score: Tensor  # (d,)
    context_weight: Tensor  # (3 d, d) of the second GRU's state
    context_bias: Tensor  # (3 d,)
    gate_bias: Tensor  # (3 d,) of the second GRU's input


STEP_WEIGHTS = len(StepWeights._fields)
# Places of the tensors that only [`steps_forward`] reads: gates, visible, state, two inputs of a further part.
READ_BY_STEPS = (0, 3, 4, 6 + STEP_WEIGHTS, 7 + STEP_WEIGHTS)


def run_steps(
    recurrence: Any,
    words: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Mask,
    state: Tensor,
    token_mask: Mask,
    *further_tensors: Tensor | None,
    further: Any = None,
) -> list[Tensor]:
    """
    Compute [`~.modeling_rnmt.run_steps_reference`] with few operations in the loop: the words' part of the gates is one
    matmul, keys and values are given. The backward pass ([`AttentionalSteps`]) forms the gradients of the weights after
    all steps, and no tensor of the size steps x source_length x d_model is stored. A class `further` adds a part to
    each step ([`steps_forward`]); its `run` is the graph operator.

    Return states, attention weights `(batch_size, 1, steps, source_length)`, and the results of `further`.
    """
    cell, attention, layers = recurrence.context_cell, recurrence.attention, recurrence.step_layers
    first = recurrence.word_cell if recurrence.is_conditional else None
    words, maps = words.transpose(0, 1), None
    if layers is not None:  # a quantized copy
        gates = project(layers["words"], words)
        maps = [dict(layers.items()).get(name) for name in ("state", "query", "context")]
    elif first is not None:
        gates = fast_linear(words, first.weight_ih, first.bias_ih)
    else:
        gates = fast_linear(words, cell.weight_ih[:, : words.shape[-1]])
    # Under autocast the state and its gates stay in the parameters' type; only matmuls are made in the lower one.
    dtype = cell.weight_hh.dtype
    tensors = (
        gates.to(dtype),
        keys.to(dtype),
        values.to(dtype),
        visible,
        state.to(dtype),
        None if token_mask is None else (token_mask != 0).t()[:, :, None],
        *((None, None) if first is None else (first.weight_hh, first.bias_hh)),
        attention.q_proj.weight,
        attention.score.weight[0],
        cell.weight_hh,
        cell.bias_hh,
        cell.bias_ih,
        *further_tensors,
    )
    run = attentional_states if further is None else further.run
    results = run(*tensors) if maps is None else steps_forward(tensors, further=further, maps=maps)
    states, weights, *others = (tensor.transpose(0, 1) for tensor in results)
    return [states, weights[:, None], *others]


@graph_operator(lambda gates, keys, *rest: [((*gates.shape[:2], keys.shape[i]), keys.dtype) for i in (2, 1)])
def attentional_states(*tensors: Tensor | None) -> list[Tensor]:
    """Return states and attention of all steps; the arguments are the tensors of [`steps_forward`]."""
    return differentiable_steps(tensors)


def differentiable_steps(tensors: Sequence[Any], further: Any = None) -> list[Tensor]:
    """
    Run [`steps_forward`], as [`AttentionalSteps`] where gradients are needed: all but the matmuls in float32, since
    roundings add up over the steps.
    """
    if not torch.is_grad_enabled() or is_exporting():
        return steps_forward(tensors, further=further)
    device, dtype = tensors[1].device, tensors[1].dtype
    wide = wide_type(dtype)
    tensors = [tensor.to(wide) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors]
    with with_autocast(device, autocast_dtype(device) if dtype == wide else dtype):
        return [result.to(dtype) for result in AttentionalSteps.apply(SavedSteps(further), *tensors)]


def step_matmuls(weights: StepWeights) -> tuple[Any, StepMatmuls, StepMatmuls]:
    """Return the matmuls of the first GRU's state (`None` for RNNsearch), the query, and the second GRU's state."""
    return (
        None if weights.word_weight is None else StepMatmuls(weights.word_weight, weights.word_bias),
        StepMatmuls(weights.query_weight),
        StepMatmuls(weights.context_weight, weights.context_bias),
    )


def runs_kernels(keys: Tensor, values: Tensor, states: Tensor, further: Any) -> bool:
    """Return whether Triton kernels compute the steps with keys, values and states, and those of `further`."""
    name, own = ("additive attention", example) if further is None else (further.__name__, further.example)
    # Shapes are read late, since that makes conditions of an exported graph.
    return runs_triton(name, own, keys, values, states) and keys.shape[1] <= LONGEST


def example(*place: Any) -> list[Tensor]:
    """Return the results and gradients of a few steps for `runs_triton`."""
    shapes: Any = [(3, 4, 60), (2, 5, 20), (2, 5, 60), None, (4, 20), None, (60, 20), (60,), (20, 20), (20,)]
    shapes += [(60, 20), (60,), (60,)]
    tensors = [None if shape is None else sample(*place, *shape) for shape in shapes]
    return with_gradients(differentiable_steps(tensors), [tensor for tensor in tensors if tensor is not None])


def steps_forward(
    tensors: Sequence[Any], saved: list[Any] | None = None, further: Any = None, maps: Sequence[Any] | None = None
) -> list[Tensor]:
    """
    Run all steps without gradients. The `tensors` are the words' part of the (first) GRU's gates `(steps, batch_size,
    3 * d)`, keys, values, which keys are visible, the first state, `real` `(steps, batch_size, 1)`, which is `False`
    where the state does not change, the parameters of [`StepWeights`], and those of `further`, a class for a part of
    each step between attention and second GRU, such as [`~.kernels_vrnmt.LatentPart`].

    Append to `saved` what [`AttentionalSteps`] needs of each step. `maps` replaces [`step_matmuls`]. Return states,
    attention weights and results of `further`, `(steps, batch_size, ..)`.
    """
    gates, keys, values, visible, state, real, *rest = tensors
    weights = StepWeights(*rest[:STEP_WEIGHTS])
    part = None if further is None else further(*rest[STEP_WEIGHTS:])
    _, length, width = keys.shape
    is_conditional = weights.word_weight is not None
    if maps is None and runs_kernels(keys, values, state, further):
        low = autocast_dtype(keys.device) or keys.dtype
        with with_autocast(keys.device, None):
            return run_forward(tensors, weights, part, low, saved)
    map_word, map_query, map_context = step_matmuls(weights) if maps is None else maps
    inputs = [gates, *([] if part is None else part.inputs), *([] if real is None else [real])]

    def step(carry: Sequence[Tensor], gate: Tensor, *given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        (state,) = carry
        first: tuple[Tensor | None, ...] = (None, None, None)
        middle = state
        if is_conditional:
            recurrent = map_word(state)
            middle, both, new = gru_step(gate, recurrent, state)
            first = (both, new, recurrent[:, 2 * width :].clone() if saved is not None else None)
        query = map_query(middle)
        attention = attend(query, keys, visible, weights.score)
        reads = torch.matmul(attention, values).view(-1, values.shape[-1])
        results, kept = [], ()
        if part is None:
            context = reads + weights.gate_bias
        else:
            added, results, kept = part.step(middle, reads[:, 3 * width :], *given[: len(part.inputs)])
            context = reads[:, : 3 * width] + weights.gate_bias + added
        recurrent = map_context(middle)
        next_state, both, new = gru_step(context if is_conditional else context + gate, recurrent, middle)
        if saved is not None:
            saved.append((state, middle, query, *first, both, new, recurrent[:, 2 * width :].clone(), *kept))
        if real is not None:
            next_state = torch.where(given[-1], next_state, state)
        return [next_state], [next_state, attention.view(-1, length), *results]

    with with_autocast(keys.device, None):
        return scan_steps(step, [state], *inputs)


@dataclass
class SavedSteps:
    """The argument `further` of [`steps_forward`], and the tensors saved for each step, too many to return them."""

    further: Any = None
    steps: list[tuple[Tensor | None, ...]] = field(default_factory=list)


class AttentionalSteps(OnceDifferentiable):
    """[`steps_forward`] with its backward pass, which recomputes the attention's energies."""

    @staticmethod
    def forward(saved: SavedSteps, *tensors: Any) -> tuple[Tensor, ...]:
        return tuple(steps_forward(tensors, saved.steps, saved.further))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        saved, *tensors = inputs
        ctx.autocast_dtype = autocast_dtype(tensors[1].device)
        ctx.further, ctx.sizes = saved.further, [len(output), len(tensors), len(output) - 1, *map(len, saved.steps)]
        if saved.steps:
            tensors = [None if place in READ_BY_STEPS else tensor for place, tensor in enumerate(tensors)]
        ctx.save_for_backward(*tensors, *output[1:], *itertools.chain(*saved.steps))

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], saved: SavedSteps, *inputs: Any) -> Any:
        # Steps of several samples are not saved: the backward pass repeats them.
        return super().vmap(info, in_dims, SavedSteps(saved.further), *inputs)

    @staticmethod
    def gradients(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        rest, further = iter(given), ctx.further
        gradients, tensors, (attention, *others), *steps = [list(itertools.islice(rest, size)) for size in ctx.sizes]
        grad_states, grad_attention, *grad_others = gradients
        _, keys, values, _, _, real, *parameters = tensors
        weights, count = StepWeights(*parameters[:STEP_WEIGHTS]), len(attention)
        with with_autocast(keys.device, ctx.autocast_dtype):
            map_word, map_query, map_context = step_matmuls(weights)
            part: Any = None if further is None else further(*parameters[STEP_WEIGHTS:])
            if not steps:
                steps_forward(tensors, steps, further)
            low = autocast_dtype(keys.device) or keys.dtype
        if runs_kernels(keys, values, grad_states, further):
            return None, *run_backward(steps, gradients, tensors, weights, part, low, attention, others)
        rows, width = grad_states.shape[1], keys.shape[2]
        is_conditional = weights.word_weight is not None
        new = grad_states.new_empty
        grad_gates: Any = new(count, rows, 3 * width) if is_conditional else None
        grad_first: Any = new(count, rows, 3 * width) if is_conditional else None  # of its recurrent part
        grad_second, grad_queries = new(count, rows, 3 * width), new(count, rows, width)
        grad_reads = new(count, rows, values.shape[-1])
        grad_context = grad_reads[..., : 3 * width]
        attention_gradients = AttentionGradients(keys, values, weights.score)
        if part is not None:
            part.start_backward(others, grad_others, grad_context, grad_reads[..., 3 * width :])
        gradient = torch.zeros_like(grad_states[0])
        for j in reversed(range(count)):
            state, middle, query, both1, new1, inner1, both2, new2, inner2, *kept = steps[j]
            gradient = gradient + grad_states[j]
            skipped = None
            if real is not None:
                skipped = gradient.masked_fill(real[j], 0.0)
                gradient = gradient.masked_fill(~real[j], 0.0)
            # s_j = GRU(a_j, s~_j)
            grad_middle = gru_step_backward(gradient, middle, both2, new2, inner2, grad_context[j], grad_second[j])
            grad_middle += map_context.backward(grad_second[j])
            if part is not None:
                part.step_backward(j, grad_middle, kept)
            attention_gradients.add_step(query, attention[j], grad_reads[j], grad_attention[j], grad_queries[j])
            grad_middle += map_query.backward(grad_queries[j])
            # s~_j = GRU(y_{j-1}, s_{j-1})
            if is_conditional:
                gradient = gru_step_backward(grad_middle, state, both1, new1, inner1, grad_gates[j], grad_first[j])
                gradient += map_word.backward(grad_first[j])
            else:
                gradient = grad_middle
            if skipped is not None:
                gradient += skipped
        # All steps' part of the weights in one matmul each.
        middles = torch.stack([step[1] for step in steps])
        if is_conditional:
            grad_word_weight = map_word.weight_gradient(grad_first, torch.stack([step[0] for step in steps]))
            grad_word_bias = grad_first.sum(dim=(0, 1))
        else:
            grad_gates, grad_word_weight, grad_word_bias = grad_context, None, None
        return (
            None,
            grad_gates,
            attention_gradients.slopes * weights.score,
            values_gradient(keys.shape[0], attention, grad_reads),
            None,
            gradient,
            None,
            grad_word_weight,
            grad_word_bias,
            map_query.weight_gradient(grad_queries, middles),
            attention_gradients.of_score,
            map_context.weight_gradient(grad_second, middles),
            grad_second.sum(dim=(0, 1)),
            grad_context.sum(dim=(0, 1)),
            *(() if part is None else part.gradients(middles, [step[9:] for step in steps])),
        )


def gru_step(gates: Tensor, recurrent: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    Compute a GRU from `gates`, `W x + b`, and `recurrent`, `U h + b'`, of r, z and n, both `(batch_size, 3 * d)`:
    `r, z = sigmoid(..)`, `n = tanh(W x + b + r (U h + b'))`, `h' = (1 - z) n + z h`. Return h', `[r; z]` and n.
    """
    width = state.shape[-1]
    both = torch.sigmoid(gates[:, : 2 * width] + recurrent[:, : 2 * width])
    new = tanh_(torch.addcmul(gates[:, 2 * width :], both[:, :width], recurrent[:, 2 * width :]))
    return torch.lerp(new, state, both[:, width:]), both, new


def gru_step_backward(
    gradient: Tensor,
    state: Tensor,
    both: Tensor,
    new: Tensor,
    recurrent: Tensor,
    grad_gates: Tensor,
    grad_recurrent: Tensor,
) -> Tensor:
    """Fill the gradients of both arguments of [`gru_step`]; return the old state's part outside `recurrent` (of n)."""
    width = state.shape[-1]
    reset, update = both[:, :width], both[:, width:]
    through_new = gradient * (1 - update) * (1 - new * new)
    grad_gates[:, 2 * width :] = through_new
    torch.mul(through_new, recurrent, out=grad_gates[:, :width])
    torch.mul(gradient, state - new, out=grad_gates[:, width : 2 * width])
    grad_gates[:, : 2 * width] *= both * (1 - both)
    grad_recurrent[:, : 2 * width] = grad_gates[:, : 2 * width]
    torch.mul(through_new, reset, out=grad_recurrent[:, 2 * width :])
    return gradient * update
