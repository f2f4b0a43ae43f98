"""`recnmt score`: compute log-probabilities of given translations."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from ..errors import UserError
from ..inference.options import DecodingOptions
from . import arguments


if TYPE_CHECKING:
    from ..inference.results import SentenceScore

# Options that scores depend on.
SCORING = ("length_penalty_type", "length_penalty", "max_tokens", *arguments.LANGUAGES)
SEVERAL = (
    "has the tokens of several sentences, which have no joint probability. Translate with --split-sentences never and "
    "without --on-long split."
)


def add_arguments(parser: arguments.Parser) -> None:
    arguments.add_models_argument(parser)
    add = parser.group("input and output")
    add("--source", "-s", help="file of source sentences, one per line")
    add("--target", "-t", help="file of translations, one per line")
    arguments.add_trees_argument(parser)
    add("--jsonl", help="output of `recnmt translate --format jsonl`, scored by token ids; replaces --source, --target")
    add("--output", "-o", help="file of log-probabilities and scores (default: standard output)")
    add("--token-scores", action="store_true", help="print the log-probability of each token too")
    arguments.add_options(parser, DecodingOptions, SCORING)
    arguments.add_device_arguments(parser)


def read_translated(path: str) -> list[tuple[str, list[Any]]]:
    """Return sources and token ids from the output of `recnmt translate --format jsonl`."""
    from ..data.text import read_lines

    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
            source, tokens, parts = str(record["source"]), list(record["tokens"]), record.get("parts", 1)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{place} is not an object with source and tokens ({error}).", field=place) from error
        if parts != 1:
            raise UserError(f"{place} {SEVERAL}", field=place)
        pairs.append((source, tokens))
    return pairs


def check(args: argparse.Namespace) -> None:
    by_files = [args.source is not None, args.target is not None]
    if (args.jsonl is not None) == any(by_files) or any(by_files) != all(by_files):
        raise UserError("Pass either --source and --target, or --jsonl.")


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output

    pairs: list[Any] = arguments.read_pairs(args) if args.jsonl is None else read_translated(args.jsonl)
    inputs = [path for path in (args.source, args.target, args.source_trees, args.jsonl) if path is not None]
    with open_output(arguments.stream(args.output), inputs) as out:
        write_scores(args, pairs, out)


def write_scores(args: argparse.Namespace, pairs: list[Any], out: IO[str]) -> None:
    """Write a line of scores for each pair of sentences, or of a sentence and token ids, and report the perplexity."""
    from ..inference.codec import check_text
    from ..inference.model_settings import end_ids

    by_record, file = args.jsonl is not None, args.jsonl or args.source
    options = arguments.read_options(DecodingOptions, args, SCORING)
    translator = arguments.load_translator(args)
    codec = translator.codec
    if by_record:
        ends = end_ids(translator.model)
        for number, (source, tokens) in enumerate(pairs, start=1):
            place = f"{file}, line {number}"
            check_text(source, f"{place}: source")
            if tokens and not ends.isdisjoint(codec.target_ids(tokens, place).ids[:-1]):
                raise UserError(f"{place} {SEVERAL}", field=place)

    def results() -> Iterator[SentenceScore | None]:
        for chunk in arguments.chunks(enumerate(pairs, start=1)):
            # The empty translation of a blank line has no tokens and a score of 0, without the model.
            scored = [(number, pair) for number, pair in chunk if pair[1] or not codec.is_empty_source(pair[0])]
            places = [f"{file}, line {number}" for number, _ in scored]
            sources, targets = [source for _, (source, _) in scored], [target for _, (_, target) in scored]
            scores = translator.score(sources, targets, options, places) if scored else []
            by_line = dict(zip((number for number, _ in scored), scores, strict=True))
            yield from (by_line.get(number) for number, _ in chunk)

    total, tokens = 0.0, 0
    for result in arguments.progress(results(), "pairs", len(pairs), out):
        values = [] if result is None else result.token_log_probs
        line = "0.000000\t0.000000" if result is None else f"{result.log_prob:.6f}\t{result.score:.6f}"
        if args.token_scores:
            line += "\t" + " ".join(f"{value:.6f}" for value in values)
        print(line, file=out)
        total, tokens = total + sum(values), tokens + len(values)
    empty = sum(not pair[1] for pair in pairs)
    note = f", {empty} without tokens, whose log-probability is 0" if empty else ""
    entropy = -total / max(tokens, 1)
    perplexity = math.exp(entropy) if entropy < 700 else math.inf
    arguments.note(f"{len(pairs)} pairs, {tokens} tokens, perplexity {perplexity:.4f}{note}")
