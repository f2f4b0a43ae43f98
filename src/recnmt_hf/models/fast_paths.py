"""
Faster ways to the same results, chosen by device, data type and shape.

The environment variable `RECNMT_FAST_PATHS=0` switches all of them off.
"""

import os

import torch
from torch import nn


def allowed() -> bool:
    """Whether the user lets fast paths be taken."""
    return os.environ.get("RECNMT_FAST_PATHS", "1") != "0"


def enabled() -> bool:
    """Whether fast paths that go around torch's own kernels may be taken: not in compiled code, which has its own."""
    return allowed() and not torch.compiler.is_compiling()


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Whether a module is exactly of a kind, unobserved and unchanged (no hooks, offloading, `forward` of its own, nor
    quantized or sharded weights), so that reading its parameters equals calling it.
    """
    return (
        # torch.export looks at modules through proxies of the same name.
        (type(module) is kind or (torch.compiler.is_compiling() and type(module).__name__ == kind.__name__))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
        # Quantized and sharded tensors are wrappers, which say how to take them apart.
        and not any(hasattr(each, "__tensor_flatten__") for each in module._parameters.values())
    )


def prefers_plain_products(query: torch.Tensor, key: torch.Tensor, dropout: float) -> bool:
    """
    Whether attention by plain matrix products trains faster than `scaled_dot_product_attention` on the CPU: with
    dropout, where sdpa makes the same products with a slower dropout, and in bfloat16 up to some hundred keys, where
    the backward pass of its fused kernel takes several times as long.

    Args:
        query, key (`torch.Tensor` of shape `(batch_size, num_heads, length, head_dim)`).
        dropout (`float`): Dropout in force; 0 in evaluation.
    """
    if query.device.type != "cpu" or not enabled():
        return False
    if dropout > 0:
        return True
    return query.requires_grad and query.dtype == torch.bfloat16 and key.shape[2] <= 384


def dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """
    Dropout (Srivastava et al., 2014): zeroes elements with probability `p` and scales the others by `1 / (1 - p)`.

    On the CPU torch draws its mask one number after the other, which takes up to a third of a training step. Here one
    64-bit draw decides four elements, so that `p` is rounded to a multiple of `2 ** -16`. Elsewhere, and in compiled
    code, it is torch's own.

    Args:
        states (`torch.Tensor` of any shape).
        p (`float`): Probability of zeroing an element.
        training (`bool`): `False` returns `states` as they are.
    """
    if not training or p == 0.0:
        return states
    if states.device.type != "cpu" or not enabled():
        return nn.functional.dropout(states, p=p, training=True)
    dropped = round(p * 65536)
    count = states.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = (draws.view(torch.int16)[:count] >= dropped - 32768).view(states.shape)
    return states * kept.to(states.dtype).mul_(65536.0 / (65536 - dropped))


def project(linear: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """
    A linear layer, `states @ weight.T + bias`.

    For the few rows of a decoding step on the CPU it is computed as `(weight @ states.T).T`: the same products, but the
    library then streams the weights once at the memory's speed, which makes a step of four beams up to twice as fast.

    Args:
        linear (`nn.Module`): Usually `nn.Linear`; anything else (adapters, quantized layers) is simply called.
        states (`torch.Tensor` of shape `(..., in_features)`).
    """
    if (
        not is_plain(linear, nn.Linear)
        or torch.is_grad_enabled()
        or states.device.type != "cpu"
        or states.dtype != torch.float32
        or not 2 <= states.numel() // linear.in_features <= 5
        or linear.in_features > linear.out_features
        or torch.is_autocast_enabled("cpu")
        or not enabled()
    ):
        return linear(states)
    rows = states.reshape(-1, linear.in_features)
    projected = torch.mm(linear.weight, rows.t()).t().contiguous()
    if linear.bias is not None:
        projected += linear.bias
    return projected.view(*states.shape[:-1], linear.out_features)
