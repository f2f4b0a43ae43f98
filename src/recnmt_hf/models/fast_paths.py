"""
Faster ways to the same results, and the choice between them and their references.

The environment variable `RECNMT_FAST_PATHS` says how the choice is made:

- unset or `auto`: Whatever may be part of training is chosen by rules alone (device, data type, shape, and the
  processor's vendor where that decides), so that every run on a machine computes the same bits. The matmuls of a
  decoding step, whose winner depends on the processor and its library, are measured: once per process and kind of
  shape, for some hundredths of a second; a path is taken only where it wins clearly.
- `1`: every eligible path is taken, nothing is measured.
- `0`: no path is taken. Nor is anything measured, so outputs are bit-equal in every process of a machine.

`recnmt benchmark --fast-paths` prints what each path gains where it runs.
"""

import functools
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .custom_gradients import CustomGradient
from .user_errors import UserError


# A measured path is taken if it is faster than its reference by this factor: what wins by less could win in one process
# and lose in the next, and two runs would differ in their last bits for nothing.
MARGIN = 1.2


def setting() -> str:
    """
    Return `"0"`, `"1"` or `"auto"`, the value of `RECNMT_FAST_PATHS`; unset or empty, it is `"auto"`.

    Raises:
        ValueError: It has another value.
    """
    value = os.environ.get("RECNMT_FAST_PATHS") or "auto"
    if value not in ("0", "1", "auto"):
        raise UserError(
            f"RECNMT_FAST_PATHS={value!r} is not allowed; it must be 0, 1 or auto. Remedy: correct the environment "
            "variable, or unset it."
        )
    return value


def allowed() -> bool:
    """Whether the user lets fast paths be taken."""
    return setting() != "0"


def enabled() -> bool:
    """Whether fast paths that go around torch's own kernels may be taken: not in compiled code, which has its own."""
    return not torch.compiler.is_compiling() and allowed()


@functools.cache
def is_amd() -> bool:
    """Whether the processor is one of AMD's."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return any("AuthenticAMD" in line for line in lines if line.startswith("vendor_id"))
    except OSError:
        return "AuthenticAMD" in platform.processor()


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


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """
    One measured choice.

    Attributes:
        path (`str`): What was chosen for, e.g. `"matmul of few rows"`.
        shape (`str`): The kind of shape.
        threads (`int`): torch's threads while it was measured.
        seconds (`dict[str, float]`): Median time of one call of each candidate, the reference first.
        taken (`str`): The candidate that is used from now on in this process.
    """

    path: str
    shape: str
    threads: int
    seconds: dict[str, float]
    taken: str


_choices: list[Choice] = []
_measuring = threading.RLock()


def choices() -> list[Choice]:
    """What was measured in this process so far."""
    with _measuring:
        return list(_choices)


def clock() -> float:
    """Processor time of this thread, which other programs do not disturb; wall time where several threads compute."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def time_in_turns(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each round; in a round all take their turn, in changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for turn in range(rounds):
        for name in candidates if turn % 2 == 0 else reversed(list(candidates)):
            start = clock()
            candidates[name]()
            seconds[name].append(clock() - start)
    return seconds


def clear_winner(seconds: Mapping[str, list[float]], margin: float = MARGIN) -> str:
    """
    The candidate with the largest gain over the reference, the first of them, by the median of its rounds; the
    reference where no gain reaches `margin`.
    """
    (reference, base), *others = seconds.items()
    gains = {
        name: statistics.median(a / max(b, 1e-9) for a, b in zip(base, each, strict=True)) for name, each in others
    }
    best = max(gains, key=gains.__getitem__, default=reference)
    return best if gains.get(best, 0.0) >= margin else reference


def may_measure(*tensors: torch.Tensor) -> bool:
    """
    Whether running something for its time is harmless here: ordinary tensors, no graph being made, no gradient wanted,
    and nobody who watches the operations (fake tensors, counters, functional transformations).
    """
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors)
        and _get_current_dispatch_mode() is None
    )


# -- matmuls in float32 ------------------------------------------------------------------------------------------------

# Rows of the left side, and elements, rows and columns of the right one, below which calls decide, not arithmetic.
FEWEST_WIDE_ROWS, SMALLEST_WIDE_WEIGHT = 8, 2**13
# Calls and rows from which a weight is worth being put in order for them.
FEWEST_PACKED_CALLS, FEWEST_PACKED_ROWS = 24, 2


@functools.cache
def has_wide_matmul() -> bool:
    """Whether this build of torch has oneDNN's linear layer."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


@functools.cache
def gains_by_width() -> bool:
    """
    Whether torch's usual matmuls in float32 leave the processor half unused: with AVX512 on AMD's, MKL takes vectors of
    half their width. oneDNN, which torch has beside it, takes all of it, forward and backward alike.
    """
    return is_amd() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def onednn_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's linear layer; weights with gaps between their rows, which it would read number by number, are copied."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        by_columns = weight.stride(0) < weight.stride(1)
        weight = weight.t().contiguous().t() if by_columns else weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def takes_wide(left: torch.Tensor, right: torch.Tensor, fewest_rows: int = FEWEST_WIDE_ROWS) -> bool:
    """
    Whether a matmul of `left` `(.., k)` with the elements of `right` goes to oneDNN: ordinary tensors in float32 on the
    CPU, nobody who watches the operations, and enough to multiply.
    """
    return (
        enabled()  # before shapes are looked at, which in a graph would be conditions of it
        and not torch.jit.is_tracing()
        and left.dtype == right.dtype == torch.float32
        and left.device.type == "cpu"
        and right.device.type == "cpu"
        and right.numel() >= SMALLEST_WIDE_WEIGHT
        and min(right.shape) >= FEWEST_WIDE_ROWS
        and left.numel() >= fewest_rows * left.shape[-1]
        and has_wide_matmul()
        and (gains_by_width() or setting() == "1")
        and all(type(each) in (torch.Tensor, nn.Parameter) for each in (left, right))
        and not torch.is_autocast_enabled("cpu")
        and _get_current_dispatch_mode() is None
    )


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` of `(m, k)` and `(k, n)`, in whatever order they stand in memory; no gradient is recorded."""
    if takes_wide(left, right):
        return onednn_linear(left, right.t(), None)
    return torch.mm(left, right)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right`, in the type of `total`; see [`wide_product`]."""
    if total.dtype == left.dtype and not takes_wide(left, right):
        total.addmm_(left, right)
    else:
        total += wide_product(left, right)


def transposed_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """
    `left.T @ right` of `(m, k)` and `(m, n)`, as a weight's gradient is made; no gradient is recorded. oneDNN reads its
    left side row by row: the smaller of the two is copied for it.
    """
    if not takes_wide(left.t(), right):
        return torch.mm(left.t(), right)
    if left.shape[1] <= right.shape[1]:
        return onednn_linear(left.t().contiguous(), right.t(), None)
    return onednn_linear(right.t().contiguous(), left.t(), None).t().contiguous()


class RepeatedLinear:
    """
    `states @ weight.T + bias` again and again, as the steps of a recurrence have it. Where oneDNN multiplies and no
    gradient is recorded, it is given the weight in its own order, made once; otherwise it would make that order at
    every call, which takes as long as to multiply some rows.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`).
        calls (`int`): How many calls there will be.
    """

    def __init__(self, weight: torch.Tensor, calls: int):
        self.weight, self.calls = weight, calls
        self.packed: torch.Tensor | None = None

    def is_packed(self, states: torch.Tensor) -> bool:
        """Whether the weight stands in oneDNN's order, put so now if these states make it worth while."""
        if self.packed is not None:
            return True
        if not enabled() or torch.is_grad_enabled():  # first, since in a graph the number of calls is free
            return False
        if self.calls >= FEWEST_PACKED_CALLS and takes_wide(states, self.weight, FEWEST_PACKED_ROWS):
            rows = states.numel() // states.shape[-1]
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), rows)
        return self.packed is not None

    def __call__(self, states: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_packed(states):
            return torch.ops.mkldnn._linear_pointwise(states, self.packed, bias, "none", [], "")
        return wide_linear(states, self.weight, bias)


class WideLinear(CustomGradient):
    """`states @ weight.T + bias` with its gradients, all by oneDNN; gradients of gradients by torch's own matmuls."""

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
    `torch.nn.functional.linear`, by oneDNN where the processor gains by it: by rule, so that runs on one machine
    compute the same bits.

    Args:
        states (`torch.Tensor` of shape `(.., in_features)`).
        weight (`torch.Tensor` of shape `(out_features, in_features)`).
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*).
    """
    if not takes_wide(states, weight):
        return nn.functional.linear(states, weight, bias)
    flat = states.reshape(-1, states.shape[-1])
    if torch.is_grad_enabled():
        found = WideLinear.apply(flat, weight, bias)
    else:
        found = onednn_linear(flat, weight, bias)
    return found.view(*states.shape[:-1], weight.shape[0])


# -- matmuls of a decoding step ----------------------------------------------------------------------------------------

# Numbers of rows for which candidates differ, each with the number at which its kind of shape is measured.
ROW_KINDS = {2: 3, 3: 3, 4: 4, 5: 4, 6: 8, 7: 8, 8: 8} | dict.fromkeys(range(9, 16), 12)
MANY_ROWS = 16
# Narrower and smaller weights are bound by the calls, not by the matmul; all from the larger sizes on behave alike, but
# for those with the many channels of an output layer.
SMALLEST_WIDTH, LARGER_WIDTH = 256, 512
SMALLEST_WEIGHT, LARGER_WEIGHT = 2**18, 2**19
MANY_CHANNELS = 2**13
# Elements of the buffer that weights are read from in turn: more than a core's own cache holds and knows the addresses
# of, as with the weights of a decoding step.
MEASURED_BUFFER = 6 * 2**20
BLOCK = 32

Matmul = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def weight_first(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`(weight @ states.T).T + bias`: the same matmul with weights as the long side."""
    projected = torch.mm(weight, states.t()).t().contiguous()
    return projected if bias is None else projected.add_(bias)


def by_blocks(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The matmul for `BLOCK` output channels at a time, in one batched call: each block is read once."""
    rows, (channels, width) = states.shape[0], weight.shape
    count = channels // BLOCK
    whole = count * BLOCK
    blocks = weight[:whole].view(count, BLOCK, width).transpose(1, 2)
    states_of_all = states.expand(count, rows, width)
    if bias is None:
        projected = torch.bmm(states_of_all, blocks)
    else:
        projected = torch.baddbmm(bias[:whole].view(count, 1, BLOCK), states_of_all, blocks)
    if whole == channels:
        return projected.transpose(0, 1).reshape(rows, channels)
    output = states.new_empty(rows, channels)
    output[:, :whole].view(rows, count, BLOCK).copy_(projected.transpose(0, 1))
    output[:, whole:] = nn.functional.linear(states, weight[whole:], None if bias is None else bias[whole:])
    return output


MATMULS: dict[str, Matmul] = {"linear": nn.functional.linear, "weight first": weight_first, "by blocks": by_blocks}
if has_wide_matmul():
    MATMULS["wide"] = wide_linear
_matmuls: dict[tuple[int, int, int, int], str] = {}


def choose_matmul(rows: int, width: int, channels: int) -> str:
    """
    The name in `MATMULS` of the matmul that wins for `rows` states of `width` elements and a weight `(channels,
    width)` with this number of threads: measured on the first call for a kind of shape, remembered afterwards.
    """
    size = 2 * LARGER_WEIGHT if width * channels >= LARGER_WEIGHT else SMALLEST_WEIGHT
    width = LARGER_WIDTH if width >= LARGER_WIDTH else SMALLEST_WIDTH
    channels = MANY_CHANNELS if channels >= MANY_CHANNELS else size // width
    key = ROW_KINDS[rows], width, channels, torch.get_num_threads()
    if key not in _matmuls:
        with _measuring:
            if key not in _matmuls:  # not measured by another thread in the meantime
                _matmuls[key] = measure_matmuls(*key)
    return _matmuls[key]


def measure_matmuls(rows: int, width: int, channels: int, threads: int) -> str:
    """Measures `MATMULS`, records a [`Choice`], and returns the name of the winner."""
    states, bias = torch.ones(rows, width), torch.ones(channels)
    weights = torch.ones(max(MEASURED_BUFFER // (width * channels), 1), channels, width).unbind(0)

    def over_all(matmul: Matmul) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                matmul(states, weight, bias)

        return run

    seconds = time_in_turns({name: over_all(matmul) for name, matmul in MATMULS.items()}, rounds=3)
    taken = clear_winner(seconds)
    medians = {name: statistics.median(each) / len(weights) for name, each in seconds.items()}
    shape = f"{rows} rows, {width} to {channels} channels"
    _choices.append(Choice("matmul of few rows", shape, threads, medians, taken))
    return taken


def project(linear: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """
    A linear layer, `states @ weight.T + bias`.

    For the few rows of a decoding step on the CPU the time goes into reading the weights, and which matmul reads them
    fastest depends on the processor and its library: see [`choose_matmul`].

    Args:
        linear (`nn.Module`): Usually `nn.Linear`; anything else (adapters, quantized layers) is simply called.
        states (`torch.Tensor` of shape `(..., in_features)`).
    """
    if type(linear) is not nn.Linear:
        return linear(states)
    weight = linear.weight
    channels, width = weight.shape
    if takes_wide(states, weight) and states.numel() >= MANY_ROWS * width and is_plain(linear, nn.Linear):
        return wide_linear(states, weight, linear.bias)
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or states.device.type != "cpu"
        or states.numel() // width not in ROW_KINDS
        or channels * width < SMALLEST_WEIGHT
        or width < SMALLEST_WIDTH
        or states.dtype != torch.float32
        or weight.dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
        or not is_plain(linear, nn.Linear)
    ):
        return linear(states)
    matmul = fastest_matmul(states, weight)
    if matmul is nn.functional.linear:
        return linear(states)
    return matmul(states.reshape(-1, width), weight, linear.bias).view(*states.shape[:-1], channels)


def fastest_matmul(states: torch.Tensor, weight: torch.Tensor) -> Matmul:
    """The matmul that `RECNMT_FAST_PATHS` and measuring name; see [`project`]."""
    chosen = setting()
    if chosen == "1":
        return by_blocks
    if chosen == "0" or not may_measure(states, weight):
        return nn.functional.linear
    channels, width = weight.shape
    return MATMULS[choose_matmul(states.numel() // width, width, channels)]


# -- paths of training, by rule ----------------------------------------------------------------------------------------


# Fewer elements are dropped faster by torch's own kernel: the calls decide, not the random numbers.
SMALLEST_DROPOUT = 2**13


def prefers_plain_matmuls(query: torch.Tensor, key: torch.Tensor, dropout: float) -> bool:
    """
    Whether attention by plain matmuls trains faster than `scaled_dot_product_attention` on the CPU. With
    dropout sdpa makes the same matmuls with a slower dropout: for batches of some size plain ones win in bfloat16, and
    in float32 on AMD's processors, while on Intel's they gain nothing. In bfloat16 without dropout they win up to some
    hundred keys: the backward pass of sdpa's fused kernel takes several times as long.

    Args:
        query, key (`torch.Tensor` of shape `(batch_size, num_heads, length, head_dim)`).
        dropout (`float`): Dropout in force; 0 in evaluation.
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
    Dropout (Srivastava et al., 2014): zeroes elements with probability `p` and scales the others by `1 / (1 - p)`.

    On the CPU torch draws its mask one number after the other, which takes up to a third of a training step. Here one
    64-bit draw decides four elements, so that `p` is rounded to a multiple of `2 ** -16`. For few elements, elsewhere,
    and in compiled code, it is torch's own.

    Args:
        states (`torch.Tensor` of any shape).
        p (`float`): Probability of zeroing an element.
        training (`bool`): `False` returns `states` as they are.
    """
    if not training or p == 0.0:
        return states
    if states.device.type != "cpu" or not enabled() or states.numel() < SMALLEST_DROPOUT:
        return nn.functional.dropout(states, p=p, training=True)
    dropped = round(p * 65536)
    count = states.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = (draws.view(torch.int16)[:count] >= dropped - 32768).view(states.shape)
    return states * kept.to(states.dtype).mul_(65536.0 / (65536 - dropped))
