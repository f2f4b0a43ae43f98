"""Commands that use trained models: `recnmt translate`, `score`, `align`, `demo`."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from ..demo.limits import Limits
from ..errors import UserError, explained
from ..inference.options import DecodingOptions
from ..options import options_of
from . import arguments, translation_parts


if TYPE_CHECKING:
    from ..metrics.alignment import GoldAlignment, Links

T = TypeVar("T")
# Decoding options that scores depend on.
SCORING = ("length_penalty_type", "length_penalty", "max_tokens", *arguments.LANGUAGES)
SEVERAL = (
    "has the tokens of several sentences, which have no joint probability. Translate with --split-sentences never and "
    "without --on-long split."
)
# Options of `recnmt demo`.
LIMITS = list(options_of(Limits))


def chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of at most 500."""
    items = iter(items)
    while chunk := list(islice(items, 500)):
        yield chunk


def add_translate(parser: arguments.Parser) -> None:
    parser.add_argument("model", nargs="+", help=arguments.ENSEMBLE_HELP)
    add = parser.group("input and output")
    add("--input", "-i", default="-", help="text file, plain or compressed with gzip or Zstandard; -: standard input")
    add("--output", "-o", default="-", help="output file; -: standard output")
    formats = "text: the best translations; n-best: `line ||| text ||| log-probability ||| score`; jsonl: objects with "
    formats += "scores and token ids (default: text, n-best with --n-best, jsonl with --alignments)"
    add("--format", choices=("text", "n-best", "jsonl"), help=formats)
    add("--source-trees", metavar="FILE", help=arguments.TREES_HELP)
    add("--prefix", help="file with the beginning of each translation; an empty line sets no prefix")
    add("--trace", help="JSON lines with what the model read and wrote for each sentence: tokens, tags, truncation")
    arguments.add_options(parser, DecodingOptions, arguments.DECODING)
    arguments.add_generate_argument(parser)
    arguments.add_device_arguments(parser)


def run_translate(args: argparse.Namespace) -> None:
    from ..data.files import open_output, refuse_inputs

    args.options = arguments.read_decoding(args, arguments.DECODING)
    args.format = args.format or ("jsonl" if args.alignments else "n-best" if args.num_hypotheses > 1 else "text")
    if args.prefix == args.input == "-":
        raise UserError("--prefix - and --input - cannot be combined.", field="--prefix -")
    if translation_parts.launched_processes()[1] > 1:
        translation_parts.translate_in_parts(args)
        return
    target = arguments.stream(args.output)
    inputs = [arguments.stream(path) for path in (args.input, args.prefix, args.source_trees) if path is not None]
    with ExitStack() as stack:
        out = stack.enter_context(open_output(target, inputs))
        lines, prefixes = translation_parts.inputs_of(args)
        translator = arguments.load_translator(args)
        trace = None
        if args.trace is not None:
            refuse_inputs(args.trace, [*inputs, *([] if target is None else [target])])
            file = stack.enter_context(open(args.trace, "w", buffering=1, encoding="utf-8", newline="\n"))

            def trace(record: dict[str, Any]) -> None:
                print(json.dumps(record, ensure_ascii=False), file=file)

        translation_parts.write_translations(args, translator, lines, prefixes, out, trace=trace)


def add_score(parser: arguments.Parser) -> None:
    parser.add_argument("model", nargs="+", help=arguments.ENSEMBLE_HELP)
    arguments.add_pair_arguments(parser)
    add = parser.group("input and output")
    add("--jsonl", help="output of `recnmt translate --format jsonl`, scored by token ids; replaces --source, --target")
    add("--output", "-o", default="-", help="file of log-probabilities and scores; -: standard output")
    add("--token-scores", action="store_true", help="print the log-probability of each token too")
    arguments.add_options(parser, DecodingOptions, SCORING)
    arguments.add_device_arguments(parser)


def read_translated(path: str) -> list[tuple[str, list[Any]]]:
    """Return sources and token ids from the output of `recnmt translate --format jsonl`."""
    from ..data.text import read_lines
    from ..inference.codec import check_text

    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        with explained(f"{place} is not an object with source and tokens", place):
            record = json.loads(line)
            source, tokens = str(record["source"]), list(record["tokens"])
        pairs.append((check_text(source, f"{place}: source"), tokens))
    return pairs


def run_score(args: argparse.Namespace) -> None:
    from ..data.files import open_output
    from ..inference.model_settings import end_ids

    inputs = [path for path in (args.source, args.target, args.source_trees, args.jsonl) if path is not None]
    if {args.source is not None, args.target is not None} != {args.jsonl is None}:
        raise UserError("Pass either --source and --target, or --jsonl.")
    options = arguments.read_options(DecodingOptions, args, SCORING)
    pairs: list[Any] = arguments.read_pairs(args) if args.jsonl is None else read_translated(args.jsonl)
    places = [f"{args.jsonl or args.source}, line {number}" for number in range(1, len(pairs) + 1)]
    total, count = 0.0, 0
    with open_output(arguments.stream(args.output), inputs) as out:
        translator = arguments.load_translator(args)
        codec, ends = translator.codec, end_ids(translator.model)
        for place, (_, tokens) in zip(places, pairs if args.jsonl else (), strict=False):
            if tokens and not ends.isdisjoint(codec.encode_target(tokens, None, place).ids[:-1]):
                raise UserError(f"{place} {SEVERAL}", field=place)
        for chunk in chunks(zip(places, arguments.progress(pairs, "pairs", len(pairs), out), strict=True)):
            # The empty translation of a blank line has no tokens and a score of 0, without the model.
            scored = {place: pair for place, pair in chunk if pair[1] or not codec.is_empty_source(pair[0])}
            sources, targets = [source for source, _ in scored.values()], [target for _, target in scored.values()]
            results = translator.score(sources, targets, options, list(scored)) if scored else []
            by_place = dict(zip(scored, results, strict=True))
            for result in (by_place.get(place) for place, _ in chunk):
                values = [] if result is None else result.token_log_probs
                line = "0.000000\t0.000000" if result is None else f"{result.log_prob:.6f}\t{result.score:.6f}"
                print(line + ("\t" + " ".join(f"{value:.6f}" for value in values)) * args.token_scores, file=out)
                total, count = total + sum(values), count + len(values)
    empty = sum(not pair[1] for pair in pairs)
    note = f", {empty} without tokens, whose log-probability is 0" if empty else ""
    entropy = -total / max(count, 1)
    perplexity = math.exp(entropy) if entropy < 700 else math.inf
    arguments.note(f"{len(pairs)} pairs, {count} tokens, perplexity {perplexity:.4f}{note}")


def add_align(parser: arguments.Parser) -> None:
    add = parser.group("input and output")
    add("model", nargs="?", help=arguments.MODEL_HELP)
    arguments.add_pair_arguments(parser, ", words separated by spaces")
    add("--text", nargs=2, metavar=("SOURCE", "TARGET"), help="one sentence and its translation, instead of files")
    add("--output", "-o", help="file of links (default: standard output, or none with --gold or --plot)")
    add("--gold", help="file of gold alignments to compare with: 0-0 sure, 0p1 possible")
    add("--links", help="file of links to compare with --gold (instead of a model)")
    add("--one-based", action="store_true", help="positions in --gold and --links count from 1")
    add("--plot", help=f"{arguments.PICTURE_HELP} for a plot of the attention of one pair")
    add("--pair", type=arguments.whole(1), default=1, help="pair to plot, counted from 1")
    arguments.add_options(parser, DecodingOptions, ["alignment_layer", "max_tokens", *arguments.LANGUAGES])
    head = "attention head, counted from 0 (default: the head trained to align words, else the mean of all heads)"
    parser.group("alignment")("--head", type=arguments.whole(0), help=head)
    arguments.add_device_arguments(parser)


def run_align(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture, plot_alignment
    from ..data.files import open_output, refuse_inputs
    from ..data.text import SentencePair, read_lines
    from ..inference.translator import align_pairs
    from ..metrics.alignment import alignment_error_rate, format_links, parse_links

    def read_links(path: str) -> list[GoldAlignment]:
        return [parse_links(line, f"{path}, line {i}", args.one_based) for i, line in enumerate(read_lines(path), 1)]

    files = (args.source is not None) + (args.target is not None)
    has_texts = args.model is None or files == (0 if args.text else 2)
    if (args.links is None) == (args.model is None) or (args.links and not args.gold) or not has_texts:
        raise UserError("Pass a model and --text or --source with --target, or --links with --gold.")
    options = arguments.read_options(DecodingOptions, args, ["max_tokens", *arguments.LANGUAGES])
    gold = None if args.gold is None else read_links(args.gold)
    if args.links is not None and gold is not None:
        print(alignment_error_rate([links.possible for links in read_links(args.links)], gold))
        return
    pairs = [SentencePair(*args.text)] if args.text else arguments.read_pairs(args)
    if gold is not None and len(gold) != len(pairs):
        raise UserError(f"{args.gold} has {len(gold)} lines for {len(pairs)} pairs.", field=args.gold)
    for number, (known, pair) in enumerate(zip(gold or (), pairs, strict=False), start=1):
        sizes = len(str(pair.source).split()), len(pair.target.split())
        if any(i >= sizes[0] or j >= sizes[1] for i, j in known.possible):
            place = f"{args.gold}, line {number}"
            reason = f"{place} has a link beyond {sizes[0]} source and {sizes[1]} target words."
            remedy = "Pass the gold file of these sentences, source first; use --one-based if positions count from 1."
            raise UserError(f"{reason} {remedy}", field=place)
    if args.pair > len(pairs):
        raise UserError(f"--pair must be at most {len(pairs)}, got {args.pair}.", field="--pair")
    inputs = [path for path in (args.source, args.target, args.gold, args.source_trees) if path is not None]
    if args.plot is not None:
        check_picture(args.plot)
        refuse_inputs(args.plot, inputs)
        outputs = [path for path in (args.output, args.plot) if path is not None]
        arguments.refuse_duplicates(map(os.path.realpath, outputs), "--plot")
    has_links = args.output is not None or (gold is None and args.plot is None)
    links: list[Links] = []
    with open_output(arguments.stream(args.output), inputs) if has_links else nullcontext() as out:
        translator = arguments.load_translator(args)
        for chunk in chunks(arguments.progress(pairs, "pairs", len(pairs), out)):
            texts = [pair.source for pair in chunk], [pair.target for pair in chunk]
            choice, first = (args.alignment_layer, args.head), len(links) + 1
            for number, alignment in enumerate(align_pairs(translator, *texts, *choice, options, first), start=first):
                links.append(set(alignment.links))
                if out is not None:
                    print(format_links(alignment.links), file=out)
                if args.plot is not None and number == args.pair:
                    plot_alignment(alignment, args.plot, gold[number - 1] if gold else None)
                    arguments.note(f"{args.plot}: pair {number}, {len(alignment.links)} links")
    if gold is not None:
        print(alignment_error_rate(links, gold))


def add_demo(parser: arguments.Parser) -> None:
    add = parser.group("server")
    parser.add_argument("model", nargs="+", help=f"{arguments.MODEL_HELP}; several are shown side by side")
    add("--host", default="127.0.0.1", help="address of the server; 0.0.0.0 accepts connections from other machines")
    names = "further name under which browsers may reach the page, such as that of a proxy; repeat for several; *: any"
    add("--allow-host", action="append", default=[], metavar="NAME", help=names)
    add("--port", type=arguments.whole(1, 65535), help="port of the server (default: the first free one from 7860)")
    add("--share", action="store_true", help="create a public link through Gradio's servers")
    add("--open", action="store_true", help="open the page in the default browser")
    arguments.add_options(parser, Limits, LIMITS, "limits")
    arguments.add_device_arguments(parser)


def run_demo(args: argparse.Namespace) -> None:
    from ..demo.serving import serve

    limits = {name: getattr(args, name) for name in LIMITS}
    names = ("device", "dtype", "quantization", "trust_remote_code", "revision")
    loading = {name: value for name in names if (value := getattr(args, name)) is not None}
    page = {"port": args.port, "share": args.share, "open_browser": args.open, "allowed_hosts": args.allow_host}
    serve(args.model, args.host, loading=loading, **page, **limits)
