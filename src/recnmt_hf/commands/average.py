"""`recnmt average`: average checkpoints."""

import argparse
import os
import re
from pathlib import Path

from ..errors import UserError, short_repr
from .arguments import Parser, note, refuse_duplicates, whole


def add_arguments(parser: Parser) -> None:
    add = parser.group("input and output")
    add("inputs", nargs="+", help="checkpoint folders, or one folder of a training run")
    parser.add_output(help="folder of the averaged model")
    add("--count", type=whole(1), default=5, help="number of checkpoints to average, if a run is given")
    add("--which", choices=("last", "best"), default="last", help="checkpoints of a run to average")
    add("--metric", default="eval_bleu", help="metric of --which best")
    better = "lower values of --metric are better (not needed for loss, perplexity and the usual scores)"
    add("--lower-is-better", action="store_true", help=better)


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..training.checkpoints import average_checkpoints, choose_checkpoints
    from ..training.metrics import known_direction

    if args.lower_is_better and known_direction(args.metric):
        raise UserError(f"--lower-is-better and --metric {args.metric} cannot be combined.", field="--lower-is-better")
    refuse_duplicates(args.inputs, "inputs")
    for path in args.inputs:
        if not os.path.isdir(path):
            raise UserError(f"The folder {short_repr(path)} does not exist.")
    folders = [Path(path) for path in args.inputs]
    if len(folders) == 1 and not list(folders[0].glob("*.safetensors")):
        run_folder = folders[0]
        refuse_inside(args.output, run_folder, is_run=True)
        greater_is_better = False if args.lower_is_better else None
        folders = choose_checkpoints(run_folder, args.count, args.which, args.metric, greater_is_better, report)
        if len(folders) < args.count:
            place = f"{run_folder} with a value of {args.metric}" if args.which == "best" else run_folder
            raise UserError(f"--count must be at most {len(folders)}, the complete checkpoints in {place}.")
    for folder in folders:
        refuse_inside(args.output, folder)
    with open_output_folder(args.output, must_be_new=True) as working:
        average_checkpoints(folders, working)
    print(f"{args.output}: the average of {', '.join(map(str, folders))}")


def report(text: str) -> None:
    note(f"recnmt average: {text}")


def refuse_inside(output: str, folder: Path, is_run: bool = False) -> None:
    """Reject an output inside an averaged folder, or one that a later training run would treat as its checkpoint."""
    place, averaged = Path(os.path.realpath(output)), folder.resolve()  # the output may be a loop of links
    if not place.is_relative_to(averaged):
        return
    first = [*place.relative_to(averaged).parts, ""][0]
    if not is_run or not first or re.fullmatch(r"checkpoint-\d+", first):
        raise UserError(f"The output {output} is inside {folder}, which is averaged.", field=output)
