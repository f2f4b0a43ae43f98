"""`recnmt align`: word alignments from a model's attention, their error rate, and a picture of one pair."""

from __future__ import annotations

import argparse

from ..models.user_errors import UserError


def layer(text: str) -> int | str:
    return text if text == "mean" else int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder of a trained model, or a model id of the Hub")
    parser.add_argument("--source", "-s", help="source sentences, one a line, words apart by spaces")
    parser.add_argument("--target", "-t", help="their translations, one a line")
    parser.add_argument(
        "--text", nargs=2, metavar=("SOURCE", "TARGET"), help="instead of files: one sentence and its translation"
    )
    parser.add_argument(
        "--output",
        "-o",
        help="file for the links, `source-target` from 0 (default: standard output, unless --gold or --plot is given)",
    )
    parser.add_argument("--gold", help="gold alignments to measure against: 0-0 sure, 0p1 possible")
    parser.add_argument("--links", help="instead of a model: links made before, to be measured against --gold")
    parser.add_argument("--one-based", action="store_true", help="positions in --gold and --links count from 1")
    parser.add_argument(
        "--layer", type=layer, help='decoder layer from 0, or "mean" (default: the one below the top, or the only one)'
    )
    parser.add_argument("--head", type=int, help="one head, from 0 (default: the mean of all)")
    parser.add_argument("--plot", help="picture of one pair's attention: .png, .svg or .pdf")
    parser.add_argument("--pair", type=int, default=1, help="which pair, from 1 (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a batch (default: 4096)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA if there is any)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="weights' type (default: as saved)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a Hub model brings along")


def run(args: argparse.Namespace) -> None:
    import sys

    from ..data.text import SentencePair, read_lines, read_parallel, write_lines
    from ..evaluation.alignment import align_pairs, alignment_error_rate, format_links, parse_links
    from .translate import load_translator

    if (args.links is None) == (args.model is None) or (args.links and not args.gold):
        raise UserError("Give a model with --source and --target (or --text), or --links with --gold.")
    if args.links is not None and (args.source or args.target or args.text or args.plot or args.output):
        raise UserError(
            "--links are only measured against --gold; --source, --target, --text, --output and --plot need a model."
        )
    files = bool(args.source) + bool(args.target)
    if args.model is not None and files != (0 if args.text else 2):
        raise UserError(
            "Give --source and --target, the files to align line by line, or --text with a sentence and its "
            "translation."
        )

    def read_links(path: str):
        return [parse_links(line, f"{path}, line {i}", args.one_based) for i, line in enumerate(read_lines(path), 1)]

    gold = read_links(args.gold) if args.gold else None
    if args.links is not None:
        print(alignment_error_rate([each.possible for each in read_links(args.links)], gold))
        return
    pairs = [SentencePair(*args.text)] if args.text else list(read_parallel(args.source, args.target))
    if gold is not None and len(gold) != len(pairs):
        raise UserError(f"{args.gold} has {len(gold)} lines for {len(pairs)} pairs. Remedy: give the file of the same.")
    for number, (links, pair) in enumerate(zip(gold or [], pairs, strict=False), start=1):
        sizes = len(pair.source.split()), len(pair.target.split())
        if any(i >= sizes[0] or j >= sizes[1] for i, j in links.possible):
            raise UserError(
                f"{args.gold}, line {number}: a link beyond the {sizes[0]} source and {sizes[1]} target words. Remedy: "
                "is it the file of these sentences, with the source first? Positions from 1 need --one-based."
            )
    if not 1 <= args.pair <= len(pairs):
        raise UserError(f"There is no pair {args.pair}; the files have 1 to {len(pairs)}. Remedy: choose one.")
    if args.plot:
        from ..analysis.plots import check_picture

        check_picture(args.plot)
    sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
    found = list(align_pairs(load_translator(args), sources, targets, args.layer, args.head, args.max_tokens))
    lines = [format_links(alignment.links) for alignment in found]
    if args.output:
        write_lines(args.output, lines)
    elif gold is None and not args.plot:
        print("\n".join(lines))
    if args.plot:
        from ..analysis.plots import plot_alignment

        plot_alignment(found[args.pair - 1], args.plot, gold[args.pair - 1] if gold else None)
        print(f"{args.plot}: pair {args.pair}, {len(found[args.pair - 1].links)} links", file=sys.stderr)
    if gold is not None:
        print(alignment_error_rate([set(alignment.links) for alignment in found], gold))
