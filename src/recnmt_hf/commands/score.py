"""`recnmt score`: compute log-probabilities of given translations."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..inference.options import DecodingOptions
from . import arguments


if TYPE_CHECKING:
    from ..inference.results import SentenceScore

# Options that scores depend on.
SCORING = ("length_penalty_type", "length_penalty", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_models_argument(parser)
    add("--source", "-s", help="file of source sentences, one per line")
    add("--target", "-t", help="file of translations, one per line")
    add(
        "--jsonl",
        help="output of `recnmt translate --format jsonl`, scored by its token ids (instead of --source and --target)",
    )
    add("--token-scores", action="store_true", help="print the log-probability of each token too")
    arguments.add_options(parser, DecodingOptions, SCORING)
    arguments.add_device_arguments(parser)


def read_records(path: str) -> Iterator[tuple[str, list[int]]]:
    """
    Yield sources and token ids from the output of `recnmt translate --format jsonl`.

    Raises:
        UserError: A line is not such a record; the error's field is the file with the line.
    """
    from .._plain_text import is_blank
    from ..data.text import read_lines

    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("not an object")
            source, tokens = record["source"], record["tokens"]
            if not isinstance(source, str) or not isinstance(tokens, list):
                raise TypeError("source must be a text, and tokens a list")
            if any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
                raise TypeError("tokens must be whole numbers")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError("records.line", field=place, reason=reason) from error
        arguments.check_text(source, f"{place}: source")
        if tokens and is_blank(source):
            raise UserError("records.empty_source", field=place)
        yield source, tokens


def check_tokens(records: list[tuple[str, list[int]]], path: str, symbols: int, ends: Collection[int]) -> None:
    """Raise `UserError` for token ids that the model does not have, and for those of a split text."""
    for number, (_, tokens) in enumerate(records, start=1):
        place = f"{path}, line {number}"
        for token in tokens:
            if not 0 <= token < symbols:
                raise UserError("records.unknown_token", field=place, value=token, most=symbols - 1)
        if not set(tokens[:-1]).isdisjoint(ends):
            raise UserError("records.split", field=place)


def check(args: argparse.Namespace) -> None:
    by_files = [args.source is not None, args.target is not None]
    if (args.jsonl is not None) == any(by_files) or any(by_files) != all(by_files):
        raise UserError("usage.inputs", inputs="either --source and --target, or --jsonl")


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_parallel

    by_record = args.jsonl is not None
    options = arguments.read_options(DecodingOptions, args, SCORING)
    pairs: list[tuple[str, Any]] = list(
        read_records(args.jsonl) if by_record else read_parallel(args.source, args.target)
    )
    if not pairs:
        raise UserError("usage.empty_file", field=args.jsonl, content="record")
    translator = arguments.load_translator(args)
    if by_record:
        config = translator.model.config
        symbols = getattr(config, "decoder_vocab_size", None) or config.vocab_size
        check_tokens(pairs, args.jsonl, symbols, translator.end_ids())

    def results() -> Iterator[SentenceScore | None]:
        file = args.jsonl if by_record else args.source
        for chunk in arguments.chunks(enumerate(pairs, start=1)):
            # The empty translation of a blank line has no tokens and a score of 0, without the model.
            scored = [(number, pair) for number, pair in chunk if pair[1] or not translator.is_empty_source(pair[0])]
            places = [f"{file}, line {number}" for number, _ in scored]
            sources, targets = [source for _, (source, _) in scored], [target for _, (_, target) in scored]
            scores = translator.score(sources, targets, options, places) if scored else []
            by_line = dict(zip((number for number, _ in scored), scores, strict=True))
            yield from (by_line.get(number) for number, _ in chunk)

    total, tokens = 0.0, 0
    for result in arguments.progress(results(), "pairs", len(pairs), sys.stdout):
        values = [] if result is None else result.token_log_probs
        line = "0.000000\t0.000000" if result is None else f"{result.log_prob:.6f}\t{result.score:.6f}"
        if args.token_scores:
            line += "\t" + " ".join(f"{value:.6f}" for value in values)
        print(line)
        total, tokens = total + sum(values), tokens + len(values)
    empty = sum(not pair[1] for pair in pairs)
    note = f", {empty} without tokens, whose log-probability is 0" if empty else ""
    entropy = -total / max(tokens, 1)
    perplexity = math.exp(entropy) if entropy < 700 else math.inf
    print(f"{len(pairs)} pairs, {tokens} tokens, perplexity {perplexity:.4f}{note}", file=sys.stderr)
