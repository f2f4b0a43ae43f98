"""`recnmt import-marian`: convert a model of Marian or of MarianMT to a model of this package."""

import argparse
import os

from ..errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "source",
        help="folder or Hub id of a MarianMT model of transformers, e.g. Helsinki-NLP/opus-mt-en-de; or a Transformer "
        "in Marian's own format: a .npz file, or a .bin file with generic 8-bit weights (intgemm8)",
    )
    add("output", help="a new folder")
    files = "SentencePiece models (.spm) of source and target, required for .npz and .bin files; may be the same file"
    add("--vocabs", nargs=2, metavar=("SOURCE", "TARGET"), help=files)
    add("--config", help="file for marian-decoder (.yml) with beam size and length penalty, for .npz and .bin files")


def is_file(source: str) -> bool:
    """Return whether a source is a file of Marian, by its name; folders may have any name."""
    return source.endswith((".npz", ".bin")) and not os.path.isdir(source)


def check(args: argparse.Namespace) -> None:
    if is_file(args.source) and args.vocabs is None:
        raise UserError("usage.requires", field=args.source, other="--vocabs")
    for name in ("vocabs", "config"):
        if not is_file(args.source) and getattr(args, name) is not None:
            raise UserError("usage.requires", field=f"--{name}", other="a .npz or .bin file")


def run(args: argparse.Namespace) -> None:
    if is_file(args.source):
        from ..hub.marian_files import import_marian_file

        print(import_marian_file(args.source, args.vocabs, args.output, args.config))
        return
    from ..hub.marian import import_marian

    print(import_marian(args.source, args.output))
