"""Arguments shared by the subcommands: numbers, options, recipes, models, files, progress bars."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from ..errors import UserError, short_repr
from ..inference.options import DecodingOptions
from ..options import MOST_SEED, Range, describe, is_allowed, members, options_of


if TYPE_CHECKING:
    from ..data.text import SentencePair
    from ..inference.translator import Translator


T = TypeVar("T")
# Logger of the notes of commands and runs; `--quiet` shows only its warnings.
NOTES = logging.getLogger("recnmt_hf.progress")
NOTES.setLevel(logging.INFO)
MODEL_HELP = "folder of a trained model, or a model id of the Hub"
ENSEMBLE_HELP = f"{MODEL_HELP}; several with one vocabulary form an ensemble, which averages their log-probabilities"
REVISION_HELP = "branch, tag or commit of a model of the Hub (default: the newest commit of main)"
TREES_HELP = "CoNLL-U file with the trees of the sources, for a model that reads them; words are separated by spaces"
PICTURE_HELP = ".png, .svg or .pdf file"
# Options that name the languages of a model of several.
LANGUAGES = ("source_lang", "target_lang", "source_prefix")
# Kind of value in the help -> options; those of numbers are known by their type.
METAVARS = {
    **dict.fromkeys(("output", "input", "source", "target", "gold", "links", "plot", "json", "jsonl"), "FILE"),
    **dict.fromkeys(("config", "references", "prefix", "notes", "template", "trace"), "FILE"),
    **dict.fromkeys(("source_lang", "target_lang", "language"), "LANG"),
}
# Decoding options that are options of commands; `--generate` has the others.
DECODING = [name for name in options_of(DecodingOptions) if name != "generate"]
# Group in the help -> fields of DecodingOptions.
GROUPS = {
    "search": ("beams", "num_hypotheses", "length_penalty_type", "length_penalty", "seed"),
    "length": ("max_length_factor", "max_length_extra", "split_sentences", "on_long", "max_source_length"),
    "languages": LANGUAGES,
    "alignment": ("alignments", "alignment_layer"),
    "speed": ("max_tokens", "buffer"),
}
# Names of options that differ from the field's.
FLAGS = {"beams": ["--beams", "--beam-size", "--num-beams"], "num_hypotheses": ["--n-best"]}
FLAGS["alignment_layer"] = ["--layer", "--alignment-layer"]


class HelpFormatter(argparse.HelpFormatter):
    """Formatter of help that shows the default of each option, and `N`, `LANG` and `FILE` for their values."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default, text = action.default, action.help or ""
        if action.nargs == 0 or default in (None, [], argparse.SUPPRESS) or "(default:" in text:
            return text
        words = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{text} (default: {words.replace('%', '%%')})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type not in (None, str) else METAVARS.get(action.dest, action.dest.upper())


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with groups, whose errors are one line."""

    positional_output = False

    def __init__(self, **settings: Any):
        super().__init__(**{"formatter_class": HelpFormatter, **settings})
        self.groups: dict[str, Any] = {}

    def group(self, title: str) -> Callable[..., argparse.Action]:
        """Return the function that adds arguments to the group with a title."""
        if title not in self.groups:
            self.groups[title] = self.add_argument_group(title)
        return self.groups[title].add_argument

    def exclusive(self, title: str, required: bool = False) -> Callable[..., argparse.Action]:
        """Return the function that adds arguments to a group, of which a command line may have one."""
        self.group(title)
        return self.groups[title].add_mutually_exclusive_group(required=required).add_argument

    def add_output(self, **settings: Any) -> None:
        """Add the required option --output, which earlier command lines pass as the last positional argument."""
        add = self.group("input and output")
        if self.positional_output:
            add = self.exclusive("input and output", required=True)
            add("output", nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        add("--output", "-o", metavar="FOLDER", required=not self.positional_output, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message.rstrip('.'))}. Run {self.prog} --help for usage.\n")


def printable(text: str) -> str:
    """Escape line breaks, control characters and characters that cannot be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def numeric(kind: type[T], allowed: Range, words: Iterable[str] = ()) -> Callable[[str], Any]:
    """Return the argparse type of numbers in a range, and of words in their place; `kind` is `int` or `float`."""

    def convert(text: str) -> Any:
        if text in words:
            return text
        with suppress(ValueError):
            value: Any = kind(text)  # type: ignore[call-arg]
            if is_allowed(value, kind, allowed):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be {describe(kind, allowed)}")

    return convert


def whole(least: float, most: float | None = None) -> Callable[[str], int]:
    """Return the argparse type of integers from `least` to `most`."""
    return numeric(int, Range(least=least, most=most))


SEED = whole(0, MOST_SEED)


def add_options(parser: Parser, kind: type, names: Iterable[str], group: str = "options") -> None:
    """
    Add arguments for fields of a dataclass, with the type, range, choices, default and help of the field, to `group` or
    that of [`GROUPS`].
    """
    for name in names:
        option = options_of(kind)[name]
        flags = FLAGS.get(name, [f"--{name.replace('_', '-')}"])
        add = parser.group(next((title for title, fields in GROUPS.items() if name in fields), group))
        settings: dict[str, Any] = {"dest": name, "help": option.help.replace("%", "%%")}
        if option.hint is bool:
            add(*flags, action="store_true", **settings)
            continue
        hint, default = option.hint, option.default
        if get_origin(hint) is list:
            (hint,), default = get_args(hint), list(getattr(kind(), name))
            settings["nargs"] = "+"
        kinds = members(hint)
        if choices := option.choices or (get_args(hint) if get_origin(hint) is Literal else None):
            settings["choices"] = choices
        elif str not in kinds:
            words = {word for one in kinds if get_origin(one) is Literal for word in get_args(one)}
            settings["type"] = numeric(float if float in kinds else int, option.allowed or Range(), words)
        add(*flags, default=default, **settings)


def read_options(kind: type[T], args: argparse.Namespace, names: Iterable[str], **further: Any) -> T:
    """Build a dataclass from the arguments that [`add_options`] added."""
    return kind(**{name: getattr(args, name) for name in names}, **further)


def add_device_arguments(parser: Parser) -> None:
    """Add the options of loading a model."""
    add = parser.group("model and device")
    add("--revision", help=REVISION_HELP)
    add("--device", help="cpu, cuda, cuda:1, ... (default: CUDA if available)")
    types = ("float32", "bfloat16", "float16", "fastest")
    fastest = "fastest: bfloat16 if the processor or GPU has instructions for it, else float32"
    add("--dtype", choices=types, help=f"data type of the weights; {fastest} (default: as saved)")
    add("--quantization", choices=("int8",), help="quantize the weights (CPU only); faster only with AVX512_VNNI")
    add("--trust-remote-code", action="store_true", help="run Python code from the model's folder or repository")


def add_pair_arguments(parser: Parser, words: str = "") -> None:
    """Add the files that [`read_pairs`] reads."""
    add = parser.group("input and output")
    add("--source", "-s", help=f"file of source sentences, one per line{words}")
    add("--target", "-t", help="file of translations, one per line")
    add("--source-trees", metavar="FILE", help=TREES_HELP)


def read_sources(source: str | None, trees: str | None) -> Iterator[Any]:
    """Return the lines of a file (`None`: standard input), with their dependency trees if there is a file of them."""
    from ..data.text import read_lines
    from ..data.tree_inputs import attach_trees

    return read_lines(source) if trees is None else attach_trees(read_lines(source), source, trees)


def read_pairs(args: argparse.Namespace) -> list[SentencePair]:
    """Return the pairs of `--source` and `--target`, with the dependency trees of `--source-trees`."""
    from ..data.text import SentencePair, read_aligned, read_lines

    lines = [read_sources(args.source, args.source_trees), read_lines(args.target)]
    return [SentencePair(*row) for row in read_aligned([args.source, args.target], lines=lines)]


def load_translator(args: argparse.Namespace) -> Translator:
    """Load the model of the arguments, or an ensemble. `UserError` for `--source-trees` if it reads no trees."""
    from ..inference.devices import keep_freed_memory, resolve_device
    from ..inference.translator import Translator

    settings = {name: getattr(args, name) for name in ("device", "dtype", "quantization", "trust_remote_code")}
    settings |= {} if args.revision is None else {"revision": args.revision}
    models = args.model if isinstance(args.model, list) else [args.model]
    translator = Translator.from_pretrained(models[0] if len(models) == 1 else models, **settings)
    if resolve_device(args.device).type == "cpu":
        keep_freed_memory()
    if getattr(args, "source_trees", None) and not translator.codec.reads_trees:
        message = f"--source-trees has no effect, because the model {', '.join(models)} reads no dependency trees."
        raise UserError(message, field="--source-trees")
    return translator


def add_generate_argument(parser: Parser) -> None:
    """Add the option for further settings of generation, which [`read_decoding`] parses."""
    text = "further settings of transformers' GenerationConfig, with values in YAML: do_sample=true top_p=0.9 ..."
    parser.group("search")("--generate", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=text)


def read_decoding(args: argparse.Namespace, names: Iterable[str]) -> DecodingOptions:
    """Return the decoding options of the arguments, with the settings of `--generate`, whose values are YAML."""
    from ..training.recipe_yaml import load_yaml

    settings: dict[str, Any] = {}
    for word in args.generate:
        name, _, value = word.partition("=")
        if not name or not value.strip():
            message = f"{short_repr(word)} is not a setting. Write name=value, such as no_repeat_ngram_size=3."
            raise UserError(message, field="--generate")
        refuse_duplicates([*settings, name], "--generate")
        settings[name] = load_yaml(value, f"--generate {name}")
    return read_options(DecodingOptions, args, names, generate=settings)


def add_recipe_arguments(parser: Parser, overrides: str, output: str) -> None:
    """Add a recipe, its overrides and the output folder."""
    add = parser.group("input and output")
    add("recipe", help="YAML file, e.g. one of scripts/recipes")
    add("overrides", nargs="*", default=[], metavar="SECTION.FIELD=VALUE", help=overrides)
    add("--output", "-o", metavar="FOLDER", help=output)


def refuse_duplicates(values: Iterable[Any], flag: str) -> None:
    """Raise a [`UserError`] if a value, file or folder is given twice. Pipes and devices may be given twice."""
    for other, word in combinations(map(str, values), 2):
        is_same = word == other
        with suppress(OSError, ValueError):
            is_same |= (os.path.isfile(word) or os.path.isdir(word)) and os.path.samefile(word, other)
        if is_same:
            raise UserError(f"{short_repr(word)} repeats {short_repr(other)}.", field=flag)


def note(text: str) -> None:
    """Print a note on standard error, unless `--quiet` is given."""
    if NOTES.isEnabledFor(logging.INFO):
        print(text, file=sys.stderr, flush=True)


def stream(path: str | None) -> str | None:
    """Return the name of a file, or `None` for `-` (standard input or output)."""
    return None if path == "-" else path


def progress(items: Iterable[T], unit: str, total: int | None = None, out: IO[Any] | None = None) -> Iterator[T]:
    """
    Iterate with a progress bar on standard error if that is a terminal, unless the results (`out`) go to one too.
    `unit` is the plural of an item's name.
    """
    from tqdm import tqdm

    has_bar = sys.stderr.isatty() and not (out is not None and out.isatty())
    return iter(tqdm(items, unit=f" {unit}", total=total, file=sys.stderr, disable=not has_bar, mininterval=0.5))
