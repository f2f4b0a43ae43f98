"""`recnmt export-marian`: write a base Transformer as a checkpoint of MarianMT or as a file of Marian."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="folder of a trained base Transformer, or a model id of the Hub")
    add("output", help="a new folder")
    formats = "transformers: a MarianMT checkpoint; npz: model.npz, .spm files and decoder.yml for marian-decoder"
    add("--format", choices=("transformers", "npz"), default="transformers", help=formats)


def run(args: argparse.Namespace) -> None:
    if args.format == "npz":
        from ..hub.marian_files import export_marian_file as export
    else:
        from ..hub.marian import export_marian as export

    print(export(args.source, args.output))
