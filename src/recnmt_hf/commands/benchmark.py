"""`recnmt benchmark`: speed ratios of two models, measured in turns within one run."""

from __future__ import annotations

import argparse

from .arguments import BEAMS, SEED, number, whole
from .named_models import MODEL_HELP, build_model, parse_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        default=["nmt_transformer", "marian"],
        help=f"{MODEL_HELP} (default: nmt_transformer marian). Ratios are those of the first one's speed to each "
        "other one's",
    )
    parser.add_argument(
        "--against",
        metavar="FOLDER",
        help="measure each model against itself as the code in this folder has it: the src/recnmt_hf/models of another "
        "version",
    )
    parser.add_argument("--size", default="base", help="preset of all models (default: base)")
    parser.add_argument("--modes", nargs="+", choices=("train", "generate"), default=["train", "generate"])
    parser.add_argument("--vocab-size", type=whole(5, 2**31 - 1), default=32000)
    parser.add_argument("--mean-length", type=whole(1), default=27, help="mean tokens of a sentence (default: 27)")
    parser.add_argument("--train-batch-size", type=whole(1), default=16)
    parser.add_argument("--generate-batch-size", type=whole(1), nargs="+", default=[16])
    parser.add_argument("--beams", type=BEAMS, default=4)
    parser.add_argument("--batches", type=whole(1), default=1, help="batches of one turn (default: 1)")
    parser.add_argument("--repeats", type=whole(1), default=7, help="turns of each model (default: 7)")
    parser.add_argument("--label-smoothing", type=number(0, below=1), default=0.0)
    parser.add_argument("--threads", type=whole(1, 1024), default=1, help="CPU threads (default: 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="autocast data type")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: CUDA if there is any)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward pass of training")
    parser.add_argument(
        "--count",
        action="store_true",
        help="count the matmuls too: the ratio if all were equally fast, and how fast they are",
    )
    parser.add_argument(
        "--fast-paths",
        action="store_true",
        help="time each fast path of the zoo against its reference on this processor, at --size, --train-batch-size, "
        "the first --generate-batch-size and --mean-length, instead of whole models",
    )
    parser.add_argument("--seed", type=SEED, default=1)


def run(args: argparse.Namespace) -> None:
    import torch
    import transformers

    from ..inference.loading import resolve_device
    from ..models import fast_paths
    from ..training.run import keep_freed_memory
    from .other_version import build_other_model
    from .path_timings import of_choice, time_paths
    from .speed_measuring import measure_models, processor_name

    device = resolve_device(args.device)
    torch.set_num_threads(args.threads)
    if device.type == "cpu":
        keep_freed_memory()  # as in a training run: what the kernel does with pages is not what is measured
    dtype = getattr(torch, args.dtype)
    runs: list[tuple[list[str], list[torch.nn.Module]]] = []
    for text in [] if args.fast_paths else args.models:
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
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    print(
        f"{hardware}, {args.threads} thread(s), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{args.dtype}, size {args.size}, vocabulary {args.vocab_size}, mean length {args.mean_length}, "
        f"RECNMT_FAST_PATHS={fast_paths.setting()}",
        flush=True,
    )
    if args.fast_paths:
        for timing in time_paths(
            args.size,
            args.vocab_size,
            args.train_batch_size,
            args.generate_batch_size[0],
            args.mean_length,
            args.beams,
            args.repeats,
        ):
            print(timing, flush=True)
        return
    for names, models in runs:
        measure_models(args, names, models, dtype, device)
    for choice in fast_paths.choices():
        print(of_choice(choice), flush=True)
