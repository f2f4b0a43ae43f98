"""`recnmt translate`: translate a file or standard input."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import chain, islice

from ..inference.options import DecodingOptions
from ..models.user_errors import UserError
from .arguments import add_device_arguments, add_options, load_translator, progress, read_settings, stream


# Flags of another name than their option.
FLAGS = {"num_hypotheses": "--n-best"}
# Options that scoring depends on.
SCORING = ("length_penalty_type", "length_penalty", "max_tokens")
DECODING = [each.name for each in fields(DecodingOptions) if each.name != "generate"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="+",
        help="folder of a trained model, or a model id of the Hub; several models with one vocabulary form an ensemble "
        "that averages their log-probabilities",
    )
    parser.add_argument("--input", "-i", help="text file, plain or gzipped (default: -, standard input)")
    parser.add_argument("--output", "-o", help="output file (default: -, standard output)")
    parser.add_argument(
        "--format",
        choices=("text", "n-best", "jsonl"),
        help="text: the best translation of each line; n-best: `line ||| text ||| log-probability ||| score`; jsonl: "
        "one object per line with scores and token ids (default: text, or n-best with --n-best)",
    )
    parser.add_argument(
        "--prefix",
        metavar="FILE",
        help="file with the beginning of the translation of each line; an empty line sets no prefix",
    )
    add_options(parser, DecodingOptions, DECODING, FLAGS)
    parser.add_argument(
        "--generate",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="further settings of transformers' GenerationConfig, with values in YAML: "
        "do_sample=true temperature=0.8 top_p=0.9 no_repeat_ngram_size=3 repetition_penalty=1.2 ...",
    )
    add_device_arguments(parser)


def begun(lines: Iterable[str]) -> Iterator[str]:
    """The same lines, with the first one read already: an unreadable file is reported before a model is loaded."""
    lines = iter(lines)
    return chain(list(islice(lines, 1)), lines)


def check(args: argparse.Namespace) -> None:
    args.generate = read_settings(args.generate, "--generate")
    samples = args.generate.get("do_sample") and args.beams == 1
    if args.num_hypotheses > args.beams and not samples:
        raise UserError(
            f"--n-best {args.num_hypotheses} is more than --beams {args.beams}. Remedy: as many beams as hypotheses, "
            "or more."
        )
    args.format = args.format or ("n-best" if args.num_hypotheses > 1 else "text")
    if args.alignments and args.format != "jsonl":
        raise UserError("--alignments are written with --format jsonl only. Remedy: add --format jsonl.")
    if args.prefix == "-" and stream(args.input) is None:
        raise UserError("--prefix and --input cannot both be standard input. Remedy: name a file for one of them.")
    args.options = DecodingOptions(**{each.name: getattr(args, each.name) for each in fields(DecodingOptions)})


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output
    from ..data.text import read_lines

    source, target = stream(args.input), stream(args.output)
    inputs = [source, *([] if args.prefix is None else [stream(args.prefix)])]
    with open_output(target, inputs) as out:
        lines = read_lines(source)
        lines = lines if source is None else begun(lines)
        prefixes = None if args.prefix is None else begun(read_lines(stream(args.prefix)))
        translations = load_translator(args).translate(lines, args.options, prefixes, scores=args.format != "text")
        for line, translation in enumerate(progress(translations, "sentences", out=out)):
            if args.format == "text":
                print(translation.text, file=out)
            for hypothesis in translation.hypotheses:
                if args.format == "n-best":
                    fields = (str(line), hypothesis.text, f"{hypothesis.log_prob:.6f}", f"{hypothesis.score:.6f}")
                    print(" ||| ".join(fields), file=out)
                elif args.format == "jsonl":
                    record = {
                        "line": line,
                        "source": translation.source,
                        "text": hypothesis.text,
                        "score": hypothesis.score,
                        "log_prob": hypothesis.log_prob,
                        "tokens": hypothesis.tokens,
                        "finished": hypothesis.finished,
                    }
                    if hypothesis.alignment is not None:
                        record["alignment"] = hypothesis.alignment
                    print(json.dumps(record, ensure_ascii=False), file=out)
            if (line + 1) % args.buffer == 0:
                out.flush()  # for a reader that waits for its answers
