"""`recnmt translate`: translate a file or standard input."""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import chain, islice
from typing import IO, TYPE_CHECKING

from ..errors import UserError
from ..inference.options import DecodingOptions
from . import arguments


if TYPE_CHECKING:
    from ..inference.translator import Translator


DECODING = [field.name for field in fields(DecodingOptions) if field.name != "generate"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_models_argument(parser)
    add("--input", "-i", help="text file, plain or gzipped (default: -, standard input)")
    add("--output", "-o", help="output file (default: -, standard output)")
    formats = (
        "text: the best translation of each line; n-best: `line ||| text ||| log-probability ||| score`; jsonl: one "
        "object per line with scores and token ids (default: text, or n-best with --n-best)"
    )
    add("--format", choices=("text", "n-best", "jsonl"), help=formats)
    arguments.add_trees_argument(parser)
    add("--prefix", metavar="FILE", help="file with the beginning of each translation; an empty line sets no prefix")
    arguments.add_options(parser, DecodingOptions, DECODING, num_hypotheses="--n-best")
    arguments.add_generate_argument(parser)
    workers = "number of processes, for files; after an interruption, the same command continues (default: 1)"
    add("--workers", type=arguments.whole(1, 1024), default=1, help=workers)
    arguments.add_device_arguments(parser)


def read_first(lines: Iterable[str]) -> Iterator[str]:
    """Read the first line now, so that an unreadable file is reported before a model is loaded."""
    lines = iter(lines)
    return chain(list(islice(lines, 1)), lines)


def check(args: argparse.Namespace) -> None:
    args.generate = arguments.read_settings(args.generate, "--generate")
    args.format = args.format or ("n-best" if args.num_hypotheses > 1 else "text")
    if args.alignments and args.format != "jsonl":
        raise UserError("usage.requires", field="--alignments", other="--format jsonl")
    if args.prefix == "-" and arguments.stream(args.input) is None:
        raise UserError("usage.excludes", field="--prefix -", other="--input -")
    args.options = arguments.read_options(DecodingOptions, args, (*DECODING, "generate"))


def inputs_of(args: argparse.Namespace) -> tuple[Iterator[str], Iterator[str] | None]:
    """Return the lines to translate, with their dependency trees, and the prefixes."""
    from ..data.text import read_lines

    source = arguments.stream(args.input)
    lines = arguments.with_trees(read_lines(source), source, args.source_trees)
    lines = lines if source is None else read_first(lines)
    return lines, None if args.prefix is None else read_first(read_lines(arguments.stream(args.prefix)))


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output
    from .translation_parts import launched_processes, translate_in_parts

    source, target = arguments.stream(args.input), arguments.stream(args.output)
    if args.workers > 1 or launched_processes()[1] > 1:
        if source is None or target is None:
            raise UserError("translate.streams", field="--workers", value=args.workers)
        translate_in_parts(args)
        return
    prefix, trees = args.prefix, args.source_trees
    inputs = [source, *([] if prefix is None else [arguments.stream(prefix)]), *([] if trees is None else [trees])]
    with open_output(target, inputs) as out:
        lines, prefixes = inputs_of(args)
        write_translations(args, arguments.load_translator(args), lines, prefixes, out)


def write_translations(
    args: argparse.Namespace,
    translator: "Translator",
    lines: Iterable[str],
    prefixes: Iterable[str] | None,
    out: IO[str],
    first: int = 0,
) -> None:
    """Write the translations of lines in the format of the arguments; the number of the first line is `first`."""
    translations = translator.translate(lines, args.options, prefixes, scores=args.format != "text")
    for line, translation in enumerate(arguments.progress(translations, "sentences", out=out), start=first):
        if args.format == "text":
            print(translation.text, file=out)
        for hypothesis in translation.hypotheses:
            if args.format == "n-best":
                fields = (str(line), hypothesis.text, f"{hypothesis.log_prob:.6f}", f"{hypothesis.score:.6f}")
                print(" ||| ".join(fields), file=out)
            elif args.format == "jsonl":
                record = {"line": line, "source": translation.source}
                for name in ("text", "score", "log_prob", "tokens", "finished"):
                    record[name] = getattr(hypothesis, name)
                if hypothesis.alignment is not None:
                    record["alignment"] = hypothesis.alignment
                print(json.dumps(record, ensure_ascii=False), file=out)
        if (line + 1) % args.buffer == 0:
            out.flush()  # for a reader that waits for its answers
