"""The console command `recnmt`: parses, calls, prints."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ..models.user_errors import UserError


# subcommand -> (module, one line of help)
COMMANDS = {
    "train": ("train", "train a model from a recipe"),
    "translate": ("translate", "translate a file or standard input"),
    "score": ("score", "give the model's log-probability of translations"),
    "evaluate": ("evaluate", "measure translations against references and each other"),
    "align": ("align", "link words of translations to source words, and measure such links"),
    "average": ("average", "average checkpoints"),
    "tokenizer": ("tokenizer", "train a tokenizer"),
    "attention": ("attention", "show what the steps of a recurrence encoder read"),
    "parameters": ("parameters", "count parameters of models, and what one adds to another"),
    "corpus": ("corpus", "write the generated English-German corpus"),
    "benchmark": ("benchmark", "measure speed ratios of two models in one run"),
}


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser; only the chosen subcommand's module is imported."""
    parser = argparse.ArgumentParser(prog="recnmt", description="Train, translate, score and share translation models.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            implementation = importlib.import_module(f".{module}", __package__)
            implementation.add_arguments(sub)
            sub.set_defaults(run=implementation.run)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; a recipe's overrides may stand behind options too, where argparse does not look for them."""
    args, rest = parser.parse_known_args(argv)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (late != rest or not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if late:
        args.overrides += late
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; a user's mistake ends with one sentence and exit code 2, not with a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    args = parse(build_parser(chosen), argv)
    try:
        args.run(args)
    except UserError as error:
        if os.environ.get("RECNMT_TRACEBACK"):
            raise
        print(f"recnmt {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
