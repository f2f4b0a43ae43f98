"""`recnmt attention`: what the steps of a recurrence encoder read, as a picture or a table."""

from __future__ import annotations

import argparse

from .arguments import add_device_arguments, check_text, load_translator, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained biarn_transformer, or a model id of the Hub")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("--output", "-o", help=".png, .svg or .pdf (default: a table on standard output)")
    parser.add_argument(
        "--layer", type=whole(0), default=0, help="layer of the recurrence encoder, from 0 (default: 0)"
    )
    parser.add_argument("--head", type=whole(0), help="one head, from 0 (default: the mean of all)")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture
    from ..analysis.recurrence import plot_recurrence_attention, recurrence_attention

    check_text(args.sentence, "The sentence")
    if args.output is not None:
        check_picture(args.output)
    translator = load_translator(args)
    attention = recurrence_attention(translator.inspected_model(), translator.tokenizer, args.sentence, args.layer)
    if args.output is None:
        print(attention.to_tsv(args.head), end="")
        return
    plot_recurrence_attention(attention, args.output, args.head)
    steps, count = attention.weights.shape[2:]
    print(f"{args.output}: {' and '.join(attention.directions)}, {steps} steps over {count} tokens")
