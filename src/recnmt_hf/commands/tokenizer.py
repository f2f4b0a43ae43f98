"""`recnmt tokenizer`: trains a tokenizer on text files."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help="text files, plain or gzipped; of both languages for a joint one")
    parser.add_argument("--output", "-o", required=True, help="folder that AutoTokenizer loads")
    parser.add_argument("--kind", choices=("bpe", "word", "space", "character"), default="bpe")
    parser.add_argument("--vocab-size", type=int, default=8000, help="symbols (default: 8000)")
    parser.add_argument("--min-frequency", type=int, default=1)
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        help="whether BPE writes what it does not know in bytes, 256 of its symbols (default: from 1000 symbols on)",
    )


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_lines
    from ..data.tokenization import train_tokenizer

    texts = (line for path in args.files for line in read_lines(path) if line)
    tokenizer = train_tokenizer(
        texts, args.kind, args.vocab_size, args.min_frequency, args.lowercase, byte_fallback=args.byte_fallback
    )
    tokenizer.save_pretrained(args.output)
    print(f"{args.output}: {len(tokenizer)} symbols")
