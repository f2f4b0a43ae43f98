"""`recnmt average`: the mean of several checkpoints."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..models.user_errors import UserError
from .arguments import named_twice, told_twice, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", help="checkpoint folders, or one folder of a training run")
    parser.add_argument("--output", "-o", required=True, help="folder of the averaged model")
    parser.add_argument("--count", type=whole(1), default=5, help="of a run: how many checkpoints (default: 5)")
    parser.add_argument("--which", choices=("last", "best"), default="last", help="of a run: which ones")
    parser.add_argument("--metric", default="eval_bleu", help="of a run: what best means (default: eval_bleu)")
    parser.add_argument("--lower-is-better", action="store_true", help="for a metric that is not known to be such")


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..training.checkpoints import average_checkpoints, choose_checkpoints
    from ..training.metrics import known_direction

    if args.lower_is_better and known_direction(args.metric):
        raise UserError(
            f"--lower-is-better contradicts --metric {args.metric}, of which more is better. Remedy: leave it out."
        )
    if twice := named_twice(args.inputs):
        raise UserError(f"{told_twice(twice)}, and would count twice. Remedy: name each checkpoint once.")
    chosen = [Path(path) for path in args.inputs]
    if "" in args.inputs:
        raise UserError("The name of a folder to average is empty. Remedy: name folders of checkpoints.")
    for folder in chosen:
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {reason}. Remedy: name folders of checkpoints, or of one training run.")
    if len(chosen) == 1 and not list(chosen[0].glob("*.safetensors")):
        refuse_inside(args.output, chosen[0], is_run=True)
        chosen = choose_checkpoints(
            chosen[0], args.count, args.which, args.metric, False if args.lower_is_better else None
        )
    for folder in chosen:
        refuse_inside(args.output, folder)
    with open_output_folder(args.output, must_be_new=True) as working:
        average_checkpoints(chosen, working)
    print(f"{args.output}: the average of {', '.join(str(path) for path in chosen)}")


def refuse_inside(output: str, folder: Path, is_run: bool = False) -> None:
    """Refuses an output that would become a part of what is averaged, or be taken for it in the next training."""
    place, own = Path(output).resolve(), folder.resolve()
    if not place.is_relative_to(own):
        return
    first = [*place.relative_to(own).parts, ""][0]
    if not is_run or not first or re.fullmatch(r"checkpoint-\d+", first):
        raise UserError(
            f"The output {output} is or lies in {folder}, which is averaged. Remedy: choose another folder."
        )
