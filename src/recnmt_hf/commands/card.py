"""`recnmt card`: write the model card of a trained model."""

import argparse

from .arguments import add_card_arguments, card_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a run or a trained model, where the card is written as README.md")
    parser.add_argument("--name", help="model id in the code of the card (default: the model's folder)")
    add_card_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..hub.card import write_card

    print(write_card(args.model, args.name, **card_options(args)))
