"""Label-smoothed cross-entropy without a smoothed-target matrix and without the logits of the whole batch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .kernels_cpu_matmuls import add_product, fast_product
from .kernels_shared import (
    FINAL,
    CustomGradient,
    autocast_dtype,
    final_gradients,
    graph_operator,
    is_transformed,
    on_cpu,
    with_autocast,
)
from .user_errors import UserError


IGNORE_INDEX = -100
# Logit of symbols that do not exist, in models that were imported from Marian; small enough for float16.
FORBIDDEN = -1e4


def smoothed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """
    Compute the cross-entropy of logits `(..., vocab_size)` and labels `(...)` against `(1 - e) one-hot + e / V`
    (Szegedy et al., 2016, section 7) as `(1 - e) (lse - z_y) + e (lse - mean(z))`, in at least float32. The label -100
    is ignored; `num_items_in_batch` is the divisor of the sum, by default the number of labels. The `bias` of the
    logits, which contain it, excludes symbols from V ([`uniform_targets`]).
    """
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).to(logits.device)
    return summed_cross_entropy(logits, labels, label_smoothing, bias) / divisor(labels, num_items_in_batch)


def uniform_targets(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the uniform distribution `(vocab_size,)` over the symbols that a bias does not forbid; `None`: all."""
    if bias is None:
        return None
    exists = (bias.flatten() > FORBIDDEN / 2).to(dtype)
    return exists / exists.sum()


def mean_logits(logits: Tensor, uniform: Tensor | None) -> Tensor:
    """Return the mean logits `(tokens,)` over the symbols of [`uniform_targets`], in at least float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.mean(dim=-1, dtype=dtype) if uniform is None else torch.mv(logits.to(dtype), uniform)


def summed_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float, bias: Tensor | None = None) -> Tensor:
    """Sum [`smoothed_cross_entropy`] over logits `(tokens, vocab_size)` and labels `(tokens,)`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if label_smoothing == 0.0:
        return nn.functional.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    ignored = labels == IGNORE_INDEX
    chosen = wide.gather(-1, labels.masked_fill(ignored, 0)[:, None])[:, 0]
    mean = mean_logits(wide, uniform_targets(bias, wide.dtype))
    losses = wide.logsumexp(dim=-1) - (1 - label_smoothing) * chosen - label_smoothing * mean
    return losses.masked_fill(ignored, 0.0).sum()


def divisor(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    """Return the divisor of a summed loss: `num_items_in_batch`, or the number of labels; at least 1."""
    if num_items_in_batch is None:
        return (labels != IGNORE_INDEX).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(labels.device).clamp(min=1)
    return max(num_items_in_batch, 1)


class ChunkedCrossEntropy(CustomGradient):
    """Smoothed cross-entropy of a linear output layer in chunks, whose forward pass also computes the gradients."""

    @staticmethod
    def forward(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor | int,
        *settings: Any,
    ) -> tuple[Tensor | None, ...]:
        label_smoothing, chunk_size, compute_dtype, wants_grad = settings
        states, matrix = hidden_states.to(compute_dtype), weight.to(compute_dtype)
        sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        factor = torch.ones((), dtype=sum_dtype, device=states.device) / divisor if wants_grad else None
        chunks = {"label_smoothing": float(label_smoothing), "chunk_size": chunk_size}
        total, *gradients = chunked_losses(states, matrix, bias, labels, factor, **chunks)
        return total / divisor, *(gradients or (None, None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        states, matrix = inputs[:2]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(gradient for gradient in output[1:] if gradient is not None))
        ctx.dtypes = states.dtype, matrix.dtype
        # With the inputs, a second derivative by `torch.func` raises its error.
        ctx.save_for_backward(*output[1:], *((states, matrix) if is_transformed() else ()))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *of_gradients: None) -> Any:
        if grad_output is None:
            return (None,) * 9
        if torch.is_grad_enabled() and not is_transformed():
            # create_graph=True: gradients formed in the forward pass would count as constant.
            raise UserError(FINAL)
        scale = functools.partial(ChunkedCrossEntropy.scaled_gradients, ctx.dtypes)
        return *final_gradients(scale, grad_output, *ctx.saved_tensors), *(None,) * 7

    @staticmethod
    def scaled_gradients(
        dtypes: tuple[torch.dtype, torch.dtype], grad_output: Tensor, *saved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scale the gradients of the forward pass, the first of the `saved` tensors."""
        grad_states, grad_matrix = saved[:2]
        # Usually it is 1. On CPU reading it avoids scaling a tensor of the matrix's size; elsewhere it would wait.
        if not on_cpu(grad_output) or torch.compiler.is_compiling() or grad_output.item() != 1.0:
            grad_states = grad_states * grad_output.to(grad_states.dtype)
            grad_matrix = grad_matrix * grad_output
        return grad_states.to(dtypes[0]), grad_matrix.to(dtypes[1])


def loss_shapes(states: Tensor, matrix: Tensor, *others: Tensor | None, **settings: Any) -> Any:
    """Return shapes and types of the results of [`chunked_losses`]."""
    wide = torch.promote_types(states.dtype, torch.float32)
    return [((), wide)] + ([] if others[-1] is None else [(states.shape, states.dtype), (matrix.shape, wide)])


@graph_operator(loss_shapes)
def chunked_losses(
    states: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factor: Tensor | None,
    *,
    label_smoothing: float,
    chunk_size: int,
) -> list[Tensor]:
    """
    Sum the losses of `states @ matrix.T + bias` for states `(tokens, d_model)` and a matrix `(vocab_size, d_model)`.
    With a `factor` also return the gradients of the sum times this factor, those of `states` in their own type.
    """
    ignored = labels == IGNORE_INDEX
    targets = labels.masked_fill(ignored, 0)
    sum_dtype = torch.promote_types(states.dtype, torch.float32)
    total = torch.zeros((), dtype=sum_dtype, device=states.device)
    grad_states: Any = torch.empty_like(states) if factor is not None else None
    grad_matrix: Any = None
    compute = losses_on_cpu if on_cpu(states) else losses_on_accelerator
    uniform = uniform_targets(bias, sum_dtype) if label_smoothing else None
    for start in range(0, states.shape[0], chunk_size):
        part = slice(start, start + chunk_size)
        logits = fast_product(states[part], matrix.t())
        if bias is not None:
            logits = logits.to(sum_dtype).add_(bias)
        is_counted = (~ignored[part]).to(sum_dtype)
        share = None if factor is None else is_counted * factor
        losses, grad = compute(logits, targets[part], share, label_smoothing, uniform)
        total += (losses * is_counted).sum()
        if grad is None:
            continue
        grad = grad.to(states.dtype)
        grad_states[part] = fast_product(grad, matrix)
        if grad_matrix is None:
            grad_matrix = fast_product(grad.t(), states[part]).to(sum_dtype)
        else:
            add_product(grad_matrix, grad.t(), states[part])
    return [total] if factor is None else [total, grad_states, grad_matrix]


def losses_on_cpu(
    logits: Tensor, targets: Tensor, share: Tensor | None, label_smoothing: float, uniform: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """
    Return the losses `(tokens,)` of logits `(tokens, vocab_size)`; with the `share` of each token in the result, also
    the gradients softmax - (1 - e) one-hot - e / V times that share, or with [`uniform_targets`] in place of 1 / V.
    """
    # In place, since new memory is slow.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    mean = mean_logits(logits, uniform) if label_smoothing else 0.0
    peak = logits.amax(dim=-1)
    # One pass of exponentials serves both the log-sum-exp and, divided by the sum, the softmax.
    exponentials = logits.sub_(peak[:, None]).exp_()
    sums = exponentials.sum(dim=-1)
    losses = sums.log() + peak - (1 - label_smoothing) * chosen - label_smoothing * mean
    if share is None:
        return losses, None
    grad = exponentials.mul_((share / sums)[:, None])
    if uniform is not None:
        grad.addr_(share, uniform, alpha=-label_smoothing)
    elif label_smoothing:
        grad.sub_((share * (label_smoothing / logits.shape[1]))[:, None])
    return losses, grad.scatter_add_(-1, targets[:, None], ((label_smoothing - 1.0) * share)[:, None])


def losses_on_accelerator(
    logits: Tensor, targets: Tensor, share: Tensor | None, label_smoothing: float, uniform: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute [`losses_on_cpu`] by torch's fused softmax on logits and gradients in their own type."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    peak, place = logits.max(dim=-1, keepdim=True)
    probabilities = torch.softmax(logits, dim=-1, dtype=dtype)
    # The largest probability is at least 1 / V, so that its logarithm is exact.
    sums = peak.to(dtype) - probabilities.gather(-1, place).log()
    chosen = logits.gather(-1, targets[:, None]).to(dtype)
    mean = mean_logits(logits, uniform) if label_smoothing else 0.0
    losses = (sums - (1 - label_smoothing) * chosen)[:, 0] - label_smoothing * mean
    if share is None:
        return losses, None
    share = share[:, None]
    even: Any = label_smoothing / logits.shape[1] if uniform is None else label_smoothing * uniform
    probabilities.scatter_add_(-1, targets[:, None], torch.full_like(share, label_smoothing - 1.0))
    return losses, torch.addcmul(-even * share, probabilities, share, out=torch.empty_like(logits))


def tokens_at_a_time(states: Tensor) -> int:
    """Return how many tokens' logits are computed together: on an accelerator more, since each launch costs."""
    return 1024 if on_cpu(states) else 4096


def chunked_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """
    Compute [`smoothed_cross_entropy`] of `hidden_states @ weight.T + bias` for states `(..., d_model)` and a weight
    `(vocab_size, d_model)`, with the logits of `chunk_size` tokens at a time. The bias gets no gradient.
    """
    chunk_size = chunk_size or tokens_at_a_time(hidden_states)
    labels = labels.reshape(-1).to(hidden_states.device)
    compute_dtype = autocast_dtype(hidden_states.device) or hidden_states.dtype
    if compute_dtype == torch.float16:  # gradients of the forward pass would underflow without a scaler's factor
        layer = functools.partial(nn.functional.linear, weight=weight)
        settings = label_smoothing, num_items_in_batch, chunk_size
        return chunked_cross_entropy_of_layer(layer, hidden_states, labels, bias, *settings)
    with with_autocast(hidden_states.device, None):
        states, count = hidden_states.reshape(-1, hidden_states.shape[-1]), divisor(labels, num_items_in_batch)
        wants_grad = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
        chunks = label_smoothing, chunk_size, compute_dtype, wants_grad
        return ChunkedCrossEntropy.apply(states, weight, bias, labels, count, *chunks)[0]


def chunked_cross_entropy_of_layer(
    layer: Callable[[Tensor], Tensor],
    hidden_states: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute [`chunked_cross_entropy`] by calling the layer, in the backward pass again (adapters, hooks, float16)."""
    labels = labels.reshape(-1).to(hidden_states.device)
    states = hidden_states.reshape(-1, hidden_states.shape[-1])

    def part_loss(states: Tensor, labels: Tensor) -> Tensor:
        logits = layer(states)
        logits = logits if bias is None else logits + bias
        return summed_cross_entropy(logits, labels, label_smoothing, bias)

    chunk_size = chunk_size or tokens_at_a_time(states)
    parts = zip(states.split(chunk_size), labels.split(chunk_size), strict=True)
    compute = functools.partial(checkpoint, part_loss, use_reentrant=False) if torch.is_grad_enabled() else part_loss
    total: Any = sum(compute(*part) for part in parts)
    return total / divisor(labels, num_items_in_batch)
