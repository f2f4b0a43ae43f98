#!/usr/bin/env python
"""
Run `recnmt prepare` on a cluster: each task of an executor of datatrove (local, Slurm or Ray) makes a part of the
shards on a disk that all machines see. Tasks that were completed are not started again.

    pip install "datatrove[ray]"
    python scripts/examples/prepare_on_cluster.py recipe.yaml --output prepared --executor slurm --tasks 64 \\
        --option partition=cpu --option time=12:00:00 --option cpus_per_task=8
"""

import argparse
import os
from pathlib import Path

from datatrove import executor


EXECUTORS = {"local": "LocalPipelineExecutor", "slurm": "SlurmPipelineExecutor", "ray": "RayPipelineExecutor"}


class Part:
    """Step of a pipeline that makes the part of a task."""

    def __init__(self, command: list[str]):
        self.command = command

    def __call__(self, data, rank: int, world_size: int) -> None:
        import subprocess  # a pickled object of this file has none of its imports

        subprocess.run([*self.command, "--part", f"{rank + 1}/{world_size}"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the prepared data")
    parser.add_argument("--executor", choices=EXECUTORS, default="local", help="engine (default: local)")
    parser.add_argument("--tasks", type=int, default=os.cpu_count(), help="number of parts (default: the processors)")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the executor; may be repeated")
    args = parser.parse_args()
    pairs = (option.split("=", 1) for option in args.option)
    options = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    workers = str(options.get("cpus_per_task", 1))
    recipe, output = str(args.recipe.resolve()), str(args.output.resolve())
    step = Part(["recnmt", "prepare", recipe, "--output", output, "--workers", workers])
    engine = getattr(executor, EXECUTORS[args.executor])
    engine(pipeline=[step], tasks=args.tasks, logging_dir=f"{output}.logs", **options).run()


if __name__ == "__main__":
    main()
