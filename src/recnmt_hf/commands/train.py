"""Commands that make models: `recnmt train`, `average`."""

import argparse
import os
import re
import sys
from pathlib import Path

from ..errors import UserError
from .arguments import PICTURE_HELP, Parser, add_recipe_arguments, refuse_duplicates, whole


def add_train(parser: Parser) -> None:
    overrides = "fields to override, e.g. training.max_steps=2000"
    add_recipe_arguments(parser, overrides, "output folder (default: outputs/NAME-OF-RECIPE)")
    add = parser.group("run")
    start = parser.exclusive("run")
    start("--resume", action="store_true", help="resume from the newest intact checkpoint")
    start("--overwrite", action="store_true", help="delete the files of an earlier run in the folder")
    add("--print-recipe", action="store_true", help="print the recipe with all defaults without training")
    add("--plan", action="store_true", help="check the recipe and print what would be trained, without training")
    plot = f"plot the learning curves of run folders; --output: {PICTURE_HELP} (default: curve.png)"
    add("--plot", action="store_true", help=plot)


def run_train(args: argparse.Namespace) -> None:
    if args.plot:
        from ..analysis.curves import curve_of_run, plot_curves, validation_of_run

        runs, output = [args.recipe, *args.overrides], args.output or "curve.png"
        refuse_duplicates(runs, "runs")
        plot_curves({run: curve_of_run(run) for run in runs}, output, map(validation_of_run, runs))
        print(output)
        return
    from accelerate import PartialState

    from ..hub.card import write_card
    from ..training.plan import Plan, dry_run, model_on_meta
    from ..training.recipe import Recipe
    from ..training.run import train

    recipe = Recipe.from_file(args.recipe, args.overrides)
    output = args.output or Path("outputs") / Path(args.recipe).stem
    if args.print_recipe or args.plan:
        plan = Plan.of(recipe, output)
        (dry_run if args.plan else model_on_meta)(plan)
        print(plan.describe() if args.plan else recipe.to_yaml(), end="")
        return
    folder = train(recipe, output, resume=args.resume, overwrite=args.overwrite)
    # All processes leave the group together: while the card is written, the others may end, which can abort this one.
    PartialState().destroy_process_group()
    if PartialState().is_main_process:
        try:
            write_card(folder)
        except UserError as error:
            print(f"The model is complete, but its card was not written: {error}", file=sys.stderr)


def add_average(parser: Parser) -> None:
    add = parser.group("input and output")
    add("inputs", nargs="+", help="checkpoint folders, or one folder of a training run")
    parser.add_output(help="folder of the averaged model")
    add("--count", type=whole(1), default=5, help="number of checkpoints to average, if a run is given")
    add("--which", choices=("last", "best"), default="last", help="checkpoints of a run to average")
    add("--metric", default="eval_bleu", help="metric of --which best")
    add("--lower-is-better", action="store_true", help="lower --metric is better (needed for unusual metrics)")


def run_average(args: argparse.Namespace) -> None:
    from ..training.checkpoints import average_checkpoints, choose_checkpoints

    refuse_duplicates(args.inputs, "inputs")
    folders, output = [Path(path) for path in args.inputs], Path(os.path.realpath(args.output))
    # Training takes a folder with the name of a checkpoint for an incomplete one, and deletes it.
    if re.fullmatch(r"checkpoint-\d+", output.name):
        raise UserError(f"The output {args.output} has the name of a checkpoint.", field=args.output)
    if len(folders) == 1 and not list(folders[0].glob("*.safetensors")):
        better = False if args.lower_is_better else None
        folders = choose_checkpoints(folders[0], args.count, args.which, args.metric, better)
    for folder in folders:
        if output.is_relative_to(folder.resolve()):
            raise UserError(f"The output {args.output} is inside {folder}, which is averaged.", field=args.output)
    average_checkpoints(folders, args.output)
    print(f"{args.output}: the average of {', '.join(map(str, folders))}")
