"""`recnmt score`: the model's log-probability of given translations."""

from __future__ import annotations

import argparse
import json
import math
import sys

from ..models.user_errors import UserError
from .translate import add_decoding_arguments, load_translator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained model, or a model id of the Hub")
    parser.add_argument("--source", "-s", help="source sentences, one a line")
    parser.add_argument("--target", "-t", help="their translations, one a line")
    parser.add_argument(
        "--jsonl", help="instead of both: the output of `recnmt translate --format jsonl`, scored token by token id"
    )
    parser.add_argument("--token-scores", action="store_true", help="adds each token's log-probability")
    add_decoding_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_lines, read_parallel
    from ..evaluation.translator import DecodingOptions

    if bool(args.jsonl) == bool(args.source or args.target) or bool(args.source) != bool(args.target):
        raise UserError("Give either --source with --target, or --jsonl.")
    if args.jsonl:
        records = [json.loads(line) for line in read_lines(args.jsonl)]
        records = [record for record in records if record["tokens"]]
        sources, targets = [r["source"] for r in records], [r["tokens"] for r in records]
    else:
        pairs = list(read_parallel(args.source, args.target))
        sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
    options = DecodingOptions(
        length_penalty_type=args.length_penalty_type,
        length_penalty=args.length_penalty,
        max_tokens=args.max_tokens,
    )
    total, tokens = 0.0, 0
    for result in load_translator(args).score(sources, targets, options):
        line = f"{result.log_prob:.6f}\t{result.score:.6f}"
        if args.token_scores:
            line += "\t" + " ".join(f"{value:.6f}" for value in result.token_log_probs)
        print(line)
        total, tokens = total + result.log_prob, tokens + len(result.token_log_probs)
    print(f"{len(sources)} pairs, {tokens} tokens, perplexity {math.exp(-total / max(tokens, 1)):.4f}", file=sys.stderr)
