"""`recnmt export-marian`: write a base Transformer as a checkpoint of MarianMT or as a file of Marian."""

import argparse

from ..errors import UserError
from .import_marian import is_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="folder of a trained base Transformer, or a model id of the Hub")
    add("output", help="a new folder; or a .npz file, beside which .spm files and .npz.decoder.yml are written")
    formats = "transformers: a MarianMT checkpoint; npz: Marian's own format, in a folder model.npz, .spm files and "
    formats += "decoder.yml for marian-decoder (default: npz for an output that ends in .npz, otherwise transformers)"
    add("--format", choices=("transformers", "npz"), help=formats)


def check(args: argparse.Namespace) -> None:
    if args.format is None and is_file(args.output):
        if args.output.endswith(".bin"):
            raise UserError("export.binary", field=args.output)
        args.format = "npz"


def run(args: argparse.Namespace) -> None:
    if args.format == "npz":
        from ..hub.marian_files import export_marian_file as export
    else:
        from ..hub.marian import export_marian as export

    print(export(args.source, args.output))
