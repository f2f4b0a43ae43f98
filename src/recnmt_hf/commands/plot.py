"""`recnmt plot`: plot the learning curves of training runs."""

from __future__ import annotations

import argparse

from .arguments import find_duplicate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="folders of running or finished training runs, or of their models")
    parser.add_argument("--output", "-o", default="curve.png", help=".png, .svg or .pdf file (default: curve.png)")


def check(args: argparse.Namespace) -> None:
    from ..models.user_errors import UserError

    if duplicate := find_duplicate(args.runs):
        raise UserError(f"{duplicate}. Remedy: name each run once.")


def run(args: argparse.Namespace) -> None:
    from ..analysis.curves import curve_of_run, plot_curves

    plot_curves({path: curve_of_run(path) for path in args.runs}, args.output)
    print(args.output)
