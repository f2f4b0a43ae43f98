"""What the subcommands' options have in common: values that are checked as they are read, sentences, progress bars."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from .._values import MOST_BEAMS, MOST_SEED, MOST_TOKENS, Option, Range, members, options_of, shown_default
from ..models.user_errors import MissingFileError, UserError


if TYPE_CHECKING:
    from ..inference.translator import Translator


T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one sentence each, and name the nearest command or option."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message = suggested(message[: found.end(1) + 1], found[1], re.findall(r"[^\s,']+", found[2])) or message
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {printable(message.rstrip('.'))}{end} Remedy: run {self.prog} --help for usage.\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Exit because of arguments that do not exist."""
        message = f"unrecognized arguments: {' '.join(words)}"
        option = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
        self.error(suggested(message, option, re.findall(r"--[\w-]+", self.format_usage())) or message)


def suggested(message: str, word: str, known: Sequence[str]) -> str | None:
    """A message with the known word that is nearest to a mistyped one, or `None`."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"{message}; did you mean {near[0]}?" if near else None


def printable(text: str) -> str:
    """A message on one line, without characters that move the cursor or cannot be shown: names may hold any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def whole(least: float | None = None, most: float | None = None) -> Callable[[str], int]:
    """The type of an option that takes whole numbers of a range, both ends included."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{value} is not allowed; it must be at least {least}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{value} is not allowed; it must be at most {most}")
        return value

    return convert


def number(least: float | None = None, below: float | None = None, most: float | None = None) -> Callable[[str], float]:
    """The type of an option that takes finite numbers of a range: from `least`, below `below` or to `most`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be a finite number")
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be at least {least:g}")
        if below is not None and value >= below:
            raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be below {below:g}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be at most {most:g}")
        return value

    return convert


SEED = whole(0, MOST_SEED)
TOKENS = whole(1, MOST_TOKENS)
BEAMS = whole(1, MOST_BEAMS)


def add_options(parser: argparse.ArgumentParser, kind: type, names: Sequence[str], flags: Mapping[str, str]) -> None:
    """
    Adds arguments for fields of a dataclass: type, range, choices, default and help are those that the fields state.

    Args:
        kind (`type`): The dataclass.
        names (sequence of `str`): Which fields; the arguments have their names.
        flags (`dict`): Flags of another name, by field.
    """
    for name in names:
        each = options_of(kind)[name]
        flag = flags.get(name, f"--{name.replace('_', '-')}")
        if each.hint is bool:
            parser.add_argument(flag, dest=name, action="store_true", help=each.help)
            continue
        choices = each.choices or (get_args(each.hint) if get_origin(each.hint) is Literal else None)
        stated = "" if each.default is None else f" (default: {shown_default(each)})"
        parser.add_argument(
            flag,
            dest=name,
            default=each.default,
            help=f"{each.help}{stated}".replace("%", "%%"),
            **({"choices": choices} if choices else {"type": reader(each), "metavar": flag[2:].upper()}),
        )


def reader(option: Option) -> Callable[[str], Any]:
    """What reads an option's values that are no choices: text, or numbers and words that may stand in their place."""
    kinds = members(option.hint)
    if str in kinds:
        return str
    words = {word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}
    allowed = option.allowed or Range()
    convert = (
        number(allowed.least, allowed.below, allowed.most) if float in kinds else whole(allowed.least, allowed.most)
    )
    return lambda text: text if text in words else convert(text)


def progress(items: Iterable[T], unit: str, total: int | None = None, out: IO[Any] | None = None) -> Iterator[T]:
    """
    The items, with a bar on standard error where that is a terminal, and where no results appear between.

    Args:
        items (iterable): What is counted.
        unit (`str`): What an item is.
        total (`int`, *optional*): How many there are, where that is known.
        out (text stream, *optional*): Where the results go.
    """
    from tqdm import tqdm

    shown = sys.stderr.isatty() and not (out is not None and out.isatty())
    return iter(tqdm(items, unit=f" {unit}", total=total, file=sys.stderr, disable=not shown, mininterval=0.5))


def check_text(text: str, name: str) -> None:
    """Raises `UserError` where an argument was no UTF-8, or JSON named half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error.reason}). Remedy: correct it.") from error


def check_file(path: str | None) -> None:
    """Raise a [`UserError`] if a file is named but does not exist."""
    if path is not None and not os.path.isfile(path):
        raise MissingFileError(f"There is no file {path}. Remedy: correct the path.")


def named_twice(paths: Sequence[str]) -> tuple[str, str] | None:
    """Two names of the same file or folder, if there are any; pipes and devices may be read twice."""
    for number, path in enumerate(paths):
        for other in paths[:number]:
            if path == other:
                return other, path
            with suppress(OSError, ValueError):
                is_plain = os.path.isfile(path) or os.path.isdir(path)
                if is_plain and os.path.samefile(path, other):
                    return other, path
    return None


def told_twice(names: tuple[str, str]) -> str:
    return f"{names[0]} is named twice" if names[0] == names[1] else f"{names[0]} and {names[1]} are the same"


def stream(path: str | None) -> str | None:
    """The name of a file; `None`, standard input or output, for what commands usually call them."""
    return None if path == "-" else path


def chunks(items: Iterable[T], size: int = 500) -> Iterator[list[T]]:
    """The items in lists of a size."""
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Where and how a model is loaded."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: CUDA if there is any)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="weights' type (default: as saved)")
    parser.add_argument(
        "--quantization",
        choices=("int8",),
        help="on the CPU: whole numbers for weights, faster and slightly less exact",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a Hub model brings along")


def load_translator(args: argparse.Namespace) -> Translator:
    """Load the model, or several as an ensemble, on the device and in the data type that the arguments name."""
    from ..inference.translator import Translator

    settings = {"device": args.device, "dtype": args.dtype, "quantization": args.quantization}
    models = [args.model] if isinstance(args.model, str) else args.model
    settings["trust_remote_code"] = args.trust_remote_code
    return Translator.from_pretrained(models[0] if len(models) == 1 else models, **settings)


def read_settings(words: Sequence[str], flag: str) -> dict[str, Any]:
    """
    The values of `NAME=VALUE`, read as YAML.

    Raises:
        UserError: A word has no `=`, a name is given twice, or a value is no YAML.
    """
    from ..training.recipe_yaml import load_yaml

    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value.strip():
            raise UserError(f"{flag}: {word!r} is no setting. Remedy: write name=value, as no_repeat_ngram_size=3.")
        if name in settings:
            raise UserError(f"{flag}: {name} is given twice. Remedy: give it once.")
        settings[name] = load_yaml(value, f"{flag} {name}")
    return settings
