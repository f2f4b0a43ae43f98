"""`recnmt evaluate`: score translations with BLEU, chrF and TER, or with ROUGE, and test significance."""

import argparse
import json
import os
import sys
from typing import Any

from ..errors import UserError
from .arguments import Parser, add_rouge_argument, optional_output, refuse_duplicates, whole


def add_arguments(parser: Parser) -> None:
    add = parser.group("input and output")
    add("hypotheses", nargs="+", help="files of translations, one per line; the first of several is the baseline")
    add("--references", "-r", nargs="+", action="extend", required=True, help="reference files")
    add("--source", "-s", help="file of source sentences; adds BLEU (or ROUGE-L) by source length")
    add("--length-edges", type=whole(1), nargs="+", default=[15, 30, 45], help="upper limits of source-length bins")
    add("--examples", type=whole(0), default=0, help="print N sentences and their translations")
    add("--json", help="JSON file for all figures (default: none)")
    add = parser.group("metrics")
    add_rouge_argument(add)
    tokenize = "sacrebleu's tokenizer: 13a, zh, ja-mecab, char, flores200, none, ... (default: that of --language)"
    add("--tokenize", help=tokenize)
    language = "language code of the translations, which chooses sacrebleu's and Moses' tokenizers (default: 13a for "
    add("--language", help=f"{language}BLEU, and none for tokenized BLEU, whose texts are tokenized already)")
    add("--no-ter", action="store_true", help="omit TER, which is slow on long sentences")
    tests = ("bootstrap", "randomization", "sign", "both", "all")
    add = parser.group("significance")
    add("--significance", choices=tests, default="both", help="significance test; both: bootstrap and randomization")
    add("--test", dest="significance", choices=tests, default="both", help=argparse.SUPPRESS)
    add("--samples", type=whole(1), default=1000, help="samples of the significance test")


def check(args: argparse.Namespace) -> None:
    refuse_duplicates(args.hypotheses, "hypotheses")


def run(args: argparse.Namespace) -> None:
    from .._plain_text import count_words
    from ..data.text import read_lines
    from ..metrics import bleu as metrics
    from ..metrics.significance import BOOTSTRAP, METHODS, RANDOMIZATION, SIGN, compare_systems
    from ..metrics.suspicion import suspicions

    args.tokenize = metrics.bleu_tokenizer(args.language) if args.tokenize is None else args.tokenize
    inputs = [*args.references, *args.hypotheses, *([] if args.source is None else [args.source])]
    with optional_output(args.json, inputs) as out:
        texts = {path: list(read_lines(path)) for path in inputs}
        first, count = args.hypotheses[0], len(texts[args.hypotheses[0]])
        for path, lines in texts.items():
            if len(lines) != count or not lines:
                raise UserError(f"{first} has {count} lines, but {path} has {len(lines)}.", field=first)
        references = [texts[path] for path in args.references]
        # Names of files may contain bytes that are not text.
        systems = {os.fsencode(path).decode(errors="backslashreplace"): texts[path] for path in args.hypotheses}
        source = None if args.source is None else texts[args.source]
        has_no_spaces = count_words(" ".join(source or ())) > 2 * sum(len(text.split()) for text in source or ())
        units = "characters" if args.rouge == "characters" or has_no_spaces else "words"
        name, kind = ("ROUGE-L F1", "rougeL") if args.rouge else ("BLEU", "bleu")
        shown = examples(args.examples, source, systems, references)
        report: dict[str, Any] = {"systems": {}, "comparisons": {}}
        for system, hypotheses in systems.items():
            scores, bins = measure(args, source, hypotheses, references)
            shown += [system, *(f"  {score}" for score in scores)]
            for words, size, score in bins:
                shown.append(f"  {name} of sources with {words} {units}: {score.score:.2f} ({size} sentences)")
            report["systems"][system] = {"scores": [vars(score) for score in scores]}
            if source is not None:
                rows = [{"words": words, "sentences": size, kind: score.score} for words, size, score in bins]
                report["systems"][system]["by_length"] = rows
        options = {"metric": "rougeL", "units": args.rouge} if args.rouge else {"tokenize": args.tokenize}
        tests = {"both": (BOOTSTRAP, RANDOMIZATION), "all": METHODS}
        for method in tests.get(args.significance, [args.significance]) if len(systems) > 1 else ():
            results = compare_systems(systems, references, method, args.samples, **options)
            samples = "" if method == SIGN else f", {args.samples} samples"
            shown.append(f"paired {method} test{samples}, against {first}")
            for result in results[1:]:
                counts = "" if method != SIGN else f" ({result.better} sentences better, {result.worse} worse)"
                difference = f"{result.score:.2f} ({result.difference:+.2f}), p = {result.p_value:.4f}{counts}"
                shown.append(f"  {result.system}: {name} {difference}")
            report["comparisons"][method] = [vars(result) for result in results]
        if out is not None:
            json.dump(report, out, indent=2, ensure_ascii=False)
    print("\n".join(shown))
    for system, hypotheses in systems.items():
        for suspicion in suspicions(hypotheses, references, source):
            print(f"Warning: {system}: {suspicion}", file=sys.stderr)


def measure(
    args: argparse.Namespace, source: list[str] | None, hypotheses: list[str], references: list[list[str]]
) -> tuple[list[Any], list[Any]]:
    """Return the scores of a system, and with sources those of bins by source length."""
    from ..metrics import bleu as metrics
    from ..metrics.rouge import rouge_scores, units_of

    if args.rouge:
        scores = rouge_scores(hypotheses, references, args.rouge)
        # Sources may be in another language than the summaries.
        units = units_of("characters" if args.rouge == "characters" else "words")
        by_length: dict[str, Any] = {
            "score": lambda texts, streams: rouge_scores(texts, streams, args.rouge)[-1],
            "length": lambda text: len(units(text)),
        }
    else:
        scores = [
            metrics.sacrebleu_score(hypotheses, references, tokenize=args.tokenize, samples=args.samples),
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


def examples(
    count: int, source: list[str] | None, systems: dict[str, list[str]], references: list[list[str]]
) -> list[str]:
    """Return source, outputs and references of sentences spread over the test set, as lines."""
    total, shown = len(references[0]), []
    for i in [total * k // count for k in range(min(count, total))]:
        rows = [("source", source[i])] if source is not None else []
        rows += [("output" if len(systems) == 1 else path, lines[i]) for path, lines in systems.items()]
        rows += [("reference", lines[i]) for lines in references]
        width = max(len(name) for name, _ in rows)
        shown += [*(f"{name:>{width}}  {text}" for name, text in rows), ""]
    return shown
