"""`recnmt align`: align words by the attention of a model, and compute the alignment error rate."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..errors import UserError
from ..inference.options import DecodingOptions
from . import arguments


if TYPE_CHECKING:
    from ..data.text import SentencePair
    from ..inference.word_alignment import WordAlignment
    from ..metrics.alignment import GoldAlignment, Links

HEAD_HELP = "attention head, counted from 0 (default: the head trained to align words, else the mean of all heads)"


def add_arguments(parser: arguments.Parser) -> None:
    add = parser.group("input and output")
    add("model", nargs="?", help=arguments.MODEL_HELP)
    add("--source", "-s", help="file of source sentences, one per line, words separated by spaces")
    add("--target", "-t", help="file of translations, one per line")
    arguments.add_trees_argument(parser)
    add("--text", nargs=2, metavar=("SOURCE", "TARGET"), help="one sentence and its translation, instead of files")
    add("--output", "-o", help="file of links (default: standard output, or none with --gold or --plot)")
    add("--gold", help="file of gold alignments to compare with: 0-0 sure, 0p1 possible")
    add("--links", help="file of links to compare with --gold (instead of a model)")
    add("--one-based", action="store_true", help="positions in --gold and --links count from 1")
    arguments.add_options(parser, DecodingOptions, ["alignment_layer"])
    parser.group("alignment")("--head", type=arguments.whole(0), help=HEAD_HELP)
    add("--plot", help=f"{arguments.PICTURE_HELP} for a plot of the attention of one pair")
    add("--pair", type=arguments.whole(1), default=1, help="pair to plot, counted from 1")
    arguments.add_options(parser, DecodingOptions, ["max_tokens", *arguments.LANGUAGES])
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    files = (args.source is not None) + (args.target is not None)
    has_texts = args.model is None or files == (0 if args.text else 2)
    if (args.links is None) == (args.model is None) or (args.links and not args.gold) or not has_texts:
        raise UserError("Pass a model with either --source and --target or --text, or --links with --gold.")
    args.options = arguments.read_options(DecodingOptions, args, arguments.LANGUAGES)


def run(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture, plot_alignment
    from ..data.files import open_output, refuse_inputs
    from ..data.text import SentencePair, read_lines
    from ..inference.word_alignment import align_pairs
    from ..metrics.alignment import alignment_error_rate, format_links, parse_links

    def read_links(path: str) -> list[GoldAlignment]:
        return [parse_links(line, f"{path}, line {i}", args.one_based) for i, line in enumerate(read_lines(path), 1)]

    gold = read_links(args.gold) if args.gold is not None else None
    if args.links is not None:
        assert gold is not None, "`check` rejects --links without --gold"
        print(alignment_error_rate([links.possible for links in read_links(args.links)], gold))
        return
    pairs = [SentencePair(*args.text)] if args.text else arguments.read_pairs(args)
    if gold is not None:
        check_gold(gold, pairs, args.gold)
    if args.pair > len(pairs):
        raise UserError(f"--pair must be at most {len(pairs)}, got {args.pair}.", field="--pair")
    inputs = [path for path in (args.source, args.target, args.gold, args.source_trees) if path is not None]
    outputs = [] if args.output is None else [os.path.realpath(args.output)]
    if args.plot is not None:
        check_picture(args.plot)
        refuse_inputs(args.plot, inputs)
        arguments.refuse_duplicates([*outputs, os.path.realpath(args.plot)], "--plot")
    has_links = args.output is not None or (gold is None and args.plot is None)
    with open_output(arguments.stream(args.output), inputs) if has_links else nullcontext() as out:
        translator = arguments.load_translator(args)

        def aligned() -> Iterator[WordAlignment]:
            first, choice = 1, (args.alignment_layer, args.head)
            for chunk in arguments.chunks(pairs):
                sources, targets = [pair.source for pair in chunk], [pair.target for pair in chunk]
                yield from align_pairs(translator, sources, targets, *choice, args.max_tokens, args.options, first)
                first += len(chunk)

        links: list[Links] = []
        plotted: WordAlignment | None = None
        wanted = aligned() if has_links or gold is not None or args.plot is not None else iter(())
        for number, alignment in enumerate(arguments.progress(wanted, "pairs", len(pairs), out), start=1):
            if gold is not None:
                links.append(set(alignment.links))
            plotted = alignment if number == args.pair else plotted
            if out is not None:
                print(format_links(alignment.links), file=out)
    if args.plot is not None:
        assert plotted is not None, "the pair is one of those aligned"
        plot_alignment(plotted, args.plot, gold[args.pair - 1] if gold else None)
        arguments.note(f"{args.plot}: pair {args.pair}, {len(plotted.links)} links")
    if gold is not None:
        print(alignment_error_rate(links, gold))


def check_gold(gold: list[GoldAlignment], pairs: list[SentencePair], path: str) -> None:
    """Raise a [`UserError`] unless a file of gold alignments belongs to the pairs."""
    if len(gold) != len(pairs):
        raise UserError(f"{path} has {len(gold)} lines for {len(pairs)} pairs.", field=path)
    for number, (links, pair) in enumerate(zip(gold, pairs, strict=True), start=1):
        sizes = len(str(pair.source).split()), len(pair.target.split())
        if any(i >= sizes[0] or j >= sizes[1] for i, j in links.possible):
            raise UserError(
                f"{path}, line {number} has a link beyond {sizes[0]} source and {sizes[1]} target words. Pass the "
                "gold file of these sentences, source first; use --one-based if positions count from 1.",
                field=f"{path}, line {number}",
            )
