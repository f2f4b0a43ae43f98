"""Label-smoothed cross-entropy without a smoothed-target matrix, and without the logits of the whole batch."""

from typing import Any

import torch
from torch import nn


IGNORE_INDEX = -100


def smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """
    Cross-entropy against `(1 - e) one-hot + e / V` (Szegedy et al., 2016, section 7) from the log-sum-exp and the mean
    logit:  `(1 - e) (lse - z_y) + e (lse - mean(z))`.

    Args:
        logits (`torch.Tensor` of shape `(..., vocab_size)`).
        labels (`torch.LongTensor` of shape `(...)`): -100 is ignored.
        label_smoothing (`float`, *optional*, defaults to 0): e.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*):
            Divides the sum; given by the Trainer under gradient accumulation. `None`: the mean over real labels.

    Returns:
        A scalar in float32 (float64 for float64 logits).
    """
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).to(logits.device)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if label_smoothing == 0.0:
        total = nn.functional.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    else:
        real = labels != IGNORE_INDEX
        lse = wide.logsumexp(dim=-1)
        picked = wide.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        losses = lse - (1 - label_smoothing) * picked - label_smoothing * wide.mean(dim=-1)
        total = losses.masked_fill(~real, 0.0).sum()
    return total / divisor(labels, num_items_in_batch)


def divisor(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    if num_items_in_batch is None:
        return (labels != IGNORE_INDEX).sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(labels.device)
    return num_items_in_batch


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    Smoothed cross-entropy of a linear output layer, summed and divided, a chunk of tokens at a time.

    The gradients of states and matrix are formed in the forward pass while a chunk's logits are at hand, so no more
    than `chunk_size x vocab_size` logits exist at any moment. Products run in the states' dtype (bf16 under autocast),
    softmax and sums in float32 (float64 for float64 states).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: torch.Tensor | int,
        label_smoothing: float,
        chunk_size: int,
        compute_dtype: torch.dtype,
        wants_grad: bool,
    ) -> torch.Tensor:
        real = labels != IGNORE_INDEX
        vocab_size = weight.shape[0]
        sum_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        states, matrix = hidden_states.to(compute_dtype), weight.to(compute_dtype)
        needs_grad = wants_grad and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        grad_states = torch.empty_like(states) if needs_grad else None
        grad_matrix = None
        total = torch.zeros((), dtype=sum_dtype, device=states.device)
        targets = labels.clamp(min=0)
        for start in range(0, states.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            logits = torch.mm(states[part], matrix.t()).to(sum_dtype)
            if bias is not None:
                logits += bias
            kept = real[part].to(sum_dtype)
            picked = logits.gather(-1, targets[part, None])[:, 0]
            mean = logits.mean(dim=-1) if label_smoothing else 0.0
            peak = logits.amax(dim=-1)
            # One pass of exponentials serves both the log-sum-exp and, divided by the sum, the softmax.
            exponentials = logits.sub_(peak[:, None]).exp_()
            sums = exponentials.sum(dim=-1)
            losses = sums.log() + peak - (1 - label_smoothing) * picked - label_smoothing * mean
            total += (losses * kept).sum()
            if needs_grad:
                # d loss / d logits = softmax - (1 - e) one-hot - e / V, zero for ignored labels
                share = kept / divisor
                grad = exponentials.mul_((share / sums)[:, None])
                if label_smoothing:
                    grad.sub_((share * (label_smoothing / vocab_size))[:, None])
                grad.scatter_add_(-1, targets[part, None], ((label_smoothing - 1.0) * share)[:, None])
                grad = grad.to(compute_dtype)
                torch.mm(grad, matrix, out=grad_states[part])
                if grad_matrix is None:
                    grad_matrix = torch.mm(grad.t(), states[part]).to(sum_dtype)
                elif grad_matrix.dtype == grad.dtype:
                    grad_matrix.addmm_(grad.t(), states[part])
                else:
                    grad_matrix += torch.mm(grad.t(), states[part])
        ctx.dtypes = hidden_states.dtype, weight.dtype
        ctx.save_for_backward(grad_states, grad_matrix)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor):
        grad_states, grad_matrix = ctx.saved_tensors
        states_dtype, weight_dtype = ctx.dtypes
        # Usually the loss is what backward starts from. Looking costs nothing on the CPU, a product of the matrix's
        # size does; elsewhere looking would wait for the device.
        if grad_output.device.type != "cpu" or torch.compiler.is_compiling() or grad_output.item() != 1.0:
            grad_states = grad_states * grad_output.to(grad_states.dtype)
            grad_matrix = grad_matrix * grad_output
        return grad_states.to(states_dtype), grad_matrix.to(weight_dtype), None, None, None, None, None, None, None


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
    [`smoothed_cross_entropy`] of `hidden_states @ weight.T + bias`, without ever holding all logits.

    Args:
        hidden_states (`torch.Tensor` of shape `(..., d_model)`): The decoder's last states.
        weight (`torch.Tensor` of shape `(vocab_size, d_model)`): The output matrix.
        labels (`torch.LongTensor` of shape `(...)`): -100 is ignored.
        bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): A fixed bias; it gets no gradient.
        chunk_size (`int`, *optional*, defaults to 1024): Tokens whose logits exist at one time.

    Returns:
        A scalar in float32 (float64 for float64 states).
    """
    labels = labels.reshape(-1).to(hidden_states.device)
    device_type = hidden_states.device.type
    compute_dtype = hidden_states.dtype
    if torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        return ChunkedCrossEntropy.apply(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            weight,
            bias,
            labels,
            divisor(labels, num_items_in_batch),
            label_smoothing,
            chunk_size,
            compute_dtype,
            torch.is_grad_enabled(),
        )
