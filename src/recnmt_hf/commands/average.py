"""`recnmt average`: average checkpoints."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from ..errors import UserError
from .arguments import refuse_duplicates, whole


DEFAULT_COUNT = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("inputs", nargs="+", help="checkpoint folders, or one folder of a training run")
    add("--output", "-o", required=True, help="folder of the averaged model")
    add("--count", type=whole(1), default=DEFAULT_COUNT, help="number of checkpoints of a run (default: %(default)s)")
    add("--which", choices=("last", "best"), default="last", help="checkpoints of a run to average (default: last)")
    add("--metric", default="eval_bleu", help="metric of --which best (default: eval_bleu)")
    add("--lower-is-better", action="store_true", help="lower values of --metric are better (known for usual metrics)")


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..training.checkpoints import average_checkpoints, choose_checkpoints
    from ..training.metrics import known_direction

    if args.lower_is_better and known_direction(args.metric):
        raise UserError("usage.excludes", field="--lower-is-better", other=f"--metric {args.metric}")
    refuse_duplicates(args.inputs, "inputs")
    folders = [Path(path) for path in args.inputs]
    for path, folder in zip(args.inputs, folders, strict=True):
        if not path or not folder.is_dir():
            raise UserError("average.no_folder", value=path)
    if len(folders) == 1 and not list(folders[0].glob("*.safetensors")):
        run_folder = folders[0]
        refuse_inside(args.output, run_folder, is_run=True)
        greater_is_better = False if args.lower_is_better else None
        folders = choose_checkpoints(run_folder, args.count, args.which, args.metric, greater_is_better, report)
        if len(folders) < args.count:
            values = f" with a value of {args.metric}" if args.which == "best" else ""
            raise UserError(
                "option.value",
                field="--count",
                value=args.count,
                allowed=f"at most {len(folders)}, the number of complete checkpoints in {run_folder}{values}",
                remedy=f"pass --count {len(folders)} (the default is {DEFAULT_COUNT}), or the checkpoints to average",
            )
    for folder in folders:
        refuse_inside(args.output, folder)
    with open_output_folder(args.output, must_be_new=True) as working:
        average_checkpoints(folders, working)
    print(f"{args.output}: the average of {', '.join(map(str, folders))}")


def report(text: str) -> None:
    print(f"recnmt average: {text}", file=sys.stderr, flush=True)


def refuse_inside(output: str, folder: Path, is_run: bool = False) -> None:
    """Reject an output inside an averaged folder, or one that a later training run would treat as its checkpoint."""
    place, averaged = Path(output).resolve(), folder.resolve()
    if not place.is_relative_to(averaged):
        return
    first = [*place.relative_to(averaged).parts, ""][0]
    if not is_run or not first or re.fullmatch(r"checkpoint-\d+", first):
        raise UserError("average.output", field=output, folder=folder)
