"""`recnmt probe-words`: measure how well a source vector predicts the words of the translation."""

import argparse
import json
from dataclasses import asdict, fields

from ..experiments.probing_options import ProbeOptions
from . import arguments


SETS = ("train", "validation", "test")
OPTIONS = [field.name for field in fields(ProbeOptions)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help=arguments.MODEL_HELP)
    for name in SETS:
        add(f"--{name}", nargs=2, required=True, metavar=("SOURCE", "TARGET"), help=f"line-aligned {name} files")
    add("--states", nargs="+", help="vectors to probe: last, average, global, ... (default: all vectors of the model)")
    top = (
        "numbers of most likely words to compare with the translation (default: 200, 500 and 1000 as in the paper and "
        "scaled from 32,000 words to the model's vocabulary)"
    )
    add("--top", type=arguments.whole(1), nargs="+", help=top)
    add("--sentences", type=arguments.whole(1), help="maximum number of training pairs (default: all)")
    arguments.add_options(parser, ProbeOptions, OPTIONS)
    add("--output", "-o", help="file to which the table is also written")
    add("--json", help="JSON file for all figures (default: none)")
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    for name in SETS:
        arguments.refuse_duplicates(getattr(args, name), f"--{name}")


def run(args: argparse.Namespace) -> None:
    from itertools import islice

    from ..data.text import read_parallel
    from ..experiments.bag_of_words import probe_words, scaled_tops, target_embeddings, to_tsv

    inputs = [path for name in SETS for path in getattr(args, name)]
    options = arguments.read_options(ProbeOptions, args, OPTIONS)
    train = list(islice(read_parallel(*args.train), args.sentences))
    validation, test = list(read_parallel(*args.validation)), list(read_parallel(*args.test))
    output = arguments.optional_output
    with output(args.output, inputs) as table, output(args.json, inputs) as figures:
        translator = arguments.load_translator(args)
        tops = args.top
        if tops is None:
            vocabulary = len(target_embeddings(translator))
            paper = (200, 500, 1000)
            tops = sorted({*(top for top in paper if top <= vocabulary), *scaled_tops(paper, vocabulary)})
        results = probe_words(translator, train, validation, test, tops, args.states, options)
        print(to_tsv(results), end="")
        if table is not None:
            table.write(to_tsv(results))
        if figures is not None:
            json.dump([asdict(result) for result in results], figures, indent=2)
