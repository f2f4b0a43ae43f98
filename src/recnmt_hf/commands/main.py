"""The console command `recnmt`: parse the arguments, run the subcommand, report errors."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from typing import Any

from .. import __version__
from .._interrupts import Interrupts, raised_interrupts
from .._registration import register
from ..errors import UserError
from ..models.user_errors import masked_message
from .arguments import NOTES, Parser, printable


# Group in `recnmt --help` -> subcommand -> one line of help. The module has the name of the subcommand.
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
# Commands that end when the reader of a pipe does, unless they also write files.
STREAMING_COMMANDS = {"translate", "score", "align"}
FILE_OPTIONS = ("plot", "shortlist")
# Exit codes. argparse also exits with 2.
SUCCESS, BUG, USER_ERROR = 0, 1, 2
# Errors of the system about any file: permissions, types, space, limits, damage.
FILE_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENXIO),
}


class ClosedOutput(io.TextIOBase):
    """Replacement of a closed standard output. Writing to it is an error, because the results would be lost."""

    def write(self, text: str) -> int:
        raise UserError("Standard output is closed, so results would be lost.")


class LastingOutput:
    """Standard output that ignores text once its reader is gone, so that a command still writes its files."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except BrokenPipeError:
            discard_output()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            discard_output()


class NoTerminal:
    """Standard error that does not count as a terminal, so that no progress bars are shown."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        return False


@contextmanager
def quiet_notes() -> Iterator[None]:
    """Show neither notes nor progress bars on standard error, but warnings and errors."""
    level = NOTES.level
    NOTES.setLevel(logging.WARNING)
    try:
        with redirect_stderr(NoTerminal(sys.stderr)):
            yield
    finally:
        NOTES.setLevel(level)


def build_parser(chosen: str | None = None, typed: str | None = None) -> argparse.ArgumentParser:
    """
    Return the parser, with only the chosen subcommand's module imported; `typed` is the name on the command line if it
    is an earlier one. A module has `add_arguments` and `run`, and optionally `check` for errors that can be found
    before large packages are imported.
    """
    listing = ""
    for group, commands in GROUPS.items():
        listing += f"{group}:\n" + "".join(f"  {name:<11}{summary}\n" for name, summary in commands.items()) + "\n"
    parser = Parser(
        prog="recnmt",
        description="Train, translate, score and share translation models.",
        epilog=f"{listing}`recnmt COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recnmt {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = subparsers.add_parser(name, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            implementation = importlib.import_module(f".{name}", __package__)
            sub.positional_output = (typed or name) in POSITIONAL_OUTPUT
            implementation.add_arguments(sub)
            sub.add_argument("--quiet", action="store_true", help="show only warnings and errors on standard error")
            check = getattr(implementation, "check", lambda args: None)
            sub.set_defaults(check=check, run=implementation.run, refuse=sub.refuse)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; overrides of a recipe may also follow options, which argparse does not support."""
    args, rest = parser.parse_known_args(argv)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (late != rest or not hasattr(args, "overrides")):
        args.refuse(rest)
    if late:
        args.overrides = args.overrides + late
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a subcommand.

    Returns:
        The exit code: 0 for success; 2 for a user error, reported with a remedy on standard error (with a traceback
        only if `RECNMT_TRACEBACK` is set); 1 for a bug, with its traceback; 130 for SIGINT; 143 for SIGTERM. Wrong
        command lines raise `SystemExit` with 2, as in argparse.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    prepare_streams()
    typed = chosen
    if chosen in MOVED:
        place, (program, *words) = argv.index(chosen), MOVED[chosen].split()
        print(f"recnmt {chosen} is now `{MOVED[chosen]}`; the old name will be removed in 0.4.0.", file=sys.stderr)
        if program != "recnmt":
            return USER_ERROR
        argv[place : place + 1] = words
        chosen = words[0]
    name = f"recnmt {chosen}" if chosen in COMMANDS else "recnmt"
    with raised_interrupts() as interrupts:
        is_interrupted = False
        try:
            code = run_command(name, chosen, typed, argv, interrupts)
        except KeyboardInterrupt:
            is_interrupted = True
        except SystemExit:
            if not interrupts.received:
                raise
        if is_interrupted or interrupts.received:  # a library may turn the interrupt into another error, or drop it
            print(f"\n{name}: {interrupts.word()}.", file=sys.stderr)
            code = interrupts.exit_code()
    return code


def run_command(name: str, chosen: str | None, typed: str | None, argv: list[str], interrupts: Interrupts) -> int:
    """Parse the arguments, run the subcommand and report its errors; return the exit code."""
    args = None
    try:
        args = parse(build_parser(chosen, typed), argv)
        args.check(args)
        if args.command not in MODEL_FREE_COMMANDS:
            register()
        is_alone = args.command in STREAMING_COMMANDS and not any(getattr(args, name, None) for name in FILE_OPTIONS)
        output: Any = sys.stdout if is_alone else LastingOutput(sys.stdout)
        with redirect_stdout(output), quiet_notes() if args.quiet else nullcontext():
            args.run(args)
            sys.stdout.flush()
    except Exception as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has closed it
            discard_output()
            return SUCCESS
        if interrupts.received and not os.environ.get("RECNMT_TRACEBACK"):
            return BUG  # `main` reports the interrupt
        if isinstance(error, UserError):
            if os.environ.get("RECNMT_TRACEBACK"):
                raise
            return report(name, error)
        user_error = explain_system_error(error, argv, getattr(args, "output", None))
        if user_error is None or os.environ.get("RECNMT_TRACEBACK"):
            print(masked_message(traceback.format_exc()), end="", file=sys.stderr)
            print(f"{name}: this is a bug in recnmt_hf. Please report it with the lines above.", file=sys.stderr)
            return BUG
        discard_output()
        return report(name, user_error)
    return SUCCESS


def report(name: str, error: UserError) -> int:
    """Print a user error, and return the exit code."""
    print(f"{name}: {printable(str(error))}", file=sys.stderr)
    return USER_ERROR


def explain_system_error(error: Exception, argv: Sequence[str], output: str | None) -> UserError | None:
    """
    Return the user error for an error of the system: about a file, a full disk, exhausted memory. `None` means a bug;
    so is a missing file that the user did not name.
    """
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "can't allocate memory" in str(error):
        reason = str(error).partition("DefaultCPUAllocator: ")[2] or str(error) or "out of memory"
        return UserError(
            f"{reason.split('. ')[0].rstrip('.')}. Use smaller batches (--max-tokens), fewer beams, or a smaller data "
            "type."
        )
    if not isinstance(error, OSError):
        return None
    from ..data.files import MEDIUM_ERRORS, SPACE_ERRORS

    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(f"{error.strerror}. Raise the limit (`ulimit -n`), or close programs with many open files.")
    file = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    if error.errno in SPACE_ERRORS or (file is None and error.errno in MEDIUM_ERRORS):
        # An error while copying names the file that is read, but the output is to blame.
        return UserError(
            f"{output if file and output else 'output'} cannot be written ({error.strerror}).",
            field=output if file and output else "output",
        )
    if file is not None and (error.errno in FILE_ERRORS or is_argument(file, argv)):
        return UserError(f"{error.strerror}.", field=file)
    return None


def is_argument(file: str, argv: Sequence[str]) -> bool:
    """Return whether the command line names a file, also as `option=file`."""
    words = {part for word in argv for part in (word, word.partition("=")[2]) if part}
    return os.path.realpath(file) in {os.path.realpath(word) for word in words if "\0" not in word}


def prepare_streams() -> None:
    """Write UTF-8 to standard output, and reserve the descriptors of closed streams, so that no file takes them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        # File names may contain bytes that are not text.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def discard_output() -> None:
    """Discard pending output, so that the interpreter does not try to write it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
