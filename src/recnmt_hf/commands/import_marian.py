"""`recnmt import-marian`: convert a MarianMT checkpoint to a model of this package."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder or Hub id of a MarianMT model, e.g. Helsinki-NLP/opus-mt-en-de")
    parser.add_argument("output", help="a new folder")


def run(args: argparse.Namespace) -> None:
    from ..hub.marian import import_marian

    print(import_marian(args.source, args.output))
