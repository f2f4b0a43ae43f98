#!/usr/bin/env python
"""
Speed and memory of the models of a comparison, in turns within one run: sentences translated per second, tokens trained
on per second, and the most memory of a training process. The figures are written to `speed.json` in the folder of the
comparison, for `scripts/results.py`; they replace earlier ones of the same hardware.

The models are those of the recipes in the evidence, with random weights: speed does not depend on the values. Each
translation has as many tokens as its source. Times are processor times of one thread.

    python scripts/benchmarks/table_speed.py model_cards/evidence/multi30k_table --tokenizers outputs/table/X/model \\
        --source test.en --target test.de
"""

import argparse
import json
import multiprocessing
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from compare import Batch, training_step
from measuring import run_script, time_in_turns
from transformers import AutoModelForSeq2SeqLM

from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.data.batching import batches_by_tokens, pad_rows
from recnmt_hf.data.files import open_output
from recnmt_hf.data.text import read_aligned
from recnmt_hf.data.tokenizer_pair import TokenizerPair
from recnmt_hf.errors import UserError, short_repr
from recnmt_hf.inference.devices import keep_freed_memory
from recnmt_hf.inference.options import DecodingOptions
from recnmt_hf.inference.translator import Translator
from recnmt_hf.options import MOST_BEAMS, MOST_TOKENS
from recnmt_hf.training.building import Architecture, stage_configs
from recnmt_hf.training.evidence import EVIDENCE, Evidence, hardware, versions


SPEED = "speed.json"
# Figures of a row: lists with a value for each turn. That of a first stage is there only for two stages.
TRANSLATED, TRAINED, FIRST_STAGE = "sentences_per_second", "training_tokens_per_second", "first_stage_tokens_per_second"
MEMORY = "training_mebibytes"
LABEL_SMOOTHING = 0.1


def read_rows(folder: Path) -> dict[str, Evidence]:
    """Return the evidence of the first run of each row, by the row's name; `UserError` if there is none."""
    rows: dict[str, Evidence] = {}
    for path in sorted(folder.glob(f"*-*/{EVIDENCE}")):
        rows.setdefault(path.parent.name.rpartition("-")[0], Evidence.load(path.parent))
    if not rows:
        raise UserError(f"{folder} has no folder ROW-SEED with evidence.", field=folder)
    return rows


def read_tokenizers(folder: str, evidence: Evidence) -> TokenizerPair:
    """Return the tokenizers in a folder; `UserError` if the models of a comparison have another vocabulary."""
    tokenizers = TokenizerPair.load(folder)
    symbols, expected = len(tokenizers.source), evidence.tokenizer["source_symbols"]
    if symbols != expected:
        raise UserError(
            f"{folder} has {short_repr(symbols)} symbols, but the models have {expected}. Pass the tokenizers of one "
            "of them.",
            field=folder,
        )
    return tokenizers


def build_models(evidence: Evidence, tokenizers: TokenizerPair) -> list[Any]:
    """Return the model of a run's recipe with random weights; for two stages, after that of the first one."""
    section, stages = Architecture(**evidence.recipe["model"]), has_two_stages(evidence)
    return list(map(AutoModelForSeq2SeqLM.from_config, stage_configs(section, tokenizers, stages)))


def has_two_stages(evidence: Evidence) -> bool:
    return evidence.recipe.get("training", {}).get("baseline_steps") is not None


def training_batches(pairs: Sequence[tuple[str, str]], tokenizers: TokenizerPair, max_tokens: int) -> list[Batch]:
    """Return sentence pairs in batches of similar length with at most `max_tokens` of the longer side."""
    rows = [tokenizer([pair[side] for pair in pairs])["input_ids"] for side, tokenizer in enumerate(tokenizers)]
    lengths = [max(len(source), len(target)) for source, target in zip(*rows, strict=True)]
    batches = []
    for places in batches_by_tokens(lengths, max_tokens):
        source, mask = pad_rows([rows[0][k] for k in places], tokenizers.source.pad_token_id, "cpu")
        labels, kept = pad_rows([rows[1][k] for k in places], tokenizers.target.pad_token_id, "cpu")
        labels = labels.masked_fill(kept == 0, -100)
        batches.append({"input_ids": source, "attention_mask": mask, "labels": labels})
    return batches


def trains(model: Any, evidence: Evidence, batches: Sequence[Batch]) -> Callable[[], None]:
    """Return what trains a model on all batches, in the data type of its recipe."""
    dtype = torch.bfloat16 if evidence.recipe.get("training", {}).get("bf16") else torch.float32
    step = training_step(model, dtype, LABEL_SMOOTHING)

    def run() -> None:
        for batch in batches:
            step(batch)

    return run


def training_memory(evidence: Evidence, tokenizers: TokenizerPair, batches: Sequence[Batch]) -> int:
    """Train in this process, which is a new one, and return its most memory in MiB."""
    torch.set_num_threads(1)
    keep_freed_memory()
    trains(build_models(evidence, tokenizers)[-1], evidence, batches)()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def read_speeds(path: Path) -> list[dict[str, Any]]:
    """Return the figures measured earlier, each with its hardware; `UserError` if the file is damaged."""
    try:
        speeds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return [{"hardware": speed["hardware"], **speed} for speed in speeds]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}).", field=path) from error


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="table_speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="folder with the evidence of all runs")
    parser.add_argument("--tokenizers", required=True, help="folder of a model of the comparison, or of its tokenizers")
    parser.add_argument("--source", required=True, help="file with one sentence per line")
    parser.add_argument("--target", required=True, help="file with their translations, for training")
    parser.add_argument("--sentences", type=whole(1), default=320, help="sentence pairs to use (default: 320)")
    parser.add_argument("--beams", type=whole(1, MOST_BEAMS), default=4, help="beam size (default: 4)")
    parser.add_argument("--batch", type=whole(1), default=16, help="sentences per batch (default: 16)")
    parser.add_argument("--max-tokens", type=whole(1), default=1024, help="tokens of a training batch (default: 1024)")
    parser.add_argument("--rounds", type=whole(1), default=3, help="turns per model (default: 3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = read_rows(args.comparison)
    tokenizers = read_tokenizers(args.tokenizers, next(iter(rows.values())))
    path = args.comparison / SPEED
    earlier = read_speeds(path)
    pairs = list(islice(read_aligned([args.source, args.target], "skip"), args.sentences))
    sources = [source for source, _ in pairs]
    # A buffer of the batch's size, whose tokens are not limited, is one batch.
    lengths = {"max_length_factor": 1.0, "max_length_extra": 0, "split_sentences": "never"}
    options = DecodingOptions(beams=args.beams, buffer=args.batch, max_tokens=MOST_TOKENS, **lengths)
    batches = training_batches(pairs, tokenizers, args.max_tokens)
    tokens = sum(int(batch["attention_mask"].sum() + (batch["labels"] >= 0).sum()) for batch in batches)

    def translate(translator: Translator) -> None:
        list(translator.translate(sources, options, scores=False, warn_short=False))

    memory = {}
    # A process of its own for each row: its most memory is that of all it has done.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, evidence in rows.items():
            memory[name] = pool.submit(training_memory, evidence, tokenizers, batches).result()
    models = {name: build_models(evidence, tokenizers) for name, evidence in rows.items()}
    jobs = {}
    for name, (*first, model) in models.items():
        jobs[name, TRAINED] = trains(model, rows[name], batches)
        for baseline in first:
            jobs[name, FIRST_STAGE] = trains(baseline, rows[name], batches)
    training = time_in_turns(jobs, args.rounds)
    translators = {name: Translator(own[-1], *tokenizers, check=False) for name, own in models.items()}
    for translator in translators.values():  # or a model that happens to prefer the end of the sentence seems fast
        translator.model.generation_config.eos_token_id = None
    translation = time_in_turns({name: partial(translate, one) for name, one in translators.items()}, args.rounds)
    figures: dict[str, dict[str, list[float]]] = {name: {MEMORY: [memory[name]]} for name in rows}
    for name, seconds in translation.items():
        figures[name][TRANSLATED] = [round(len(sources) / spent, 3) for spent in seconds]
    for (name, figure), seconds in training.items():
        figures[name][figure] = [round(tokens / spent, 1) for spent in seconds]
    for name, own in figures.items():
        print(f"{name}: {', '.join(f'{figure} {median(turns):,.1f}' for figure, turns in own.items())}")
    device = hardware(torch.device("cpu"))
    settings = {name: getattr(args, name) for name in ("beams", "batch", "max_tokens")}
    entry = {"hardware": device, **settings, "sentences": len(sources), "versions": versions(), "rows": figures}
    with open_output(path) as file:
        json.dump([*(other for other in earlier if other["hardware"] != device), entry], file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    sys.exit(run_script(main))
