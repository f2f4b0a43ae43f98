"""`recnmt average`: average checkpoints."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from ..models.user_errors import UserError
from .arguments import find_duplicate, whole


DEFAULT_COUNT = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", help="checkpoint folders, or one folder of a training run")
    parser.add_argument("--output", "-o", required=True, help="folder of the averaged model")
    parser.add_argument(
        "--count",
        type=whole(1),
        default=DEFAULT_COUNT,
        help=f"number of checkpoints to average from a run, which must have that many (default: {DEFAULT_COUNT})",
    )
    parser.add_argument(
        "--which", choices=("last", "best"), default="last", help="checkpoints of a run to average (default: last)"
    )
    parser.add_argument("--metric", default="eval_bleu", help="metric of --which best (default: eval_bleu)")
    parser.add_argument(
        "--lower-is-better",
        action="store_true",
        help="treat lower values of --metric as better (default: known for usual metrics)",
    )


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..training.checkpoints import average_checkpoints, choose_checkpoints
    from ..training.metrics import known_direction

    if args.lower_is_better and known_direction(args.metric):
        raise UserError(
            f"--lower-is-better contradicts --metric {args.metric}, of which more is better. Remedy: leave it out."
        )
    if duplicate := find_duplicate(args.inputs):
        raise UserError(f"{duplicate}, and would count twice. Remedy: name each checkpoint once.")
    chosen = [Path(path) for path in args.inputs]
    if "" in args.inputs:
        raise UserError("The name of a folder to average is empty. Remedy: name folders of checkpoints.")
    for folder in chosen:
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {reason}. Remedy: name folders of checkpoints, or of one training run.")
    if len(chosen) == 1 and not list(chosen[0].glob("*.safetensors")):
        refuse_inside(args.output, chosen[0], is_run=True)
        greater_is_better = False if args.lower_is_better else None
        run_folder = chosen[0]
        chosen = choose_checkpoints(run_folder, args.count, args.which, args.metric, greater_is_better, report)
        if len(chosen) < args.count:
            evaluated = f" with a value of {args.metric}" if args.which == "best" else ""
            raise UserError(
                f"--count must be at most {len(chosen)}, the number of complete checkpoints in {run_folder}"
                f"{evaluated}, got {args.count} (default: {DEFAULT_COUNT}). Remedy: give --count {len(chosen)}, or "
                "name the checkpoints to average."
            )
    for folder in chosen:
        refuse_inside(args.output, folder)
    with open_output_folder(args.output, must_be_new=True) as working:
        average_checkpoints(chosen, working)
    print(f"{args.output}: the average of {', '.join(str(path) for path in chosen)}")


def report(text: str) -> None:
    print(f"recnmt average: {text}", file=sys.stderr, flush=True)


def refuse_inside(output: str, folder: Path, is_run: bool = False) -> None:
    """Reject an output inside an averaged folder, or one that a later training run would take for its own."""
    place, own = Path(output).resolve(), folder.resolve()
    if not place.is_relative_to(own):
        return
    first = [*place.relative_to(own).parts, ""][0]
    if not is_run or not first or re.fullmatch(r"checkpoint-\d+", first):
        raise UserError(
            f"The output {output} is or lies in {folder}, which is averaged. Remedy: choose another folder."
        )
