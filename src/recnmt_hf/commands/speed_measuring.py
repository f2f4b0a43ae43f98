"""Speed of models, measured in turns within one run, and their floating-point operations."""

from __future__ import annotations

import argparse
import inspect
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import flop_counter


Batch = dict[str, torch.Tensor]


@dataclass
class Workload:
    """Random batches whose lengths are log-normal, as those of translation corpora."""

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
    """Processor time for one CPU thread (other programs do not disturb it), wall time otherwise."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def training_step(model: torch.nn.Module, dtype: torch.dtype, label_smoothing: float) -> Callable[[Batch], object]:
    """Forward, backward and AdamW, each model as `Seq2SeqTrainer` runs it."""
    from transformers.trainer_pt_utils import LabelSmoother

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)  # the Trainer's default
    device = next(model.parameters()).device
    own_loss = "return_logits" in inspect.signature(model.forward).parameters
    smoother = LabelSmoother(epsilon=label_smoothing)

    def step(batch: Batch) -> None:
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


def generation_step(model: torch.nn.Module, dtype: torch.dtype, beams: int) -> Callable[[Batch], object]:
    """Beam search to the length of the references, whatever the random model would stop at."""
    device = next(model.parameters()).device
    generate: Any = model.generate

    def step(batch: Batch) -> None:
        model.eval()
        length = batch["labels"].shape[1]
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            generate(
                batch["input_ids"],
                attention_mask=batch["attention_mask"],
                num_beams=beams,
                do_sample=False,
                min_new_tokens=length,
                max_new_tokens=length,
            )

    return step


def measure(
    steps: Sequence[Callable[[Batch], object]], batches: list[Batch], repeats: int, device: torch.device
) -> np.ndarray:
    """Seconds of every step over all batches, `(repeats, len(steps))`, the steps taking turns in changing order."""
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


def report(title: str, names: Sequence[str], seconds: np.ndarray, operations: Sequence[int] | None = None) -> None:
    """
    Prints the speed of the first model relative to each other one.

    Args:
        title: What was measured.
        names: The models.
        seconds: As [`measure`] returns them.
        operations (*optional*): As [`count_operations`] returns them, of each model.
    """
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


def count_operations(step: Callable[[Batch], object], batches: list[Batch]) -> int:
    """Floating-point operations of all matmuls, convolutions and attentions of a step over all batches."""
    aten = torch.ops.aten
    uncounted = {  # which torch 2.13 leaves out, and their likes
        aten.addmm_: aten.addmm,
        aten.baddbmm_: aten.baddbmm,
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    }

    def formula(like: Any) -> Callable[..., int]:
        return lambda *shapes, out_shape=None, **kwargs: flop_counter.flop_registry[like](*shapes, **kwargs)

    of_kernels = {kernel: formula(like) for kernel, like in uncounted.items()}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=of_kernels) as counter:
        for batch in batches:
            step(batch)
    return counter.get_total_flops()


def matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of one matmul of two square matrices, the fastest of seven."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = measure([lambda _: torch.mm(left, right)], [{}], 7, device)
    return 2 * size**3 / seconds.min()


def processor_name() -> str:
    """The processor's own name and the vector instructions that torch uses on it."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def measure_models(
    args: argparse.Namespace, names: list[str], models: list[torch.nn.Module], dtype: torch.dtype, device: torch.device
) -> None:
    """Prints the ratios of the first model to the others, in the modes that the command's arguments name."""
    if "train" in args.modes:
        load = Workload.make(args.vocab_size, args.train_batch_size, args.batches, args.mean_length, args.seed, device)
        runnable: list[Any] = [torch.compile(model) if args.compile else model for model in models]
        steps = [training_step(model, dtype, args.label_smoothing) for model in runnable]
        seconds = measure(steps, load.batches, args.repeats, device)
        operations = None
        if args.count:
            size = 1024
            rate = matmul_rate(size, dtype, device) / 1e9
            print(f"one matmul of {size} x {size} matrices: {rate:.1f} GFLOP/s", flush=True)
            operations = [
                count_operations(training_step(model, dtype, args.label_smoothing), load.batches) for model in models
            ]
        report(f"training step, batch {args.train_batch_size}", names, seconds, operations)
    if "generate" in args.modes:
        for batch_size in args.generate_batch_size:
            load = Workload.make(args.vocab_size, batch_size, args.batches, args.mean_length, args.seed, device)
            steps = [generation_step(model, dtype, args.beams) for model in models]
            seconds = measure(steps, load.batches, args.repeats, device)
            operations = [count_operations(step, load.batches) for step in steps] if args.count else None
            report(f"generation, beam {args.beams}, batch {batch_size}", names, seconds, operations)
