"""`recnmt tree`: the binary tree that the master gates of an ON-LSTM make of a sentence, as text or a picture."""

from __future__ import annotations

import argparse

from .arguments import add_device_arguments, check_text, load_translator, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained onlstm_transformer, or a model id of the Hub")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("--output", "-o", help=".png, .svg or .pdf (default: brackets and a table on standard output)")
    parser.add_argument("--layer", type=whole(0), help="ON-LSTM layer, from 0 (default: the top one)")
    parser.add_argument(
        "--direction",
        choices=("forward", "backward"),
        default="forward",
        help="whose gates are read (default: forward)",
    )
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture
    from ..analysis.syntactic_distance import plot_tree, syntactic_distances

    check_text(args.sentence, "The sentence")
    if args.output is not None:
        check_picture(args.output)
    state = syntactic_distances(load_translator(args), args.sentence)
    layer = -1 if args.layer is None else args.layer
    if args.output is not None:
        plot_tree(state, args.output, layer, args.direction)
        print(f"{args.output}: a tree over {len(state.tokens)} tokens")
        return
    print(state.brackets(layer, args.direction))
    print("token\tdistance")
    for token, distance in zip(state.tokens, state.of(layer, args.direction), strict=True):
        print(f"{token}\t{distance:.6f}")
