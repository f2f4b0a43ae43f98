"""
Fast path of VRNMT (Su et al., 2018): the steps of the decoder with attention and latent variables. The plain reference
is in `modeling_vrnmt.py`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .kernels_recurrent_layers import StepMatmuls
from .kernels_rnmt import (
    AttentionGradients,
    SavedSteps,
    StepWeights,
    attend,
    gru_step,
    gru_step_backward,
    map_words,
    step_layers,
    step_matmuls,
    step_weights,
    tanh_,
)
from .kernels_shared import (
    CustomGradient,
    autocast_dtype,
    final_gradients,
    graph_operator,
    is_exporting,
    scan_steps,
    with_autocast,
)


LARGEST_LOG_VARIANCE = 10.0


class LatentWeights(NamedTuple):
    """The parameters of the latent variables; all `None` where these are known before the steps."""

    hidden_weight: torch.Tensor | None  # (g, d) of the query
    moments_weight: torch.Tensor | None  # (2 l, g), or (l, g) without noise
    moments_bias: torch.Tensor | None  # (2 l,) or (l,)
    latent_weight: torch.Tensor | None  # (d, l)
    latent_bias: torch.Tensor | None  # (d,)
    gates_weight: torch.Tensor | None  # (3 d, d) of the second GRU's input u


SIZES = len(StepWeights._fields), len(LatentWeights._fields)
# Tensors before the weights: gates, inputs, noise, keys, values, visible, state, real.
INPUTS = 8


class LatentSteps(NamedTuple):
    """Results of all steps, `(batch_size, steps, ..)`; the last three are `None` without [`LatentWeights`]."""

    states: torch.Tensor
    attention: torch.Tensor  # (batch_size, 1, steps, source_length)
    queries: torch.Tensor | None  # q_j
    moments: torch.Tensor | None  # mean and log-variance, side by side
    latents: torch.Tensor | None  # u_j


def clamped(log_variance: torch.Tensor) -> torch.Tensor:
    """Return a log-variance in a range where its exponential and the inverse of it are finite in half precision."""
    return log_variance.clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)


def draw(moments: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return `z = mean + exp(v / 2) noise` from mean and log-variance v, side by side in `(.., 2 * l)`."""
    mean, log_variance = moments.chunk(2, dim=-1)
    return torch.addcmul(mean, (clamped(log_variance) / 2).exp(), noise)


def run_latent_steps(
    recurrence: Any,
    words: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    token_mask: torch.Tensor | None,
    network: Any,
    inputs: torch.Tensor,
    noise: torch.Tensor | None,
) -> LatentSteps:
    """
    Compute [`~.modeling_vrnmt.run_steps_reference`] with few operations in the loop. The parts of words and target
    words are one matmul for all steps, keys and values are given, and only the `network` (posterior or prior) that the
    latent variable is drawn from runs in the loop. `inputs` `(batch_size, steps, g)` are the words' part of its hidden
    layer; without a network they are the latent variables' part of the second GRU's gates, `(.., 3 * d)`. The backward
    pass ([`LatentAttentionalSteps`]) forms the gradients of the weights after all steps.
    """
    width, cell = state.shape[-1], recurrence.context_cell
    gates, weights = map_words(recurrence, words), step_weights(recurrence)
    latent = LatentWeights(*[None] * SIZES[1])
    reads = 3 * width
    if network is not None:
        maps = [network.mean] if noise is None else [network.mean, network.log_variance]
        latent = LatentWeights(
            network.hidden.weight[:, :width],
            torch.cat([linear.weight for linear in maps]) if len(maps) > 1 else network.mean.weight,
            torch.cat([linear.bias for linear in maps]) if len(maps) > 1 else network.mean.bias,
            recurrence.latent.weight,
            recurrence.latent.bias,
            recurrence.latent_gates.weight,
        )
        reads += inputs.shape[-1]
    # As in RNMT's steps, only matmuls are made in the type of autocast.
    dtype = cell.weight_hh.dtype
    by_step = [gates, inputs.transpose(0, 1), None if noise is None else noise.transpose(0, 1)]
    by_step = [None if tensor is None else tensor.to(dtype) for tensor in by_step]
    real = None if token_mask is None else (token_mask != 0).t()[:, :, None]
    sources = keys.to(dtype), values[..., :reads].to(dtype), visible, state.to(dtype)
    tensors: Any = *by_step, *sources, real
    layers = step_layers(recurrence)
    if layers is None:
        states, attention, *others = latent_states(*tensors, *weights, *latent)
    else:
        states, attention, *others = latent_steps_forward(weights, latent, None, *tensors, layers=layers)
    by_row = [tensor.transpose(0, 1) for tensor in others] or [None] * 3
    return LatentSteps(states.transpose(0, 1), attention.transpose(0, 1)[:, None], *by_row)


def latent_shapes(gates: Any, inputs: Any, noise: Any, keys: torch.Tensor, *rest: torch.Tensor | None) -> Any:
    steps, rows = gates.shape[:2]
    sizes = [keys.shape[2], keys.shape[1]]
    latent = LatentWeights(*rest[-SIZES[1] :])
    if latent.moments_weight is not None:
        sizes += [keys.shape[2], latent.moments_weight.shape[0], keys.shape[2]]
    return [((steps, rows, size), keys.dtype) for size in sizes]


@graph_operator(latent_shapes)
def latent_states(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the results of all steps; the arguments are those of [`LatentAttentionalSteps`]."""
    if torch.is_grad_enabled() and not is_exporting():
        return list(LatentAttentionalSteps.apply(SavedSteps(), *tensors))
    return latent_steps_forward(*weights_of(tensors), None, *tensors[:INPUTS])  # type: ignore[arg-type]


def weights_of(tensors: Sequence[Any]) -> tuple[StepWeights, LatentWeights]:
    """Return the weights among the arguments of [`LatentAttentionalSteps`]."""
    end = INPUTS + SIZES[0]
    return StepWeights(*tensors[INPUTS:end]), LatentWeights(*tensors[end:])


class StepMaps:
    """The matmuls of a step; `None` for those that a model does not have."""

    def __init__(self, weights: StepWeights, latent: LatentWeights, steps: int, layers: Sequence[Any] | None = None):
        def matmuls(weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> Any:
            return None if weight is None else StepMatmuls(weight, bias, steps)

        first: Sequence[Any] = step_matmuls(weights, steps) if layers is None else layers
        self.word, self.query, self.context = first
        self.hidden = matmuls(latent.hidden_weight)
        self.moments = matmuls(latent.moments_weight, latent.moments_bias)
        self.latent = matmuls(latent.latent_weight, latent.latent_bias)
        self.gates = matmuls(latent.gates_weight)


def latent_steps_forward(
    weights: StepWeights,
    latent: LatentWeights,
    saved: list[tuple[torch.Tensor | None, ...]] | None,
    gates: torch.Tensor,
    inputs: torch.Tensor,
    noise: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    real: torch.Tensor | None,
    *,
    layers: Sequence[Any] | None = None,
) -> list[torch.Tensor]:
    """
    Run all steps without gradients, as [`~.kernels_rnmt.steps_forward`] does, with `inputs` and `noise` of
    [`run_latent_steps`], `(steps, batch_size, ..)`. Append to `saved` what [`LatentAttentionalSteps`] needs of each
    step. `layers` are those of a quantized copy. Return states and attention weights, with a network also queries,
    moments and u, `(steps, batch_size, ..)`.
    """
    _, length, width = keys.shape
    maps = StepMaps(weights, latent, gates.shape[0], layers)

    def advance(
        gate: torch.Tensor, given: torch.Tensor, drawn: torch.Tensor | None, state: torch.Tensor
    ) -> list[torch.Tensor]:
        first: tuple[torch.Tensor | None, ...] = (None, None, None)
        middle = state
        if maps.word is not None:
            recurrent = maps.word(state)
            middle, both, new = gru_step(gate, recurrent, state)
            first = (both, new, recurrent[:, 2 * width :].clone() if saved is not None else None)
        query = maps.query(middle)
        attention = attend(query, keys, visible, weights.score)
        reads = torch.matmul(attention, values).view(-1, values.shape[-1])
        added, hidden, value, further = given, None, None, []
        if maps.hidden is not None:
            hidden = tanh_(maps.hidden(middle) + given + reads[:, 3 * width :])
            moments = maps.moments(hidden)
            value = moments if drawn is None else draw(moments, drawn)
            u = tanh_(maps.latent(value))
            added, further = maps.gates(u), [middle, moments, u]
        context = reads[:, : 3 * width] + weights.gate_bias + added
        recurrent = maps.context(middle)
        next_state, both, new = gru_step(context if maps.word is not None else context + gate, recurrent, middle)
        if saved is not None:
            second = (both, new, recurrent[:, 2 * width :].clone())
            saved.append((state, middle, query, *first, *second, hidden, value))
        return [next_state, attention.view(-1, length), *further]

    rows = [tensor for tensor in (gates, inputs, noise, real) if tensor is not None]
    sizes = [tensor.shape[-1] for tensor in rows]

    def scan_step(carry: Sequence[torch.Tensor], row: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        gate, given, *rest = row.split(sizes, dim=-1)
        next_state, *others = advance(gate, given, rest[0] if noise is not None else None, carry[0])
        if real is not None:
            next_state = torch.where(rest[-1] != 0, next_state, carry[0])
        return [next_state], [next_state, *others]

    with with_autocast(keys.device, None):
        if is_exporting():  # any number of steps
            return list(scan_steps(scan_step, [state], torch.cat([row.to(gates.dtype) for row in rows], dim=-1)))
        steps = []
        for j in range(gates.shape[0]):
            results = advance(gates[j], inputs[j], None if noise is None else noise[j], state)
            state = results[0] = results[0] if real is None else torch.where(real[j], results[0], state)
            steps.append(results)
    return [torch.stack(column) for column in zip(*steps, strict=True)]


class LatentAttentionalSteps(CustomGradient):
    """
    [`latent_steps_forward`] with its backward pass, which recomputes the attention's energies. Not differentiable
    twice.
    """

    @staticmethod
    def forward(saved: SavedSteps, *tensors: Any) -> tuple[torch.Tensor, ...]:
        """Run the steps with gates, inputs, noise, keys, values, visible, state, real, and the parameters."""
        steps: list[tuple[torch.Tensor | None, ...]] = []
        results = latent_steps_forward(*weights_of(tensors), steps, *tensors[:INPUTS])
        saved.tensors = tuple(tensor for step in steps for tensor in step)
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        saved, gates, given, noise, keys, values, visible, state, real, *weights = inputs
        ctx.autocast_dtype = autocast_dtype(keys.device)
        ctx.has_steps, ctx.count = bool(saved.tensors), len(output)
        tensors = saved.tensors if ctx.has_steps else (gates, given, visible, state)
        ctx.save_for_backward(noise, keys, values, real, *weights, *output[1:], *tensors)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], saved: SavedSteps, *inputs: Any) -> Any:
        # Steps of several samples are not saved: the backward pass repeats them.
        return super().vmap(info, in_dims, SavedSteps(), *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        compute = functools.partial(LatentAttentionalSteps.gradients, ctx.autocast_dtype, ctx.has_steps, ctx.count)
        with with_autocast(gradients[0].device, None):
            return None, *final_gradients(compute, *gradients, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        autocast: torch.dtype | None, has_steps: bool, results: int, *tensors: Any
    ) -> tuple[torch.Tensor | None, ...]:
        (grad_states, grad_attention, *grad_others), rest = tensors[:results], tensors[results:]
        (noise, keys, values, real), rest = rest[:4], rest[4:]
        weights, latent = StepWeights(*rest[: SIZES[0]]), LatentWeights(*rest[SIZES[0] : sum(SIZES)])
        (attention, *others), saved = rest[sum(SIZES) :][: results - 1], rest[sum(SIZES) + results - 1 :]
        count = len(attention)
        with with_autocast(keys.device, autocast):
            maps = StepMaps(weights, latent, count)
            steps: list[Any] = []
            if not has_steps:
                gates, given, visible, state = saved
                latent_steps_forward(weights, latent, steps, gates, given, noise, keys, values, visible, state, real)
        if has_steps:
            size = len(saved) // count
            steps = [saved[j * size : (j + 1) * size] for j in range(count)]
        rows, width, new = grad_states.shape[1], keys.shape[2], grad_states.new_empty
        grad_first: Any = new(count, rows, 3 * width) if maps.word is not None else None  # of its recurrent part
        grad_gates: Any = new(count, rows, 3 * width) if maps.word is not None else None
        grad_second, grad_queries = new(count, rows, 3 * width), new(count, rows, width)
        grad_reads = new(count, rows, values.shape[-1])  # of the second GRU's gates and of the hidden layer
        grad_context, grad_hidden = grad_reads[..., : 3 * width], grad_reads[..., 3 * width :]
        grad_moments: Any = torch.empty_like(others[1]) if others else None
        grad_latents: Any = torch.empty_like(others[2]) if others else None  # before the tanh
        attention_gradients = AttentionGradients(keys, values, weights.score)
        gradient = torch.zeros_like(grad_states[0])
        for j in reversed(range(count)):
            state, middle, query, both1, new1, inner1, both2, new2, inner2, hidden, _ = steps[j]
            gradient = gradient + grad_states[j]
            skipped = None
            if real is not None:
                skipped = gradient.masked_fill(real[j], 0.0)
                gradient = gradient.masked_fill(~real[j], 0.0)
            # s_j = GRU([a_j; u_j], s~_j)
            grad_middle = gru_step_backward(gradient, middle, both2, new2, inner2, grad_context[j], grad_second[j])
            grad_middle += maps.context.backward(grad_second[j])
            if hidden is not None:
                grad_moment = latent_gradients(
                    maps, grad_context[j], grad_others[2][j], others[1][j], others[2][j], noise, j, grad_latents[j]
                )
                torch.add(grad_moment, grad_others[1][j], out=grad_moments[j])
                torch.mul(maps.moments.backward(grad_moments[j]), 1 - hidden * hidden, out=grad_hidden[j])
                grad_middle += maps.hidden.backward(grad_hidden[j])
                grad_middle += grad_others[0][j]
            attention_gradients.add_step(
                query, attention[j], grad_reads[j], grad_attention[j], grad_query=grad_queries[j]
            )
            grad_middle += maps.query.backward(grad_queries[j])
            # s~_j = GRU(y_{j-1}, s_{j-1})
            if maps.word is not None:
                gradient = gru_step_backward(grad_middle, state, both1, new1, inner1, grad_gates[j], grad_first[j])
                gradient += maps.word.backward(grad_first[j])
            else:
                gradient = grad_middle
            if skipped is not None:
                gradient += skipped
        # All steps' part of the weights in one matmul each.
        middles = torch.stack([step[1] for step in steps])
        grad_word = (None, None)
        if maps.word is not None:
            states = torch.stack([step[0] for step in steps])
            grad_word = (maps.word.weight_gradient(grad_first, states), grad_first.sum(dim=(0, 1)))
        grad_latent: tuple[torch.Tensor | None, ...] = (None,) * SIZES[1]
        if others:
            hidden, drawn = (torch.stack([step[index] for step in steps]) for index in (-2, -1))
            grad_latent = (
                maps.hidden.weight_gradient(grad_hidden, middles),
                maps.moments.weight_gradient(grad_moments, hidden),
                grad_moments.sum(dim=(0, 1)),
                maps.latent.weight_gradient(grad_latents, drawn),
                grad_latents.sum(dim=(0, 1)),
                maps.gates.weight_gradient(grad_context, others[2]),
            )
        return (
            grad_context if grad_gates is None else grad_gates,
            grad_hidden if others else grad_context,
            None,
            attention_gradients.of_keys(),
            attention_gradients.of_values(attention, grad_reads),
            None,
            gradient,
            None,
            *grad_word,
            maps.query.weight_gradient(grad_queries, middles),
            attention_gradients.of_score,
            maps.context.weight_gradient(grad_second, middles),
            grad_second.sum(dim=(0, 1)),
            grad_context.sum(dim=(0, 1)),
            *grad_latent,
        )


def latent_gradients(
    maps: StepMaps,
    grad_gates: torch.Tensor,
    grad_u: torch.Tensor,
    moments: torch.Tensor,
    u: torch.Tensor,
    noise: torch.Tensor | None,
    step: int,
    grad_latent: torch.Tensor,
) -> torch.Tensor:
    """
    Return the gradient of a step's moments from those of the second GRU's gates and of `u = tanh(W_z z + b_z)`. Fill
    `grad_latent`, that of `W_z z + b_z`.
    """
    torch.mul(maps.gates.backward(grad_gates) + grad_u, 1 - u * u, out=grad_latent)
    grad_value = maps.latent.backward(grad_latent)
    if noise is None:
        return grad_value
    log_variance = moments.chunk(2, dim=-1)[1]
    inside = log_variance.abs() <= LARGEST_LOG_VARIANCE
    spread = (clamped(log_variance) / 2).exp() * noise[step] / 2
    return torch.cat([grad_value, grad_value * spread * inside], dim=-1)
