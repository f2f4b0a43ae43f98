"""The console command `recnmt`: parse the arguments, run the subcommand, report errors."""

import argparse
import importlib
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from typing import Any

from .._interrupts import Interrupts, raised_interrupts
from .._registration import register
from .._version import __version__
from ..errors import UserError, shorten
from ..models.user_errors import masked_message
from .arguments import NOTES, Parser, printable


# Group in `recnmt --help`, which is also a module with functions `add_NAME` and `run_NAME` -> subcommand -> its help.
GROUPS = {
    "data": {
        "corpus": "write the generated English-German corpus",
        "prepare": "tokenize the training data of a recipe once, in shards",
        "tokenizer": "train a tokenizer",
    },
    "train": {
        "train": "train a model from a recipe, or plot the learning curves of runs",
        "average": "average checkpoints",
    },
    "use": {
        "translate": "translate a file or standard input",
        "score": "compute log-probabilities of given translations",
        "align": "align words of translations with source words",
        "demo": "serve a local web page to try trained models",
    },
    "evaluate": {
        "test": "evaluate a trained model on test sets, and save scores and translations in its folder",
        "evaluate": "score translations against references, and compare systems",
    },
    "share": {
        "publish": "upload a trained model with its card to the Hub, or write the card only",
        "convert": "convert models from and to MarianMT and Marian, and to ONNX and CTranslate2",
    },
    "analyse": {
        "inspect": "show internal states of a model for one sentence, as a picture or as text",
        "env": "print versions, hardware and installed extras for a bug report",
    },
}
COMMANDS = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}
# Commands of earlier versions -> what replaces them. The names are accepted until 0.4.0.
MOVED = {
    **{name: f"recnmt inspect --subject {name}" for name in ("attention", "global", "positions", "tree")},
    "card": "recnmt publish --card-only",
    "plot": "recnmt train --plot",
    "export": "recnmt convert",
    "import-marian": "recnmt convert",
    "export-marian": "recnmt convert --to marianmt",
    "sweep": "python scripts/experiments/sweep.py",
    "parameters": "python scripts/experiments/parameters.py",
    "logic": "python scripts/experiments/logical_inference.py",
    "logic-corpus": "python scripts/experiments/logic.py",
    "probe": "python scripts/experiments/probing.py",
    "probe-words": "python scripts/experiments/bag_of_words.py",
}
# Names under which the output may be the last positional argument, in place of --output.
POSITIONAL_OUTPUT = {"corpus", "export", "import-marian", "export-marian"}
# Commands that need no model.
MODEL_FREE_COMMANDS = {"evaluate", "tokenizer", "corpus", "env"}
# Commands that have work left when they print; all others may end when the reader of a pipe, such as `head`, does.
UNFINISHED_COMMANDS = {"publish", "test", "train"}
# Exit codes. argparse also exits with 2.
SUCCESS, BUG, USER_ERROR = 0, 1, 2


class NoTerminal:
    """Standard error that does not count as a terminal, so that no progress bars are shown."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return (lambda: False) if name == "isatty" else getattr(self.stream, name)


def build_parser(chosen: str | None = None, typed: str | None = None) -> argparse.ArgumentParser:
    """
    Return the parser, with the arguments of the chosen subcommand only; `typed` is the name on the command line if it
    is an earlier one.
    """
    lists = {group: "".join(f"  {name:<11}{text}\n" for name, text in names.items()) for group, names in GROUPS.items()}
    listing = "\n".join(f"{group}:\n{lines}" for group, lines in lists.items())
    parser = Parser(
        prog="recnmt",
        description="Train, translate, score and share translation models.",
        epilog=f"{listing}\n`recnmt COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recnmt {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = subparsers.add_parser(name, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            group = next(group for group, commands in GROUPS.items() if name in commands)
            module = importlib.import_module(f".{group}", __package__)
            sub.positional_output = (typed or name) in POSITIONAL_OUTPUT
            getattr(module, f"add_{name}", lambda parser: None)(sub)
            sub.add_argument("--quiet", action="store_true", help="show only warnings and errors on standard error")
            sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
            sub.set_defaults(run=getattr(module, f"run_{name}"), parser=sub)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; overrides of a recipe may also follow options, which argparse does not support."""
    args, rest = parser.parse_known_args(argv)
    if any("=" not in word or word.startswith("-") for word in rest) or (rest and not hasattr(args, "overrides")):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = args.overrides + rest
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a subcommand.

    Returns:
        The exit code: 0 for success; 2 for a mistake of the user and 1 for a bug, reported in one sentence on standard
        error (after the traceback with `--debug`); 130 for SIGINT; 143 for SIGTERM. Wrong command lines raise
        `SystemExit` with 2, as in argparse.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("recnmt: Standard output is closed, so results would be lost.", file=sys.stderr)
        return USER_ERROR
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may contain bytes that are not text.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    typed = chosen = next((word for word in argv if not word.startswith("-")), None)
    if typed in MOVED:
        place, (program, *words) = argv.index(typed), MOVED[typed].split()
        print(f"recnmt {typed} is now `{MOVED[typed]}`; the old name will be removed in 0.4.0.", file=sys.stderr)
        if program != "recnmt":
            return USER_ERROR
        argv[place : place + 1] = words
        chosen = words[0]
    name = f"recnmt {chosen}" if chosen in COMMANDS else "recnmt"
    with raised_interrupts() as interrupts:
        code = None
        try:
            code = run_command(name, chosen, typed, argv, interrupts)
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, SystemExit) and not interrupts.received:
                raise
        if code is None or interrupts.received:  # a library may turn the interrupt into another error, or drop it
            print(f"\n{name}: interrupted.", file=sys.stderr)
            code = interrupts.exit_code()
    return code


def run_command(name: str, chosen: str | None, typed: str | None, argv: list[str], interrupts: Interrupts) -> int:
    """Parse the arguments, run the subcommand and report its errors; return the exit code."""
    try:
        with ExitStack() as stack:
            args = parse(build_parser(chosen, typed), argv)
            if args.quiet:
                stack.callback(NOTES.setLevel, NOTES.level)
                NOTES.setLevel(logging.WARNING)
                stack.enter_context(redirect_stderr(NoTerminal(sys.stderr)))
            if args.command not in MODEL_FREE_COMMANDS:
                register()
            args.run(args)
            sys.stdout.flush()
        return SUCCESS
    except Exception as error:
        # The interpreter must not try to write pending output at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError) and chosen not in UNFINISHED_COMMANDS:
            return SUCCESS
        if interrupts.received:
            return BUG  # `main` reports the interrupt
        if "--debug" in argv:
            print(masked_message(traceback.format_exc()), end="", file=sys.stderr)
        sentence, code = explain(error)
        print(f"{name}: {printable(sentence)}", file=sys.stderr)
        return code


def explain(error: Exception) -> tuple[str, int]:
    """
    Return a sentence about an error, and the exit code: 2 for errors of this package, of the system, of exhausted
    memory, of kinds that libraries define, and for a `ValueError` from a library. Everything else is a bug.
    """
    if isinstance(error, UserError):
        return str(error), USER_ERROR
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    reason = shorten(masked_message(str(error)))
    is_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    is_of_library = type(error).__module__.partition(".")[0] not in ("builtins", "recnmt_hf")
    is_value = isinstance(error, ValueError) and not frame.f_globals["__name__"].startswith("recnmt_hf")
    if isinstance(error, RuntimeError) and re.search(r"gloo|NCCL", str(error)):
        return f"Another process ended, or the network failed; restart with --resume ({reason}).", USER_ERROR
    if isinstance(error, OSError) and error.strerror:
        reason = f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    elif not (isinstance(error, OSError) or is_memory or is_of_library or is_value):
        place = f"{type(error).__name__} in {frame.f_code.co_filename}, line {line}"
        remedy = "Please report it with the output of `recnmt env` and of this command with --debug."
        return f"{reason} ({place}). This is a bug in recnmt_hf. {remedy}", BUG
    reason = reason if str(error) else type(error).__name__
    if is_memory or "memory" in reason:
        reason += ". Use smaller batches (--max-tokens), fewer beams, or a smaller data type"
    return f"{reason}.", USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
