"""`recnmt average`: the mean of several checkpoints."""

from __future__ import annotations

import argparse

from ..models.user_errors import ExistingFileError, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", help="checkpoint folders, or one folder of a training run")
    parser.add_argument("--output", "-o", required=True, help="folder of the averaged model")
    parser.add_argument("--count", type=int, default=5, help="of a run: how many checkpoints (default: 5)")
    parser.add_argument("--which", choices=("last", "best"), default="last", help="of a run: which ones")
    parser.add_argument("--metric", default="eval_bleu", help="of a run: what best means (default: eval_bleu)")
    parser.add_argument("--lower-is-better", action="store_true", help="for a metric that is not known to be such")


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    from ..training.checkpoints import average_checkpoints, choose_checkpoints
    from ..training.metrics import known_direction

    output = Path(args.output)
    if output.exists() and any(output.iterdir()):
        raise ExistingFileError(f"{output} is not empty. Remedy: choose a new folder.")
    if args.lower_is_better and known_direction(args.metric):
        raise UserError(
            f"--lower-is-better contradicts --metric {args.metric}, of which more is better. Remedy: leave it out."
        )
    chosen = [Path(path) for path in args.inputs]
    if len(chosen) == 1 and not list(chosen[0].glob("*.safetensors")):
        chosen = choose_checkpoints(
            chosen[0], args.count, args.which, args.metric, False if args.lower_is_better else None
        )
    average_checkpoints(chosen, output)
    print(f"{output}: the average of {', '.join(str(path) for path in chosen)}")
