"""
Fast paths that several models share: attention, dropout, custom gradients, operators of compiled graphs.

A fast path is used where it measured faster, by fixed rules of device, data type and shape, so that runs on one machine
compute the same bits. The environment variable `RECNMT_FAST_PATHS=0` disables all fast paths.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .user_errors import UserError


Mask = Tensor | None  # 1 or True: real or visible; None: all are


def allowed() -> bool:
    """Return whether fast paths may be used."""
    return os.environ.get("RECNMT_FAST_PATHS") != "0"


def enabled() -> bool:
    """Return whether fast paths may replace torch's own kernels; compiled code has its own kernels."""
    return not torch.compiler.is_compiling() and allowed()


def on_cpu(tensor: Tensor) -> bool:
    """Return whether the rules of the CPU apply to a tensor, otherwise those of accelerators, where launches cost."""
    return tensor.is_cpu


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether parameters may be read: a module of exactly this kind, without hooks or special weights."""
    own = type(module)
    # torch.export wraps modules in proxies of the same name that derive from them, unlike adapters (`peft`).
    is_proxy = torch.compiler.is_compiling() and own.__name__ == kind.__name__ and kind in own.__bases__
    return (
        (own is kind or is_proxy)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
        # Quantized and sharded tensors are wrapper classes with this method.
        and not any(hasattr(parameter, "__tensor_flatten__") for parameter in module._parameters.values())
    )


def is_exporting() -> bool:
    """Return whether torch.export is running; `False` before torch 2.7, which does not report it."""
    # `torch.compiler.is_exporting` is also true while torch.compile traces, in torch 2.11.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the data type of autocast on a device; `None` where autocast is off."""
    # The compiler of torch 2.11 cannot follow torch's own answer; what it compiles for has autocast.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)
    is_on = has_autocast and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the data type of sums: at least float32, since half precision is too coarse for them."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Set autocast to what [`autocast_dtype`] returned; `None` switches it off."""
    if autocast_dtype(device) == dtype:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


# Message about a second derivative.
FINAL = (
    "This gradient cannot be differentiated again. Set the environment variable RECNMT_FAST_PATHS=0, pass "
    "return_logits=True, and do not compile the model."
)


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active, such as `grad` or `vmap`."""
    return torch._C._are_functorch_transforms_active()


class CustomGradient(torch.autograd.Function):
    """Base class of functions with a hand-written backward pass; `torch.func.vmap` runs them sample by sample."""

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        if is_transformed():
            return super().apply(*inputs)
        # Skip the matching of inputs to the signature of `forward`, which takes longer than a step.
        return super(torch.autograd.Function, cls).apply(*inputs)  # type: ignore[misc]  # of its base in C

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        def sample(value: Any, dim: Any, index: int) -> Any:
            return value.select(dim, index) if isinstance(dim, int) else value

        samples = [
            cls.apply(*(sample(value, dim, index) for value, dim in zip(inputs, in_dims, strict=True)))
            for index in range(info.batch_size)
        ]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        outputs = tuple(None if column[0] is None else torch.stack(column) for column in zip(*samples, strict=True))
        return outputs, tuple(None if output is None else 0 for output in outputs)


class FinalGradients(CustomGradient):
    """Results of a backward pass that cannot be differentiated themselves."""

    @staticmethod
    def forward(compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UserError(FINAL)


def final_gradients(compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Return `compute(*tensors)` in a backward pass; differentiating it raises a `UserError`."""
    # Gradients are recorded with create_graph=True or by a transform of torch.func.
    return FinalGradients.apply(compute, *tensors) if torch.is_grad_enabled() else compute(*tensors)


class OnceDifferentiable(CustomGradient):
    """
    Base class of functions with a backward pass that cannot be differentiated: `gradients`, of the context, those
    gradients of the outputs that exist, and the saved tensors. It runs without autocast.
    """

    gradients: Callable[..., Any]

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor | None) -> Any:
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        with with_autocast(given[0].device, None):
            return final_gradients(functools.partial(cls.gradients, ctx), *given, *ctx.saved_tensors)


# Returns the shape and the type of each result.
Shapes = Callable[..., list[tuple[Sequence[int], torch.dtype]]]
SPACE = re.sub(r"\W", "_", __name__)
libraries: list[torch.library.Library] = []


def graph_operator(shapes: Shapes) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Make a function one operator of compiled graphs, where `torch.compile` would unroll its loop over words into a graph
    for each length. Elsewhere, also in exported graphs, it is called directly.

    The function takes tensors (or `None`) by position and settings of type `str`, `bool`, `int` or `float` by keyword;
    `shapes` takes the same. It returns a list of new tensors, draws no random numbers, and changes no argument. In a
    compiled graph the backward pass computes it again, and cannot be differentiated twice.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = define_operator(function, shapes)

        @functools.wraps(function)
        def call(*tensors: Tensor | None, **settings: Any) -> Any:
            if not torch.compiler.is_compiling() or is_exporting():
                return function(*tensors, **settings)
            inputs = [tensor for tensor in tensors if tensor is not None]
            present = [tensor is not None for tensor in tensors]
            return operator(inputs, present, autocast_dtype(inputs[0].device), *settings.values())

        return call

    return decorate


def define_operator(function: Callable[..., Any], shapes: Shapes) -> Any:
    """Register a function and its backward pass with torch; see [`graph_operator`]."""
    kinds = {
        name: parameter.annotation.__name__
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    settings = "".join(f", {kind} {name}" for name, kind in kinds.items())
    arguments = f"Tensor[] inputs, bool[] present, ScalarType? autocast{settings}"

    def apply(run: Callable[..., Any], inputs: Sequence[Tensor], present: Sequence[bool], values: Any) -> Any:
        rest, keywords = iter(inputs), dict(zip(kinds, values, strict=True))
        return run(*(next(rest) if is_tensor else None for is_tensor in present), **keywords)

    def forward(inputs: list[Tensor], present: list[bool], autocast: Any, *values: Any) -> list[Tensor]:
        with with_autocast(inputs[0].device, autocast):
            results = apply(function, inputs, present, values)
        expected = apply(shapes, inputs, present, values)
        return [result.to(dtype).contiguous() for result, (_, dtype) in zip(results, expected, strict=True)]

    def backward(gradients: list[Tensor], needed: list[bool], inputs: list[Tensor], *rest: Any) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed, strict=True)]
            results = forward(inputs, *rest)
        pairs = [pair for pair in zip(results, gradients, strict=True) if pair[0].requires_grad]
        outputs, grad_outputs = zip(*pairs, strict=True)
        sources = [tensor for tensor in inputs if tensor.requires_grad]
        input_gradients = torch.autograd.grad(outputs, sources, grad_outputs, allow_unused=True, materialize_grads=True)
        return [gradient.contiguous() for gradient in input_gradients]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, *ctx.rest = inputs
        ctx.save_for_backward(*tensors)

    def differentiate(ctx: Any, gradients: list[Tensor]) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise UserError(FINAL)
        needed = [bool(need) for need in ctx.needs_input_grad[0]]
        input_gradients = iter(backward_operator(gradients, needed, list(ctx.saved_tensors), *ctx.rest))
        return [next(input_gradients) if need else None for need in needed], *(None for _ in ctx.rest)

    name, name_backward = function.__name__, f"{function.__name__}_backward"
    space = SPACE
    while hasattr(getattr(torch.ops, space), name):  # code from the Hub that is loaded again
        space += "_"
    library = torch.library.Library(space, "FRAGMENT")
    libraries.append(library)  # must live as long as the operator
    library.define(f"{name}({arguments}) -> Tensor[]")
    library.define(f"{name_backward}(Tensor[] gradients, bool[] needed, {arguments}) -> Tensor[]")
    library.impl(name, forward, "CompositeExplicitAutograd")
    library.impl(name_backward, backward, "CompositeExplicitAutograd")
    # The backward pass uses autograd inside, which torch switches off below an operator's own gradient.
    library.impl(name_backward, torch.library.fallthrough_kernel, "Autograd")

    @torch.library.register_fake(f"{space}::{name}", lib=library)
    def forward_shapes(inputs: Any, present: Any, autocast: Any, *values: Any) -> list[Tensor]:
        return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in apply(shapes, inputs, present, values)]

    @torch.library.register_fake(f"{space}::{name_backward}", lib=library)
    def backward_shapes(gradients: Any, needed: Any, inputs: Any, *rest: Any) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor, need in zip(inputs, needed, strict=True) if need]

    torch.library.register_autograd(f"{space}::{name}", differentiate, setup_context=setup_context, lib=library)
    operators = getattr(torch.ops, space)
    backward_operator = getattr(operators, name_backward).default
    return getattr(operators, name).default


def scan_steps(
    step: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]], carry: Sequence[Tensor], *inputs: Tensor
) -> list[Tensor]:
    """
    Run a recurrence as a loop, or in an exported graph as one operator. `step` maps a carry and a row of each of the
    `inputs` `(steps, ..)` to the next carry and its outputs. Return the outputs of all steps.
    """
    if is_exporting():
        from torch._higher_order_ops.scan import scan

        def traced_step(carry: list[Tensor], rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            next_carry, outputs = step(carry, *rows)
            return list(next_carry), [output.clone() for output in outputs]  # no tensor may be both

        return scan(traced_step, list(carry), list(inputs))[1]
    all_outputs: list[Sequence[Tensor]] = []
    for rows in zip(*(tensor.unbind(0) for tensor in inputs), strict=True):
        carry, outputs = step(carry, *rows)
        all_outputs.append(outputs)
    if len(all_outputs) == 1:  # not copied
        return [output[None] for output in all_outputs[0]]
    return [torch.stack(column) for column in zip(*all_outputs, strict=True)]


# Torch's own kernel is faster for fewer elements.
SMALLEST_DROPOUT = 2**13
# In bfloat16 plain matmuls are faster than sdpa from this number of queries of all rows and heads, up to so many keys.
MANY_QUERIES, MOST_KEYS = 160, 384


@functools.cache
def has_bfloat16() -> bool:
    """Return whether the processor has instructions for matmuls in bfloat16."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # not before torch 2.10
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def prefers_plain_matmuls(query: Tensor, key: Tensor, dropout: float) -> bool:
    """
    Return whether attention by plain matmuls is faster than sdpa on the CPU, for query and key `(batch_size, num_heads,
    length, head_dim)`. With dropout, sdpa makes the same matmuls with a slower dropout; in bfloat16 it is slow for few
    queries or keys.
    """
    if not on_cpu(query) or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    queries, keys = query.shape[:-1].numel(), key.shape[2]
    if query.dtype == torch.bfloat16 and not has_bfloat16():
        return False
    if dropout > 0:
        return queries * keys >= SMALLEST_DROPOUT and allowed()
    return query.dtype == torch.bfloat16 and queries >= MANY_QUERIES and keys <= MOST_KEYS and allowed()


def has_short_rows(scores: Tensor) -> bool:
    """Return whether a softmax by plain operations is faster than torch's, which is slow for rows of few elements."""
    if not on_cpu(scores) or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return 0 < scores.shape[-1] < 16 and scores.numel() >= 2**11 and allowed()


def dropout(states: Tensor, p: float, training: bool) -> Tensor:
    """
    Compute dropout. On the CPU torch draws its mask one number after the other, which takes up to a third of a training
    step. Here one 64-bit draw decides four elements, so that `p` is rounded to a multiple of `2 ** -16`.
    """
    if not training or p == 0.0:
        return states
    if not (on_cpu(states) and enabled()) or states.numel() < SMALLEST_DROPOUT:
        return nn.functional.dropout(states, p=p, training=True)
    dropped, count = round(p * 65536), states.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
    mask = (draws.view(torch.int16)[:count] >= dropped - 32768).view(states.shape)
    return states * mask.to(states.dtype).mul_(65536.0 / (65536 - dropped))
