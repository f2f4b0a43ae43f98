"""`recnmt export-marian`: write a base Transformer as a checkpoint of MarianMT or as a file of Marian."""

import argparse

from .import_marian import is_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder of a trained base Transformer, or a model id of the Hub")
    formats = "a new folder for a checkpoint of MarianMT; or a file NAME.npz for Marian itself, beside which the "
    formats += "vocabularies (NAME.vocab.spm, or NAME.source.spm and NAME.target.spm) and NAME.decoder.yml are written"
    parser.add_argument("output", help=formats)


def run(args: argparse.Namespace) -> None:
    if is_file(args.output):
        from ..hub.marian_files import export_marian_file as export
    else:
        from ..hub.marian import export_marian as export

    print(export(args.source, args.output))
