"""`recnmt export-marian`: write a base Transformer as a MarianMT checkpoint of transformers."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder of a trained base Transformer, or a model id of the Hub")
    parser.add_argument("output", help="a new folder")


def run(args: argparse.Namespace) -> None:
    from ..hub.marian import export_marian

    print(export_marian(args.source, args.output))
