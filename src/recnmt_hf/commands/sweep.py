"""`recnmt sweep`: train variants of a recipe, and compare them in a table and a plot."""

import argparse

from ..errors import UserError
from .arguments import PICTURE_HELP, SEED, add_recipe_arguments, refuse_duplicates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe_arguments(
        parser,
        "one of scripts/recipes",
        "fields to override in all runs; {seed} in a value is replaced by the seed of the run",
        "folder in which one folder per run is written (default: outputs/NAME-OF-RECIPE_sweep)",
    )
    values = "field and values to train with; several --vary train all combinations"
    add("--vary", action="append", default=[], metavar="SECTION.FIELD=VALUE,VALUE,...", help=values)
    rows = "YAML file with named rows and the fields that each overrides, e.g. one of scripts/recipes/rows"
    add("--rows", metavar="FILE", help=rows)
    add("--size", help="preset of all rows, also for {size} in the names of presets (default: that of the recipe)")
    add("--seeds", type=SEED, nargs="+", default=[], help="seeds with which every variant is trained")
    add("--score", help="column to plot and summarize (default: that of the first test set)")
    add("--plot", help=f"{PICTURE_HELP} for a plot: a line for one varied field, a grid for two")
    add("--list", action="store_true", help="print the runs and their overrides without training")


def check(args: argparse.Namespace) -> None:
    refuse_duplicates(args.seeds, "--seeds")
    if not (args.vary or args.rows or args.seeds):
        raise UserError("usage.inputs", inputs="--vary, --rows or --seeds")
    if args.size is not None and args.rows is None:
        raise UserError("usage.requires", field="--size", other="--rows")


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    from ..analysis.plots import check_picture
    from ..data.text import tsv
    from ..experiments import sweep

    if args.plot is not None:
        check_picture(args.plot)
    rows = {} if args.rows is None else sweep.read_rows(args.rows)
    rows = sweep.with_size(rows, args.size, args.recipe, args.overrides)
    cells = sweep.cells_of(rows, [sweep.read_axis(text) for text in args.vary], args.seeds)
    if args.list:
        for cell in cells:
            print(cell.name, *cell.overrides, sep="\t")
        return
    output = Path(args.output or Path("outputs") / f"{Path(args.recipe).stem}_sweep")
    results = sweep.sweep(args.recipe, cells, output, args.overrides, args.score)
    print(tsv(sweep.table_of(results)), end="")
    score = args.score or sweep.main_score(results)
    groups = sweep.grouped(results, score)
    if args.seeds:
        print(f"{score}: mean (from, to) over seeds")
        for key, values in groups.items():
            mean = sum(values) / len(values)
            print(f"  {', '.join(key) or 'all'}: {mean:.2f} ({min(values):.2f}, {max(values):.2f})")
    if args.plot is not None:
        sweep.plot_sweep(results, args.plot, score)
        print(f"{args.plot}: {score} of {len(groups)} settings")
