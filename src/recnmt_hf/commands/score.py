"""`recnmt score`: compute log-probabilities of given translations."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ..inference.options import DecodingOptions
from ..models.user_errors import UserError
from .arguments import add_device_arguments, add_options, check_text, chunks, load_translator, progress
from .translate import FLAGS, SCORING


if TYPE_CHECKING:
    from ..inference.results import SentenceScore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="+",
        help="folder of a trained model, or a model id of the Hub; several models with one vocabulary form an ensemble "
        "that averages their log-probabilities",
    )
    parser.add_argument("--source", "-s", help="file of source sentences, one per line")
    parser.add_argument("--target", "-t", help="file of translations, one per line")
    parser.add_argument(
        "--jsonl",
        help="output of `recnmt translate --format jsonl`, scored by its token ids (instead of --source and --target)",
    )
    parser.add_argument("--token-scores", action="store_true", help="print the log-probability of each token too")
    add_options(parser, DecodingOptions, SCORING, FLAGS)
    add_device_arguments(parser)


def read_records(path: str) -> Iterator[tuple[str, list[int]]]:
    """
    Sources and token ids of what `recnmt translate --format jsonl` wrote.

    Raises:
        ValueError: A line is no such record; the message names file and line.
    """
    from .._plain_text import is_blank
    from ..data.text import read_lines

    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("it is no object")
            source, tokens = record["source"], record["tokens"]
            if not isinstance(source, str) or not isinstance(tokens, list):
                raise TypeError("source must be a text, and tokens a list")
            if any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
                raise TypeError("tokens must be whole numbers")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{place}: no JSON object with source and tokens ({reason}). Remedy: give what `recnmt translate "
                "--format jsonl` wrote."
            ) from error
        check_text(source, f"{place}: source")
        if tokens and is_blank(source):
            raise UserError(f"{place}: tokens of an empty source have no probability. Remedy: remove the line.")
        yield source, tokens


def check_tokens(records: list[tuple[str, list[int]]], path: str, symbols: int, ends: Collection[int]) -> None:
    """Raise `UserError` for token ids that a model does not have, and for those of a split text, with the line."""
    for number, (_, tokens) in enumerate(records, start=1):
        wrong = next((token for token in tokens if not 0 <= token < symbols), None)
        if wrong is not None:
            raise UserError(
                f"{path}, line {number}: there is no token {wrong}; the model has 0 to {symbols - 1}. Remedy: score "
                "with the model that translated."
            )
        if not set(tokens[:-1]).isdisjoint(ends):
            raise UserError(
                f"{path}, line {number}: the tokens are those of several sentences or parts, which were translated one "
                "by one and have no common probability. Remedy: translate with --split-sentences never and without "
                "--on-long split."
            )


def check(args: argparse.Namespace) -> None:
    by_files = [args.source is not None, args.target is not None]
    if (args.jsonl is not None) == any(by_files) or any(by_files) != all(by_files):
        raise UserError("Give either --source with --target, or --jsonl.")


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_parallel

    by_record = args.jsonl is not None
    options = DecodingOptions(**{name: getattr(args, name) for name in SCORING})
    pairs: list[tuple[str, Any]] = list(
        read_records(args.jsonl) if by_record else read_parallel(args.source, args.target)
    )
    if not pairs:
        raise UserError(f"{args.jsonl} is empty. Remedy: give a file with at least one record.")
    translator = load_translator(args)
    if by_record:
        config = translator.model.config
        symbols = getattr(config, "decoder_vocab_size", None) or config.vocab_size
        check_tokens(pairs, args.jsonl, symbols, translator.end_ids())

    def results() -> Iterator[SentenceScore | None]:
        file = args.jsonl if by_record else args.source
        for chunk in chunks(enumerate(pairs, start=1)):
            # The empty translation of an empty line has no tokens to ask the model for, and the scores it was given.
            asked = [(number, pair) for number, pair in chunk if pair[1] or not translator.is_empty_source(pair[0])]
            places = [f"{file}, line {number}" for number, _ in asked]
            sources, targets = [source for _, (source, _) in asked], [target for _, (_, target) in asked]
            scores = translator.score(sources, targets, options, places) if asked else []
            found = dict(zip(places, scores, strict=True))
            yield from (found.get(f"{file}, line {number}") for number, _ in chunk)

    total, tokens = 0.0, 0
    for result in progress(results(), "pairs", len(pairs), sys.stdout):
        values = [] if result is None else result.token_log_probs
        line = "0.000000\t0.000000" if result is None else f"{result.log_prob:.6f}\t{result.score:.6f}"
        if args.token_scores:
            line += "\t" + " ".join(f"{value:.6f}" for value in values)
        print(line)
        total, tokens = total + sum(values), tokens + len(values)
    empty = sum(not pair[1] for pair in pairs)
    note = f", {empty} without tokens, whose log-probability is 0" if empty else ""
    surprise = -total / max(tokens, 1)
    perplexity = math.exp(surprise) if surprise < 700 else math.inf
    print(f"{len(pairs)} pairs, {tokens} tokens, perplexity {perplexity:.4f}{note}", file=sys.stderr)
