"""`recnmt test`: evaluate a trained model on test sets, and save the scores in its folder for the card."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..inference.options import TEXT_OPTIONS, DecodingOptions
from ..models.user_errors import masked
from . import arguments
from .translate import DECODING


# Options that have no effect on the best translation of a sentence.
EXCLUDED = ("num_hypotheses", "alignments", "alignment_layer", *TEXT_OPTIONS)
OPTIONS = [name for name in DECODING if name not in EXCLUDED]


def add_arguments(parser: arguments.Parser) -> None:
    add = parser.group("input and output")
    add("model", help="folder of a run or a trained model, in which scores and translations are written")
    names = ("NAME", "SOURCE REFERENCE [REFERENCE ...]")
    sets = "name, sources and references (one file or several) of a test set; repeat for several sets"
    add("--set", nargs="+", action="append", required=True, metavar=names, help=sets)
    trees = "name of a test set, and a CoNLL-U file with the dependency trees of its sources, whose words are "
    trees += "separated by spaces, for a model that reads trees; repeat for several sets"
    arguments.add_trees_argument(parser, nargs=2, action="append", default=[], metavar=("NAME", "FILE"), help=trees)
    baseline = "model already tested on the same sets; adds a p-value of approximate randomization"
    add("--baseline", metavar="MODEL", help=baseline)
    tune = (
        "sources and references of a validation set, on which the exponent of the length penalty is chosen; each test "
    )
    tune += "set is evaluated with --length-penalty and, as NAME_tuned, with the chosen one"
    add("--tune-length-penalty", nargs="+", metavar=("SOURCE", "REFERENCE"), help=tune)
    add = parser.group("languages")
    add("--source-lang", help="code of the source language (default: the run's)")
    add("--target-lang", help="code of the target language, the file extension of translations (default: the run's)")
    add = parser.group("metrics")
    arguments.add_rouge_argument(add)
    add("--lowercase", action="store_true", help="case-insensitive BLEU")
    add("--tokenize", help="sacrebleu's tokenizer, e.g. flores200 (default: the run's, or by the target language)")
    arguments.add_options(parser, DecodingOptions, OPTIONS)
    arguments.add_generate_argument(parser)
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    if any(len(words) < 3 for words in args.set):
        raise UserError("--set requires a name, sources and at least one file of references.", field="--set")
    names = [name for name, *_ in args.set]
    arguments.refuse_duplicates(names, "--set")
    arguments.refuse_duplicates([name for name, _ in args.source_trees], "--source-trees")
    if unknown := {name for name, _ in args.source_trees}.difference(names):
        raise UserError(f"--source-trees: {', '.join(unknown)} is none of {', '.join(names)}.", field="--source-trees")
    args.generate = arguments.read_settings(args.generate, "--generate")
    args.options = arguments.read_options(DecodingOptions, args, (*OPTIONS, "generate"))


def run(args: argparse.Namespace) -> None:
    from ..data.corpora import load_test_set
    from ..hub.checked_copy import model_folder
    from ..metrics.bleu import bleu_tokenizer
    from ..training.evidence import Evidence, about_model, without_private
    from ..training.metrics import TextScorer
    from ..training.recipe import name_of_test
    from ..training.testing import add_score, compare_with_baseline, test_model, tune_length_penalty

    for name, *_ in args.set:
        name_of_test(name)
    folder = model_folder(args.model)
    baseline = None if args.baseline is None else model_folder(args.baseline)
    if baseline is not None:
        Evidence.load(baseline)  # reject a damaged file before translating
    corpora: dict[str, dict[str, Any]]
    corpora = {name: {"source": source, "target": targets} for name, source, *targets in args.set}
    for name, path in args.source_trees:
        corpora[name]["source_trees"] = path
    sets = {name: load_test_set(corpus, "source", "target") for name, corpus in corpora.items()}
    args.model = str(folder)
    translator = arguments.load_translator(args)
    if translator.target_langs:
        args.options = replace(args.options, source_lang=args.source_lang, target_lang=args.target_lang)
        translator.codec.direction(args.options)  # reject unknown languages before translating
    evidence = Evidence.load(folder)
    language = args.target_lang or (evidence.languages or ["", "txt"])[1]
    tokenize = args.tokenize
    if tokenize is None:
        named = [args.target_lang, *translator.codec.languages.named_codes("target", translator.task)]
        tokenize = evidence.recipe.get("training", {}).get("bleu_tokenize")
        tokenize = tokenize or bleu_tokenizer(next(filter(None, named), None))
    scorer = TextScorer("rouge" if args.rouge else "bleu", args.rouge or "words", args.lowercase, tokenize)
    scorer.scores(["a"], ["a"])  # reject an unknown tokenizer before translating
    runs = [(name, name, args.options) for name in sets]
    if args.tune_length_penalty is not None:
        corpus = {"source": args.tune_length_penalty[0], "target": args.tune_length_penalty[1:]}
        scores = tune_length_penalty(translator, *load_test_set(corpus, "source", "target"), args.options, scorer)
        alpha, best = next(iter(scores.items()))
        arguments.note(f"length penalty {alpha}: {best:.2f} on the validation set, rescored")
        tuned = replace(args.options, length_penalty=alpha)
        runs += [(name, f"{name}_tuned", tuned) for name in sets]
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
            if not evidence.model and hasattr(translator.model, "num_parameters"):
                evidence.model = about_model(translator.model.config, translator.model.num_parameters())
            if not evidence.languages and args.source_lang and args.target_lang:
                evidence.languages = [args.source_lang, args.target_lang]
            evidence.example = evidence.example or str(next(iter(sets.values()))[0][0])
            add_score(evidence, folder, score, translations)
        print(summary, flush=True)
