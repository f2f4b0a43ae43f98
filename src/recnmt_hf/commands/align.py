"""`recnmt align`: align words by the attention of a model, and compute the alignment error rate."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..inference.options import DecodingOptions
from ..models.user_errors import UserError
from .arguments import add_device_arguments, add_options, check_text, chunks, load_translator, progress, stream, whole


if TYPE_CHECKING:
    from ..inference.word_alignment import WordAlignment
    from ..metrics.alignment import GoldAlignment, Links


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder of a trained model, or a model id of the Hub")
    parser.add_argument("--source", "-s", help="file of source sentences, one per line, words separated by spaces")
    parser.add_argument("--target", "-t", help="file of translations, one per line")
    parser.add_argument(
        "--text",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="one sentence and its translation (instead of --source and --target)",
    )
    parser.add_argument(
        "--output",
        "-o",
        help="file of links `source-target`, counted from 0 (default: standard output, or none with --gold or --plot)",
    )
    parser.add_argument("--gold", help="file of gold alignments to compare with: 0-0 sure, 0p1 possible")
    parser.add_argument("--links", help="file of links to compare with --gold (instead of a model)")
    parser.add_argument("--one-based", action="store_true", help="positions in --gold and --links count from 1")
    add_options(parser, DecodingOptions, ["alignment_layer"], {"alignment_layer": "--layer"})
    parser.add_argument("--head", type=whole(0), help="attention head, counted from 0 (default: mean of all heads)")
    parser.add_argument("--plot", help=".png, .svg or .pdf file for a plot of the attention of one pair")
    parser.add_argument("--pair", type=whole(1), default=1, help="pair to plot, counted from 1 (default: 1)")
    add_options(parser, DecodingOptions, ["max_tokens"], {})
    add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    if (args.links is None) == (args.model is None) or (args.links is not None and args.gold is None):
        raise UserError("Give a model with --source and --target (or --text), or --links with --gold.")
    if args.links is not None and any(
        given is not None for given in (args.source, args.target, args.text, args.plot, args.output)
    ):
        raise UserError(
            "--links are only measured against --gold; --source, --target, --text, --output and --plot need a model."
        )
    files = (args.source is not None) + (args.target is not None)
    if args.model is not None and files != (0 if args.text else 2):
        raise UserError(
            "Give --source and --target, the files to align line by line, or --text with a sentence and its "
            "translation."
        )


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output, refuse_inputs
    from ..data.text import SentencePair, read_lines, read_parallel
    from ..inference.word_alignment import align_pairs
    from ..metrics.alignment import alignment_error_rate, format_links, parse_links

    def read_links(path: str) -> list[GoldAlignment]:
        return [parse_links(line, f"{path}, line {i}", args.one_based) for i, line in enumerate(read_lines(path), 1)]

    gold = read_links(args.gold) if args.gold is not None else None
    if args.links is not None:
        assert gold is not None, "`check` lets no --links pass without --gold"
        print(alignment_error_rate([each.possible for each in read_links(args.links)], gold))
        return
    for text in args.text or []:
        check_text(text, "--text")
    pairs = [SentencePair(*args.text)] if args.text else list(read_parallel(args.source, args.target))
    if gold is not None and len(gold) != len(pairs):
        raise UserError(
            f"{args.gold} has {len(gold)} lines for {len(pairs)} pairs. Remedy: pass the gold file of these pairs."
        )
    for number, (given, pair) in enumerate(zip(gold or [], pairs, strict=False), start=1):
        sizes = len(pair.source.split()), len(pair.target.split())
        if any(i >= sizes[0] or j >= sizes[1] for i, j in given.possible):
            raise UserError(
                f"{args.gold}, line {number}: a link beyond the {sizes[0]} source and {sizes[1]} target words. Remedy: "
                "is it the file of these sentences, with the source first? Positions from 1 need --one-based."
            )
    if not 1 <= args.pair <= len(pairs):
        raise UserError(f"There is no pair {args.pair}; the files have 1 to {len(pairs)}. Remedy: choose one.")
    inputs = [path for path in (args.source, args.target, args.gold) if path is not None]
    if args.plot is not None:
        from ..analysis.plots import check_picture

        check_picture(args.plot)
        refuse_inputs(args.plot, inputs)
        if args.output is not None and os.path.realpath(args.output) == os.path.realpath(args.plot):
            raise UserError(f"--output and --plot both name {args.plot}. Remedy: name two files.")
    to_stdout = args.output is None and gold is None and args.plot is None
    with open_output(stream(args.output), inputs) if args.output is not None or to_stdout else nullcontext() as out:
        translator = load_translator(args)

        def aligned() -> Iterator[WordAlignment]:
            for chunk in chunks(pairs):
                sources, targets = [pair.source for pair in chunk], [pair.target for pair in chunk]
                yield from align_pairs(translator, sources, targets, args.alignment_layer, args.head, args.max_tokens)

        links: list[Links] = []
        plotted: WordAlignment | None = None
        for number, alignment in enumerate(progress(aligned(), "pairs", len(pairs), out), start=1):
            links.append(set(alignment.links))
            plotted = alignment if number == args.pair else plotted
            if out is not None:
                print(format_links(alignment.links), file=out)
    if args.plot is not None:
        from ..analysis.plots import plot_alignment

        assert plotted is not None, "the pair is one of those aligned"
        plot_alignment(plotted, args.plot, gold[args.pair - 1] if gold else None)
        print(f"{args.plot}: pair {args.pair}, {len(plotted.links)} links", file=sys.stderr)
    if gold is not None:
        print(alignment_error_rate(links, gold))
