"""`recnmt evaluate`: score translations with BLEU, chrF and TER, or with ROUGE, and test significance."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import nullcontext
from typing import Any

from ..models.user_errors import UserError
from .arguments import find_duplicate, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "hypotheses", nargs="+", help="files of translations, one per line; the first of several is the baseline"
    )
    parser.add_argument("--references", "-r", nargs="+", action="extend", required=True, help="reference files")
    parser.add_argument(
        "--rouge",
        choices=("words", "characters", "english"),
        help="evaluate summaries with F1 of ROUGE-1, ROUGE-2 and ROUGE-L on these units; english: "
        "words of the letters a to z with Porter's stemmer",
    )
    parser.add_argument("--source", "-s", help="file of source sentences; adds BLEU (or ROUGE-L) by source length")
    parser.add_argument(
        "--length-edges",
        type=whole(1),
        nargs="+",
        default=[15, 30, 45],
        help="limits of the bins of source lengths (default: 15 30 45)",
    )
    parser.add_argument("--tokenize", help="sacrebleu's tokenizer: 13a (default), zh, ja-mecab, intl, char, none, ...")
    parser.add_argument(
        "--language", help="language code for Moses' tokenizer in tokenised BLEU (default: texts are tokenised already)"
    )
    parser.add_argument("--no-ter", action="store_true", help="omit TER, which is slow on long sentences")
    parser.add_argument(
        "--test",
        choices=("bootstrap", "randomization", "both"),
        default="both",
        help="significance test (default: both)",
    )
    parser.add_argument(
        "--samples", type=whole(1), default=1000, help="samples of the significance test (default: 1000)"
    )
    parser.add_argument(
        "--examples",
        type=whole(0),
        default=0,
        metavar="N",
        help="print source, translations and references of N sentences (default: 0)",
    )
    parser.add_argument("--json", help="JSON file for all figures (default: none)")


def check(args: argparse.Namespace) -> None:
    if duplicate := find_duplicate(args.hypotheses):
        raise UserError(f"{duplicate}. Remedy: name each system's translations once.")
    if args.length_edges != sorted(set(args.length_edges)):
        raise UserError(f"--length-edges {' '.join(map(str, args.length_edges))} do not rise. Remedy: e.g. 15 30 45.")
    given = [name for name in ("tokenize", "language") if args.rouge and getattr(args, name) is not None]
    if given:
        raise UserError(f"--{given[0]} is for BLEU, and --rouge leaves that out. Remedy: give one of them.")
    if args.language is not None and not re.fullmatch("[a-z]{2,3}", args.language):
        raise UserError(f"--language {args.language!r} is no code of a language. Remedy: e.g. de or en.")


def run(args: argparse.Namespace) -> None:
    from ..data.files import open_output
    from ..data.text import read_lines
    from ..metrics import bleu as metrics
    from ..metrics.significance import METHODS, compare_systems

    metrics.check_tokenizer(args.tokenize)
    inputs = [*args.references, *args.hypotheses, *([] if args.source is None else [args.source])]
    with nullcontext() if args.json is None else open_output(args.json, inputs) as out:
        references = [list(read_lines(path)) for path in args.references]
        systems = {path: list(read_lines(path)) for path in args.hypotheses}
        source = None if args.source is None else list(read_lines(args.source))
        check_lines(systems, dict(zip(args.references, references, strict=True)), args.source, source)
        show_examples(args.examples, source, systems, references)
        report: dict[str, Any] = {"systems": {}, "comparisons": {}}
        for path, hypotheses in systems.items():
            scores, bins = measure(args, source, hypotheses, references)
            print(path)
            for score in scores:
                print(f"  {score}")
            name, kind = ("ROUGE-L F1", "rougeL") if args.rouge else ("BLEU", "bleu")
            for words, count, score in bins:
                units = "characters" if args.rouge == "characters" else "words"
                print(f"  {name} of sources with {words} {units}: {score.score:.2f} ({count} sentences)")
            report["systems"][path] = {"scores": [vars(score) for score in scores]}
            if source is not None:
                report["systems"][path]["by_length"] = [
                    {"words": words, "sentences": count, kind: score.score} for words, count, score in bins
                ]
        if len(systems) > 1:
            options = {"metric": "rougeL", "units": args.rouge} if args.rouge else {"tokenize": args.tokenize}
            for method in METHODS if args.test == "both" else [args.test]:
                found = compare_systems(systems, references, method, args.samples, **options)
                print(f"paired {method}, {args.samples} samples, against {args.hypotheses[0]}")
                for each in found[1:]:
                    print(f"  {each.system}: {name} {each.score:.2f} ({each.difference:+.2f}), p = {each.p_value:.4f}")
                report["comparisons"][method] = [vars(each) for each in found]
        if out is not None:
            json.dump(report, out, indent=2, ensure_ascii=False)


def measure(
    args: argparse.Namespace, source: list[str] | None, hypotheses: list[str], references: list[list[str]]
) -> tuple[list[Any], list[Any]]:
    """Return the scores of a system, and with sources those of bins by source length."""
    from ..metrics import bleu as metrics
    from ..metrics.rouge import rouge_scores, units_of

    if args.rouge:
        scores, units = rouge_scores(hypotheses, references, args.rouge), units_of(args.rouge)
        by_length: dict[str, Any] = {
            "score": lambda texts, streams: rouge_scores(texts, streams, args.rouge)[-1],
            "length": lambda text: len(units(text)),
        }
    else:
        scores = [
            metrics.sacrebleu_score(hypotheses, references, tokenize=args.tokenize),
            metrics.sacrebleu_score(hypotheses, references, lowercase=True, tokenize=args.tokenize),
            metrics.chrf_score(hypotheses, references),
            *([] if args.no_ter else [metrics.ter_score(hypotheses, references)]),
            metrics.tokenized_bleu_score(hypotheses, references, language=args.language),
            metrics.tokenized_bleu_score(hypotheses, references, lowercase=True, language=args.language),
        ]
        by_length = {"tokenize": args.tokenize}
    if source is None:
        return scores, []
    return scores, metrics.scores_by_length(source, hypotheses, references, args.length_edges, **by_length)


def check_lines(
    systems: dict[str, list[str]], references: dict[str, list[str]], source_path: str | None, source: list[str] | None
) -> None:
    """Raise a [`UserError`] unless all files have the same number of lines, at least one."""
    first, lines = next(iter(systems.items()))
    others = {**systems, **references}
    if source_path is not None and source is not None:
        others[source_path] = source
    for name, stream in others.items():
        if len(stream) != len(lines):
            raise UserError(
                f"{first} has {len(lines)} lines, {name} has {len(stream)}. Remedy: score the translation of the file "
                "that the references belong to."
            )
    if not lines:
        raise UserError(f"{first} is empty. Remedy: give a file with at least one translation.")


def show_examples(
    count: int, source: list[str] | None, systems: dict[str, list[str]], references: list[list[str]]
) -> None:
    """Print source, outputs and references of sentences spread over the test set."""
    total = len(references[0])
    for i in [total * k // count for k in range(min(count, total))]:
        rows = [("source", source[i])] if source is not None else []
        rows += [("output" if len(systems) == 1 else path, lines[i]) for path, lines in systems.items()]
        rows += [("reference", stream[i]) for stream in references]
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:>{width}}  {text}" for name, text in rows), end="\n\n")
