#!/usr/bin/env python
"""
Speed ratios of two or more models, which alternate within one run.

    python scripts/benchmarks/compare.py nmt_transformer marian --rounds 7 --generate-batch-size 16 1
    python scripts/benchmarks/compare.py gret --against OTHER_VERSION/src/recnmt_hf/models
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from measuring import count_operations, make_parser, print_setup, run_script


sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
from named_models import MODEL_HELP, build_model, parse_model

import recnmt_hf  # noqa: F401  (registers the models)
from recnmt_hf.commands.arguments import SEED, numeric, whole
from recnmt_hf.errors import UserError, short_repr
from recnmt_hf.families import FAMILIES
from recnmt_hf.inference import pack_weights
from recnmt_hf.inference.devices import keep_freed_memory, resolve_device
from recnmt_hf.options import Range


Batch = dict[str, torch.Tensor]


@dataclass
class Workload:
    """Random batches with log-normal lengths, as in translation corpora."""

    batches: list[Batch]
    tokens: int

    @classmethod
    def make(
        cls, vocab_size: int, batch_size: int, count: int, mean_length: int, seed: int, device: torch.device
    ) -> Workload:
        rng = np.random.default_rng(seed)
        lengths = np.exp(rng.normal(np.log(mean_length) - 0.08, 0.4, size=(batch_size * count, 2)))
        lengths = np.clip(lengths.round().astype(int), 3, 4 * mean_length)
        lengths = lengths[np.lexsort((lengths[:, 1], lengths[:, 0]))]  # sentences of similar length share a batch
        batches, tokens = [], 0
        for part in lengths.reshape(count, batch_size, 2):
            source, target = part.max(axis=0)
            ids = torch.from_numpy(rng.integers(4, vocab_size, size=(batch_size, source)))
            labels = torch.from_numpy(rng.integers(4, vocab_size, size=(batch_size, target)))
            mask = torch.arange(source)[None, :] < torch.from_numpy(part[:, :1])
            labels[torch.arange(target)[None, :] >= torch.from_numpy(part[:, 1:])] = -100
            batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
            batches.append({name: tensor.to(device) for name, tensor in batch.items()})
            tokens += int(part.sum())
        return cls(batches, tokens)


def clock(device: torch.device) -> float:
    """Return processor time for one CPU thread (unaffected by other programs), wall time otherwise."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def trees_of(model: Any, batch: Batch) -> Batch:
    """Return the columns of a model that reads dependency trees: every word depends on the word before."""
    columns = {}
    for name in getattr(model.get_encoder(), "source_inputs", ()):
        columns[name] = torch.arange(-1, batch["input_ids"].shape[1] - 1, device=batch["input_ids"].device)
        columns[name] = columns[name].expand_as(batch["input_ids"])
        if name == "dependency_relations":
            columns[name] = columns[name].clamp(min=0) % model.config.num_relations
    return columns


def training_step(model: torch.nn.Module, dtype: torch.dtype, label_smoothing: float) -> Callable[[Batch], object]:
    """Return a step of forward, backward and AdamW, as `Seq2SeqTrainer` runs it."""
    from transformers.trainer_pt_utils import LabelSmoother

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)  # the Trainer's default
    device = next(model.parameters()).device
    own_loss = "return_logits" in inspect.signature(model.forward).parameters
    smoother = LabelSmoother(epsilon=label_smoothing)

    def step(batch: Batch) -> None:
        batch = batch | trees_of(model, batch)
        model.train()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if own_loss:
                loss = model(**batch, label_smoothing=label_smoothing, return_logits=False).loss
            elif label_smoothing:
                shift: Any = model.prepare_decoder_input_ids_from_labels
                decoder_input_ids = shift(batch["labels"])
                inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
                outputs = model(**inputs, decoder_input_ids=decoder_input_ids, use_cache=False)
                loss = smoother(outputs, batch["labels"])
            else:
                loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def generation_step(model: torch.nn.Module, beams: int, static_cache: bool = False) -> Callable[[Batch], object]:
    """Return a beam search to the length of the references, which ignores the end token of the random model."""
    generate: Any = model.generate
    cache = {"cache_implementation": "static"} if static_cache else {}

    def step(batch: Batch) -> None:
        model.eval()
        length = batch["labels"].shape[1]
        generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            **trees_of(model, batch),
            **cache,
            num_beams=beams,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
        )

    return step


def measure(
    steps: Sequence[Callable[[Batch], object]], batches: list[Batch], repeats: int, device: torch.device
) -> np.ndarray:
    """Return the seconds of every step over all batches, `(repeats, len(steps))`, in turns of changing order."""
    for step in steps:
        step(batches[0])
    seconds = np.zeros((repeats, len(steps)))
    for repeat in range(repeats):
        order = range(len(steps)) if repeat % 2 == 0 else reversed(range(len(steps)))
        for which in order:
            start = clock(device)
            for batch in batches:
                steps[which](batch)
            seconds[repeat, which] = clock(device) - start
    return seconds


def report(
    title: str, names: Sequence[str], seconds: np.ndarray, load: Workload, operations: Sequence[int] | None = None
) -> None:
    """
    Print the speed of each model, and that of the first one relative to each other one.

    Args:
        title: Name of the measurement.
        names: Names of the models.
        seconds: Result of [`measure`].
        load: The batches of a turn.
        operations (*optional*): Floating-point operations of each model.
    """
    for name, median in zip(names, np.median(seconds, axis=0), strict=True):
        rates = f"{len(load.batches) / median:.3g} steps/s, {load.tokens / median:,.0f} tokens/s (source and target)"
        print(f"{title}: {name} {rates}", flush=True)
    for other in range(1, len(names)):
        ratios = sorted(seconds[:, other] / seconds[:, 0])
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{title}: {names[0]} / {names[other]} = {statistics.median(ratios):.3f}x (quartiles {low:.3f} to "
            f"{high:.3f}, {len(ratios)} turns)"
            + (f"; as fast in every matmul: {operations[other] / operations[0]:.3f}x" if operations else ""),
            flush=True,
        )
    if operations:
        rates = [count / statistics.median(seconds[:, model]) / 1e9 for model, count in enumerate(operations)]
        print(
            "matmuls: "
            + ", ".join(
                f"{name} {count / 1e9:.1f} GFLOP at {rate:.1f} GFLOP/s"
                for name, count, rate in zip(names, operations, rates, strict=True)
            ),
            flush=True,
        )


def matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of a matmul of square matrices, the fastest of seven."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = measure([lambda _: torch.mm(left, right)], [{}], 7, device)
    return 2 * size**3 / seconds.min()


def build_other_model(folder: str, model_type: str, model: torch.nn.Module) -> torch.nn.Module:
    """
    Build the same model from the files of another version, with the same configuration and weights. Model files import
    each other by relative names only, so they form a package wherever they are.

    Args:
        folder (`str`): `src/recnmt_hf/models` of the other version.
        model_type (`str`): A model type of this package.
        model (`PreTrainedModel`): Model of the installed version.

    Raises:
        UserError: The folder has no such model, or its weights have other names or shapes.
    """
    if model_type not in FAMILIES:
        raise UserError(
            f"--against does not support {short_repr(model_type)}. Use one of {', '.join(FAMILIES)}.", field="--against"
        )
    prefix, configuration, modeling = (
        FAMILIES[model_type].prefix,
        f"configuration_{model_type}",
        f"modeling_{model_type}",
    )
    if not (Path(folder) / f"{modeling}.py").is_file():
        raise UserError(f"{folder} has no {modeling}.py. Pass src/recnmt_hf/models of another version.", field=folder)
    package = f"recnmt_other_{abs(hash(str(Path(folder).resolve())))}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(Path(folder).resolve())]
    config_class = getattr(importlib.import_module(f"{package}.{configuration}"), f"{prefix}Config")
    model_class = getattr(importlib.import_module(f"{package}.{modeling}"), f"{prefix}ForConditionalGeneration")
    config: Any = model.config
    other = model_class(config_class.from_dict(config.to_dict()))
    try:
        other.load_state_dict(model.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{folder} has a {model_type} with other weights ({reason}).", field=folder) from error
    return other


def measure_models(
    args: argparse.Namespace, names: list[str], models: list[torch.nn.Module], dtype: torch.dtype, device: torch.device
) -> None:
    """Measure the models in the modes of the arguments and print the ratios."""
    if "train" in args.modes:
        load = Workload.make(args.vocab_size, args.train_batch_size, args.batches, args.mean_length, args.seed, device)
        runnable: list[Any] = [torch.compile(model) if args.compile else model for model in models]
        steps = [training_step(model, dtype, args.label_smoothing) for model in runnable]
        seconds = measure(steps, load.batches, args.rounds, device)
        operations = None
        if args.count:
            size = 1024
            rate = matmul_rate(size, dtype, device) / 1e9
            print(f"one matmul of {size} x {size} matrices: {rate:.1f} GFLOP/s", flush=True)
            training = [training_step(model, dtype, args.label_smoothing) for model in models]
            operations = [count_operations(step, load.batches).operations for step in training]
        report(f"training step, batch {args.train_batch_size}", names, seconds, load, operations)
    if "generate" in args.modes:
        models = [model.to(dtype) for model in models]
        if args.pack:
            for model in models:
                pack_weights(model)
        cache = ", static cache" if args.static_cache else ""
        for batch_size in args.generate_batch_size:
            load = Workload.make(args.vocab_size, batch_size, args.batches, args.mean_length, args.seed, device)
            steps = [generation_step(model, args.beams, args.static_cache) for model in models]
            seconds = measure(steps, load.batches, args.rounds, device)
            operations = [count_operations(step, load.batches).operations for step in steps] if args.count else None
            report(f"generation, beam {args.beams}, batch {batch_size}{cache}", names, seconds, load, operations)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, {"nargs": "+", "default": [16]})
    parser.add_argument(
        "models",
        nargs="*",
        default=["nmt_transformer", "marian"],
        help=f"{MODEL_HELP} (default: nmt_transformer marian). Each ratio is the speed of the first model divided by "
        "that of another one",
    )
    parser.add_argument(
        "--against",
        metavar="FOLDER",
        help="compare each model with the same model of another version; FOLDER is its src/recnmt_hf/models",
    )
    parser.add_argument("--modes", nargs="+", choices=("train", "generate"), default=["train", "generate"])
    parser.add_argument("--batches", type=whole(1), default=1, help="batches per turn (default: 1)")
    parser.add_argument(
        "--label-smoothing", type=numeric(float, Range(least=0, below=1)), default=0.0, help="(default: 0)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="data type of autocast in training, and of the weights in generation",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: CUDA if available)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile for the forward pass of training")
    parser.add_argument(
        "--static-cache", action="store_true", help="generate with a static cache; transformers compiles it on GPUs"
    )
    parser.add_argument("--pack", action="store_true", help="pack the weights of other packages' models, too")
    parser.add_argument(
        "--count",
        action="store_true",
        help="also count floating-point operations of matmuls: print their rate, and the ratio at equal rates",
    )
    parser.add_argument("--seed", type=SEED, default=1, help="(default: 1)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = resolve_device(args.device)
    torch.set_num_threads(args.threads)
    if device.type == "cpu":
        keep_freed_memory()  # as in a training run, so that page faults are not measured
    dtype = getattr(torch, args.dtype)
    runs: list[tuple[list[str], list[torch.nn.Module]]] = []
    for text in args.models:
        torch.manual_seed(args.seed)
        name, overrides = parse_model(text)
        model = build_model(name, args.size, args.vocab_size, overrides).to(device)
        if args.against is not None:
            other = build_other_model(args.against, name, model).to(device)
            runs.append(([text, f"{text} of {args.against}"], [model, other]))
        elif runs:
            runs[0][0].append(text)
            runs[0][1].append(model)
        else:
            runs.append(([text], [model]))
    print_setup(args, device, args.dtype)
    for names, models in runs:
        measure_models(args, names, models, dtype, device)


if __name__ == "__main__":
    sys.exit(run_script(main))
