"""
Preparation and reading of data in shards.

`prepare.py speed --source FILE --target FILE` compares `recnmt prepare` with the tokenizer alone (`encode_batch` of
both sides). `prepare.py memory` writes shards of random tokens for corpora of several sizes, and measures the time
until the first batch and the memory of a process that reads batches.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from recnmt_hf.data.batching import BatchLimits
from recnmt_hf.data.corpora import Corpus
from recnmt_hf.data.prepared import ShardSettings
from recnmt_hf.data.sharded import FORMAT, SHARDS, PooledBatchSampler, ShardedDataset, ShardRecord
from recnmt_hf.data.sharding import line_ends, prepare_shards
from recnmt_hf.data.text import read_aligned, write_lines
from recnmt_hf.data.tokenization import train_tokenizer
from recnmt_hf.data.tokenizer_pair import TokenizerPair


SHARD = 100_000


def encode_alone(tokenizer, sides) -> float:
    """Return the seconds that the tokenizer takes for all sentences, 2,000 at once."""
    start = time.perf_counter()
    for side in sides:
        for first in range(0, len(side), 2000):
            tokenizer.backend_tokenizer.encode_batch(side[first : first + 2000])
    return time.perf_counter() - start


def compare_speed(args: argparse.Namespace) -> None:
    """Print pairs per second of the tokenizer alone and of the preparation, in turns."""
    pairs = list(read_aligned([args.source, args.target], "skip"))
    tokenizer = train_tokenizer((text for pair in pairs for text in pair), "bpe", args.vocab_size)
    pairs = (pairs * (-(-args.pairs // len(pairs))))[: args.pairs]
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("source", "target")]
        for number, path in enumerate(files):
            write_lines(path, (pair[number] for pair in pairs))
        sides = [[pair[number] for pair in pairs] for number in (0, 1)]
        corpus = Corpus(source=str(files[0]), target=str(files[1]))
        for turn in range(args.rounds):
            alone = encode_alone(tokenizer, sides)
            print(f"turn {turn + 1}: tokenizer alone, one thread: {len(pairs) / alone:,.0f} pairs per second")
            for workers in args.workers:
                output = Path(place) / f"{turn}-{workers}"
                start = time.perf_counter()
                prepare_shards([corpus], TokenizerPair(tokenizer), output, ShardSettings("en", "de"), workers=workers)
                seconds = time.perf_counter() - start
                rate, ratio = len(pairs) / seconds, alone / seconds
                print(f"  {workers} processes: {rate:,.0f} pairs per second, {ratio:.2f}x of the tokenizer alone")
                written = sum(path.stat().st_size for path in output.rglob("*.arrow")) / len(pairs)
                peak = resource.getrusage(resource.RUSAGE_CHILDREN if workers > 1 else resource.RUSAGE_SELF).ru_maxrss
                print(f"    {written:.0f} bytes of shards per pair; at most {peak / 1024:.0f} MiB in a process")
        size, start = sum(path.stat().st_size for path in files), time.perf_counter()
        for path in files:
            line_ends(str(path), SHARD)
        print(f"ends of lines: {size / (time.perf_counter() - start) / 1e9:.1f} GB per second")
        words = sum(len(text.split()) for pair in pairs[:100_000] for text in pair) / min(len(pairs), 100_000) / 2
        print(f"text: {size / len(pairs):.0f} bytes per pair, {words:.1f} words per sentence")


def write_random_shards(folder: Path, pairs: int) -> None:
    """Write shards with the lengths of sentences in news (about 28 tokens) and random tokens."""
    (folder / SHARDS).mkdir(parents=True)
    rng = np.random.default_rng(0)
    records = []
    for number in range(pairs // SHARD):
        lengths = np.clip(rng.gamma(4, 7, (2, SHARD)), 2, 250).astype(np.int32)
        lengths[1] = np.clip(lengths[0] * rng.normal(1.05, 0.15, SHARD), 2, 250)
        columns = {
            name: pa.ListArray.from_arrays(
                np.concatenate([[0], np.cumsum(side)]).astype(np.int32), rng.integers(0, 32000, side.sum(), np.uint16)
            )
            for name, side in zip(("input_ids", "labels"), lengths, strict=True)
        }
        record = ShardRecord(f"000-{number:06d}", 0, SHARD, SHARD)
        record.save(pa.table(columns), folder / SHARDS / f"{record.name}.arrow", [SimpleNamespace(unk_token_id=3)] * 2)
        records.append(asdict(record))
    manifest = {
        "format": FORMAT,
        "pairs": pairs,
        "corpora": [[{}, []]],
        "shards": records,
        "key": hashlib.sha256().hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def read_batches(args: argparse.Namespace) -> None:
    """Read batches of the folder, and print a JSON object with times, memory and padding."""
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    data = ShardedDataset(args.folder)
    sampler = PooledBatchSampler(data, BatchLimits(4096))
    batches = iter(sampler)
    first = data.__getitems__(next(batches))
    seconds = time.perf_counter() - start
    tokens = cells = 0
    for number, batch in enumerate(batches):
        rows = data.__getitems__(batch)
        lengths = [len(row["input_ids"]) for row in rows]
        tokens, cells = tokens + sum(lengths), cells + len(rows) * max(lengths)
        if number == args.batches:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    values = {"first": seconds, "rows": len(first), "before": before, "peak": peak, "padding": 1 - tokens / cells}
    print(json.dumps(values | {"batches": len(sampler)}))


def compare_memory(args: argparse.Namespace) -> None:
    """Print time and memory for corpora of several sizes, each read by a process of its own."""
    for millions in args.millions:
        with tempfile.TemporaryDirectory(dir=args.place) as place:
            folder = Path(place) / "data"
            write_random_shards(folder, int(millions * 10**6))
            command = [sys.executable, __file__, "read", str(folder), "--batches", str(args.batches)]
            result = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
            values = json.loads(result.stdout)
            print(
                f"{millions:g} million pairs: first batch after {values['first']:.2f} s, {values['batches']:,} batches "
                f"in an epoch, memory {values['before']:.0f} MiB before and {values['peak']:.0f} MiB at most, "
                f"{100 * values['padding']:.2f}% padding"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("--source", required=True)
    speed.add_argument("--target", required=True)
    speed.add_argument("--pairs", type=int, default=1_000_000)
    speed.add_argument("--vocab-size", type=int, default=8000)
    speed.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    speed.add_argument("--rounds", type=int, default=2)
    speed.set_defaults(run=compare_speed)
    memory = commands.add_parser("memory")
    memory.add_argument("--millions", type=float, nargs="+", default=[1, 4, 16])
    memory.add_argument("--batches", type=int, default=20_000)
    memory.add_argument("--place", help="folder for the shards: 0.12 GB for each million pairs")
    memory.set_defaults(run=compare_memory)
    read = commands.add_parser("read")
    read.add_argument("folder")
    read.add_argument("--batches", type=int, default=20_000)
    read.set_defaults(run=read_batches)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
