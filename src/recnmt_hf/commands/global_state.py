"""`recnmt global`: what the capsules of a GRET read and how far its gate opens, as a picture or tables."""

from __future__ import annotations

import argparse

from .arguments import add_device_arguments, check_text, load_translator, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained gret, or a model id of the Hub")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("--target", help="a translation of it (default: the model's own)")
    parser.add_argument("--output", "-o", help=".png, .svg or .pdf (default: tables on standard output)")
    parser.add_argument(
        "--layer", type=whole(0), help="layer of the encoder whose capsules are shown, from 0 (default: the top one)"
    )
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..analysis.global_state import global_state, plot_global_state
    from ..analysis.plots import check_picture

    check_text(args.sentence, "The sentence")
    if args.target is not None:
        check_text(args.target, "The translation")
    if args.output is not None:
        check_picture(args.output)
    state = global_state(load_translator(args), args.sentence, args.target)
    layer = -1 if args.layer is None else args.layer
    if args.output is None:
        print(state.to_tsv(layer), end="")
        return
    plot_global_state(state, args.output, layer)
    capsules = 0 if state.routing is None else state.routing.shape[1]
    print(f"{args.output}: {capsules} capsules over {len(state.source)} tokens, {len(state.target)} target tokens")
