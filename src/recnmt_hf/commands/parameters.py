"""`recnmt parameters`: count the parameters of models, and compare them."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from .arguments import whole
from .named_models import MODEL_HELP, build_model, parse_model


if TYPE_CHECKING:
    from torch import nn


def count_parameters(model: nn.Module) -> tuple[int, Counter[str]]:
    """
    Return the number of parameters of embeddings and output matrix, shared ones counted once, and those of the parts of
    the body. A part is named by the path of its module without layer numbers, e.g. `encoder.layers.self_attn`.
    """
    body: Counter[str] = Counter()
    embeddings = 0
    for name, parameter in model.named_parameters():
        words = [word for word in name.split(".")[:-1] if not word.isdigit()]
        if "embed_tokens" in words or "shared" in words or "lm_head" in words or "embed_positions" in words:
            embeddings += parameter.numel()
        else:
            words = [word for word in words if word != "model"]
            # Count the parts of a layer separately.
            depth = words.index("layers") + 2 if "layers" in words[:3] else 3
            body[".".join(words[:depth])] += parameter.numel()
    return embeddings, body


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", help=f"{MODEL_HELP}. The first is compared with each other one")
    add("--size", nargs="+", default=["base"], help="presets to count")
    add("--vocab-size", type=whole(1, 2**31 - 1), default=32000, help="vocabulary size")


def run(args: argparse.Namespace) -> None:
    import torch

    for size in args.size:
        counted = []
        for text in args.models:
            name, overrides = parse_model(text)
            with torch.device("meta"):
                embeddings, body = count_parameters(build_model(name, size, args.vocab_size, overrides))
            counted.append(body)
            total = sum(body.values())
            print(
                f"{size} {text}: {total / 1e6:.2f}M without embeddings, {(total + embeddings) / 1e6:.2f}M with the "
                f"embeddings of {args.vocab_size} symbols"
            )
        first = counted[0]
        for text, other in zip(args.models[1:], counted[1:], strict=True):
            difference = sum(first.values()) - sum(other.values())
            print(f"{size} {args.models[0]} against {text}: {difference / 1e6:+.2f}M")
            for part in sorted(set(first) | set(other)):
                if first[part] != other[part]:
                    print(f"    {first[part] - other[part]:+12,d}  {part}")
