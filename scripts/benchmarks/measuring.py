"""Shared helpers of the benchmark scripts."""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.errors import UserError
from recnmt_hf.models import kernels_shared
from recnmt_hf.options import MOST_BEAMS


aten = torch.ops.aten
Name = TypeVar("Name")
ACTIVATIONS = {aten.tanh: "tanh", aten.tanh_: "tanh", aten.sigmoid: "sigmoid", aten.sigmoid_: "sigmoid"}


@dataclass
class PathTiming:
    """
    Times of a fast path and its reference.

    Attributes:
        path: Name of the computation.
        shape: Shape of its inputs.
        fast, reference: Median seconds.
        gain: Median ratio `reference / fast` of the rounds.
        taken: Whether a model uses the fast path at this shape.
    """

    path: str
    shape: str
    fast: float
    reference: float
    gain: float
    taken: str

    def __str__(self) -> str:
        return (
            f"{self.path}, {self.shape}: fast {1000 * self.fast:.3f} ms, reference {1000 * self.reference:.3f} ms, "
            f"{self.gain:.2f}x; taken: {self.taken}"
        )


def clock() -> float:
    """Return the processor time, with that of other engines' threads; the wall time where several compute."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def time_in_turns(candidates: Mapping[Name, Callable[[], Any]], rounds: int) -> dict[Name, list[float]]:
    """Return the seconds of each candidate in each round; the order alternates between rounds."""
    seconds: dict[Name, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for turn in range(rounds):
        for name in candidates if turn % 2 == 0 else reversed(list(candidates)):
            start = clock()
            candidates[name]()
            seconds[name].append(clock() - start)
    return seconds


class Work(NamedTuple):
    """
    Counts of a step.

    Attributes:
        operations: Floating-point operations of matmuls, convolutions and attention.
        calls: Calls of operators.
        tanh, sigmoid: Values of these functions, each of which takes as long as many of those operations.
    """

    operations: int
    calls: int
    tanh: int
    sigmoid: int


class CallCounter(TorchDispatchMode):
    """Counts the calls of operators, and the values of tanh and sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.values = 0, {"tanh": 0, "sigmoid": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if func.overloadpacket in ACTIVATIONS:
            self.values[ACTIVATIONS[func.overloadpacket]] += args[0].numel()
        return func(*args, **(kwargs or {}))


def count_operations(step: Callable[[Any], object], inputs: Iterable[Any]) -> Work:
    """Count the work of a step over all inputs."""
    uncounted = {  # operators that torch 2.13 does not count, and those with the same formula
        aten.addmm_: aten.addmm,
        aten.baddbmm_: aten.baddbmm,
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    }

    def formula(like: Any) -> Callable[..., int]:
        return lambda *shapes, out_shape=None, **kwargs: flop_counter.flop_registry[like](*shapes, **kwargs)

    of_kernels = {kernel: formula(like) for kernel, like in uncounted.items()}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=of_kernels) as operations, CallCounter() as counter:
        for value in inputs:
            step(value)
    return Work(operations.get_total_flops(), counter.calls, **counter.values)


def seconds_per_activation() -> list[float]:
    """Return the times per value of tanh and sigmoid, for a tensor that fits into a processor's cache."""
    values = torch.randn(2**16)
    functions = {one: lambda one=one: [one(values) for _ in range(20)] for one in (torch.tanh, torch.sigmoid)}
    return [median(rounds) / (20 * values.numel()) for rounds in time_in_turns(functions, 9).values()]


def processor_name() -> str:
    """Return the name of the processor and the vector instructions that torch uses."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def make_parser(description: str | None, generate_batch_size: dict[str, object]) -> argparse.ArgumentParser:
    """Return a parser with the options of both `compare.py` and `fast_paths.py`."""
    parser = Parser(
        prog=Path(sys.argv[0]).name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="base", help="preset of all models (default: base)")
    parser.add_argument(
        "--vocab-size", type=whole(5, 2**31 - 1), default=32000, help="vocabulary size (default: 32000)"
    )
    parser.add_argument("--mean-length", type=whole(1), default=27, help="mean tokens per sentence (default: 27)")
    parser.add_argument(
        "--train-batch-size", type=whole(1), default=16, help="sentences per batch of training (default: 16)"
    )
    parser.add_argument(
        "--generate-batch-size",
        type=whole(1),
        help="sentences per batch of generation (default: 16)",
        **generate_batch_size,
    )
    parser.add_argument("--beams", type=whole(1, MOST_BEAMS), default=4, help="beams of generation (default: 4)")
    parser.add_argument("--rounds", type=whole(1), default=7, help="turns per candidate (default: 7)")
    parser.add_argument("--threads", type=whole(1, 1024), default=1, help="CPU threads (default: 1)")
    return parser


def print_setup(args: argparse.Namespace, device: torch.device, dtype: str) -> None:
    """Print hardware, versions and sizes of a run."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    print(
        f"{hardware}, {args.threads} thread(s), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{dtype}, size {args.size}, vocabulary {args.vocab_size}, mean length {args.mean_length}, "
        f"RECNMT_FAST_PATHS={int(kernels_shared.allowed())}",
        flush=True,
    )


def run_script(main: Callable[[], None]) -> int:
    """Run the function and report a user error in one sentence; return the exit code."""
    try:
        main()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    return 0
