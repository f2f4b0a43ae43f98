#!/usr/bin/env python
"""
Cost of guided alignment: a training step with it, and one that computes the attentions of all layers, against one
without, alternating within one run.

    python scripts/benchmarks/guided_alignment.py nmt_transformer:decoder_autoregression=ssru rnmt --size small
"""

import copy
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from compare import Batch, Workload, training_step
from measuring import make_parser, print_setup, run_script, time_in_turns
from named_models import MODEL_HELP, build_model, parse_model  # beside the experiments, as for compare.py

from recnmt_hf.inference.devices import keep_freed_memory
from recnmt_hf.training.guided_alignment import AlignmentGuide, GuidedAlignment


SMOOTHING = 0.1


def with_diagonal_links(batch: Batch) -> Batch:
    """Return a batch in which each target token is linked to the source token of the same position."""
    (rows, target), source = batch["labels"].shape, batch["input_ids"].shape[1]
    links = torch.eye(target, source).expand(rows, -1, -1) * (batch["labels"] != -100)[:, :, None]
    return {**batch, "links": links * batch["attention_mask"][:, None]}


def main() -> None:
    parser = make_parser(__doc__, {"default": 16})
    parser.add_argument("models", nargs="+", help=MODEL_HELP)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    dtype = getattr(torch, args.dtype)
    print_setup(args, torch.device("cpu"), args.dtype)
    work = Workload.make(args.vocab_size, args.train_batch_size, 4, args.mean_length, 1, torch.device("cpu"))
    for text in args.models:
        name, overrides = parse_model(text)
        model: Any = build_model(name, args.size, args.vocab_size, overrides)
        guided = copy.deepcopy(model)
        AlignmentGuide(guided, GuidedAlignment())
        plain, with_guide = training_step(model, dtype, SMOOTHING), training_step(guided, dtype, SMOOTHING)

        def run(step: Callable[[Batch], object], batches: list[Batch]) -> None:
            for batch in batches:
                step(batch)

        linked = [with_diagonal_links(batch) for batch in work.batches]
        observed = [{**batch, "output_attentions": True} for batch in work.batches]
        candidates = {
            "without": partial(run, plain, work.batches),
            "guided alignment": partial(run, with_guide, linked),
            "all attentions": partial(run, plain, observed),
        }
        seconds = time_in_turns(candidates, args.rounds)
        for kind in list(candidates)[1:]:
            ratios = sorted(one / other for one, other in zip(seconds[kind], seconds["without"], strict=True))
            print(f"{text}, {kind}: {statistics.median(ratios):.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
