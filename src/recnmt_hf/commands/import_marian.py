"""`recnmt import-marian`: a MarianMT checkpoint as a model of the zoo."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="a folder with a MarianMT model, or its id on the Hub, e.g. Helsinki-NLP/opus-mt-en-de"
    )
    parser.add_argument("output", help="a new folder")


def run(args: argparse.Namespace) -> None:
    from ..hub.marian import import_marian

    print(import_marian(args.source, args.output))
