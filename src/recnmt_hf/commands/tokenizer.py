"""`recnmt tokenizer`: train a tokenizer on text files."""

import argparse

from .arguments import Parser, whole


# Options that are arguments of `train_tokenizer`.
OPTIONS = ("kind", "vocab_size", "min_frequency", "lowercase", "byte_fallback", "tags")


def add_arguments(parser: Parser) -> None:
    add = parser.group("input and output")
    add("files", nargs="+", help="text files, plain, gzip or Zstandard; both languages for a joint tokenizer")
    parser.add_output(help="a new folder, which AutoTokenizer can load")
    add("--kind", choices=("bpe", "word", "space", "character"), default="bpe", help="kind of symbols")
    add("--vocab-size", type=whole(1, 2**31 - 1), default=8000, help="number of symbols")
    add("--min-frequency", type=whole(1, 2**31 - 1), default=1, help="minimum frequency of a symbol")
    add("--lowercase", action="store_true", help="lowercase all texts")
    fallback = "encode unknown characters as bytes, which take 256 symbols (default: for bpe with 1000 symbols or more)"
    add("--tags", nargs="+", default=[], help="symbols that are never split, such as '>>de<<'")
    add("--byte-fallback", action=argparse.BooleanOptionalAction, help=fallback)


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output_folder
    from ..data.text import read_lines
    from ..data.tokenization import train_tokenizer

    texts = (line for path in args.files for line in read_lines(path) if line)
    with open_output_folder(args.output, must_be_new=True) as working:
        tokenizer = train_tokenizer(texts, **{name: getattr(args, name) for name in OPTIONS})
        tokenizer.save_pretrained(str(working))
    print(f"{args.output}: {len(tokenizer)} symbols")
