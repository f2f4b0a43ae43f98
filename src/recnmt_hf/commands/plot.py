"""`recnmt plot`: plot the learning curves of training runs."""

import argparse

from .arguments import PICTURE_HELP, refuse_duplicates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="folders of running or finished training runs, or of their models")
    parser.add_argument("--output", "-o", default="curve.png", help=PICTURE_HELP)


def check(args: argparse.Namespace) -> None:
    refuse_duplicates(args.runs, "runs")


def run(args: argparse.Namespace) -> None:
    from ..analysis.curves import curve_of_run, plot_curves, validation_of_run

    curves = {path: curve_of_run(path) for path in args.runs}
    plot_curves(curves, args.output, map(validation_of_run, args.runs))
    print(args.output)
