"""`recnmt probe`: run probing tasks on the sentence vectors of a frozen encoder."""

import argparse
import csv
import json
import os
from dataclasses import asdict, fields

from ..experiments.probing_options import TASKS, ClassifierOptions
from . import arguments


OPTIONS = [field.name for field in fields(ClassifierOptions)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help=arguments.MODEL_HELP)
    add("data", help="folder with the tasks' files in SentEval's format, e.g. tree_depth.txt")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="tasks (default: all ten)")
    vectors = (
        "final, recurrent and attention (HO and HS of a hybrid), recurrence (H_r), gated (H_e and H_r by a gate), "
        "global (default: all vectors of the model)"
    )
    add("--vectors", nargs="+", help=vectors)
    arguments.add_options(parser, ClassifierOptions, OPTIONS)
    add("--cache", help="folder in which the vectors are stored for later runs (default: none)")
    add("--output", "-o", help="file to which the table is also written; .csv: separated by commas")
    add("--json", help="JSON file for all figures (default: none)")
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    arguments.refuse_duplicates(args.tasks, "--tasks")


def run(args: argparse.Namespace) -> None:
    from ..data.text import tsv
    from ..experiments.probing import probe, read_task, table_of

    options = arguments.read_options(ClassifierOptions, args, OPTIONS)
    tasks = [read_task(args.data, name) for name in args.tasks]
    inputs = [os.path.join(args.data, name) for name in os.listdir(args.data)]
    output = arguments.optional_output
    with output(args.output, inputs) as table, output(args.json, inputs) as figures:
        results = probe(arguments.load_translator(args), tasks, args.vectors, options, args.cache)
        rows = table_of(results)
        print(tsv(rows), end="")
        if table is not None:
            is_csv = str(args.output).lower().endswith((".csv", ".csv.gz"))
            csv.writer(table, delimiter="," if is_csv else "\t", lineterminator="\n").writerows(rows)
        if figures is not None:
            json.dump([asdict(result) for result in results], figures, indent=1)
