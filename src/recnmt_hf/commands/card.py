"""`recnmt card`: the card of a trained model, from what is known of it."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run's folder, or that of a trained model; gets the card as README.md")
    parser.add_argument("--name", help="what the code in the card calls the model (default: its folder)")
    parser.add_argument("--license", help="as the Hub names licences, e.g. apache-2.0")
    parser.add_argument("--sentence", help="what the code in the card translates (default: one of the validation set)")
    parser.add_argument("--notes", metavar="FILE", help="Markdown that the card shows below the scores")


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_lines
    from ..hub.card import write_card

    notes = None if args.notes is None else "\n".join(read_lines(args.notes))
    print(write_card(args.model, args.name, license=args.license, sentence=args.sentence, notes=notes))
