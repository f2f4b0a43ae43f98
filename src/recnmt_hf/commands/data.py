"""Commands that make data: `recnmt corpus`, `prepare`, `tokenizer`."""

import argparse
import os
import re
from pathlib import Path

from ..errors import UserError
from .arguments import SEED, Parser, add_recipe_arguments, whole


def add_corpus(parser: Parser) -> None:
    add, size, depth = parser.group("corpus"), whole(0), whole(0, 50)
    parser.add_output(help="folder in which train.en, train.de, validation.en, ... are written")
    add("--train", type=size, default=20000, help="sentence pairs for training")
    add("--validation", type=size, default=500, help="sentence pairs for validation")
    add("--test", type=size, default=500, help="sentence pairs for testing")
    add("--test-deep", type=size, default=500, help="sentence pairs with deeper nesting than in training")
    add("--max-depth", type=depth, default=2, help="maximum depth of nested clauses")
    add("--deep-depth", type=depth, default=4, help="maximum depth of the deep test set")
    add("--seed", type=SEED, default=1, help="random seed")


def run_corpus(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..data.generated import generate_corpus
    from ..data.text import write_lines

    sizes = args.train, args.validation, args.test, args.test_deep
    with open_output_folder(args.output) as working:
        corpus = generate_corpus(*sizes, args.max_depth, args.deep_depth, args.seed)
        for split, pairs in corpus.items():
            for language in ("en", "de"):
                write_lines(working / f"{split}.{language}", (getattr(pair, language) for pair in pairs))
    for split, pairs in corpus.items():
        print(f"{split}: {len(pairs)} pairs")


def add_tokenizer(parser: Parser) -> None:
    add = parser.group("input and output")
    add("files", nargs="+", help="text files, plain, gzip or Zstandard; both languages for a joint tokenizer")
    parser.add_output(help="a new folder, which AutoTokenizer can load")
    add("--kind", choices=("bpe", "word", "space", "character"), default="bpe", help="kind of symbols")
    add("--vocab-size", type=whole(1, 2**31 - 1), default=8000, help="number of symbols")
    add("--min-frequency", type=whole(1, 2**31 - 1), default=1, help="minimum frequency of a symbol")
    add("--lowercase", action="store_true", help="lowercase all texts")
    add("--tags", nargs="+", default=[], help="symbols that are never split, such as '>>de<<'")
    fallback = "encode unknown characters as bytes, which take 256 symbols (default: for bpe with 1000 symbols or more)"
    add("--byte-fallback", action=argparse.BooleanOptionalAction, help=fallback)


def run_tokenizer(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..data.text import read_lines
    from ..data.tokenization import train_tokenizer

    texts = (line for path in args.files for line in read_lines(path) if line)
    names = ("kind", "vocab_size", "min_frequency", "lowercase", "byte_fallback", "tags")
    with open_output_folder(args.output, must_be_new=True) as working:
        tokenizer = train_tokenizer(texts, **{name: getattr(args, name) for name in names})
        tokenizer.save_pretrained(str(working))
    print(f"{args.output}: {len(tokenizer)} symbols")


def add_prepare(parser: Parser) -> None:
    output = "folder of the prepared data (default: data.prepared of the recipe)"
    add_recipe_arguments(parser, "fields to override, e.g. data.max_length_ratio=3", output)
    add = parser.group("processes")
    add("--workers", type=whole(1, 1024), help="number of processes (default: the number of processors)")
    add("--part", default="1/1", help="part of the shards to make on this machine, e.g. 3/64 (default: all)")


def run_prepare(args: argparse.Namespace) -> None:
    from ..data.text import tsv
    from ..training.inputs import prepare_in_shards
    from ..training.processes import logger
    from ..training.recipe import Recipe

    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", args.part)
    number, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= parts:
        raise UserError("--part must be the number of a part and the number of parts, e.g. 3/64.", field="--part")
    recipe = Recipe.from_file(args.recipe, args.overrides)
    output = args.output or recipe.data.prepared
    if output is None:
        raise UserError("recnmt prepare requires --output, or data.prepared in the recipe.", field="recnmt prepare")
    for corpus in recipe.data.train:
        corpus.check_languages(recipe.data.source_lang, recipe.data.target_lang)
        corpus.check_files(recipe.data.source_lang, recipe.data.target_lang)
    manifest = prepare_in_shards(recipe, Path(output), args.workers or os.cpu_count() or 1, (number, parts))
    if manifest is None:
        print(f"{output}: part {number}/{parts} is complete; shards of other parts are missing.")
        return
    print(f"{output}: {manifest['pairs']} of {manifest['read']} pairs in {len(manifest['shards'])} shards")
    reasons = list(manifest["removed"])
    table = [["corpus", "read", *reasons, "kept"]]
    for index in range(len(manifest["corpora"])):
        shards = [shard for shard in manifest["shards"] if shard["corpus"] == index]
        read, kept = (sum(shard[key] for shard in shards) for key in ("read", "pairs"))
        removed = [sum(shard["removed"].get(reason, 0) for shard in shards) for reason in reasons]
        table.append([f"data.train[{index}]", *map(str, (read, *removed, kept))])
        if shards and not kept:
            logger.warning(f"Warning: no pair of data.train[{index}] remains.")
    print(tsv(table), end="")
