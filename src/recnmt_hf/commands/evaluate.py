"""Commands that measure quality: `recnmt test` for a model, `evaluate` for files of translations."""

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..inference.options import TEXT_OPTIONS, DecodingOptions
from ..models.user_errors import masked
from . import arguments


# Decoding options that have no effect on the best translation of a sentence.
EXCLUDED = ("num_hypotheses", "alignments", "alignment_layer", *TEXT_OPTIONS)
OPTIONS = [name for name in arguments.DECODING if name not in EXCLUDED]
ROUGE_UNITS = ("words", "characters", "english")
ROUGE_HELP = "report ROUGE-1, -2 and -L F1 instead of BLEU, over words, characters or stemmed a-z words (english)"


def add_test(parser: arguments.Parser) -> None:
    add = parser.group("input and output")
    add("model", help="folder of a run or a trained model, in which scores and translations are written")
    sets = "name, sources and references (one file or several) of a test set; repeat for several sets"
    names, pair = ("NAME SOURCE REFERENCE", "REFERENCE"), ("SOURCE REFERENCE", "REFERENCE")
    add("--set", nargs="+", action="append", required=True, metavar=names, help=sets)
    trees = f"name of a test set, and a {arguments.TREES_HELP}; repeat for several sets"
    add("--source-trees", nargs=2, action="append", default=[], metavar=("NAME", "FILE"), help=trees)
    add("--baseline", metavar="MODEL", help="model already tested on the same sets; adds p-values of randomization")
    tune = "validation set on which the exponent of the length penalty is chosen, for a second result (NAME_tuned)"
    add("--tune-length-penalty", nargs="+", metavar=pair, help=tune)
    add = parser.group("languages")
    add("--source-lang", help="code of the source language (default: the run's)")
    add("--target-lang", help="code of the target language, the file extension of translations (default: the run's)")
    add = parser.group("metrics")
    add("--rouge", choices=ROUGE_UNITS, help=ROUGE_HELP)
    add("--lowercase", action="store_true", help="case-insensitive BLEU")
    add("--tokenize", help="sacrebleu's tokenizer, e.g. flores200 (default: the run's, or by the target language)")
    arguments.add_options(parser, DecodingOptions, OPTIONS)
    arguments.add_generate_argument(parser)
    arguments.add_device_arguments(parser)


def run_test(args: argparse.Namespace) -> None:
    from ..data.corpora import load_test_set
    from ..hub.checked_copy import model_folder
    from ..metrics.bleu import bleu_tokenizer
    from ..training.evidence import Evidence, without_private
    from ..training.metrics import TextScorer
    from ..training.recipe import name_of_test
    from ..training.testing import add_score, compare_with_baseline, test_model, tune_length_penalty

    if any(len(words) < 3 for words in args.set):
        raise UserError("--set requires a name, sources and at least one file of references.", field="--set")
    corpora: dict[str, dict[str, Any]] = {
        name_of_test(name): {"source": source, "target": targets} for name, source, *targets in args.set
    }
    arguments.refuse_duplicates([name for name, *_ in args.set], "--set")
    arguments.refuse_duplicates([name for name, _ in args.source_trees], "--source-trees")
    for name, path in args.source_trees:
        if name not in corpora:
            raise UserError(f"--source-trees: {name} is none of {', '.join(corpora)}.", field="--source-trees")
        corpora[name]["source_trees"] = path
    options = arguments.read_decoding(args, OPTIONS)
    folder = model_folder(args.model)
    baseline = None if args.baseline is None else model_folder(args.baseline)
    if baseline is not None:
        Evidence.load(baseline)  # reject a damaged file before translating
    sets = {name: load_test_set(corpus, "source", "target") for name, corpus in corpora.items()}
    args.model = str(folder)
    translator = arguments.load_translator(args)
    if translator.target_langs:
        options = replace(options, source_lang=args.source_lang, target_lang=args.target_lang)
        translator.codec.direction(options)  # reject unknown languages before translating
    evidence = Evidence.load(folder)
    language = args.target_lang or (evidence.languages or ["", "txt"])[1]
    tokenize = args.tokenize
    if tokenize is None:
        named = [args.target_lang, *translator.codec.languages.named_codes("target")]
        tokenize = evidence.recipe.get("training", {}).get("bleu_tokenize")
        tokenize = tokenize or bleu_tokenizer(next(filter(None, named), None))
    scorer = TextScorer("rouge" if args.rouge else "bleu", args.rouge or "words", args.lowercase, tokenize)
    scorer.scores(["a"], ["a"])  # reject an unknown tokenizer before translating
    runs = [(name, name, options) for name in sets]
    if args.tune_length_penalty is not None:
        corpus = {"source": args.tune_length_penalty[0], "target": args.tune_length_penalty[1:]}
        scores = tune_length_penalty(translator, *load_test_set(corpus, "source", "target"), options, scorer)
        alpha, best = next(iter(scores.items()))
        arguments.note(f"length penalty {alpha}: {best:.2f} on the validation set, rescored")
        runs += [(name, f"{name}_tuned", replace(options, length_penalty=alpha)) for name in sets]
    for name, shown, options in runs:
        sources, references = sets[name]
        source, *targets = (Path(masked(path)).name for path in (corpora[name]["source"], *corpora[name]["target"]))
        dataset: dict[str, Any] = {"source": source, "target": targets if len(targets) > 1 else targets[0]}
        if trees := corpora[name].get("source_trees"):
            dataset["source_trees"] = Path(trees).name
        tested = test_model(translator, shown, sources, references, language, options, scorer, [dataset])
        score, translations, summary = tested
        if baseline is not None and shown == name:
            compare_with_baseline(score, translations, references, baseline, without_private(args.baseline), scorer)
            baseline_scores = ", ".join(f"{value:.2f}" for value in score.baseline_scores.values())
            summary += f"; {args.baseline} {baseline_scores}, p = {score.p_value:.4f} ({score.test})"
        with Evidence.changing(folder) as evidence:
            # A model that `recnmt train` did not train lacks these.
            model = translator.model
            if not evidence.model and hasattr(model, "num_parameters"):
                evidence.model = {"type": model.config.model_type, "parameters": model.num_parameters()}
            if not evidence.languages and args.source_lang and args.target_lang:
                evidence.languages = [args.source_lang, args.target_lang]
            evidence.example = evidence.example or str(next(iter(sets.values()))[0][0])
            add_score(evidence, folder, score, translations)
        print(summary, flush=True)


def add_evaluate(parser: arguments.Parser) -> None:
    whole = arguments.whole
    add = parser.group("input and output")
    add("hypotheses", nargs="+", help="files of translations, one per line; the first of several is the baseline")
    add("--references", "-r", nargs="+", action="extend", required=True, help="reference files")
    add("--source", "-s", help="file of source sentences; adds BLEU (or ROUGE-L) by source length")
    add("--length-edges", type=whole(1), nargs="+", default=[15, 30, 45], help="upper limits of source-length bins")
    add("--examples", type=whole(0), default=0, help="print N sentences and their translations")
    add("--json", help="write all scores to this JSON file")
    add = parser.group("metrics")
    add("--rouge", choices=ROUGE_UNITS, help=ROUGE_HELP)
    add("--tokenize", help="sacrebleu's tokenizer: 13a, zh, ja-mecab, char, none, ... (default: that of --language)")
    language = "language of the translations, which selects the tokenizer (default: none; BLEU then uses 13a)"
    add("--language", help=language)
    add("--no-ter", action="store_true", help="omit TER, which is slow on long sentences")
    tests = ("bootstrap", "randomization", "sign", "both", "all")
    add = parser.group("significance")
    add("--significance", choices=tests, default="both", help="significance test; both: bootstrap and randomization")
    add("--test", dest="significance", choices=tests, default="both", help=argparse.SUPPRESS)
    add("--samples", type=whole(1), default=1000, help="samples of the significance test")


def run_evaluate(args: argparse.Namespace) -> None:
    from .._plain_text import count_words
    from ..data.files import open_output
    from ..data.text import read_lines
    from ..metrics import bleu as metrics
    from ..metrics.significance import BOOTSTRAP, METHODS, RANDOMIZATION, SIGN, compare_systems
    from ..metrics.suspicion import suspicions

    arguments.refuse_duplicates(args.hypotheses, "hypotheses")
    args.tokenize = metrics.bleu_tokenizer(args.language) if args.tokenize is None else args.tokenize
    inputs = [*args.references, *args.hypotheses, *([] if args.source is None else [args.source])]
    with nullcontext() if args.json is None else open_output(args.json, inputs) as out:
        texts = {path: list(read_lines(path)) for path in inputs}
        first, count = args.hypotheses[0], len(texts[args.hypotheses[0]])
        if not count:
            raise UserError(f"{first} is empty.", field=first)
        for path, lines in texts.items():
            if len(lines) != count:
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
                length = "" if score.length_ratio is None else f", length ratio {score.length_ratio:.3f}"
                shown.append(f"  {name} of sources with {words} {units}: {score.score:.2f}{length} ({size} sentences)")
            own = report["systems"][system] = {"scores": [vars(score) for score in scores]}
            for words, size, score in bins:
                row = {"words": words, "sentences": size, kind: score.score, "length_ratio": score.length_ratio}
                own.setdefault("by_length", []).append(row)
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
        for suspicion in suspicions(hypotheses, references, source, options.get("tokenize")):
            print(f"Warning: {system}: {suspicion}", file=sys.stderr)


def measure(
    args: argparse.Namespace, source: list[str] | None, hypotheses: list[str], references: list[list[str]]
) -> tuple[list[Any], list[Any]]:
    """Return the scores of a system, and with sources those of bins by source length."""
    from ..metrics import bleu as metrics
    from ..metrics.rouge import rouge_scores, units_of

    texts, by_length = (hypotheses, references), {"tokenize": args.tokenize}
    if args.rouge:
        scores = rouge_scores(*texts, args.rouge)
        # Sources may be in another language than the summaries.
        units = units_of("characters" if args.rouge == "characters" else "words")
        by_length = {
            "score": lambda texts, streams: rouge_scores(texts, streams, args.rouge)[-1],
            "length": lambda text: len(units(text)),
        }
    else:
        scores = [
            metrics.sacrebleu_score(*texts, tokenize=args.tokenize, samples=args.samples),
            metrics.sacrebleu_score(*texts, lowercase=True, tokenize=args.tokenize),
            metrics.chrf_score(*texts),
            *([] if args.no_ter else [metrics.ter_score(*texts, args.tokenize)]),
            metrics.tokenized_bleu_score(*texts, language=args.language),
            metrics.tokenized_bleu_score(*texts, lowercase=True, language=args.language),
        ]
    bins = [] if source is None else metrics.scores_by_length(source, *texts, args.length_edges, **by_length)
    return scores, bins


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
