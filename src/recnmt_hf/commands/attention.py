"""`recnmt attention`: what the steps of a recurrence encoder read, as a picture or a table."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained biarn_transformer, or a model id of the Hub")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("--output", "-o", help=".png, .svg or .pdf (default: a table on standard output)")
    parser.add_argument("--layer", type=int, default=0, help="layer of the recurrence encoder, from 0 (default: 0)")
    parser.add_argument("--head", type=int, help="one head, from 0 (default: the mean of all)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA if there is any)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a Hub model brings along")


def run(args: argparse.Namespace) -> None:
    from ..analysis.recurrence import plot_recurrence_attention, recurrence_attention
    from ..evaluation.translator import Translator

    extra = {"trust_remote_code": True} if args.trust_remote_code else {}
    translator = Translator.from_pretrained(args.model, device=args.device, **extra)
    attention = recurrence_attention(translator.model, translator.tokenizer, args.sentence, args.layer)
    if args.output is None:
        print(attention.to_tsv(args.head), end="")
        return
    plot_recurrence_attention(attention, args.output, args.head)
    steps, count = attention.weights.shape[2:]
    print(f"{args.output}: {' and '.join(attention.directions)}, {steps} steps over {count} tokens")
