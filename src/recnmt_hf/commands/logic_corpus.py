"""`recnmt logic-corpus`: write a generated corpus of logical inference as text files."""

import argparse

from .arguments import SEED, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("output", help="folder for train0.tsv to train12.tsv and test0.tsv to test12.tsv, one per number of operators")
    add("--pairs", type=whole(1), default=500_000, help="number of pairs to draw; duplicates are removed")
    add("--seed", type=SEED, default=1, help="random seed")


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..data.logic import generate_logic
    from ..data.text import write_lines

    with open_output_folder(args.output) as working:
        corpus = generate_logic(args.pairs, args.seed)
        for split, bins in corpus.items():
            for operators, pairs in enumerate(bins):
                write_lines(working / f"{split}{operators}.tsv", ("\t".join(pair) for pair in pairs))
    for split, bins in corpus.items():
        print(f"{split}: {sum(map(len, bins))} pairs")
