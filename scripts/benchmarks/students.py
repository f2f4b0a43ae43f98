#!/usr/bin/env python
"""
Table of a teacher and its students: BLEU, chrF, sentences per second of one thread (processor time, alternating within
one run) and size, in float32 and int8.

    python scripts/benchmarks/students.py --source test.en --references test.de \\
        --system "teacher, beam 4" outputs/teacher/model 4 --system "student" outputs/student/model 1 \\
        --system "student, ONNX int8" outputs/student_onnx_int8 1 --output model_cards/evidence/nmt_students.json

A system is a name, a folder and a number of beams. Folders of models are measured as they are and with
`--quantization int8`, whose size is that in memory; exported folders only as they are. `scripts/card_tables.py` writes
the table into a model card.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import processor_name, run_script, time_in_turns

from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.data.files import open_output
from recnmt_hf.data.text import read_lines
from recnmt_hf.hub.card import markdown_table
from recnmt_hf.inference.backends.export_settings import ENGINE_SETTINGS, is_export
from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.inference.translator import Translator
from recnmt_hf.metrics.bleu import chrf_score, sacrebleu_score


HEADER = ["", "weights", "parameters", "BLEU", "chrF", "sentences a second", "MB"]
# Files with the weights and graphs of a model or an exported model.
WEIGHTS = ("*.safetensors", "*.onnx", "*.onnx_data", "model.bin")
MEGABYTE = 10**6


def load_systems(given: Sequence[Sequence[str]]) -> list[tuple[list[Any], Translator, DecodingOptions]]:
    """Return for each row of the table its first cells, its size in bytes, a translator and decoding options."""
    systems = []
    for name, folder, beams in given:
        options = DecodingOptions(beams=whole(1)(beams))
        translator = Translator.from_pretrained(folder, device="cpu")
        size = sum(path.stat().st_size for pattern in WEIGHTS for path in Path(folder).glob(pattern))
        if is_export(folder):
            settings = json.loads((Path(folder) / ENGINE_SETTINGS).read_text(encoding="utf-8"))
            systems.append(([name, settings["quantization"], "", size], translator, options))
            continue
        parameters = f"{translator.model.num_parameters() / 1e6:.2f}M"
        systems.append(([name, "float32", parameters, size], translator, options))
        quantized = Translator.from_pretrained(folder, quantization="int8")
        memory = io.BytesIO()
        torch.save(quantized.model.state_dict(), memory)
        systems.append(([name, "int8", parameters, memory.tell()], quantized, options))
    return systems


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="students.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="file with one sentence per line")
    parser.add_argument("--references", required=True, help="file with their translations")
    system = {"nargs": 3, "action": "append", "metavar": ("NAME", "FOLDER", "BEAMS")}
    parser.add_argument("--system", required=True, help="a row of the table, may be repeated", **system)  # type: ignore[arg-type]
    parser.add_argument("--rounds", type=whole(1), default=3, help="turns per system (default: 3)")
    parser.add_argument("--output", help="JSON file for the rows of the table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    sources, references = list(read_lines(args.source)), list(read_lines(args.references))
    systems, texts = load_systems(args.system), {}

    def run(place: str, translator: Translator, options: DecodingOptions) -> None:
        texts[place] = [translation.text for translation in translator.translate(sources, options, scores=False)]

    jobs = {str(number): partial(run, str(number), *system[1:]) for number, system in enumerate(systems)}
    seconds = time_in_turns(jobs, args.rounds)
    rows = [HEADER]
    for place, ((*cells, size), *_) in zip(jobs, systems, strict=True):
        bleu, chrf = (score(texts[place], references) for score in (sacrebleu_score, chrf_score))
        speeds = sorted(len(sources) / spent for spent in seconds[place])
        speed = f"{statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})"
        rows.append([*cells, f"{bleu.score:.2f}", f"{chrf.score:.2f}", speed, f"{size / MEGABYTE:.1f}"])
    print(f"{processor_name()}, one thread, torch {torch.__version__}, {len(sources)} sentences, {bleu.signature}")
    print(markdown_table(rows))
    if args.output:
        with open_output(args.output) as file:
            json.dump(rows, file, indent=1, ensure_ascii=False)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(run_script(main))
