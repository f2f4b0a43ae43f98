"""Label-smoothed cross-entropy without a smoothed-target matrix, and without the logits of the whole batch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .kernels_shared import (
    CustomGradient,
    add_product,
    autocast_dtype,
    final_gradients,
    graph_operator,
    is_transformed,
    wide_product,
    without_autocast,
)
from .user_errors import UserError


IGNORE_INDEX = -100


def check_labels(labels: torch.Tensor, vocab_size: int) -> None:
    """
    Raise a `UserError` for labels that are neither ids nor -100; only on the CPU, since others would be synchronised.
    """
    if (
        labels.device.type != "cpu"
        or torch.compiler.is_compiling()
        or type(labels) is not torch.Tensor
        or is_transformed()  # `vmap` lets nobody look
    ):
        return
    wrong = labels[((labels < 0) & (labels != IGNORE_INDEX)) | (labels >= vocab_size)]
    if wrong.numel():
        raise UserError(
            f"The label {int(wrong[0])} is no id from 0 to {vocab_size - 1}. Remedy: mark what is to be ignored by "
            f"{IGNORE_INDEX}, and use the tokenizer the model was made for."
        )


def smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """
    Compute the cross-entropy against `(1 - e) one-hot + e / V` (Szegedy et al., 2016, section 7) as `(1 - e) (lse -
    z_y) + e (lse - mean(z))`, in at least float32.

    Args:
        logits (`torch.Tensor` of shape `(..., vocab_size)`), labels (`torch.LongTensor` of shape `(...)`): -100 is
            ignored.
        label_smoothing (`float`, *optional*, defaults to 0): e.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*): Divisor of the sum, given by the Trainer under
            gradient accumulation. `None`: the number of labels.
    """
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).to(logits.device)
    check_labels(labels, logits.shape[-1])
    return summed_cross_entropy(logits, labels, label_smoothing) / divisor(labels, num_items_in_batch)


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Sum [`smoothed_cross_entropy`] over logits `(tokens, vocab_size)` and labels `(tokens,)`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if label_smoothing == 0.0:
        return nn.functional.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    ignored = labels == IGNORE_INDEX
    picked = wide.gather(-1, labels.masked_fill(ignored, 0)[:, None])[:, 0]
    losses = wide.logsumexp(dim=-1) - (1 - label_smoothing) * picked - label_smoothing * wide.mean(dim=-1)
    return losses.masked_fill(ignored, 0.0).sum()


def divisor(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    if num_items_in_batch is None:
        return (labels != IGNORE_INDEX).sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(labels.device).clamp(min=1)
    return max(num_items_in_batch, 1)


class ChunkedCrossEntropy(CustomGradient):
    """
    Smoothed cross-entropy of a linear output layer, one chunk of tokens at a time, so that at most `chunk_size x
    vocab_size` logits exist. Matmuls run in the states' type (that of autocast where it is on), sums in at least
    float32.

    The forward pass also computes the gradients of states and matrix. In float16 they would underflow without the
    factor of a gradient scaler: there the backward pass computes the logits again. It cannot be differentiated twice.
    """

    @staticmethod
    def forward(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: torch.Tensor | int,
        label_smoothing: float,
        chunk_size: int,
        compute_dtype: torch.dtype,
        wants_grad: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        states, matrix = hidden_states.to(compute_dtype), weight.to(compute_dtype)
        sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        one = torch.ones((), dtype=sum_dtype, device=states.device)
        factor = one / divisor if wants_grad and compute_dtype != torch.float16 else None
        total, *made = chunked_losses(states, matrix, bias, labels, label_smoothing, chunk_size, factor)
        return total / divisor, *made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
        states, matrix, bias, labels, divisor, *settings, compute_dtype, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(made for made in output[1:] if made is not None))
        if compute_dtype == torch.float16:
            ctx.gradients = functools.partial(ChunkedCrossEntropy.late_gradients, *settings)
            ctx.save_for_backward(states, matrix, bias, labels, torch.as_tensor(divisor))
        else:
            ctx.gradients = functools.partial(ChunkedCrossEntropy.scaled_gradients, (states.dtype, matrix.dtype))
            inputs_to_differentiate = (states, matrix) if is_transformed() else ()
            ctx.save_for_backward(*output[1:], *inputs_to_differentiate)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, *of_made: None) -> Any:
        if grad_output is None:
            return (None,) * 9
        if torch.is_grad_enabled() and not is_transformed():
            # create_graph=True: what was formed in the forward pass would count as constant.
            raise UserError(
                "The loss without logits cannot be differentiated twice. Remedy: compute it with return_logits=True."
            )
        remedy = "compute the loss with return_logits=True"
        return *final_gradients(ctx.gradients, grad_output, *ctx.saved_tensors, remedy=remedy), *(None,) * 7

    @staticmethod
    def scaled_gradients(
        dtypes: tuple[torch.dtype, torch.dtype],
        grad_output: torch.Tensor,
        grad_states: torch.Tensor,
        grad_matrix: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale the gradients of the forward pass. `inputs` let a second derivative by `torch.func` raise its error."""
        # Usually the loss is what backward starts from. Looking costs nothing on the CPU, scaling a tensor of the
        # matrix's size does; elsewhere looking would wait for the device.
        if grad_output.device.type != "cpu" or torch.compiler.is_compiling() or grad_output.item() != 1.0:
            grad_states = grad_states * grad_output.to(grad_states.dtype)
            grad_matrix = grad_matrix * grad_output
        return grad_states.to(dtypes[0]), grad_matrix.to(dtypes[1])

    @staticmethod
    def late_gradients(
        label_smoothing: float,
        chunk_size: int,
        grad_output: torch.Tensor,
        states: torch.Tensor,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of float16."""
        with without_autocast(states.device):
            low = states.to(torch.float16), matrix.to(torch.float16)
            made = chunked_losses(*low, bias, labels, label_smoothing, chunk_size, grad_output / divisor)
        return made[1].to(states.dtype), made[2].to(matrix.dtype)


def chunked_losses(
    states: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float,
    chunk_size: int,
    factor: torch.Tensor | None,
) -> tuple[torch.Tensor, Any, Any]:
    """
    Sum the losses of `states @ matrix.T + bias` for states `(tokens, d_model)` and a matrix `(vocab_size, d_model)`.
    With a `factor` also return the gradients of the sum times this factor, those of `states` in their own type.
    """
    settings = {"label_smoothing": float(label_smoothing), "chunk_size": chunk_size}
    total, *gradients = losses_of_chunks(states, matrix, bias, labels, factor, **settings)
    return total, *(gradients or (None, None))


def loss_shapes(
    states: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    factor: torch.Tensor | None,
    **settings: Any,
) -> Any:
    wide = torch.promote_types(states.dtype, torch.float32)
    return [((), wide)] + ([] if factor is None else [(states.shape, states.dtype), (matrix.shape, wide)])


@graph_operator(loss_shapes)
def losses_of_chunks(
    states: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    factor: torch.Tensor | None,
    *,
    label_smoothing: float,
    chunk_size: int,
) -> list[torch.Tensor]:
    """Compute [`chunked_losses`] as one operator of compiled graphs."""
    ignored = labels == IGNORE_INDEX
    targets = labels.masked_fill(ignored, 0)
    vocab_size, dtype = matrix.shape[0], states.dtype
    sum_dtype = torch.promote_types(dtype, torch.float32)
    total = torch.zeros((), dtype=sum_dtype, device=states.device)
    grad_states: Any = torch.empty_like(states) if factor is not None else None
    grad_matrix: Any = None
    for start in range(0, states.shape[0], chunk_size):
        part = slice(start, start + chunk_size)
        logits = wide_product(states[part], matrix.t()).to(sum_dtype)
        if bias is not None:
            logits += bias
        kept = (~ignored[part]).to(sum_dtype)
        picked = logits.gather(-1, targets[part, None])[:, 0]
        mean = logits.mean(dim=-1) if label_smoothing else 0.0
        peak = logits.amax(dim=-1)
        # One pass of exponentials serves both the log-sum-exp and, divided by the sum, the softmax.
        exponentials = logits.sub_(peak[:, None]).exp_()
        sums = exponentials.sum(dim=-1)
        losses = sums.log() + peak - (1 - label_smoothing) * picked - label_smoothing * mean
        total += (losses * kept).sum()
        if factor is None:
            continue
        # d loss / d logits = softmax - (1 - e) one-hot - e / V, zero for ignored labels
        share = kept * factor
        grad = exponentials.mul_((share / sums)[:, None])
        if label_smoothing:
            grad.sub_((share * (label_smoothing / vocab_size))[:, None])
        grad.scatter_add_(-1, targets[part, None], ((label_smoothing - 1.0) * share)[:, None])
        grad = grad.to(dtype)
        grad_states[part] = wide_product(grad, matrix)
        if grad_matrix is None:
            grad_matrix = wide_product(grad.t(), states[part]).to(sum_dtype)
        else:
            add_product(grad_matrix, grad.t(), states[part])
    return [total] if factor is None else [total, grad_states, grad_matrix]


def chunked_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    chunk_size: int = 1024,
) -> torch.Tensor:
    """
    Compute [`smoothed_cross_entropy`] of `hidden_states @ weight.T + bias` for states `(..., d_model)` and a weight
    `(vocab_size, d_model)`, with the logits of at most `chunk_size` tokens at a time. The bias gets no gradient.
    """
    labels = labels.reshape(-1).to(hidden_states.device)
    check_labels(labels, weight.shape[0])
    compute_dtype = autocast_dtype(hidden_states.device) or hidden_states.dtype
    with without_autocast(hidden_states.device):
        return ChunkedCrossEntropy.apply(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            weight,
            bias,
            labels,
            divisor(labels, num_items_in_batch),
            label_smoothing,
            chunk_size,
            compute_dtype,
            torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad),
        )[0]


def chunked_cross_entropy_of_layer(
    layer: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    chunk_size: int = 1024,
) -> torch.Tensor:
    """
    Compute [`chunked_cross_entropy`] for an output layer that must be called (adapters, quantization, hooks); the
    backward pass computes the logits of each chunk again.
    """
    labels = labels.reshape(-1).to(hidden_states.device)
    states = hidden_states.reshape(-1, hidden_states.shape[-1])

    def part_loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = layer(states)
        logits = logits if bias is None else logits + bias
        check_labels(labels, logits.shape[-1])
        return summed_cross_entropy(logits, labels, label_smoothing)

    parts = zip(states.split(chunk_size), labels.split(chunk_size), strict=True)
    if torch.is_grad_enabled():
        total = sum(checkpoint(part_loss, *part, use_reentrant=False) for part in parts)
    else:
        total = sum(part_loss(*part) for part in parts)
    return total / divisor(labels, num_items_in_batch)
