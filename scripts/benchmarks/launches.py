#!/usr/bin/env python
"""
Count what a GPU has to launch, operators that compute and Triton kernels, in a training step (forward and backward) and
in a decoding step. No GPU is needed: the rules of accelerators are followed on the CPU.

    python scripts/benchmarks/launches.py marian nmt_transformer onlstm_transformer rnmt:relation_layers=0
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton  # noqa: F401  (without it, torch's operators would be counted in the kernels' place)
from compare import Batch, trees_of
from measuring import run_script
from torch.utils._python_dispatch import TorchDispatchMode


sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
from named_models import MODEL_HELP, build_model, parse_model

from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.models import kernels_shared, kernels_triton


# Operators that make or look at memory without a kernel.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
FREE |= {"scalar_tensor", "promote_types", "_assert_async", "is_same_size", "_unsafe_view", "_reshape_alias"}
# Operators for which the host waits.
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal"}


class Launches(TorchDispatchMode):
    """Counts operators by name. `stops` are those for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.stops, self.paused = Counter[str](), Counter[str](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.paused and name in WAITS:
            self.stops[name] += 1
        elif not (self.paused or name in FREE or func.is_view):
            self.operators[name] += 1
        result = func(*args, **(kwargs or {}))
        # What a kernel would fill must not be an accident of the memory, on which searches depend.
        return result.zero_() if name in FREE and "empty" in name else result

    def count_kernel(self, kernel: Any) -> bool:
        """Count a Triton kernel, which the CPU does not run."""
        self.operators[kernel.fn.__name__] += 1
        return False

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count what runs inside as one operator."""
        if not self.paused:
            self.operators[name] += 1
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def fused(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that counts as one operator, as does its backward pass: a kernel of cuDNN, for example."""

        class Fused(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, run: Any, *tensors: torch.Tensor) -> Any:
                with self.one(name), torch.enable_grad():
                    ctx.inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
                    ctx.outputs = run(ctx.inputs)
                return tuple(output.detach() for output in ctx.outputs)

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
                with self.one(f"{name}_backward"):
                    inputs = [tensor for tensor in ctx.inputs if tensor.requires_grad]
                    found = iter(torch.autograd.grad(ctx.outputs, inputs, gradients, allow_unused=True))
                return None, *(next(found) if tensor.requires_grad else None for tensor in ctx.inputs)

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, places = torch.utils._pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

            def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
                rest = iter(values)
                filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                own_args, own_kwargs = torch.utils._pytree.tree_unflatten(filled, places)
                result = function(*own_args, **own_kwargs)
                return result if isinstance(result, tuple) else (result,)

            results = Fused.apply(run, *tensors)
            return results if len(results) > 1 else results[0]

        return call


@contextlib.contextmanager
def counting() -> Iterator[Launches]:
    """Count what the device would compute, by the rules of accelerators and with their fused operators."""
    launches = Launches()
    functional, names = torch.nn.functional, ("gru", "lstm", "rnn_tanh")
    patches = [mock.patch.object(torch, name, launches.fused(getattr(torch, name), name)) for name in names]
    attention = launches.fused(functional.scaled_dot_product_attention, "attention")
    patches.append(mock.patch.object(functional, "scaled_dot_product_attention", attention))

    def dropout(states: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(states, p, training)[0] if training and p > 0 else states

    patches.append(mock.patch.object(functional, "dropout", dropout))
    for module in list(sys.modules.values()):
        if getattr(module, "on_cpu", None) is kernels_shared.on_cpu:
            patches.append(mock.patch.object(module, "on_cpu", lambda tensor: False))
    patches.append(mock.patch.object(kernels_triton, "observers", [launches.count_kernel]))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield launches


def batch_of(model: Any, sentences: int, length: int) -> Batch:
    """Return a batch whose first sentence has the full length, the others less."""
    vocab_size = model.config.vocab_size
    ids = torch.randint(4, vocab_size, (sentences, length), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(length, max(length // 2, 1), sentences).long()
    mask = torch.arange(length)[None, :] < lengths[:, None]
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    return batch | trees_of(model, batch)


def count_training(model: Any, sentences: int, length: int) -> tuple[Counter[str], Counter[str], int]:
    """Return the launches of a forward and of a backward pass, and how often the host waits."""
    batch = batch_of(model.train(), sentences, length)
    own = {} if model.config.model_type == "marian" else {"return_logits": False}
    with counting() as launches, launches:
        loss = model(**batch, **own).loss
        forward = launches.operators.copy()
        loss.backward()
    model.zero_grad()
    return forward, launches.operators - forward, launches.stops.total()


def count_decoding(model: Any, sentences: int, length: int, beams: int) -> float:
    """Return the launches of a step of `generate`, by the difference of two searches."""
    batch = batch_of(model.eval(), sentences, length)
    batch.pop("labels")
    totals = []
    for steps in (4, 8):
        options = {"max_new_tokens": steps, "min_new_tokens": steps, "num_beams": beams, "do_sample": False}
        with counting() as launches, launches, torch.no_grad():
            model.generate(**batch, **options)
        totals.append(launches.operators.total())
    return (totals[1] - totals[0]) / 4


def main() -> None:
    parser = Parser(prog=Path(sys.argv[0]).name, description=__doc__)
    parser.add_argument("models", nargs="+", help=f"{MODEL_HELP}; the first one is the unit")
    parser.add_argument("--size", default="base", help="preset of all models")
    parser.add_argument("--sentences", type=whole(1), default=16, help="sentences of a batch")
    parser.add_argument("--lengths", type=whole(2), nargs="+", default=[13, 27, 54], help="tokens of a sentence")
    parser.add_argument("--beams", type=whole(1), default=4, help="beams of decoding")
    parser.add_argument("--operators", type=whole(0), default=0, help="print so many of the most frequent operators")
    args = parser.parse_args()
    units: dict[Any, float] = {}
    print("| model | tokens | forward | backward | sum | of the first | decoding step | of the first | waits |")
    print("|---|---|---|---|---|---|---|---|---|")
    for text in args.models:
        name, fields = parse_model(text)
        model = build_model(name, args.size, 1000, fields)
        for length in args.lengths:
            *passes, waits = count_training(model, args.sentences, length)
            forward, backward = (each.total() for each in passes)
            decoding = count_decoding(model, args.sentences, length, args.beams)
            total = forward + backward
            shares = [value / units.setdefault((key, length), value) for key, value in enumerate((total, decoding))]
            cells = [text, length, forward, backward, total, f"{shares[0]:.2f}", f"{decoding:.0f}", f"{shares[1]:.2f}"]
            print("|", " | ".join(map(str, [*cells, waits])), "|", flush=True)
            for each in passes if args.operators else ():
                print(each.most_common(args.operators), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_script(main))
