"""`recnmt test`: evaluate a trained model on test sets, and save the scores in its folder for the card."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .._values import LANGUAGE
from ..errors import UserError
from ..inference.options import TEXT_OPTIONS, DecodingOptions
from . import arguments
from .translate import DECODING


if TYPE_CHECKING:
    from ..data.text import SentencePair
    from ..inference.translator import Translator
    from ..training.evidence import Evidence

# Options that have no effect on the best translation of a sentence.
EXCLUDED = ("num_hypotheses", "alignments", "alignment_layer", *TEXT_OPTIONS)
OPTIONS = [name for name in DECODING if name not in EXCLUDED]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="folder of a run or a trained model, in which scores and translations are written")
    names, sets = ("NAME", "SOURCE", "REFERENCE"), "name, sources and references of a test set; repeat for several"
    add("--set", nargs=3, action="append", required=True, metavar=names, help=sets)
    baseline = "model already tested on the same sets; adds the p-value of a paired bootstrap"
    add("--baseline", metavar="MODEL", help=baseline)
    add("--source-lang", help="code of the source language (default: that of the run)")
    add("--target-lang", help="code of the target language, the file ending of translations (default: that of the run)")
    arguments.add_rouge_argument(parser)
    add("--lowercase", action="store_true", help="case-insensitive BLEU")
    arguments.add_options(parser, DecodingOptions, OPTIONS)
    arguments.add_generate_argument(parser)
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    arguments.refuse_duplicates([name for name, _, _ in args.set], "--set")
    args.generate = arguments.read_settings(args.generate, "--generate")
    args.options = arguments.read_options(DecodingOptions, args, (*OPTIONS, "generate"))
    for name in ("source_lang", "target_lang"):
        code = getattr(args, name)
        if code is not None and not LANGUAGE.fullmatch(code):
            raise UserError("option.language", field=f"--{name.replace('_', '-')}", value=code)


def complete(evidence: Evidence, translator: Translator, args: argparse.Namespace, pairs: list[SentencePair]) -> None:
    """Add evidence that is missing in a model that `recnmt train` did not train."""
    from ..training.evidence import about_model

    if not evidence.model and hasattr(translator.model, "num_parameters"):
        evidence.model = about_model(translator.model.config, translator.model.num_parameters())
    if not evidence.languages and args.source_lang and args.target_lang:
        evidence.languages = [args.source_lang, args.target_lang]
    if not evidence.example:
        evidence.example = pairs[0].source


def run(args: argparse.Namespace) -> None:
    from ..data.text import read_parallel
    from ..hub.checked_copy import model_folder
    from ..training.evidence import Evidence, public
    from ..training.metrics import TextScorer
    from ..training.recipe import name_of_test
    from ..training.testing import add_score, compare_with_baseline, test_model

    for name, _, _ in args.set:
        name_of_test(name)
    folder = model_folder(args.model)
    baseline = None if args.baseline is None else model_folder(args.baseline)
    if baseline is not None:
        Evidence.load(baseline)  # reject a damaged file before translating
    sets = {name: list(read_parallel(source, reference)) for name, source, reference in args.set}
    args.model = str(folder)
    translator = arguments.load_translator(args)
    language = args.target_lang or (Evidence.load(folder).languages or ["", "txt"])[1]
    scorer = TextScorer("rouge", args.rouge) if args.rouge else TextScorer(lowercase=args.lowercase)
    for name, source, reference in args.set:
        dataset = [{"source": Path(source).name, "target": Path(reference).name}]
        pairs = sets[name]
        score, translations, summary = test_model(translator, name, pairs, language, args.options, scorer, dataset)
        if baseline is not None:
            references = [pair.target for pair in pairs]
            compare_with_baseline(score, translations, references, baseline, public(args.baseline), scorer)
            baseline_scores = ", ".join(f"{value:.2f}" for value in score.baseline_scores.values())
            summary += f"; {args.baseline} {baseline_scores}, p = {score.p_value:.4f} ({score.test})"
        print(summary)
        with Evidence.changing(folder) as evidence:
            complete(evidence, translator, args, next(iter(sets.values())))
            add_score(evidence, folder, score, translations)
