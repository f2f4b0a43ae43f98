#!/usr/bin/env python
"""
Count the parameters of models, and compare them.

    python scripts/experiments/parameters.py biarn_transformer nmt_transformer --size base big
    python scripts/experiments/parameters.py rpe_transformer --rows scripts/recipes/rows/rpe_table_1.yaml
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from named_models import MODEL_HELP, build_model, parse_model
from sweep import paper_table_of, read_rows, with_size

from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.errors import UserError
from recnmt_hf.options import DEFAULT, mapping
from recnmt_hf.training.recipe_yaml import apply_overrides


def count_parameters(name: str, size: str, vocab_size: int, overrides: dict[str, object]) -> tuple[int, Counter[str]]:
    """
    Return the number of parameters of embeddings and output matrix, shared ones counted once, and those of the parts of
    the body, for the model that [`build_model`] would build. A part is named by the path of its module without layer
    numbers, e.g. `encoder.layers.self_attn`.
    """
    with torch.device("meta"):
        model = build_model(name, size, vocab_size, overrides)
    body: Counter[str] = Counter()
    embeddings = 0
    for path, parameter in model.named_parameters():
        words = [word for word in path.split(".")[:-1] if not word.isdigit()]
        if not {"embed_tokens", "shared", "lm_head", "embed_positions"}.isdisjoint(words):
            embeddings += parameter.numel()
        else:
            words = [word for word in words if word != "model"]
            # Count the parts of a layer separately.
            depth = words.index("layers") + 2 if "layers" in words[:3] else 3
            body[".".join(words[:depth])] += parameter.numel()
    return embeddings, body


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    description = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = Parser(prog="parameters.py", **description)
    add = parser.add_argument
    add("models", nargs="+", help=f"{MODEL_HELP}. The first is compared with each other one")
    add("--size", nargs="+", default=["base"], help="presets to count")
    rows = "YAML file with named rows, e.g. one of scripts/recipes/rows: count the parameters of each row"
    add("--rows", metavar="FILE", help=rows)
    add("--vocab-size", type=whole(1, 2**31 - 1), default=32000, help="vocabulary size")
    args = parser.parse_args(argv)
    if args.rows is not None and len(args.models) > 1:
        parser.error("--rows counts the rows of one model")
    return args


def count_rows(path: str, model: str, size: str, vocab_size: int) -> list[list[str]]:
    """
    Count the parameters of the rows of a table. The first line has the titles: parameters with and without embeddings,
    the difference to the first row, and what the paper prints for these two.
    """
    rows = with_size(read_rows(path), size, path)
    paper = paper_table_of(list(rows), size)
    table = [["row", "without embeddings", "parameters", "difference", "paper: parameters", "paper: difference"]]
    first = None
    for row, changes in rows.items():
        name, fields = parse_model(model)
        changed = mapping(apply_overrides({}, changes).get("model"), "model")
        own = {place: value for place, value in changed.items() if value not in (None, DEFAULT)}
        fields |= mapping(own.get("fields"), "model.fields")
        name, preset = str(own.get("type", name)), str(own.get("preset", size))
        embeddings, body = count_parameters(name, preset, vocab_size, fields)
        total = sum(body.values())
        first = total if first is None else first
        counts = (total / 1e6, (total + embeddings) / 1e6)
        cells = [row, *map(millions, counts), millions((total - first) / 1e6, "+")]
        printed = paper.row(row) if paper else None
        if paper and printed:
            increase = printed.added
            if increase is None and None not in (printed.parameters, paper.baseline.parameters):
                increase = printed.parameters - paper.baseline.parameters
            increase = None if printed is paper.baseline else increase
            cells += [millions(printed.parameters), millions(increase, "+")]
        table.append(cells + [""] * (6 - len(cells)))
    return table


def millions(value: float | None, sign: str = "") -> str:
    """Return a number of millions as text."""
    return "" if value is None else f"{value:{sign}.2f}M"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    for size in args.size:
        if args.rows is not None:
            print(size)
            for cells in count_rows(args.rows, args.models[0], size, args.vocab_size):
                print("\t".join(cells))
            continue
        counted = []
        for text in args.models:
            name, overrides = parse_model(text)
            embeddings, body = count_parameters(name, size, args.vocab_size, overrides)
            counted.append(body)
            total = sum(body.values())
            print(
                f"{size} {text}: {total / 1e6:.2f}M without embeddings, {(total + embeddings) / 1e6:.2f}M with the "
                f"embeddings of {args.vocab_size} symbols"
            )
        first, *others = counted
        for text, other in zip(args.models[1:], others, strict=True):
            difference = sum(first.values()) - sum(other.values())
            print(f"{size} {args.models[0]} against {text}: {difference / 1e6:+.2f}M")
            for part in sorted(set(first) | set(other)):
                if first[part] != other[part]:
                    print(f"    {first[part] - other[part]:+12,d}  {part}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"parameters.py: {error}")
