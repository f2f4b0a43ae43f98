#!/usr/bin/env python
"""
Translation speed of the models of a comparison: sentences per second of one thread (processor time), in turns within
one run. The figures are added as `speed.json` to the evidence of the same model for `scripts/results.py`; they replace
earlier ones of the same hardware.

    python scripts/benchmarks/table_speed.py outputs/table/*/model --source test.en \\
        --evidence model_cards/evidence/multi30k_table
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import run_script, time_in_turns

from recnmt_hf._values import MOST_BEAMS, MOST_TOKENS
from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.data.files import open_output
from recnmt_hf.data.text import read_lines
from recnmt_hf.errors import UserError
from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.inference.translator import Translator
from recnmt_hf.training.evidence import EVIDENCE, Evidence, hardware, sum_of_lines, versions


SPEED = "speed.json"


def folder_of(model: Path, evidence: Path) -> Path:
    """Return the folder below `evidence` with the evidence of a trained model; `UserError` if there is none."""
    own = Evidence.load(model)
    for path in sorted(evidence.glob(f"*/{EVIDENCE}")):
        other = Evidence.load(path.parent)
        if own.training and (own.recipe, own.training, own.curve) == (other.recipe, other.training, other.curve):
            return path.parent
    raise UserError("results.no_evidence", field=str(model), value=str(evidence))


def read_speeds(path: Path) -> list[dict[str, Any]]:
    """Return the speeds measured earlier, each with its hardware; `UserError` if the file is damaged."""
    try:
        speeds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return [{"hardware": speed["hardware"], **speed} for speed in speeds]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("results.damaged", field=str(path), reason=str(error)) from error


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="table_speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders of trained models, with their evidence")
    parser.add_argument("--source", required=True, help="file with one sentence per line")
    parser.add_argument("--evidence", required=True, type=Path, help="folder of the comparison's evidence")
    parser.add_argument("--sentences", type=whole(1), default=320, help="sentences to translate (default: 320)")
    parser.add_argument("--beams", type=whole(1, MOST_BEAMS), default=4, help="beam size (default: 4)")
    parser.add_argument("--batch", type=whole(1), default=16, help="sentences per batch (default: 16)")
    parser.add_argument("--rounds", type=whole(1), default=3, help="turns per model (default: 3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    sources = list(islice(read_lines(args.source), args.sentences))
    if not sources:
        raise UserError("usage.empty_file", field=args.source, content="sentence")
    # A buffer of the batch's size, whose tokens are not limited, is one batch.
    options = DecodingOptions(beams=args.beams, buffer=args.batch, max_tokens=MOST_TOKENS, split_sentences="never")
    folders = {folder_of(model, args.evidence): model for model in args.models}
    earlier = {folder: read_speeds(folder / SPEED) for folder in folders}

    def translate(translator: Translator) -> None:
        list(translator.translate(sources, options, scores=False))

    jobs = {
        str(folder): partial(translate, Translator.from_pretrained(model, device="cpu"))
        for folder, model in folders.items()
    }
    seconds = time_in_turns(jobs, args.rounds)
    settings = {"beams": args.beams, "batch": args.batch, "threads": 1, "sentences": len(sources)}
    measured = {"hardware": hardware(torch.device("cpu")), **settings, "source_sha256": sum_of_lines(sources)}
    for folder in folders:
        speeds = [round(len(sources) / spent, 3) for spent in seconds[str(folder)]]
        path = folder / SPEED
        entry = {**measured, "sentences_per_second": speeds, "versions": versions()}
        kept = [other for other in earlier[folder] if other["hardware"] != entry["hardware"]]
        with open_output(path) as file:
            json.dump([*kept, entry], file, indent=1, ensure_ascii=False)
            file.write("\n")
        print(f"{folder.name}: {median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f}) sentences a second")


if __name__ == "__main__":
    sys.exit(run_script(main))
