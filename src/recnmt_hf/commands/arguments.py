"""Shared options of the subcommands: types with ranges, checks of files and texts, loading, progress bars."""

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

from .._values import MOST_BEAMS, MOST_SEED, Option, Range, members, options_of, shown_default
from ..models.user_errors import MissingFileError, UserError


if TYPE_CHECKING:
    from ..inference.translator import Translator


T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one sentence and suggest the nearest command or option."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message = suggested(message[: found.end(1) + 1], found[1], re.findall(r"[^\s,']+", found[2])) or message
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {printable(message.rstrip('.'))}{end} Remedy: run {self.prog} --help for usage.\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Exit with an error about unknown arguments."""
        message = f"unrecognized arguments: {' '.join(words)}"
        option = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
        self.error(suggested(message, option, re.findall(r"--[\w-]+", self.format_usage())) or message)


def suggested(message: str, word: str, known: Sequence[str]) -> str | None:
    """Add the nearest known word to a message about a mistyped one; return `None` if no word is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"{message}; did you mean {near[0]}?" if near else None


def printable(text: str) -> str:
    """Escape line breaks, control characters and characters that cannot be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def whole(least: float | None = None, most: float | None = None) -> Callable[[str], int]:
    """Return the type of an option that takes whole numbers from `least` to `most`."""

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
    """Return the type of an option that takes finite numbers: at least `least`, below `below`, at most `most`."""

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
BEAMS = whole(1, MOST_BEAMS)


def add_options(parser: argparse.ArgumentParser, kind: type, names: Sequence[str], flags: Mapping[str, str]) -> None:
    """
    Add arguments for fields of a dataclass, with the type, range, choices, default and help of the field.

    Args:
        kind (`type`): The dataclass.
        names (sequence of `str`): Names of the fields and of the arguments.
        flags (`dict`): Flags that differ from the name of the field.
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
    """Return the type of an option without choices: text, or numbers and the words allowed in their place."""
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
    Iterate with a progress bar on standard error, if that is a terminal and the results do not go to a terminal too.

    Args:
        items (iterable): Items to count.
        unit (`str`): Name of an item.
        total (`int`, *optional*): Number of items, if known.
        out (text stream, *optional*): Destination of the results.
    """
    from tqdm import tqdm

    has_bar = sys.stderr.isatty() and not (out is not None and out.isatty())
    return iter(tqdm(items, unit=f" {unit}", total=total, file=sys.stderr, disable=not has_bar, mininterval=0.5))


def check_text(text: str, name: str) -> None:
    """Raise a [`UserError`] if a text is not valid UTF-8 or contains half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error.reason}). Remedy: correct it.") from error


def check_file(path: str | None) -> None:
    """Raise a [`UserError`] if a file is named but does not exist."""
    if path is not None and not os.path.isfile(path):
        raise MissingFileError(f"There is no file {path}. Remedy: correct the path.")


def find_duplicate(paths: Sequence[str]) -> str | None:
    """Describe the first two names of the same file or folder, if any; pipes and devices may be read twice."""
    for number, path in enumerate(paths):
        for other in paths[:number]:
            if path == other:
                return f"{path} is named twice"
            with suppress(OSError, ValueError):
                is_plain = os.path.isfile(path) or os.path.isdir(path)
                if is_plain and os.path.samefile(path, other):
                    return f"{other} and {path} are the same"
    return None


def stream(path: str | None) -> str | None:
    """Return the name of a file, or `None` for `-` (standard input or output)."""
    return None if path == "-" else path


def chunks(items: Iterable[T], size: int = 500) -> Iterator[list[T]]:
    """Yield the items in lists of at most `size`."""
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of loading a model."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: CUDA if available)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="data type of the weights (default: as saved)"
    )
    parser.add_argument(
        "--quantization",
        choices=("int8",),
        help="quantize the weights (CPU only): faster, slightly less exact",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code contained in the model's folder or repository"
    )


def load_translator(args: argparse.Namespace) -> Translator:
    """Load the model, or several models as an ensemble, as specified by the arguments."""
    from ..inference.translator import Translator

    settings = {"device": args.device, "dtype": args.dtype, "quantization": args.quantization}
    models = [args.model] if isinstance(args.model, str) else args.model
    settings["trust_remote_code"] = args.trust_remote_code
    return Translator.from_pretrained(models[0] if len(models) == 1 else models, **settings)


def read_settings(words: Sequence[str], flag: str) -> dict[str, Any]:
    """
    Parse words of the form `NAME=VALUE`, with values in YAML.

    Raises:
        UserError: A word has no `=`, a name is given twice, or a value is not YAML.
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
