"""`recnmt test`: evaluate a trained model on test sets, and save the scores in its folder for the card."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from .._values import LANGUAGE
from ..inference.options import OF_TEXTS, DecodingOptions
from ..models.user_errors import UserError
from .arguments import add_device_arguments, add_options, find_duplicate, load_translator, read_settings
from .translate import DECODING, FLAGS


if TYPE_CHECKING:
    from ..data.text import SentencePair
    from ..inference.translator import Translator
    from ..training.evidence import Evidence

# A best translation has no use for these.
NOT_HERE = ("num_hypotheses", "alignments", "alignment_layer", *OF_TEXTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="folder of a run or a trained model, in which scores and translations are written"
    )
    parser.add_argument(
        "--set",
        nargs=3,
        action="append",
        required=True,
        metavar=("NAME", "SOURCE", "REFERENCE"),
        help="name, source file and reference file of a test set, plain or gzipped; repeat for several",
    )
    parser.add_argument(
        "--baseline",
        metavar="MODEL",
        help="model already tested on the same sets; adds the p-value of a paired bootstrap",
    )
    parser.add_argument("--source-lang", help="code of the source language (default: that of the run)")
    parser.add_argument(
        "--target-lang",
        help="code of the target language, used as file ending of the translations (default: that of the run)",
    )
    parser.add_argument(
        "--rouge", choices=("words", "characters", "english"), help="evaluate with ROUGE on these units instead of BLEU"
    )
    parser.add_argument("--lowercase", action="store_true", help="case-insensitive BLEU")
    add_options(parser, DecodingOptions, [name for name in DECODING if name not in NOT_HERE], FLAGS)
    parser.add_argument(
        "--generate",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="further settings of transformers' GenerationConfig (see recnmt translate)",
    )
    add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    if duplicate := find_duplicate([name for name, _, _ in args.set]):
        raise UserError(f"{duplicate}. Remedy: give each test set a name of its own.")
    args.generate = read_settings(args.generate, "--generate")
    known = [each.name for each in fields(DecodingOptions) if each.name not in NOT_HERE]
    args.options = DecodingOptions(**{name: getattr(args, name) for name in known})


def complete(evidence: Evidence, translator: Translator, args: argparse.Namespace, pairs: list[SentencePair]) -> None:
    """Add the evidence that a model lacks if `recnmt train` did not train it."""
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
    for code in (args.source_lang, args.target_lang):
        if code is not None and not LANGUAGE.fullmatch(code):
            raise UserError(f"{code!r} is no code of a language. Remedy: e.g. de or zh-CN.")
    folder = model_folder(args.model)
    baseline = None if args.baseline is None else model_folder(args.baseline)
    if baseline is not None:
        Evidence.load(baseline)  # damaged, it is rejected before anything is translated
    sets = {name: list(read_parallel(source, reference)) for name, source, reference in args.set}
    args.model = str(folder)
    translator = load_translator(args)
    language = args.target_lang or (Evidence.load(folder).languages or ["", "txt"])[1]
    scorer = TextScorer("rouge", args.rouge) if args.rouge else TextScorer(lowercase=args.lowercase)
    for name, source, reference in args.set:
        dataset = [{"source": Path(source).name, "target": Path(reference).name}]
        pairs = sets[name]
        score, found, words = test_model(translator, name, pairs, language, args.options, scorer, dataset)
        if baseline is not None:
            references = [pair.target for pair in pairs]
            compare_with_baseline(score, found, references, baseline, public(args.baseline), scorer)
            before = ", ".join(f"{value:.2f}" for value in score.baseline_scores.values())
            words += f"; {args.baseline} {before}, p = {score.p_value:.4f} ({score.test})"
        print(words)
        with Evidence.changing(folder) as evidence:
            complete(evidence, translator, args, next(iter(sets.values())))
            add_score(evidence, folder, score, found)
