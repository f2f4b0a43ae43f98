"""`recnmt probe`: run probing tasks on the sentence vectors of a frozen encoder."""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import asdict

from . import arguments


SINGLE = ("classifier", "epochs", "every", "patience", "batch_size", "learning_rate", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..experiments.probing_options import TASKS, ClassifierOptions

    add = parser.add_argument
    usual = ClassifierOptions()
    add("model", help=arguments.MODEL_HELP)
    add("data", help="folder with the tasks' files in SentEval's format, e.g. tree_depth.txt")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default: all ten")
    add(
        "--vectors",
        nargs="+",
        help="final, recurrent and attention (HO and HS of a hybrid), recurrence (H_r), gated (H_e and H_r by a gate), "
        "global (default: all vectors of the model)",
    )
    arguments.add_options(parser, ClassifierOptions, SINGLE)
    add("--hidden", type=arguments.whole(1), nargs="+", default=usual.hidden, help="sizes of the hidden layer to try")
    share = arguments.number(0, below=1)
    add("--dropout", type=share, nargs="+", default=usual.dropout, help="dropout rates of the hidden layer to try")
    add("--l2", type=arguments.number(0), nargs="+", default=usual.l2, help="weight decays to try without hidden layer")
    add("--cache", help="folder in which the vectors are stored for later runs (default: none)")
    add("--output", "-o", help="file to which the table is also written; .csv: separated by commas")
    add("--json", help="JSON file for all figures (default: none)")
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    arguments.refuse_duplicates(args.tasks, "--tasks")


def run(args: argparse.Namespace) -> None:
    from ..experiments.probing import probe, read_task, table_of
    from ..experiments.probing_options import ClassifierOptions

    options = arguments.read_options(ClassifierOptions, args, (*SINGLE, "hidden", "dropout", "l2"))
    tasks = [read_task(args.data, name) for name in args.tasks]
    with arguments.optional_output(args.output) as table, arguments.optional_output(args.json) as figures:
        results = probe(arguments.load_translator(args), tasks, args.vectors, options, args.cache)
        rows = table_of(results)
        for row in rows:
            print("\t".join(row))
        if table is not None:
            is_csv = str(args.output).lower().endswith((".csv", ".csv.gz"))
            csv.writer(table, delimiter="," if is_csv else "\t", lineterminator="\n").writerows(rows)
        if figures is not None:
            json.dump([asdict(result) for result in results], figures, indent=1)
