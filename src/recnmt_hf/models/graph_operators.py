"""
Functions that are one operator in a compiled graph.

`torch.compile` unrolls a loop over words, so that each length gets a graph of its own. As an operator the loop is
one node for all lengths, and the graph runs the function as eager mode does, with its fast paths.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch

from .user_errors import UserError


SETTING_TYPES = {str: "str", bool: "bool", int: "int", float: "float"}


def is_exporting() -> bool:
    """Return whether torch.export is at work; releases before 2.7 cannot be asked."""
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the type that autocast names for a device; `None` where it is off."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def with_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Set autocast to what [`autocast_dtype`] returned."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


# The shape and the type of each result.
Shapes = Callable[..., list[tuple[Sequence[int], torch.dtype]]]


def graph_operator(shapes: Shapes) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Make a function one operator of compiled graphs. Elsewhere, in exported graphs too, it is called as it is.

    The function takes tensors (or `None`) by position and settings of type `str`, `bool`, `int` or `float` by keyword.
    It returns a list of new tensors, draws no random numbers, and changes none of its arguments. In a compiled graph
    the backward pass computes it again, and cannot be differentiated twice.

    Args:
        shapes (callable): Takes the same arguments and returns shape and type of each result.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        operator = define_operator(function, shapes)

        @wraps(function)
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
        return [each.to(dtype).contiguous() for each, (_, dtype) in zip(results, expected, strict=True)]

    def backward(
        gradients: list[torch.Tensor],
        wanted: list[bool],
        given: list[torch.Tensor],
        places: list[bool],
        autocast: Any,
        *values: Any,
    ) -> list[torch.Tensor]:
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_(want) for each, want in zip(given, wanted, strict=True)]
            results = forward(inputs, places, autocast, *values)
        sources = [each for each in inputs if each.requires_grad]
        targets = [place for place, each in enumerate(results) if each.requires_grad]
        found = torch.autograd.grad(
            [results[place] for place in targets],
            sources,
            [gradients[place] for place in targets],
            allow_unused=True,
            materialize_grads=True,
        )
        return [each.contiguous() for each in found]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given, *ctx.rest = inputs
        ctx.save_for_backward(*given)

    def differentiate(ctx: Any, gradients: list[torch.Tensor]) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise UserError(
                f"A compiled graph cannot be differentiated twice through {function.__name__}. Remedy: run the model "
                "without torch.compile and with RECNMT_FAST_PATHS=0."
            )
        wanted = [bool(each) for each in ctx.needs_input_grad[0]]
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
        return [each.new_empty(each.shape) for each, want in zip(given, wanted, strict=True) if want]

    torch.library.register_autograd(name, differentiate, setup_context=keep, lib=library)
    of_gradients = getattr(getattr(torch.ops, space), f"{function.__name__}_backward").default
    return getattr(getattr(torch.ops, space), function.__name__).default


def new_library(name: str, schema: str) -> tuple[torch.library.Library, str]:
    """
    Define an operator in a namespace of this module. Code from the Hub is another module, and one that is loaded again
    finds its names taken: then the namespace gets a number.

    Returns:
        The library, which must live as long as the operator, and its namespace.
    """
    own = re.sub(r"\W", "_", __name__)
    for copy in itertools.count():
        space = f"{own}_{copy}" if copy else own
        library = torch.library.Library(space, "FRAGMENT")
        try:
            library.define(name + schema)
        except RuntimeError:
            continue
        libraries.append(library)
        return library, space
    raise AssertionError


libraries: list[torch.library.Library] = []
