"""`recnmt prepare`: tokenize the training data of a recipe once, in shards."""

import argparse
import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .arguments import Parser, add_recipe_arguments, whole


def add_arguments(parser: Parser) -> None:
    add_recipe_arguments(
        parser,
        "fields to override, e.g. data.deduplicate=pair",
        "folder of the prepared data (default: data.prepared of the recipe)",
    )
    add = parser.group("processes")
    add("--workers", type=whole(1, 1024), help="number of processes (default: the number of processors)")
    add("--part", default="1/1", help="part of the shards to make on this machine, e.g. 3/64 (default: all)")


def check(args: argparse.Namespace) -> None:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", args.part)
    args.part = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= args.part[0] <= args.part[1]:
        raise UserError("--part must be the number of a part and the number of parts, e.g. 3/64.", field="--part")


def run(args: argparse.Namespace) -> None:
    from pathlib import Path

    from ..data.sharded import ShardRecord
    from ..training.inputs import prepare_in_shards
    from ..training.processes import logger
    from ..training.recipe import Recipe

    recipe = Recipe.from_file(args.recipe, args.overrides)
    output = args.output or recipe.data.prepared
    if output is None:
        raise UserError("recnmt prepare requires --output, or data.prepared in the recipe.", field="recnmt prepare")
    for corpus in recipe.data.train:
        corpus.check_languages(recipe.data.source_lang, recipe.data.target_lang)
        corpus.check_files(recipe.data.source_lang, recipe.data.target_lang)

    def report(record: ShardRecord) -> None:
        logger.info(f"Shard {record.name}: {record.pairs} of {record.read} pairs.")

    workers = args.workers or os.cpu_count() or 1
    manifest = prepare_in_shards(recipe, Path(output), workers, args.part, report)
    if manifest is None:
        print(f"{output}: part {args.part[0]}/{args.part[1]} is complete; shards of other parts are missing.")
        return
    print(f"{output}: {manifest['pairs']} of {manifest['read']} pairs in {len(manifest['shards'])} shards")
    print(table_of_removed(manifest), end="")
    for number in range(len(manifest["corpora"])):
        shards = [shard for shard in manifest["shards"] if shard["corpus"] == number]
        if shards and not any(shard["pairs"] for shard in shards):
            by_language = any(shard["removed"].get("language") for shard in shards)
            reason = " min_language_score expects the languages of data, or a corpus' own." * by_language
            logger.warning(f"Warning: no pair of data.train[{number}] remains.{reason}")


def table_of_removed(manifest: Mapping[str, Any]) -> str:
    """Return a tab-separated table: the pairs of each corpus, and those that each filter removed."""
    from ..data.text import tsv

    reasons = list(manifest["removed"])
    rows = [["corpus", "read", *reasons, "kept"]]
    for number in range(len(manifest["corpora"])):
        shards = [shard for shard in manifest["shards"] if shard["corpus"] == number]
        removed = [sum(shard["removed"].get(reason, 0) for shard in shards) for reason in reasons]
        counts = [sum(shard["read"] for shard in shards), *removed, sum(shard["pairs"] for shard in shards)]
        rows.append([f"data.train[{number}]", *map(str, counts)])
    return tsv(rows)
