"""`recnmt translate`: sentences in, translations out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from ..models.user_errors import UserError


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that translation and scoring share."""
    parser.add_argument(
        "--length-penalty-type",
        choices=("vaswani", "hf"),
        default="vaswani",
        help="vaswani: ((5 + length) / 6) ** alpha; hf: length ** alpha (default: vaswani)",
    )
    parser.add_argument("--length-penalty", type=float, default=0.6, metavar="ALPHA", help="default: 0.6")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a batch, times beams (default: 4096)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: CUDA if there is any)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="weights' type (default: as saved)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a Hub model brings along")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained model, or a model id of the Hub")
    parser.add_argument("--input", "-i", help="text file, plain or gzipped (default: standard input)")
    parser.add_argument("--output", "-o", help="file to write (default: standard output)")
    parser.add_argument("--beams", type=int, default=4, help="beam size; 1 is greedy search (default: 4)")
    parser.add_argument("--n-best", type=int, default=1, help="hypotheses of each sentence (default: 1)")
    parser.add_argument(
        "--format",
        choices=("text", "n-best", "jsonl"),
        help="text: the best translation of each line; n-best: `line ||| text ||| log-probability ||| score`; jsonl: "
        "an object a line with scores and token ids (default: text, or n-best with --n-best)",
    )
    parser.add_argument("--max-length-factor", type=float, default=1.0, metavar="F")
    parser.add_argument(
        "--max-length-extra", type=int, default=50, metavar="N", help="at most F x source tokens + N (default: 1, 50)"
    )
    parser.add_argument(
        "--on-long", choices=("error", "split"), default="error", help="sources beyond the model's positions"
    )
    parser.add_argument("--alignments", action="store_true", help="source-target token links (jsonl)")
    add_decoding_arguments(parser)


def load_translator(args: argparse.Namespace):
    from ..evaluation.translator import Translator

    extra = {"trust_remote_code": True} if args.trust_remote_code else {}
    return Translator.from_pretrained(args.model, device=args.device, dtype=args.dtype, **extra)


def input_lines(path: str | None) -> Iterator[str]:
    from ..data.text import read_lines

    if path is not None:
        return read_lines(path)
    sys.stdin.reconfigure(encoding="utf-8")
    return (line.strip() for line in sys.stdin)


def run(args: argparse.Namespace) -> None:
    from ..evaluation.translator import DecodingOptions

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
    style = args.format or ("n-best" if args.n_best > 1 else "text")
    if args.alignments and style != "jsonl":
        raise UserError("--alignments are written with --format jsonl only. Remedy: add --format jsonl.")
    translator = load_translator(args)
    translations = translator.translate(input_lines(args.input), options)
    with (
        open(args.output, "w", encoding="utf-8")
        if args.output
        else open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False) as out
    ):
        for number, translation in enumerate(translations):
            if style == "text":
                print(translation.text, file=out)
            for hypothesis in translation.hypotheses:
                if style == "n-best":
                    fields = (str(number), hypothesis.text, f"{hypothesis.log_prob:.6f}", f"{hypothesis.score:.6f}")
                    print(" ||| ".join(fields), file=out)
                elif style == "jsonl":
                    record = {
                        "line": number,
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
