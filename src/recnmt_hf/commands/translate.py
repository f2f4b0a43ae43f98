"""`recnmt translate`: translate a file or standard input."""

import argparse
import json
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..inference.options import DecodingOptions
from . import arguments


DECODING = [field.name for field in fields(DecodingOptions) if field.name != "generate"]


def add_arguments(parser: arguments.Parser) -> None:
    arguments.add_models_argument(parser)
    add = parser.group("input and output")
    add("--input", "-i", help="text file, plain or compressed with gzip or Zstandard (default: -, standard input)")
    add("--output", "-o", help="output file (default: -, standard output)")
    formats = (
        "text: the best translation of each line; n-best: `line ||| text ||| log-probability ||| score`; jsonl: one "
        "object per line with scores and token ids (default: text, n-best with --n-best, jsonl with --alignments)"
    )
    add("--format", choices=("text", "n-best", "jsonl"), help=formats)
    arguments.add_trees_argument(parser)
    add("--prefix", help="file with the beginning of each translation; an empty line sets no prefix")
    trace = "JSON lines with what the model read and wrote for each sentence: token ids and tokens, tags, truncation"
    add("--trace", metavar="FILE", help=trace)
    arguments.add_options(parser, DecodingOptions, DECODING)
    arguments.add_generate_argument(parser)
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    args.generate = arguments.read_settings(args.generate, "--generate")
    args.format = args.format or ("jsonl" if args.alignments else "n-best" if args.num_hypotheses > 1 else "text")
    if args.prefix == "-" and arguments.stream(args.input) is None:
        raise UserError("--prefix - and --input - cannot be combined.", field="--prefix -")
    args.options = arguments.read_options(DecodingOptions, args, (*DECODING, "generate"))


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output, refuse_inputs
    from .translation_parts import inputs_of, launched_processes, translate_in_parts, write_translations

    source, target = arguments.stream(args.input), arguments.stream(args.output)
    if launched_processes()[1] > 1:
        files = [Path(path) for path in (args.input, args.prefix, args.source_trees) if path is not None]
        is_pipe = any(path.exists() and not (path.is_file() or path.is_dir()) for path in files)
        if source is None or target is None or args.prefix == "-" or is_pipe or args.trace is not None:
            raise UserError("Several processes need --input and --output that are files, without --trace.")
        translate_in_parts(args)
        return
    inputs = [source, *(arguments.stream(path) for path in (args.prefix, args.source_trees) if path is not None)]
    with ExitStack() as stack:
        out = stack.enter_context(open_output(target, inputs))
        lines, prefixes = inputs_of(args)
        translator = arguments.load_translator(args)
        trace = None
        if args.trace is not None:
            refuse_inputs(args.trace, [*inputs, *([] if target is None else [target])])
            file = stack.enter_context(open(args.trace, "w", buffering=1, encoding="utf-8", newline="\n"))

            def trace(record: dict[str, Any]) -> None:
                print(json.dumps(record, ensure_ascii=False), file=file)

        write_translations(args, translator, lines, prefixes, out, trace=trace)
