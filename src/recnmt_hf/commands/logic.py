"""`recnmt logic`: train and evaluate encoders on logical inference."""

import argparse

from .arguments import PICTURE_HELP, add_recipe_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(
        parser,
        "scripts/recipes/logic/logical_inference.yaml",
        "fields of the recipe to override",
        "folder in which one folder per model is written (default: outputs/NAME-OF-RECIPE)",
    )
    parser.add_argument("--plot", help=f"{PICTURE_HELP} for a plot of accuracy by number of operators")
    parser.add_argument("--overwrite", action="store_true", help="delete results of another recipe in those folders")


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    from ..analysis.plots import check_picture
    from ..data.text import tsv
    from ..experiments.logic_recipe import LogicRecipe
    from ..experiments.logical_inference import plot_logic, table_of, train_logic

    if args.plot is not None:
        check_picture(args.plot)
    recipe = LogicRecipe.from_file(args.recipe, args.overrides)
    output = Path(args.output or Path("outputs") / Path(args.recipe).stem)
    results = train_logic(recipe, output, args.overwrite)
    print(tsv(table_of(results)), end="")
    if args.plot is not None:
        plot_logic(results, args.plot, recipe.data.most_operators)
        print(f"{args.plot}: accuracy of {len(results)} models")
