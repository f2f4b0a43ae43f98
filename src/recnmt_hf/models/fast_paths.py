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


# A measured path is taken if it is faster than its reference by this factor: what wins by less could win in one process
# and lose in the next, and two runs would differ in their last bits for nothing.
MARGIN = 1.2


def setting() -> str:
    """`"0"`, `"1"` or `"auto"`, as `RECNMT_FAST_PATHS` has it; any other value is `"auto"`."""
    value = os.environ.get("RECNMT_FAST_PATHS", "auto")
    return value if value in ("0", "1") else "auto"


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


# -- matmuls of a decoding step ----------------------------------------------------------------------------------------

# Numbers of rows for which candidates differ, each with the number at which its kind of shape is measured.
ROW_KINDS = {2: 3, 3: 3, 4: 4, 5: 4, 6: 8, 7: 8, 8: 8} | dict.fromkeys(range(9, 16), 12)
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
    if torch.is_grad_enabled() or type(linear) is not nn.Linear:
        return linear(states)
    weight = linear.weight
    channels, width = weight.shape
    if (
        torch.compiler.is_compiling()
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
