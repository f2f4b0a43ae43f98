"""`recnmt train`: train a model from a recipe."""

import argparse
import sys

from ..errors import UserError
from .arguments import PICTURE_HELP, Parser, add_recipe_arguments, refuse_duplicates


def add_arguments(parser: Parser) -> None:
    add_recipe_arguments(
        parser,
        "fields to override, e.g. training.max_steps=2000",
        "output folder (default: outputs/NAME-OF-RECIPE)",
    )
    add = parser.group("run")
    start = parser.groups["run"].add_mutually_exclusive_group().add_argument
    start("--resume", action="store_true", help="resume from the newest intact checkpoint")
    start("--overwrite", action="store_true", help="delete the files of an earlier run in the folder")
    add("--print-recipe", action="store_true", help="print the recipe with all defaults without training")
    add("--plan", action="store_true", help="check the recipe and print what would be trained, without training")
    plot = "plot the learning curves of the runs whose folders are given in place of a recipe, in --output (default: "
    add("--plot", action="store_true", help=f"{plot}curve.png), a {PICTURE_HELP}")


def check(args: argparse.Namespace) -> None:
    if args.plot:
        refuse_duplicates([args.recipe, *args.overrides], "runs")


def run(args: argparse.Namespace) -> None:
    if args.plot:
        from ..analysis.curves import curve_of_run, plot_curves, validation_of_run

        runs, output = [args.recipe, *args.overrides], args.output or "curve.png"
        plot_curves({run: curve_of_run(run) for run in runs}, output, map(validation_of_run, runs))
        print(output)
        return
    from pathlib import Path

    from accelerate import PartialState

    from ..hub.card import write_card
    from ..training.plan import Plan, dry_run, model_on_meta
    from ..training.recipe import Recipe
    from ..training.run import train

    recipe = Recipe.from_file(args.recipe, args.overrides)
    output = args.output or Path("outputs") / Path(args.recipe).stem
    if args.print_recipe or args.plan:
        plan = Plan.of(recipe, output)
        if args.plan:
            dry_run(plan)
        else:
            model_on_meta(plan)
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
