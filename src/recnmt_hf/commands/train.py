"""`recnmt train`: train a model from a recipe."""

from __future__ import annotations

import argparse
import sys

from ..models.user_errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, e.g. one of scripts/recipes")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.FIELD=VALUE", help="fields to override, e.g. training.max_steps=2000"
    )
    parser.add_argument("--output", "-o", help="output folder (default: outputs/NAME-OF-RECIPE)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="delete the files of an earlier run in the folder")
    parser.add_argument(
        "--print-recipe", action="store_true", help="print the recipe with all defaults without training"
    )


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    from accelerate import PartialState

    from ..hub.card import write_card
    from ..training.checks import check_decoding, check_model
    from ..training.recipe import Recipe
    from ..training.run import train

    if args.resume and args.overwrite:
        raise UserError("--resume goes on with what --overwrite deletes. Remedy: give one of them.")
    recipe = Recipe.from_file(args.recipe, args.overrides)
    if args.print_recipe:
        check_model(recipe)
        check_decoding(recipe)
        print(recipe.to_yaml(), end="")
        return
    output = args.output or Path("outputs") / Path(args.recipe).stem
    folder = train(recipe, output, resume=args.resume, overwrite=args.overwrite)
    # All processes leave the group together. The card takes seconds, and the threads of a group whose other processes
    # have ended can abort a run that has done all its work.
    PartialState().destroy_process_group()
    if PartialState().is_main_process:
        try:
            write_card(folder)
        except UserError as error:
            print(f"The model is whole; its card is not: {error}", file=sys.stderr)
