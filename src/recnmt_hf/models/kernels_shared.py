"""
Fast paths that several models share: matmuls, dropout, custom gradients, operators of compiled graphs.

A fast path is used where it measured faster, by fixed rules of device, data type, shape and processor vendor, so that
runs on one machine compute the same bits. The environment variable `RECNMT_FAST_PATHS` changes the choice: `1` uses
every eligible fast path, `0` none, `auto` (default) those that are faster.
"""

import functools
import inspect
import os
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .user_errors import UserError


# -- choice ------------------------------------------------------------------------------------------------------------


def setting() -> str:
    """Return the value of `RECNMT_FAST_PATHS`."""
    value = os.environ.get("RECNMT_FAST_PATHS") or "auto"
    if value not in ("0", "1", "auto"):
        raise UserError("environment.fast_paths", field="RECNMT_FAST_PATHS", value=value)
    return value


def allowed() -> bool:
    """Return whether fast paths may be used."""
    return setting() != "0"


def enabled() -> bool:
    """Return whether fast paths may replace torch's own kernels; compiled code has its own kernels."""
    return not torch.compiler.is_compiling() and allowed()


@functools.cache
def is_amd() -> bool:
    """Return whether the processor is from AMD."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return any("AuthenticAMD" in line for line in lines if line.startswith("vendor_id"))
    except OSError:
        return "AuthenticAMD" in platform.processor()


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


# -- autocast and export -----------------------------------------------------------------------------------------------


def is_exporting() -> bool:
    """Return whether torch.export is running; `False` before torch 2.7, which does not report it."""
    # `torch.compiler.is_exporting` is also true while torch.compile traces, in torch 2.11.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def has_autocast(device: torch.device) -> bool:
    """Return whether a device has autocast."""
    # The compiler of torch 2.11 cannot follow torch's own answer; what it compiles for has autocast.
    return torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the data type of autocast on a device; `None` where autocast is off."""
    if has_autocast(device) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the data type of sums: at least float32, since half precision is too coarse for them."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Set autocast to what [`autocast_dtype`] returned; `None` switches it off."""
    if not has_autocast(device):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


# -- custom gradients --------------------------------------------------------------------------------------------------


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
        if isinstance(samples[0], torch.Tensor):
            return torch.stack(samples), 0
        outputs = tuple(None if column[0] is None else torch.stack(column) for column in zip(*samples, strict=True))
        return outputs, tuple(None if output is None else 0 for output in outputs)


class FinalGradients(CustomGradient):
    """Results of a backward pass that cannot be differentiated themselves."""

    @staticmethod
    def forward(compute: Callable[..., Any], *tensors: torch.Tensor | None) -> Any:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UserError("gradients.second_derivative")


def final_gradients(compute: Callable[..., Any], *tensors: torch.Tensor | None) -> Any:
    """Return `compute(*tensors)` in a backward pass; differentiating it raises a `UserError`."""
    # Gradients are recorded with create_graph=True or by a transform of torch.func.
    return FinalGradients.apply(compute, *tensors) if torch.is_grad_enabled() else compute(*tensors)


# -- operators of compiled graphs --------------------------------------------------------------------------------------

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
        def call(*tensors: torch.Tensor | None, **settings: Any) -> Any:
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

    def apply(run: Callable[..., Any], inputs: Sequence[torch.Tensor], present: Sequence[bool], values: Any) -> Any:
        rest, keywords = iter(inputs), dict(zip(kinds, values, strict=True))
        return run(*(next(rest) if is_tensor else None for is_tensor in present), **keywords)

    def forward(inputs: list[torch.Tensor], present: list[bool], autocast: Any, *values: Any) -> list[torch.Tensor]:
        with with_autocast(inputs[0].device, autocast):
            results = apply(function, inputs, present, values)
        expected = apply(shapes, inputs, present, values)
        return [result.to(dtype).contiguous() for result, (_, dtype) in zip(results, expected, strict=True)]

    def backward(
        gradients: list[torch.Tensor], needed: list[bool], inputs: list[torch.Tensor], *rest: Any
    ) -> list[torch.Tensor]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed, strict=True)]
            results = forward(inputs, *rest)
        targets = [index for index, result in enumerate(results) if result.requires_grad]
        input_gradients = torch.autograd.grad(
            [results[index] for index in targets],
            [tensor for tensor in inputs if tensor.requires_grad],
            [gradients[index] for index in targets],
            allow_unused=True,
            materialize_grads=True,
        )
        return [gradient.contiguous() for gradient in input_gradients]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, *ctx.rest = inputs
        ctx.save_for_backward(*tensors)

    def differentiate(ctx: Any, gradients: list[torch.Tensor]) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise UserError("gradients.second_derivative")
        needed = [bool(need) for need in ctx.needs_input_grad[0]]
        input_gradients = iter(backward_operator(gradients, needed, list(ctx.saved_tensors), *ctx.rest))
        return [next(input_gradients) if need else None for need in needed], *(None for _ in ctx.rest)

    name, name_backward = function.__name__, f"{function.__name__}_backward"
    space, copies = SPACE, 0
    while hasattr(getattr(torch.ops, space), name):  # code from the Hub that is loaded again
        copies += 1
        space = f"{SPACE}_{copies}"
    library = torch.library.Library(space, "FRAGMENT")
    libraries.append(library)  # must live as long as the operator
    library.define(f"{name}({arguments}) -> Tensor[]")
    library.define(f"{name_backward}(Tensor[] gradients, bool[] needed, {arguments}) -> Tensor[]")
    library.impl(name, forward, "CompositeExplicitAutograd")
    library.impl(name_backward, backward, "CompositeExplicitAutograd")
    # The backward pass uses autograd inside, which torch switches off below an operator's own gradient.
    library.impl(name_backward, torch.library.fallthrough_kernel, "Autograd")

    @torch.library.register_fake(f"{space}::{name}", lib=library)
    def forward_shapes(inputs: Any, present: Any, autocast: Any, *values: Any) -> list[torch.Tensor]:
        return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in apply(shapes, inputs, present, values)]

    @torch.library.register_fake(f"{space}::{name_backward}", lib=library)
    def backward_shapes(gradients: Any, needed: Any, inputs: Any, *rest: Any) -> list[torch.Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor, need in zip(inputs, needed, strict=True) if need]

    torch.library.register_autograd(f"{space}::{name}", differentiate, setup_context=setup_context, lib=library)
    operators = getattr(torch.ops, space)
    backward_operator = getattr(operators, name_backward).default
    return getattr(operators, name).default


# -- steps of a recurrence ---------------------------------------------------------------------------------------------

Step = Callable[[Sequence[torch.Tensor], torch.Tensor], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]


def scan_steps(step: Step, carry: Sequence[torch.Tensor], inputs: torch.Tensor) -> list[torch.Tensor]:
    """
    Run a recurrence as a loop, or in an exported graph as one operator. `step` maps a carry and a row of `inputs`
    `(steps, ..)` to the next carry and its outputs. Return the outputs of all steps.
    """
    if is_exporting():
        from torch._higher_order_ops.scan import scan

        def traced_step(carry: list[torch.Tensor], row: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            next_carry, outputs = step(carry, row)
            return list(next_carry), [output.clone() for output in outputs]  # no tensor may be both

        return scan(traced_step, list(carry), inputs)[1]
    all_outputs: list[Sequence[torch.Tensor]] = []
    for row in inputs.unbind(0):
        carry, outputs = step(carry, row)
        all_outputs.append(outputs)
    return [torch.stack(column) for column in zip(*all_outputs, strict=True)]


# -- matmuls in float32 ------------------------------------------------------------------------------------------------

# Smallest number of rows of the left side, and of elements of the right side, for which oneDNN is used; their types.
FEWEST_WIDE_ROWS, SMALLEST_WIDE_WEIGHT, ORDINARY = 8, 2**13, (torch.Tensor, nn.Parameter)


@functools.cache
def has_wide_matmul() -> bool:
    """Return whether this build of torch has oneDNN's linear layer."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


@functools.cache
def prefers_onednn() -> bool:
    """Return whether oneDNN uses vectors of twice the width that MKL uses in float32: on AMD with AVX512."""
    return is_amd() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def onednn_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a linear layer by oneDNN; a weight with gaps between its rows is slow to read, so copy it."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        by_columns = weight.stride(0) < weight.stride(1)
        weight = weight.t().contiguous().t() if by_columns else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def are_ordinary(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether both are plain float32 tensors on the CPU, while nothing casts or observes the operations."""
    return (
        type(left) in ORDINARY
        and type(right) in ORDINARY
        and left.dtype == right.dtype == torch.float32
        and left.is_cpu
        and right.is_cpu
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and _get_current_dispatch_mode() is None
    )


def takes_wide(left: torch.Tensor, right: torch.Tensor, fewest_rows: int = FEWEST_WIDE_ROWS) -> bool:
    """Return whether a matmul of `left` `(.., k)` with the elements of `right` uses oneDNN."""
    # Shapes are read last, since that makes conditions of a graph.
    return enabled() and are_ordinary(left, right) and suits_wide(left, right, fewest_rows)


def suits_wide(left: torch.Tensor, right: torch.Tensor, fewest_rows: int, is_output: bool = False) -> bool:
    """Return whether oneDNN is faster for tensors of these shapes; `is_output`: an output layer in decoding."""
    return (
        right.numel() >= SMALLEST_WIDE_WEIGHT
        and min(right.shape) >= FEWEST_WIDE_ROWS
        and left.numel() >= fewest_rows * left.shape[-1]
        and has_wide_matmul()
        and (prefers_onednn() or (is_output and is_amd()) or setting() == "1")
    )


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right` of `(m, k)` and `(k, n)` in any memory order; no gradient is recorded."""
    if takes_wide(left, right):
        return onednn_linear(left, right.t(), None)
    return torch.mm(left, right)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to `total`, in the type of `total`; see [`wide_product`]."""
    if total.dtype == left.dtype and not takes_wide(left, right):
        total.addmm_(left, right)
    else:
        total += wide_product(left, right)


class WideLinear(CustomGradient):
    """`states @ weight.T + bias` with its gradients by oneDNN; second derivatives use torch's own matmuls."""

    @staticmethod
    def forward(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return onednn_linear(states, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        states, weight = ctx.saved_tensors
        multiply = torch.mm if torch.is_grad_enabled() else wide_product
        grad_states = multiply(gradient, weight) if ctx.needs_input_grad[0] else None
        grad_weight = multiply(gradient.t(), states) if ctx.needs_input_grad[1] else None
        return grad_states, grad_weight, gradient.sum(dim=0) if ctx.needs_input_grad[2] else None


def wide_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`, by oneDNN where that is faster."""
    multiply = onednn_layer if takes_wide(states, weight) else nn.functional.linear
    return multiply(states, weight, bias)


def onednn_layer(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a linear layer by oneDNN, with its gradients."""
    flat = states.reshape(-1, states.shape[-1])
    multiply = WideLinear.apply if torch.is_grad_enabled() else onednn_linear
    return multiply(flat, weight, bias).view(*states.shape[:-1], weight.shape[0])


# Matmuls of a decoding step: on AMD processors `weight @ states.T` is 1.3 to 3.8 times as fast as `states @ weight.T`
# for these numbers of rows, at most so many elements, and weights of at least this width and size.
FEW_ROWS, MAX_ELEMENTS, SMALLEST_WIDTH, SMALLEST_WEIGHT = range(2, 6), 3072, 256, 2**18
# Rows from which oneDNN is used for a layer; in decoding, fewer suffice from these sizes, with and without AVX512.
MANY_ROWS, LARGE_WEIGHT, LARGE_WITHOUT_AVX512 = 16, 2**22, 2_000_000


def weight_first(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `(weight @ states.T).T + bias` of states `(.., in_features)`."""
    projected = torch.mm(weight, states.flatten(0, -2).t()).t().contiguous().view(*states.shape[:-1], -1)
    return projected if bias is None else projected.add_(bias)


def suits_weight_first(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a layer of ordinary tensors reads its weight first, for the few rows of a decoding step."""
    return (
        not torch.is_grad_enabled()
        and weight.numel() >= SMALLEST_WEIGHT
        and weight.shape[1] >= SMALLEST_WIDTH
        and states.numel() // weight.shape[1] in FEW_ROWS
        and states.numel() <= MAX_ELEMENTS
        and (is_amd() or setting() == "1")
    )


def project(linear: nn.Module, states: torch.Tensor, activation: Any = None) -> torch.Tensor:
    """Apply a linear layer to states `(.., in_features)` by the fastest matmul, then an activation; call adapters."""
    if not states.is_cpu:
        return linear(states) if activation is None else activation(linear(states))
    packed = None if torch.compiler.is_compiling() else linear.__dict__.get("packed_weight")  # of recnmt_hf.inference
    if packed is not None and packed.suits(linear, states):
        return packed.multiply(linear, states, activation)
    if activation is not None:
        return activation(project(linear, states))
    weight = linear.weight if type(linear) is nn.Linear and not torch.compiler.is_compiling() else None
    # In this order: each check costs as much as a small matmul, and a row alone has no faster one.
    if weight is not None and are_ordinary(states, weight) and states.numel() > weight.shape[1] and allowed():
        bias: Any = linear.bias
        large = LARGE_WEIGHT if prefers_onednn() else LARGE_WITHOUT_AVX512
        is_output = not torch.is_grad_enabled() and weight.numel() >= large
        rows = FEWEST_WIDE_ROWS if is_output else MANY_ROWS
        if suits_wide(states, weight, rows, is_output) and is_plain(linear, nn.Linear):
            return onednn_layer(states, weight, bias)
        if suits_weight_first(states, weight) and is_plain(linear, nn.Linear):
            return weight_first(states, weight, bias)
    return linear(states)


# -- attention and dropout ---------------------------------------------------------------------------------------------

# Torch's own kernel is faster for fewer elements.
SMALLEST_DROPOUT = 2**13
# Plain matmuls are faster than sdpa for these numbers of queries of a row, keys in float32, and queries of all rows and
# heads in decoding; in bfloat16 up to more keys, also in training.
FEW_QUERIES, FEW_KEYS, MANY_QUERIES, MOST_KEYS = range(1, 9), range(7, 25), 160, 384


def prefers_plain_matmuls(query: torch.Tensor, key: torch.Tensor, dropout: float) -> bool:
    """
    Return whether attention by plain matmuls is faster than sdpa on the CPU, for query and key `(batch_size, num_heads,
    length, head_dim)`. In decoding, sdpa is slow for the few queries of a step, above all in bfloat16. In training with
    dropout, it makes the same matmuls with a slower dropout; without, its backward pass in bfloat16 is slow.
    """
    if not query.is_cpu or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    keys, is_half = key.shape[2], query.dtype == torch.bfloat16
    if not torch.is_grad_enabled():
        suits = query.shape[2] in FEW_QUERIES and (keys in FEW_KEYS or (is_half and FEW_KEYS.stop <= keys <= MOST_KEYS))
        many = suits and query.shape[:-1].numel() >= MANY_QUERIES
        return many and allowed() and (is_amd() or setting() == "1")
    if dropout > 0:
        many = query.shape[:-1].numel() * keys >= SMALLEST_DROPOUT
        return many and allowed() and (is_half or is_amd() or setting() == "1")
    return is_half and query.requires_grad and keys <= MOST_KEYS and allowed()


def has_short_rows(scores: torch.Tensor) -> bool:
    """Return whether [`short_softmax`] is faster: torch's own is slow for rows shorter than a vector of AVX512."""
    if not scores.is_cpu or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return 0 < scores.shape[-1] < 16 and scores.numel() >= 2**11 and allowed()


def short_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Compute a softmax over the last axis, without gradients."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(-1, keepdim=True))


def dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """
    Compute dropout. On the CPU torch draws its mask one number after the other, which takes up to a third of a training
    step. Here one 64-bit draw decides four elements, so that `p` is rounded to a multiple of `2 ** -16`.
    """
    if not training or p == 0.0:
        return states
    if not (states.is_cpu and enabled()) or states.numel() < SMALLEST_DROPOUT:
        return nn.functional.dropout(states, p=p, training=True)
    dropped, count = round(p * 65536), states.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
    mask = (draws.view(torch.int16)[:count] >= dropped - 32768).view(states.shape)
    return states * mask.to(states.dtype).mul_(65536.0 / (65536 - dropped))
