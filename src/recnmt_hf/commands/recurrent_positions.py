"""`recnmt positions`: what recurrent positional embeddings add to position embeddings, as a picture or a table."""

from __future__ import annotations

import argparse

from .arguments import add_device_arguments, check_text, load_translator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained rpe_transformer, or a model id of the Hub")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("--target", help="a translation of it (default: the model's own)")
    parser.add_argument("--output", "-o", help=".png, .svg or .pdf (default: a table on standard output)")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture
    from ..analysis.recurrent_positions import plot_positions, positions_to_tsv, recurrent_positions

    check_text(args.sentence, "The sentence")
    if args.target is not None:
        check_text(args.target, "The translation")
    if args.output is not None:
        check_picture(args.output)
    sides = recurrent_positions(load_translator(args), args.sentence, args.target)
    if args.output is None:
        print(positions_to_tsv(sides), end="")
        return
    plot_positions(sides, args.output)
    print(f"{args.output}: " + ", ".join(f"{len(side.tokens)} {side.name} tokens" for side in sides))
