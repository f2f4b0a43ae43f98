"""`recnmt plot`: curves of training runs."""

from __future__ import annotations

import argparse

from .arguments import named_twice, told_twice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="folders of training runs, going on or finished, or of their models")
    parser.add_argument("--output", "-o", default="curve.png", help=".png, .svg or .pdf (default: curve.png)")


def check(args: argparse.Namespace) -> None:
    from ..models.user_errors import UserError

    if twice := named_twice(args.runs):
        raise UserError(f"{told_twice(twice)}. Remedy: name each run once.")


def run(args: argparse.Namespace) -> None:
    from ..analysis.curves import curve_of_run, plot_curves

    plot_curves({path: curve_of_run(path) for path in args.runs}, args.output)
    print(args.output)
