#!/usr/bin/env python
"""
Table of translation speed: engines and types of weights of any number of models, in turns within one run.

    python scripts/benchmarks/translation.py --source test.en --references test.de --transformers \\
        --system baseline outputs/multi30k/model 4 --system baseline outputs/ct2 4 \\
        --system RNMT outputs/rnmt/model 4 --types float32 bfloat16 int8 --csv speeds.csv

A system is a name, a folder and a number of beams. Folders of models are measured with each of `--types`, exported
folders as they are. Times are processor times of one thread, or wall times of several. Megabytes are those of the
files, in bfloat16 and int8 those in memory. `scripts/card_tables.py` writes a table saved by `--output` into a card.

CTranslate2 has one limit of length for a batch. Compare untrained models with `--max-length-extra 0` and
`--source-tokens`: all sources then have the same length, and each engine generates as many tokens.

With `--early-stopping`, further rows end a sentence once as many hypotheses are finished as there are beams, as
CTranslate2 does. Transformers' rule, the default, continues while a running one may exceed the worst of them.

With `--count`, the first system is measured with several numbers of beams, best three. From them follows what an
operation of matmuls and what a call of an operator costs. These and the measured times of tanh and sigmoid predict
the speed of each other system in float32; time for reading and writing memory is not counted.

    python scripts/benchmarks/translation.py --source test.en --count --types float32 \\
        --system base outputs/base/model 1 --system base outputs/base/model 4 --system base outputs/base/model 8 \\
        --system GRET outputs/gret/model 4
"""

import argparse
import csv
import io
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from measuring import count_operations, processor_name, run_script, seconds_per_activation, time_in_turns

from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.data.files import open_output
from recnmt_hf.data.text import read_lines
from recnmt_hf.errors import UserError, short_repr
from recnmt_hf.hub.card import markdown_table
from recnmt_hf.inference.backends import torch_model
from recnmt_hf.inference.devices import keep_freed_memory
from recnmt_hf.inference.model_settings import ENGINE_SETTINGS, is_export
from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.inference.translator import Translator
from recnmt_hf.metrics.bleu import chrf_score, sacrebleu_score


TYPES = ("float32", "bfloat16", "int8")
OWN, EARLY, TRANSFORMERS = "recnmt_hf", "recnmt_hf, early stopping", "transformers' search"
# Files with the weights and graphs of a model or an exported model.
WEIGHTS = ("*.safetensors", "*.onnx", "*.onnx_data", "model.bin")
MEGABYTE = 10**6
# Columns that only the CSV has.
ONLY_CSV = ("family", "beams", "range", "threads", "processor", "torch")


@dataclass
class Row:
    """A row of the table; `equal` is the number of sentences translated as by the first row of the same name."""

    name: str
    family: str
    parameters: str
    engine: str
    weights: str
    beams: int
    MB: str
    BLEU: str = ""
    chrF: str = ""
    speed: str = ""
    range: str = ""
    ratio: str = ""
    equal: str = ""
    GFLOP: str = ""
    calls: str = ""
    predicted: str = ""
    threads: int = 1
    processor: str = ""
    torch: str = torch.__version__


@dataclass
class System:
    """Translator of a row of the table, and its last translations."""

    row: Row
    translator: Translator
    options: DecodingOptions
    texts: Sequence[str] = ()

    def translate(self, sources: Sequence[str]) -> None:
        own = torch_model.can_drop_finished
        if self.row.engine == TRANSFORMERS:
            torch_model.can_drop_finished = lambda *_: False
        try:
            self.texts = [one.text for one in self.translator.translate(sources, self.options, scores=False)]
        finally:
            torch_model.can_drop_finished = own


def load_systems(args: argparse.Namespace) -> Iterator[System]:
    """Yield the system of each row, without its measurements."""
    for name, folder, beams in args.system:
        options = DecodingOptions(beams=whole(1)(beams), max_length_extra=args.max_length_extra)
        size = sum(path.stat().st_size for pattern in WEIGHTS for path in Path(folder).glob(pattern))
        megabytes = f"{size / MEGABYTE:.1f}"
        if is_export(folder):
            settings = json.loads((Path(folder) / ENGINE_SETTINGS).read_text(encoding="utf-8"))
            row = Row(name, "", "", settings["format"], settings["quantization"], options.beams, megabytes)
            yield System(row, Translator.from_pretrained(folder, device="cpu"), options)
            continue
        # Layers in int8 have packed weights, not parameters.
        parameters = f"{Translator.from_pretrained(folder, device='cpu').model.num_parameters() / 1e6:.2f}M"
        for kind in args.types:
            loading = {"quantization": kind} if kind == "int8" else {"dtype": kind}
            translator = Translator.from_pretrained(folder, device="cpu", **loading)
            model, memory = translator.model, io.BytesIO()
            torch.save(model.state_dict(), memory)
            own_size = size if kind == "float32" else memory.tell()
            megabytes = f"{own_size / MEGABYTE:.1f}"
            engines = {OWN: options}
            if args.transformers and kind == args.types[0]:
                engines = {TRANSFORMERS: options, **engines}
            if args.early_stopping and options.beams > 1:
                engines[EARLY] = replace(options, generate={"early_stopping": True})
            for engine, chosen in engines.items():
                row = Row(name, model.config.model_type, parameters, engine, kind, options.beams, megabytes)
                yield System(row, translator, chosen)


def fill(system: System, seconds: Sequence[float], systems: Sequence[System], first: Sequence[float]) -> None:
    """Write the measurements of a system into its row; `first` are the seconds of the first row."""
    row, count = system.row, len(system.texts)
    speeds = [count / spent for spent in seconds]
    row.speed, row.range = f"{statistics.median(speeds):.1f}", f"{min(speeds):.1f}–{max(speeds):.1f}"
    row.ratio = f"{statistics.median(one / own for one, own in zip(first, seconds, strict=True)):.2f}"
    namesake = next(other for other in systems if other.row.name == row.name)
    same = sum(one == other for one, other in zip(system.texts, namesake.texts, strict=True))
    row.equal = str(same)
    row.threads, row.processor = torch.get_num_threads(), processor_name()


def predict(systems: Sequence[System], seconds: Sequence[Sequence[float]], sources: Sequence[str]) -> None:
    """Write counts and the predicted speed into the rows in float32 of this package's search."""
    counted = [place for place, one in enumerate(systems) if (one.row.engine, one.row.weights) == (OWN, "float32")]
    counts = {place: count_operations(systems[place].translate, [sources]) for place in counted}
    known = [place for place in counted if systems[place].row.name == systems[0].row.name]
    activations = seconds_per_activation()
    spent = np.array(
        [statistics.median(seconds[place]) - float(np.dot(counts[place][2:], activations)) for place in known]
    )
    shares = np.array([counts[place][:2] for place in known]) / spent[:, None]
    per_operation, per_call = np.linalg.lstsq(shares, np.ones(len(known)))[0]
    if per_call < 0:  # too little to be told from the cost of operations
        (per_operation,), per_call = np.linalg.lstsq(shares[:, :1], np.ones(len(known)))[0], 0.0
    costs = [per_operation, per_call, *activations]
    scaled = [f"{cost * scale:.3g}" for cost, scale in zip(costs, (1e12, 1e6, 1e9, 1e9), strict=True)]
    print("1 GFLOP takes {} ms, 1,000 calls {}, 10^6 tanh {}, 10^6 sigmoids {}".format(*scaled))
    for place, work in counts.items():
        row, expected = systems[place].row, float(np.dot(work, costs))
        row.GFLOP, row.calls = f"{work.operations / 1e9:.1f}", f"{work.calls:,}"
        row.predicted = f"{len(sources) / expected:.1f} ({expected / statistics.median(seconds[place]):.2f}x)"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="translation.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="file with one sentence per line")
    parser.add_argument("--references", help="file with their translations, for BLEU and chrF")
    parser.add_argument("--sentences", type=whole(1), help="number of sentences to use (default: all)")
    parser.add_argument(
        "--source-tokens", type=whole(2), help="use only sentences of this many tokens, end token included"
    )
    system = {"nargs": 3, "action": "append", "metavar": ("NAME", "FOLDER", "BEAMS")}
    parser.add_argument("--system", required=True, help="a model to measure, may be repeated", **system)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["float32", "int8"], help="types of weights")
    parser.add_argument("--transformers", action="store_true", help="add rows with the search of transformers")
    parser.add_argument("--early-stopping", action="store_true", help="add rows that end a search as CTranslate2 does")
    parser.add_argument("--max-length-extra", type=whole(0), default=50, help="as of translate (default: 50)")
    parser.add_argument("--threads", type=whole(1, 1024), default=1, help="CPU threads (default: 1)")
    parser.add_argument("--rounds", type=whole(1), default=3, help="turns per row (default: 3)")
    parser.add_argument("--count", action="store_true", help="predict speeds from counted operations, see above")
    parser.add_argument("--output", help="JSON file for the rows of the table")
    parser.add_argument("--csv", help="CSV file for the rows, with all columns")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as `recnmt translate`
    first = args.system[0][0]
    beams = {beams for name, folder, beams in args.system if name == first and not is_export(folder)}
    if args.count and (len(beams) < 2 or "float32" not in args.types):
        raise UserError(
            f"--count needs a model of {short_repr(first)} in float32 with two beam sizes. Add a --system, and "
            "float32 to --types.",
            field="--count",
        )
    systems = list(load_systems(args))
    lines = list(read_lines(args.source))
    places = list(range(len(lines)))
    if args.source_tokens:
        encode = systems[0].translator.encode_source
        places = [place for place in places if len(encode(lines[place])) == args.source_tokens]
    places = places[: args.sentences]
    if not places:
        raise UserError(
            f"{args.source} has no sentence to translate. Use another file or another --source-tokens.",
            field=args.source,
        )
    sources = [lines[place] for place in places]
    jobs = {str(place): (lambda system=system: system.translate(sources)) for place, system in enumerate(systems)}
    seconds = list(time_in_turns(jobs, args.rounds).values())
    for system, own in zip(systems, seconds, strict=True):
        fill(system, own, systems, seconds[0])
    if args.count:
        predict(systems, seconds, sources)
    if args.references:
        references = list(read_lines(args.references))
        if len(references) != len(lines):
            raise UserError(f"{args.references} has {len(references)} lines, but {args.source} has {len(lines)}.")
        references = [references[place] for place in places]
        for system in systems:
            bleu, chrf = (score(system.texts, references) for score in (sacrebleu_score, chrf_score))
            system.row.BLEU, system.row.chrF = f"{bleu.score:.2f}", f"{chrf.score:.2f}"
        print(bleu.signature)
    names = [field.name for field in fields(Row)]
    cells = [asdict(system.row) for system in systems]
    shown = [name for name in names if name not in ONLY_CSV and any(row[name] for row in cells)]
    headings = {"name": "", "speed": "sentences a second"}
    texts = [{**row, "speed": f"{row['speed']} ({row['range']})"} for row in cells]
    table = [[headings.get(name, name) for name in shown], *([str(row[name]) for name in shown] for row in texts)]
    print(f"{processor_name()}, {args.threads} thread(s), torch {torch.__version__}, {len(sources)} sentences")
    print(markdown_table(table))
    if args.output:
        with open_output(args.output) as file:
            json.dump(table, file, indent=1, ensure_ascii=False)
            file.write("\n")
    if args.csv:
        with open_output(args.csv) as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(cells)


if __name__ == "__main__":
    sys.exit(run_script(main))
