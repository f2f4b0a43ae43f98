"""`recnmt probe`: run probing tasks on the sentence vectors of a frozen encoder."""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import asdict

from ..models.user_errors import UserError
from .arguments import add_device_arguments, add_options, load_translator, number, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..experiments.probing_options import TASKS, ClassifierOptions

    usual = ClassifierOptions()
    parser.add_argument("model", help="folder of a trained model, or a model id of the Hub")
    parser.add_argument("data", help="folder with the tasks' files in SentEval's format, e.g. tree_depth.txt")
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default: all ten"
    )
    parser.add_argument(
        "--vectors",
        nargs="+",
        help="final, recurrent and attention (HO and HS of a hybrid), recurrence (H_r), gated (H_e and H_r by a gate), "
        "global (default: all vectors of the model)",
    )
    single = ("classifier", "epochs", "every", "patience", "batch_size", "learning_rate", "seed")
    add_options(parser, ClassifierOptions, single, {})
    parser.add_argument(
        "--hidden", type=whole(1), nargs="+", default=usual.hidden, help="sizes of the hidden layer to try"
    )
    share = number(0, below=1)
    parser.add_argument(
        "--dropout", type=share, nargs="+", default=usual.dropout, help="dropout rates of the hidden layer to try"
    )
    parser.add_argument(
        "--l2", type=number(0), nargs="+", default=usual.l2, help="weight decays to try without hidden layer"
    )
    parser.add_argument("--cache", help="folder in which the vectors are stored for later runs (default: none)")
    parser.add_argument("--output", "-o", help="file to which the table is also written; .csv: separated by commas")
    parser.add_argument("--json", help="JSON file for all figures (default: none)")
    add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    if len(set(args.tasks)) < len(args.tasks):
        raise UserError("--tasks: a task is named twice. Remedy: name each once.")


def run(args: argparse.Namespace) -> None:
    from contextlib import nullcontext

    from ..data.files import open_output
    from ..experiments.probing import probe, read_task, table_of
    from ..experiments.probing_options import ClassifierOptions

    names = ("classifier", "epochs", "every", "patience", "batch_size", "learning_rate", "seed", "hidden", "dropout")
    options = ClassifierOptions(**{name: getattr(args, name) for name in (*names, "l2")})
    tasks = [read_task(args.data, name) for name in args.tasks]
    with (
        nullcontext() if args.output is None else open_output(args.output) as table,
        nullcontext() if args.json is None else open_output(args.json) as figures,
    ):
        results = probe(load_translator(args), tasks, args.vectors, options, args.cache)
        rows = table_of(results)
        for row in rows:
            print("\t".join(row))
        if table is not None:
            is_csv = str(args.output).lower().endswith((".csv", ".csv.gz"))
            csv.writer(table, delimiter="," if is_csv else "\t", lineterminator="\n").writerows(rows)
        if figures is not None:
            json.dump([asdict(each) for each in results], figures, indent=1)
