"""
Fast paths that several models share: matmuls, dropout, custom gradients, operators of compiled graphs.

A fast path is chosen by fixed rules: device, data type, shape, and the processor's vendor where that decides. Runs on
one machine therefore compute the same bits. The environment variable `RECNMT_FAST_PATHS` changes the choice:

- unset or `auto`: a fast path is used where it measured faster.
- `1`: every eligible fast path is used.
- `0`: no fast path is used, only the plain reference.

`scripts/benchmarks/fast_paths.py` prints the gain of each path on the machine where it runs.
"""

import functools
import inspect
import itertools
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
    """Return the value of `RECNMT_FAST_PATHS`: `"0"`, `"1"` or `"auto"` (default); raise `UserError` for any other."""
    value = os.environ.get("RECNMT_FAST_PATHS") or "auto"
    if value not in ("0", "1", "auto"):
        raise UserError(
            f"RECNMT_FAST_PATHS={value!r} is not allowed; it must be 0, 1 or auto. Remedy: correct the environment "
            "variable, or unset it."
        )
    return value


def allowed() -> bool:
    """Return whether fast paths may be used."""
    return setting() != "0"


def enabled() -> bool:
    """Return whether fast paths may replace torch's own kernels; compiled code has kernels of its own."""
    return not torch.compiler.is_compiling() and allowed()


@functools.cache
def is_amd() -> bool:
    """Return whether the processor is made by AMD."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return any("AuthenticAMD" in line for line in lines if line.startswith("vendor_id"))
    except OSError:
        return "AuthenticAMD" in platform.processor()


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Return whether reading the parameters of a module equals calling it: it is exactly of this kind, without hooks,
    offloading, a replaced `forward`, or quantized or sharded weights.
    """
    return (
        # torch.export wraps modules in proxies of the same name.
        (type(module) is kind or (torch.compiler.is_compiling() and type(module).__name__ == kind.__name__))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
        # Quantized and sharded tensors are wrapper classes with this method.
        and not any(hasattr(parameter, "__tensor_flatten__") for parameter in module._parameters.values())
    )


# -- autocast and export -----------------------------------------------------------------------------------------------


def is_exporting() -> bool:
    """Return whether torch.export is running; releases before 2.7 cannot be asked."""
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the data type of autocast on a device; `None` where autocast is off."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def with_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Set autocast to what [`autocast_dtype`] returned; `None` switches it off."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return with_autocast(device, None)


# -- custom gradients --------------------------------------------------------------------------------------------------


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active, such as `grad` or `vmap`."""
    return torch._C._are_functorch_transforms_active()


class CustomGradient(torch.autograd.Function):
    """
    Base class of functions with a hand-written backward pass. Their operations write into buffers, which neither
    autograd nor `vmap` can follow: `torch.func.vmap` runs them sample by sample.
    """

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
    def forward(compute: Callable[..., Any], remedy: str, *tensors: torch.Tensor | None) -> Any:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.remedy = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UserError(f"This gradient cannot be differentiated again. Remedy: {ctx.remedy}.")


def final_gradients(
    compute: Callable[..., Any],
    *tensors: torch.Tensor | None,
    remedy: str = "set the environment variable RECNMT_FAST_PATHS=0",
) -> Any:
    """
    Return `compute(*tensors)`, a tensor or a tuple of tensors and `None`, in the backward pass of a [`CustomGradient`].
    Differentiating the result raises a `UserError` with this remedy.
    """
    if torch.is_grad_enabled():  # create_graph=True, or a transform of torch.func
        return FinalGradients.apply(compute, remedy, *tensors)
    return compute(*tensors)


# -- operators of compiled graphs --------------------------------------------------------------------------------------

SETTING_TYPES = {str: "str", bool: "bool", int: "int", float: "float"}
# Returns the shape and the type of each result.
Shapes = Callable[..., list[tuple[Sequence[int], torch.dtype]]]
libraries: list[torch.library.Library] = []


def graph_operator(shapes: Shapes) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Make a function one operator of compiled graphs. Elsewhere, also in exported graphs, it is called directly.

    `torch.compile` unrolls a loop over words, so that each length gets its own graph. As an operator the loop is one
    node for all lengths, and runs as in eager mode, with its fast paths.

    The function takes tensors (or `None`) by position and settings of type `str`, `bool`, `int` or `float` by keyword.
    It returns a list of new tensors, draws no random numbers, and changes none of its arguments. In a compiled graph
    the backward pass computes it again, and cannot be differentiated twice.

    Args:
        shapes (callable): Takes the same arguments and returns shape and type of each result.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = define_operator(function, shapes)

        @functools.wraps(function)
        def call(*tensors: torch.Tensor | None, **settings: Any) -> Any:
            if not torch.compiler.is_compiling() or is_exporting():
                return function(*tensors, **settings)
            given = [tensor for tensor in tensors if tensor is not None]
            places = [tensor is not None for tensor in tensors]
            return operator(given, places, autocast_dtype(given[0].device), *settings.values())

        return call

    return decorate


def define_operator(function: Callable[..., Any], shapes: Shapes) -> Any:
    """Register a function and its backward pass with torch; see [`graph_operator`]."""
    names = {
        name: SETTING_TYPES[parameter.annotation]
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    settings = "".join(f", {kind} {name}" for name, kind in names.items())
    arguments = f"Tensor[] given, bool[] places, ScalarType? autocast{settings}"

    def apply(run: Callable[..., Any], given: Sequence[torch.Tensor], places: Sequence[bool], values: Any) -> Any:
        rest = iter(given)
        return run(*(next(rest) if place else None for place in places), **dict(zip(names, values, strict=True)))

    def forward(given: list[torch.Tensor], places: list[bool], autocast: Any, *values: Any) -> list[torch.Tensor]:
        with with_autocast(given[0].device, autocast):
            results = apply(function, given, places, values)
        expected = apply(shapes, given, places, values)
        return [result.to(dtype).contiguous() for result, (_, dtype) in zip(results, expected, strict=True)]

    def backward(
        gradients: list[torch.Tensor], wanted: list[bool], given: list[torch.Tensor], *rest: Any
    ) -> list[torch.Tensor]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(want) for tensor, want in zip(given, wanted, strict=True)]
            results = forward(inputs, *rest)
        targets = [place for place, result in enumerate(results) if result.requires_grad]
        found = torch.autograd.grad(
            [results[place] for place in targets],
            [tensor for tensor in inputs if tensor.requires_grad],
            [gradients[place] for place in targets],
            allow_unused=True,
            materialize_grads=True,
        )
        return [gradient.contiguous() for gradient in found]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given, *ctx.rest = inputs
        ctx.save_for_backward(*given)

    def differentiate(ctx: Any, gradients: list[torch.Tensor]) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise UserError(
                f"A compiled graph cannot be differentiated twice through {function.__name__}. Remedy: run the model "
                "without torch.compile and with RECNMT_FAST_PATHS=0."
            )
        wanted = [bool(need) for need in ctx.needs_input_grad[0]]
        found = iter(of_gradients(gradients, wanted, list(ctx.saved_tensors), *ctx.rest))
        return [next(found) if want else None for want in wanted], *(None for _ in ctx.rest)

    library, space = new_library(function.__name__, f"({arguments}) -> Tensor[]")
    name = f"{space}::{function.__name__}"
    library.define(f"{function.__name__}_backward(Tensor[] gradients, bool[] wanted, {arguments}) -> Tensor[]")
    library.impl(function.__name__, forward, "CompositeExplicitAutograd")
    library.impl(f"{function.__name__}_backward", backward, "CompositeExplicitAutograd")
    # The backward pass uses autograd inside, which torch switches off below an operator's own gradient.
    library.impl(f"{function.__name__}_backward", torch.library.fallthrough_kernel, "Autograd")

    @torch.library.register_fake(name, lib=library)
    def forward_shapes(given: Any, places: Any, autocast: Any, *values: Any) -> list[torch.Tensor]:
        return [given[0].new_empty(shape, dtype=dtype) for shape, dtype in apply(shapes, given, places, values)]

    @torch.library.register_fake(f"{name}_backward", lib=library)
    def backward_shapes(gradients: Any, wanted: Any, given: Any, *rest: Any) -> list[torch.Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor, want in zip(given, wanted, strict=True) if want]

    torch.library.register_autograd(name, differentiate, setup_context=keep, lib=library)
    of_gradients = getattr(getattr(torch.ops, space), f"{function.__name__}_backward").default
    return getattr(getattr(torch.ops, space), function.__name__).default


def new_library(name: str, schema: str) -> tuple[torch.library.Library, str]:
    """
    Define an operator in a namespace of this module, and return its library and the namespace. Where the names are
    taken, since code from the Hub was loaded again, the namespace gets a number.
    """
    own = re.sub(r"\W", "_", __name__)
    for copy in itertools.count():
        space = f"{own}_{copy}" if copy else own
        library = torch.library.Library(space, "FRAGMENT")
        try:
            library.define(name + schema)
        except RuntimeError:
            continue
        libraries.append(library)  # must live as long as the operator
        return library, space
    raise AssertionError


# -- matmuls in float32 ------------------------------------------------------------------------------------------------

# Smallest number of rows of the left side, and of elements of the right side, for which oneDNN is used.
FEWEST_WIDE_ROWS, SMALLEST_WIDE_WEIGHT = 8, 2**13


@functools.cache
def has_wide_matmul() -> bool:
    """Return whether this build of torch has oneDNN's linear layer."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


@functools.cache
def gains_by_width() -> bool:
    """
    Return whether torch's usual matmuls in float32 leave the processor half unused: on AMD processors with AVX512, MKL
    uses vectors of half their width. oneDNN uses the full width.
    """
    return is_amd() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def onednn_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a linear layer by oneDNN; a weight with gaps between its rows, which is slow to read, is copied."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        by_columns = weight.stride(0) < weight.stride(1)
        weight = weight.t().contiguous().t() if by_columns else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def takes_wide(left: torch.Tensor, right: torch.Tensor, fewest_rows: int = FEWEST_WIDE_ROWS) -> bool:
    """
    Return whether a matmul of `left` `(.., k)` with the elements of `right` uses oneDNN: ordinary float32 tensors on
    the CPU of sufficient size, and no dispatch mode that watches the operations.
    """
    return (
        enabled()  # before shapes are read, which a graph would turn into conditions
        and not torch.jit.is_tracing()
        and left.dtype == right.dtype == torch.float32
        and left.device.type == "cpu"
        and right.device.type == "cpu"
        and right.numel() >= SMALLEST_WIDE_WEIGHT
        and min(right.shape) >= FEWEST_WIDE_ROWS
        and left.numel() >= fewest_rows * left.shape[-1]
        and has_wide_matmul()
        and (gains_by_width() or setting() == "1")
        and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in (left, right))
        and not torch.is_autocast_enabled("cpu")
        and _get_current_dispatch_mode() is None
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
    """
    Compute `torch.nn.functional.linear` of states `(.., in_features)` and a weight `(out_features, in_features)`, by
    oneDNN where the processor gains by it.
    """
    if not takes_wide(states, weight):
        return nn.functional.linear(states, weight, bias)
    flat = states.reshape(-1, states.shape[-1])
    multiply = WideLinear.apply if torch.is_grad_enabled() else onednn_linear
    return multiply(flat, weight, bias).view(*states.shape[:-1], weight.shape[0])


# Matmuls of a decoding step. On AMD processors `weight @ states.T` is 1.3 to 3.8 times as fast as `states @ weight.T`
# for these numbers of rows and at most so many elements, with weights of at least this width and size.
FEW_ROWS, MOST_ELEMENTS, SMALLEST_WIDTH, SMALLEST_WEIGHT = range(2, 6), 3072, 256, 2**18
# Rows from which oneDNN is used for a layer. While decoding, fewer suffice for the large weight of an output layer.
MANY_ROWS, LARGE_WEIGHT = 16, 2**22


def weight_first(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `(weight @ states.T).T + bias`."""
    projected = torch.mm(weight, states.t()).t().contiguous()
    return projected if bias is None else projected.add_(bias)


def takes_weight_first(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a linear layer reads its weight first, for the few rows of a decoding step on the CPU."""
    return (
        not torch.is_grad_enabled()
        and enabled()
        and not torch.jit.is_tracing()
        and states.device.type == "cpu"
        and states.dtype == weight.dtype == torch.float32
        and weight.numel() >= SMALLEST_WEIGHT
        and weight.shape[1] >= SMALLEST_WIDTH
        and states.numel() // weight.shape[1] in FEW_ROWS
        and states.numel() <= MOST_ELEMENTS
        and (is_amd() or setting() == "1")
        and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in (states, weight))
        and not torch.is_autocast_enabled("cpu")
        and _get_current_dispatch_mode() is None
    )


def project(linear: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """
    Apply a linear layer to states `(.., in_features)` by the fastest matmul. Anything but a plain `nn.Linear`
    (adapters, quantized layers) is called.
    """
    if type(linear) is not nn.Linear:
        return linear(states)
    weight = linear.weight
    channels, width = weight.shape
    is_large = not torch.is_grad_enabled() and weight.numel() >= LARGE_WEIGHT
    if takes_wide(states, weight, FEWEST_WIDE_ROWS if is_large else MANY_ROWS) and is_plain(linear, nn.Linear):
        return wide_linear(states, weight, linear.bias)
    if takes_weight_first(states, weight) and is_plain(linear, nn.Linear):
        return weight_first(states.reshape(-1, width), weight, linear.bias).view(*states.shape[:-1], channels)
    return linear(states)


# -- attention and dropout in training ---------------------------------------------------------------------------------

# Torch's own kernel drops fewer elements faster.
SMALLEST_DROPOUT = 2**13


def prefers_plain_matmuls(query: torch.Tensor, key: torch.Tensor, dropout: float) -> bool:
    """
    Return whether attention by plain matmuls trains faster than `scaled_dot_product_attention` on the CPU. With
    dropout, sdpa makes the same matmuls with a slower dropout: plain ones win in bfloat16, and in float32 on AMD
    processors. In bfloat16 without dropout they win up to 384 keys, since the backward pass of sdpa's kernel is slow.

    Args:
        query, key (`torch.Tensor` of shape `(batch_size, num_heads, length, head_dim)`).
        dropout (`float`): Dropout of the weights; 0 in evaluation.
    """
    if query.device.type != "cpu":
        return False
    if dropout > 0:
        if not enabled() or query.shape[:-1].numel() * key.shape[2] < SMALLEST_DROPOUT:
            return False
        return query.dtype == torch.bfloat16 or is_amd() or setting() == "1"
    return query.dtype == torch.bfloat16 and query.requires_grad and key.shape[2] <= 384 and enabled()


def dropout(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """
    Zero elements with probability `p` and scale the others by `1 / (1 - p)` (Srivastava et al., 2014).

    On the CPU torch draws its mask one number after the other, which takes up to a third of a training step. Here one
    64-bit draw decides four elements, so that `p` is rounded to a multiple of `2 ** -16`. For few elements, on other
    devices and in compiled code, torch's own dropout is used.
    """
    if not training or p == 0.0:
        return states
    if states.device.type != "cpu" or not enabled() or states.numel() < SMALLEST_DROPOUT:
        return nn.functional.dropout(states, p=p, training=True)
    dropped = round(p * 65536)
    count = states.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
    kept = (draws.view(torch.int16)[:count] >= dropped - 32768).view(states.shape)
    return states * kept.to(states.dtype).mul_(65536.0 / (65536 - dropped))
