"""`recnmt corpus`: write the generated English-German corpus as text files."""

import argparse

from .arguments import SEED, Parser, whole


def add_arguments(parser: Parser) -> None:
    add = parser.group("corpus")
    size, depth = whole(0), whole(0, 50)
    parser.add_output(help="folder in which train.en, train.de, validation.en, ... are written")
    add("--train", type=size, default=20000, help="sentence pairs for training")
    add("--validation", type=size, default=500, help="sentence pairs for validation")
    add("--test", type=size, default=500, help="sentence pairs for testing")
    add("--test-deep", type=size, default=500, help="sentence pairs with deeper nesting than in training")
    add("--max-depth", type=depth, default=2, help="maximum depth of nested clauses")
    add("--deep-depth", type=depth, default=4, help="maximum depth of the deep test set")
    add("--seed", type=SEED, default=1, help="random seed")


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..data.generated import generate_corpus
    from ..data.text import write_lines

    with open_output_folder(args.output) as working:
        corpus = generate_corpus(
            args.train, args.validation, args.test, args.test_deep, args.max_depth, args.deep_depth, args.seed
        )
        for split, pairs in corpus.items():
            for language in ("en", "de"):
                write_lines(working / f"{split}.{language}", (getattr(pair, language) for pair in pairs))
    for split, pairs in corpus.items():
        print(f"{split}: {len(pairs)} pairs")
