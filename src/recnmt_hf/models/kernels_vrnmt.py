"""
Fast path of VRNMT (Su et al., 2018): the steps of the decoder with attention and latent variables. The plain reference
is in `modeling_vrnmt.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .additive_attention import tanh_
from .kernels_attentional_steps import differentiable_steps
from .kernels_cpu_matmuls import StepMatmuls
from .kernels_shared import graph_operator
from .kernels_triton import sample, with_gradients
from .kernels_triton_vrnmt import LARGEST_LOG_VARIANCE, draw_gradient, draw_on_gpu


class LatentWeights(NamedTuple):
    """The parameters of the latent variables; all `None` where these are known before the steps."""

    hidden_weight: Tensor | None  # (g, d) of the query
    moments_weight: Tensor | None  # (2 l, g), or (l, g) without noise
    moments_bias: Tensor | None  # (2 l,) or (l,)
    latent_weight: Tensor | None  # (d, l)
    latent_bias: Tensor | None  # (d,)
    gates_weight: Tensor | None  # (3 d, d) of the second GRU's input u

    @classmethod
    def of(cls, recurrence: Any, network: Any, draws: bool) -> "LatentWeights":
        """Return the parameters of a recurrence and of the `network` that `draws` (or whose mean is taken), if any."""
        if network is None:
            return cls(None, None, None, None, None, None)
        weight, bias, latent = network.mean.weight, network.mean.bias, recurrence.latent
        if draws:
            weight = torch.cat([weight, network.log_variance.weight])
            bias = torch.cat([bias, network.log_variance.bias])
        query = network.hidden.weight[:, : latent.weight.shape[0]]
        return cls(query, weight, bias, latent.weight, latent.bias, recurrence.latent_gates.weight)


LATENT_WEIGHTS = len(LatentWeights._fields)


def clamped(log_variance: Tensor) -> Tensor:
    """Return a log-variance in a range where its exponential and the inverse of it are finite in half precision."""
    return log_variance.clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)


def draw(moments: Tensor, noise: Tensor) -> Tensor:
    """Return `z = mean + exp(v / 2) noise` from mean and log-variance v, side by side in `(.., 2 * l)`."""
    mean, log_variance = moments.chunk(2, dim=-1)
    return torch.addcmul(mean, (clamped(log_variance) / 2).exp(), noise)


def latent_shapes(gates: Tensor, keys: Tensor, *rest: Tensor | None) -> Any:
    sizes = [keys.shape[2], keys.shape[1]]
    latent = LatentWeights(*rest[-LATENT_WEIGHTS:])
    if latent.moments_weight is not None:
        sizes += [keys.shape[2], latent.moments_weight.shape[0], keys.shape[2]]
    return [((*gates.shape[:2], size), keys.dtype) for size in sizes]


@graph_operator(latent_shapes)
def latent_states(*tensors: Tensor | None) -> list[Tensor]:
    """Return the results of all steps for the tensors of [`~.kernels_attentional_steps.steps_forward`]."""
    return differentiable_steps(tensors, LatentPart)


class LatentPart:
    """
    The latent variables in [`~.kernels_attentional_steps.steps_forward`]: a part of the second GRU's gates. Only the
    network (posterior or prior) that they are drawn from runs in the loop. `inputs` `(steps, batch_size, g)` are the
    words' and target words' part of its hidden layer, or without a network the latent variables' part of the gates,
    `(.., 3 * d)`; `noise` is `(steps, batch_size, l)`. The results are q_j, mean and log-variance side by side, u_j.
    """

    run = staticmethod(latent_states)

    def __init__(self, inputs: Tensor | None, noise: Tensor | None, *weights: Any):
        def matmuls(weight: Tensor | None, bias: Tensor | None = None) -> Any:
            return None if weight is None else StepMatmuls(weight, bias)

        self.inputs = [tensor for tensor in (inputs, noise) if tensor is not None]
        latent = LatentWeights(*weights)
        self.hidden = matmuls(latent.hidden_weight)
        self.moments = matmuls(latent.moments_weight, latent.moments_bias)
        self.latent = matmuls(latent.latent_weight, latent.latent_bias)
        self.gates = matmuls(latent.gates_weight)

    @staticmethod
    def example(*place: Any) -> list[Tensor]:
        """Return the results and gradients of a few steps for `runs_triton`."""
        shapes: Any = [(3, 4, 60), (2, 5, 20), (2, 5, 72), None, (4, 20), None, (60, 20), (60,), (20, 20), (20,)]
        shapes += [(60, 20), (60,), (60,)]  # then those of this part
        shapes += [(3, 4, 12), (3, 4, 6), (12, 20), (12, 12), (12,), (20, 6), (20,), (60, 20)]
        tensors = [None if shape is None else sample(*place, *shape) for shape in shapes]
        inputs = [tensor for index, tensor in enumerate(tensors) if tensor is not None and index != 14]  # not the noise
        return with_gradients(latent_states(*tensors), inputs)

    def step(
        self, query: Tensor, reads: Tensor, given: Tensor, noise: Tensor | None = None, mapped: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], tuple[Tensor | None, ...]]:
        """
        Return a step's part of the gates, the results query, moments and u, and what the backward pass needs. With the
        query's part `mapped` of the hidden layer, kernels for GPUs draw.
        """
        if self.hidden is None:
            return given, [], ()
        hidden = tanh_((self.hidden(query) if mapped is None else mapped) + given + reads)
        moments = self.moments(hidden)
        value = moments if noise is None else (draw if mapped is None else draw_on_gpu)(moments, noise)
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

    def step_backward(self, j: int, grad_query: Tensor | None, saved: Sequence[Any]) -> None:
        """
        Fill the gradients of a step, from that of the second GRU's gates, and add its part to `grad_query`; without it,
        that part is left out and kernels for GPUs are used.
        """
        if self.hidden is None:
            return
        hidden, _, noise = saved
        # u_j = tanh(W_z z_j + b_z)
        u, moments = self.all_u[j], self.all_moments[j]
        torch.mul(self.gates.backward(self.grad_gates[j]) + self.of_u[j], 1 - u * u, out=self.grad_latents[j])
        grad_moment = self.latent.backward(self.grad_latents[j])
        if noise is not None and grad_query is None:
            draw_gradient(grad_moment, self.of_moments[j], moments, noise, self.grad_moments[j])
        else:
            if noise is not None:
                # z_j = mu_j + exp(v_j / 2) e_j
                log_variance = moments.chunk(2, dim=-1)[1]
                inside = log_variance.abs() <= LARGEST_LOG_VARIANCE
                spread = (clamped(log_variance) / 2).exp() * noise / 2
                grad_moment = torch.cat([grad_moment, grad_moment * spread * inside], dim=-1)
            torch.add(grad_moment, self.of_moments[j], out=self.grad_moments[j])
        torch.mul(self.moments.backward(self.grad_moments[j]), 1 - hidden * hidden, out=self.grad_hidden[j])
        if grad_query is not None:
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
