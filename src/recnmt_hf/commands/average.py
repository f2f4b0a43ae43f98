"""`recnmt average`: average checkpoints."""

import argparse
import os
import re
from pathlib import Path

from ..errors import UserError
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

    refuse_duplicates(args.inputs, "inputs")
    folders, output = [Path(path) for path in args.inputs], Path(os.path.realpath(args.output))
    # Training takes a folder with the name of a checkpoint for an incomplete one, and deletes it.
    if re.fullmatch(r"checkpoint-\d+", output.name):
        raise UserError(f"The output {args.output} has the name of a checkpoint.", field=args.output)
    if len(folders) == 1 and not list(folders[0].glob("*.safetensors")):
        better = False if args.lower_is_better else None
        folders = choose_checkpoints(folders[0], args.count, args.which, args.metric, better, note)
    for folder in folders:
        if output.is_relative_to(folder.resolve()):
            raise UserError(f"The output {args.output} is inside {folder}, which is averaged.", field=args.output)
    with open_output_folder(args.output, must_be_new=True) as working:
        average_checkpoints(folders, working)
    print(f"{args.output}: the average of {', '.join(map(str, folders))}")
