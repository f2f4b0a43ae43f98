"""`recnmt translate`: sentences in, translations out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from .._values import MOST_LENGTH_PENALTY
from ..models.user_errors import UserError
from .arguments import BEAMS, TOKENS, add_device_arguments, load_translator, number, progress, stream, whole


ALPHA = number(-MOST_LENGTH_PENALTY, most=MOST_LENGTH_PENALTY)


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that translation and scoring share."""
    parser.add_argument(
        "--length-penalty-type",
        choices=("vaswani", "hf"),
        default="vaswani",
        help="vaswani: ((5 + length) / 6) ** alpha; hf: length ** alpha (default: vaswani)",
    )
    parser.add_argument("--length-penalty", type=ALPHA, default=0.6, metavar="ALPHA", help="default: 0.6")
    parser.add_argument(
        "--max-tokens", type=TOKENS, default=4096, help="tokens of a batch, times beams (default: 4096)"
    )
    add_device_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained model, or a model id of the Hub")
    parser.add_argument("--input", "-i", help="text file, plain or gzipped (default: -, standard input)")
    parser.add_argument("--output", "-o", help="file to write (default: -, standard output)")
    parser.add_argument("--beams", type=BEAMS, default=4, help="beam size; 1 is greedy search (default: 4)")
    parser.add_argument("--n-best", type=BEAMS, default=1, help="hypotheses of each sentence (default: 1)")
    parser.add_argument(
        "--format",
        choices=("text", "n-best", "jsonl"),
        help="text: the best translation of each line; n-best: `line ||| text ||| log-probability ||| score`; jsonl: "
        "an object a line with scores and token ids (default: text, or n-best with --n-best)",
    )
    parser.add_argument("--max-length-factor", type=number(0), default=1.0, metavar="F")
    parser.add_argument(
        "--max-length-extra",
        type=whole(0),
        default=50,
        metavar="N",
        help="at most F x source tokens + N (default: 1, 50)",
    )
    parser.add_argument(
        "--on-long", choices=("error", "split"), default="error", help="sources beyond the model's positions"
    )
    parser.add_argument("--alignments", action="store_true", help="source-target token links (jsonl)")
    add_decoding_arguments(parser)


def begun(lines: Iterable[str]) -> Iterator[str]:
    """The same lines, with the first one read already: a file that cannot be read is told before a model is loaded."""
    lines = iter(lines)
    return chain(list(islice(lines, 1)), lines)


def check(args: argparse.Namespace) -> None:
    if args.n_best > args.beams:
        raise UserError(
            f"--n-best {args.n_best} is more than --beams {args.beams}. Remedy: as many beams as hypotheses, or more."
        )
    args.format = args.format or ("n-best" if args.n_best > 1 else "text")
    if args.alignments and args.format != "jsonl":
        raise UserError("--alignments are written with --format jsonl only. Remedy: add --format jsonl.")


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output
    from ..data.text import read_lines
    from ..evaluation.translator import DecodingOptions

    style = args.format
    options = DecodingOptions(
        beams=args.beams,
        num_hypotheses=args.n_best,
        length_penalty_type=args.length_penalty_type,
        length_penalty=args.length_penalty,
        max_length_factor=args.max_length_factor,
        max_length_extra=args.max_length_extra,
        max_tokens=args.max_tokens,
        on_long=args.on_long,
        alignments=args.alignments,
    )
    source, target = stream(args.input), stream(args.output)
    with open_output(target, inputs=[source]) as out:
        lines = read_lines(source)
        lines = lines if source is None else begun(lines)
        translations = load_translator(args).translate(lines, options)
        for line, translation in enumerate(progress(translations, "sentences", out=out)):
            if style == "text":
                print(translation.text, file=out)
            for hypothesis in translation.hypotheses:
                if style == "n-best":
                    fields = (str(line), hypothesis.text, f"{hypothesis.log_prob:.6f}", f"{hypothesis.score:.6f}")
                    print(" ||| ".join(fields), file=out)
                elif style == "jsonl":
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
