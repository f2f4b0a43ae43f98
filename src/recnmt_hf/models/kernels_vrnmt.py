"""
Fast path of VRNMT (Su et al., 2018): the steps of the decoder with attention and latent variables. The plain reference
is in `modeling_vrnmt.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels_recurrent_layers import StepMatmuls
from .kernels_rnmt import differentiable_steps, map_words, step_layers, step_weights, steps_forward, tanh_
from .kernels_shared import graph_operator


LARGEST_LOG_VARIANCE = 10.0


class LatentWeights(NamedTuple):
    """The parameters of the latent variables; all `None` where these are known before the steps."""

    hidden_weight: Tensor | None  # (g, d) of the query
    moments_weight: Tensor | None  # (2 l, g), or (l, g) without noise
    moments_bias: Tensor | None  # (2 l,) or (l,)
    latent_weight: Tensor | None  # (d, l)
    latent_bias: Tensor | None  # (d,)
    gates_weight: Tensor | None  # (3 d, d) of the second GRU's input u


LATENT_WEIGHTS = len(LatentWeights._fields)


def clamped(log_variance: Tensor) -> Tensor:
    """Return a log-variance in a range where its exponential and the inverse of it are finite in half precision."""
    return log_variance.clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)


def draw(moments: Tensor, noise: Tensor) -> Tensor:
    """Return `z = mean + exp(v / 2) noise` from mean and log-variance v, side by side in `(.., 2 * l)`."""
    mean, log_variance = moments.chunk(2, dim=-1)
    return torch.addcmul(mean, (clamped(log_variance) / 2).exp(), noise)


def run_latent_steps(
    recurrence: Any,
    words: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    state: Tensor,
    token_mask: Tensor | None,
    network: Any,
    inputs: Tensor,
    noise: Tensor | None,
) -> list[Tensor]:
    """
    Compute [`~.modeling_vrnmt.run_steps_reference`] with few operations in the loop. The parts of words and target
    words are one matmul for all steps, keys and values are given, and only the `network` (posterior or prior) that the
    latent variable is drawn from runs in the loop. `inputs` `(batch_size, steps, g)` are the words' part of its hidden
    layer; without a network they are the latent variables' part of the second GRU's gates, `(.., 3 * d)`. The backward
    pass ([`~.kernels_rnmt.AttentionalSteps`]) forms the gradients of the weights after all steps.

    Return states, attention weights `(batch_size, 1, steps, source_length)`, and with a network q_j, mean and
    log-variance side by side, and u_j; all but the weights are `(batch_size, steps, ..)`.
    """
    width, cell = state.shape[-1], recurrence.context_cell
    gates, weights = map_words(recurrence, words), step_weights(recurrence)
    latent = LatentWeights(*[None] * LATENT_WEIGHTS)
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
    gates, inputs = gates.to(dtype), inputs.transpose(0, 1).to(dtype)
    noise = None if noise is None else noise.transpose(0, 1).to(dtype)
    real = None if token_mask is None else (token_mask != 0).t()[:, :, None]
    sources = keys.to(dtype), values[..., :reads].to(dtype), visible, state.to(dtype), real
    tensors = gates, *sources, *weights, inputs, noise, *latent
    layers = step_layers(recurrence)
    results = latent_states(*tensors) if layers is None else steps_forward(tensors, further=LatentPart, maps=layers)
    states, attention, *others = (tensor.transpose(0, 1) for tensor in results)
    return [states, attention[:, None], *others]


def latent_shapes(gates: Any, keys: Tensor, *rest: Tensor | None) -> Any:
    steps, rows = gates.shape[:2]
    sizes = [keys.shape[2], keys.shape[1]]
    latent = LatentWeights(*rest[-LATENT_WEIGHTS:])
    if latent.moments_weight is not None:
        sizes += [keys.shape[2], latent.moments_weight.shape[0], keys.shape[2]]
    return [((steps, rows, size), keys.dtype) for size in sizes]


@graph_operator(latent_shapes)
def latent_states(*tensors: Tensor | None) -> list[Tensor]:
    """Return the results of all steps; the arguments are the tensors of [`~.kernels_rnmt.steps_forward`]."""
    return differentiable_steps(tensors, LatentPart)


class LatentPart:
    """
    The latent variables in [`~.kernels_rnmt.steps_forward`]: a part of the second GRU's gates. The tensors are `inputs`
    and `noise` of [`run_latent_steps`], `(steps, batch_size, ..)`, and the [`LatentWeights`].
    """

    def __init__(self, inputs: Tensor | None, noise: Tensor | None, *weights: Any):
        def matmuls(weight: Tensor | None, bias: Tensor | None = None) -> Any:
            return None if weight is None else StepMatmuls(weight, bias)

        self.inputs = [tensor for tensor in (inputs, noise) if tensor is not None]
        latent = LatentWeights(*weights)
        self.hidden = matmuls(latent.hidden_weight)
        self.moments = matmuls(latent.moments_weight, latent.moments_bias)
        self.latent = matmuls(latent.latent_weight, latent.latent_bias)
        self.gates = matmuls(latent.gates_weight)

    def step(
        self, query: Tensor, reads: Tensor, given: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], tuple[Tensor | None, ...]]:
        """Return a step's part of the gates, the results query, moments and u, and what the backward pass needs."""
        if self.hidden is None:
            return given, [], ()
        hidden = tanh_(self.hidden(query) + given + reads)
        moments = self.moments(hidden)
        value = moments if noise is None else draw(moments, noise)
        u = tanh_(self.latent(value))
        return self.gates(u), [query, moments, u], (hidden, value, noise)

    def start_backward(
        self, results: Sequence[Tensor], gradients: Sequence[Tensor], grad_gates: Tensor, grad_hidden: Tensor
    ) -> None:
        """Take the results of all steps with their gradients, and those of gates and hidden layer, which steps fill."""
        self.grad_gates, self.grad_hidden = grad_gates, grad_hidden
        if self.hidden is not None:
            _, self.all_moments, self.all_u = results
            self.of_queries, self.of_moments, self.of_u = gradients
            self.grad_moments, self.grad_latents = map(torch.empty_like, results[1:])  # of u before the tanh

    def step_backward(self, j: int, grad_query: Tensor, saved: Sequence[Any]) -> None:
        """Fill the gradients of a step, from that of the second GRU's gates, and add its part to `grad_query`."""
        if self.hidden is None:
            return
        hidden, _, noise = saved
        # u_j = tanh(W_z z_j + b_z)
        u = self.all_u[j]
        torch.mul(self.gates.backward(self.grad_gates[j]) + self.of_u[j], 1 - u * u, out=self.grad_latents[j])
        grad_moment = self.latent.backward(self.grad_latents[j])
        if noise is not None:
            # z_j = mu_j + exp(v_j / 2) e_j
            log_variance = self.all_moments[j].chunk(2, dim=-1)[1]
            inside = log_variance.abs() <= LARGEST_LOG_VARIANCE
            spread = (clamped(log_variance) / 2).exp() * noise / 2
            grad_moment = torch.cat([grad_moment, grad_moment * spread * inside], dim=-1)
        torch.add(grad_moment, self.of_moments[j], out=self.grad_moments[j])
        torch.mul(self.moments.backward(self.grad_moments[j]), 1 - hidden * hidden, out=self.grad_hidden[j])
        grad_query += self.hidden.backward(self.grad_hidden[j])
        grad_query += self.of_queries[j]

    def gradients(self, queries: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the gradients of all tensors, from all steps' queries and saved tensors."""
        if self.hidden is None:
            return self.grad_gates, None, *[None] * LATENT_WEIGHTS
        hidden, values = (torch.stack([step[place] for step in saved]) for place in (0, 1))
        return (
            self.grad_hidden,
            None,
            self.hidden.weight_gradient(self.grad_hidden, queries),
            self.moments.weight_gradient(self.grad_moments, hidden),
            self.grad_moments.sum(dim=(0, 1)),
            self.latent.weight_gradient(self.grad_latents, values),
            self.grad_latents.sum(dim=(0, 1)),
            self.gates.weight_gradient(self.grad_gates, self.all_u),
        )
