"""`recnmt card`: write the model card of a trained model."""

from __future__ import annotations

import argparse

from .arguments import check_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a run or a trained model, where the card is written as README.md")
    parser.add_argument("--name", help="model id in the code of the card (default: the model's folder)")
    parser.add_argument("--license", help="licence identifier of the Hub, e.g. apache-2.0")
    parser.add_argument("--sentence", help="example sentence in the card (default: one of the validation set)")
    parser.add_argument("--notes", metavar="FILE", help="Markdown file to insert below the scores")
    parser.add_argument("--template", metavar="FILE", help="Jinja template of the card (default: the package's own)")


def check(args: argparse.Namespace) -> None:
    check_file(args.template)


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_lines
    from ..hub.card import write_card

    notes = None if args.notes is None else "\n".join(read_lines(args.notes))
    print(
        write_card(
            args.model, args.name, license=args.license, sentence=args.sentence, notes=notes, template=args.template
        )
    )
