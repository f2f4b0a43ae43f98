"""`recnmt evaluate`: metrics with signatures, bins by source length, significance between systems."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..models.user_errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "hypotheses", nargs="+", help="translations, one a line; of several files the first is the baseline"
    )
    parser.add_argument("--references", "-r", nargs="+", required=True, help="one or several reference files")
    parser.add_argument("--source", "-s", help="source sentences; adds BLEU by source length")
    parser.add_argument("--length-edges", type=int, nargs="+", default=[15, 30, 45], help="default: 15 30 45")
    parser.add_argument("--tokenize", help="sacrebleu's tokenizer: 13a (default), zh, ja-mecab, intl, char, none, ...")
    parser.add_argument(
        "--language", help="tokenises both sides as Moses does for this language, for tokenised BLEU (default: as is)"
    )
    parser.add_argument("--no-ter", action="store_true", help="leaves out TER, which takes long on long sentences")
    parser.add_argument("--test", choices=("bootstrap", "randomization", "both"), default="both")
    parser.add_argument("--samples", type=int, default=1000, help="resamplings of the significance test")
    parser.add_argument(
        "--examples", type=int, default=0, metavar="N", help="shows N sentences: source, translations, references"
    )
    parser.add_argument("--json", help="also writes all figures to this file")


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_lines
    from ..evaluation import metrics
    from ..evaluation.significance import METHODS, compare_systems

    references = [list(read_lines(path)) for path in args.references]
    systems = {path: list(read_lines(path)) for path in args.hypotheses}
    source = list(read_lines(args.source)) if args.source else None
    show_examples(args.examples, source, systems, references)
    report: dict = {"systems": {}, "comparisons": {}}
    for path, hypotheses in systems.items():
        for name, stream in zip(args.references, references, strict=True):
            if len(stream) != len(hypotheses):
                raise UserError(
                    f"{path} has {len(hypotheses)} lines, {name} has {len(stream)}. Remedy: score the translation of "
                    "the file that the references belong to."
                )
        scores = [
            metrics.sacrebleu_score(hypotheses, references, tokenize=args.tokenize),
            metrics.sacrebleu_score(hypotheses, references, lowercase=True, tokenize=args.tokenize),
            metrics.chrf_score(hypotheses, references),
            *([] if args.no_ter else [metrics.ter_score(hypotheses, references)]),
            metrics.tokenized_bleu_score(hypotheses, references, language=args.language),
            metrics.tokenized_bleu_score(hypotheses, references, lowercase=True, language=args.language),
        ]
        print(path)
        for score in scores:
            print(f"  {score}")
        entry = {"scores": [vars(score) for score in scores]}
        if source is not None:
            bins = metrics.scores_by_length(source, hypotheses, references, args.length_edges, args.tokenize)
            for name, count, score in bins:
                print(f"  BLEU of sources with {name} words: {score.score:.2f} ({count} sentences)")
            entry["by_length"] = [{"words": n, "sentences": c, "bleu": s.score} for n, c, s in bins]
        report["systems"][path] = entry
    if len(systems) > 1:
        for method in METHODS if args.test == "both" else [args.test]:
            found = compare_systems(systems, references, method, args.samples, tokenize=args.tokenize)
            print(f"paired {method}, {args.samples} samples, against {args.hypotheses[0]}")
            for each in found[1:]:
                print(f"  {each.system}: BLEU {each.score:.2f} ({each.difference:+.2f}), p = {each.p_value:.4f}")
            report["comparisons"][method] = [vars(each) for each in found]
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")


def show_examples(count: int, source: list[str] | None, systems: dict[str, list[str]], references: list) -> None:
    """Prints sentences spread over the test set, one above the other."""
    total = len(references[0])
    for i in [total * k // count for k in range(min(count, total))]:
        rows = [("source", source[i])] if source is not None else []
        rows += [("output" if len(systems) == 1 else path, lines[i]) for path, lines in systems.items()]
        rows += [("reference", stream[i]) for stream in references]
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:>{width}}  {text}" for name, text in rows), end="\n\n")
