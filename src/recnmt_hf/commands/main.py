"""The console command `recnmt`: parse the arguments, run the subcommand, report errors."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from .. import __version__
from .._interrupts import Interrupts, raised_interrupts
from .._registration import register
from ..models.user_errors import UserError
from .arguments import Parser, printable


# subcommand -> (module, one line of help)
COMMANDS = {
    "train": ("train", "train a model from a recipe"),
    "sweep": ("sweep", "train a recipe several times with other fields or seeds, and compare"),
    "translate": ("translate", "translate a file or standard input"),
    "score": ("score", "give the model's log-probability of translations"),
    "evaluate": ("evaluate", "measure translations against references and each other"),
    "align": ("align", "link words of translations to source words, and measure such links"),
    "average": ("average", "average checkpoints"),
    "tokenizer": ("tokenizer", "train a tokenizer"),
    "inspect": ("inspect", "show recurrence attention, global state, positions or tree of a sentence"),
    "probe": ("probe", "run ten probing tasks on the sentence vectors of a model"),
    "probe-words": ("probe_words", "measure how well a source vector predicts the words of the translation"),
    "logic": ("logic", "train encoders on logical inference, and evaluate them by number of operators"),
    "test": ("test", "evaluate a trained model on test sets, and save scores and translations in its folder"),
    "plot": ("plot", "plot the learning curves of training runs"),
    "card": ("card", "write the model card of a trained model"),
    "publish": ("publish", "upload a trained model to the Hub with code, card, recipe, scores and translations"),
    "export": ("export", "export a trained model for an inference engine"),
    "import-marian": ("import_marian", "convert a MarianMT checkpoint and its tokenizers"),
    "export-marian": ("export_marian", "write a base Transformer as a MarianMT checkpoint"),
    "parameters": ("parameters", "count the parameters of models, and compare them"),
    "corpus": ("corpus", "write the generated English-German corpus"),
    "logic-corpus": ("logic_corpus", "write a generated corpus of logical inference"),
}
# Commands of 0.2, now subjects of `inspect`; they work for one more version.
RENAMED = ("attention", "global", "positions", "tree")
# Commands that need no model.
WITHOUT_MODELS = {"evaluate", "tokenizer", "corpus", "logic-corpus"}
# Exit codes; argparse's own for a wrong command line is that of a user's mistake.
SUCCESS, FAULT, MISTAKE = 0, 1, 2
# Errors of the system about any file: permissions, file types, space, limits, damage.
TOO_MANY = {errno.EMFILE, errno.ENFILE}
ENVIRONMENT = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENXIO),
}


class ClosedOutput(io.TextIOBase):
    """Replacement of a closed standard output that reports the loss of what is written."""

    def write(self, text: str) -> int:
        raise UserError(
            "Standard output is closed, so the results would be lost. Remedy: leave it open, or redirect it to a file."
        )


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """
    Return the parser, with only the chosen subcommand's module imported. A module has `add_arguments` and `run`, and
    optionally `check` for errors that can be found before large packages are imported.
    """
    parser = Parser(prog="recnmt", description="Train, translate, score and share translation models.")
    parser.add_argument("--version", action="version", version=f"recnmt {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            implementation = importlib.import_module(f".{module}", __package__)
            implementation.add_arguments(sub)
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
        args.overrides += late
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a subcommand.

    Returns:
        The exit code: 0 for success; 2 for a user error, reported in one sentence on standard error (with a traceback
        if `RECNMT_TRACEBACK` is set); 1 for a bug, with its traceback; 130 for SIGINT; 143 for SIGTERM. Wrong command
        lines raise `SystemExit` with 2, as in argparse.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    prepare_streams()
    if chosen in RENAMED:
        place = argv.index(chosen)
        argv[place : place + 1] = ["inspect", f"--subject={chosen}"]
        print(f"recnmt {chosen} is now `recnmt inspect`; the old name will be removed.", file=sys.stderr)
        chosen = "inspect"
    name = f"recnmt {chosen}" if chosen in COMMANDS else "recnmt"
    with raised_interrupts() as interrupts:
        try:
            code = run_command(name, chosen, argv, interrupts)
        except KeyboardInterrupt:
            return interrupted(name, interrupts)
        except SystemExit:
            if not interrupts.received:
                raise
            return interrupted(name, interrupts)
        if interrupts.received:  # a library turned the interrupt into another error, or dropped it
            return interrupted(name, interrupts)
    return code


def run_command(name: str, chosen: str | None, argv: list[str], interrupts: Interrupts) -> int:
    """Parse the arguments, run the subcommand and report its errors; return the exit code."""
    args = None
    try:
        args = parse(build_parser(chosen), argv)
        args.check(args)
        if args.command not in WITHOUT_MODELS:
            register()
        args.run(args)
        sys.stdout.flush()
    except Exception as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough
            discard_output()
            return SUCCESS
        if interrupts.received and not os.environ.get("RECNMT_TRACEBACK"):
            return FAULT  # `main` reports the interrupt
        if isinstance(error, UserError):
            if os.environ.get("RECNMT_TRACEBACK"):
                raise
            return complain(name, str(error))
        sentence = sentence_of(error, argv, getattr(args, "output", None))
        if sentence is None or os.environ.get("RECNMT_TRACEBACK"):
            traceback.print_exc()
            print(f"{name}: this is a fault in recnmt_hf worth a report, with the lines above.", file=sys.stderr)
            return FAULT
        discard_output()
        return complain(name, sentence)
    return SUCCESS


def interrupted(name: str, interrupts: Interrupts) -> int:
    print(f"\n{name}: {interrupts.word()}.", file=sys.stderr)
    return interrupts.exit_code()


def complain(name: str, sentence: str) -> int:
    print(f"{name}: {printable(sentence)}", file=sys.stderr)
    return MISTAKE


def sentence_of(error: Exception, argv: Sequence[str], output: str | None = None) -> str | None:
    """
    Return the message for an error of the system: about a file, a full disk, exhausted memory. `None` means a bug, as
    does a missing file that the user did not name.
    """
    if type(error).__name__ == "OutOfMemoryError":
        first = str(error).split(". ")[0].rstrip(".")
        return f"{first}. Remedy: smaller batches (--max-tokens), fewer beams, or a data type of fewer bytes."
    if not isinstance(error, OSError):
        return None
    from ..data.files import MEDIUM_ERRORS, SPACE_ERRORS

    if error.errno in TOO_MANY:
        return f"{error.strerror}. Remedy: allow more (`ulimit -n`), or end what holds files open."
    file = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    if error.errno in SPACE_ERRORS or (file is None and error.errno in MEDIUM_ERRORS):
        # Copying names the file that is read; what the user gave was looked at where it was opened.
        place = f"{output} cannot be written" if file is not None and output else "Writing failed"
        return f"{place}: {error.strerror}. Remedy: make room, or choose another place for the output."
    if file is not None and (error.errno in ENVIRONMENT or is_named(file, argv)):
        return f"{file}: {error.strerror}. Remedy: correct the path, or what stands there and its permissions."
    return None


def is_named(file: str, argv: Sequence[str]) -> bool:
    """Return whether the command line names a file, also as `option=file`."""
    words = {part for word in argv for part in (word, word.partition("=")[2]) if part}
    return os.path.realpath(file) in {os.path.realpath(word) for word in words if "\0" not in word}


def prepare_streams() -> None:
    """
    Make the standard streams usable: reserve the descriptors of closed ones, so that no file opened later takes them,
    and write UTF-8.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        # Names of files may hold what is no text.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def discard_output() -> None:
    """Discard pending output, so that the interpreter does not try to write it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
