"""`recnmt probe-words`: measure how well a source vector predicts the words of the translation."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields

from ..experiments.probe_options import ProbeOptions
from ..models.user_errors import UserError
from .arguments import add_device_arguments, add_options, find_duplicate, load_translator, whole


SETS = ("train", "validation", "test")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained model, or a model id of the Hub")
    for name in SETS:
        parser.add_argument(
            f"--{name}", nargs=2, required=True, metavar=("SOURCE", "TARGET"), help=f"line-aligned {name} files"
        )
    parser.add_argument(
        "--states", nargs="+", help="vectors to probe: last, average, global, ... (default: all vectors of the model)"
    )
    parser.add_argument(
        "--top",
        type=whole(1),
        nargs="+",
        help="numbers of most likely words to compare with the translation (default: 200, 500 and 1000 as in the paper "
        "and the same shares of the model's vocabulary as they are of 32,000 words)",
    )
    parser.add_argument("--sentences", type=whole(1), help="maximum number of training pairs (default: all)")
    add_options(parser, ProbeOptions, [each.name for each in fields(ProbeOptions)], {})
    parser.add_argument("--output", "-o", help="file to which the table is also written")
    parser.add_argument("--json", help="JSON file for all figures (default: none)")
    add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    for name in SETS:
        if find_duplicate(getattr(args, name)):
            source = getattr(args, name)[0]
            raise UserError(f"--{name}: source and target are both {source}. Remedy: name the translations second.")


def run(args: argparse.Namespace) -> None:
    from contextlib import nullcontext
    from itertools import islice

    from ..data.files import open_output
    from ..data.text import read_parallel
    from ..experiments.bag_of_words import probe_words, scaled_tops, target_embeddings, to_tsv

    inputs = [path for name in SETS for path in getattr(args, name)]
    options = ProbeOptions(**{each.name: getattr(args, each.name) for each in fields(ProbeOptions)})
    train, validation, test = (
        list(islice(read_parallel(*getattr(args, name)), args.sentences if name == "train" else None)) for name in SETS
    )
    with (
        nullcontext() if args.output is None else open_output(args.output, inputs) as table,
        nullcontext() if args.json is None else open_output(args.json, inputs) as figures,
    ):
        translator = load_translator(args)
        tops = args.top
        if tops is None:
            vocabulary = len(target_embeddings(translator))
            usual = (200, 500, 1000)
            tops = sorted({*(top for top in usual if top <= vocabulary), *scaled_tops(usual, vocabulary)})
        results = probe_words(translator, train, validation, test, tops, args.states, options)
        print(to_tsv(results), end="")
        if table is not None:
            table.write(to_tsv(results))
        if figures is not None:
            json.dump([asdict(each) for each in results], figures, indent=2)
