"""
The perceptron over all pairs of words of a relation network (Zhang et al., 2018, Eqs. 8-9), with memory for a tile of
pairs only; the plain reference stands with the model.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .custom_gradients import CustomGradient, final_gradients, is_transformed
from .fast_paths import add_product, wide_linear, wide_product
from .step_matmuls import without_autocast


SLOPE = 0.1  # of the leaky ReLU
# Bytes of a batch's pairs that a relation layer keeps for its backward pass; above it they are recomputed, tile by
# tile, which costs another third of its FLOPs.
KEPT_PAIRS = 2**28


def counted_pairs(features: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which j count in the mean over real tokens, `(batch_size, length)`, and how many do, `(batch_size, 1, 1)`."""
    if attention_mask is None:
        count = torch.full((features.shape[0], 1, 1), float(features.shape[1]), device=features.device)
        return features.new_ones(features.shape[:2]), count
    kept = attention_mask != 0
    return kept.to(features.dtype), kept.sum(dim=1).clamp(min=1)[:, None, None].float()


def all_pairs(layers: Iterable[Any], features: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """
    The same as [`all_pairs_reference`] with memory for a tile of pairs only.

    `W [c_i; c_j] = W_a c_i + W_b c_j`: the first layer costs two matmuls per word instead of one per pair. The others
    run over a tile of pairs at a time, which stays in the processor's cache, and of a large batch the backward pass
    recomputes each tile.
    """
    first, *rest = layers
    width = features.shape[-1]
    left = wide_linear(features, first.weight[:, :width], first.bias)
    right = wide_linear(features, first.weight[:, width:])
    kept, count = counted_pairs(left, attention_mask)
    lengths = None
    is_readable = left.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()
    if attention_mask is not None and is_readable:
        # Elsewhere knowing them would wait for the device.
        lengths = (attention_mask != 0).sum(dim=1).tolist()
    parameters = [parameter.to(left.dtype) for layer in rest for parameter in (layer.weight, layer.bias)]
    wants_gradient = any(tensor.requires_grad for tensor in (left, right, *parameters))
    if torch.is_grad_enabled() and wants_gradient and not torch.compiler.is_compiling():
        pooled, *_ = PairTiles.apply(left, right, kept, lengths, *parameters)
    else:
        pooled = torch.zeros_like(left)
        # A graph is free of the batch's size and length, and cuts its loops itself.
        whole = Tile(slice(None), slice(None), left.shape[1])
        for tile in [whole] if torch.compiler.is_compiling() else pair_tiles(left, lengths):
            pooled[tile.rows, tile.words] = pool(tile_states(tile, left, right, parameters)[-1], tile, kept)
    pooled = pooled / count.to(pooled.dtype)
    if attention_mask is not None:
        pooled = pooled.masked_fill(attention_mask[:, :, None] == 0, 0.0)
    return pooled


class Tile(NamedTuple):
    """Pairs `(i, j)` of some sentences: `rows` of the batch, the words `i`, and the words `j` before `length`."""

    rows: slice | list[int]
    words: slice
    length: int


def pair_tiles(states: torch.Tensor, lengths: list[int] | None = None) -> Iterator[Tile]:
    """
    Cuts the pairs of a batch into tiles: several short sentences, or some words of a long one.

    Args:
        states (`torch.Tensor` of shape `(batch_size, length, m)`): One side of the pairs.
        lengths (`list[int]`, *optional*): Real words of each sentence, which stand first; pairs with others are left
            out, but for a few where sentences of similar lengths share a tile.
    """
    batch_size, longest, width = states.shape
    # On a processor a tile's layers should stay in its cache; a GPU wants enough work for one launch.
    size = 2**20 if states.device.type == "cpu" else 2**26
    pairs = max(size // (width * states.element_size()), 1)
    if lengths is None:
        count = max(pairs // longest**2, 1)
        groups: list[tuple[Any, int, int]] = [
            (slice(row, row + count), count, longest) for row in range(0, batch_size, count)
        ]
    else:
        groups = []
        order = sorted((row for row in range(batch_size) if lengths[row]), key=lambda row: -lengths[row])
        while order:
            longest = lengths[order[0]]
            group = order[: max(pairs // longest**2, 1)]
            # Not more than a quarter of a tile for padding.
            group = [row for row in group if 4 * lengths[row] ** 2 >= 3 * longest**2]
            groups.append((group, len(group), longest))
            order = order[len(group) :]
    for rows, count, length in groups:
        words = length if count > 1 else min(max(pairs // length, 1), length)
        for word in range(0, length, words):
            yield Tile(rows, slice(word, min(word + words, length)), length)


def tile_states(
    tile: Tile, left: torch.Tensor, right: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs of all layers for a tile of pairs, one row for each pair."""
    pairs = left[tile.rows, tile.words][:, :, None] + right[tile.rows, : tile.length][:, None]
    states = [nn.functional.leaky_relu(pairs, SLOPE, inplace=True).flatten(0, 2)]
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        states.append(nn.functional.leaky_relu(wide_linear(states[-1], weight, bias), SLOPE, inplace=True))
    return states


def pool(states: torch.Tensor, tile: Tile, kept: torch.Tensor) -> torch.Tensor:
    """The sum over the real j of a tile's last states, `(sentences, words, m)`."""
    kept = kept[tile.rows, : tile.length]
    sentences, length = kept.shape
    states = states.view(sentences, -1, length, states.shape[-1])
    return torch.matmul(kept[:, None, None, :], states)[:, :, 0]


class PairTiles(CustomGradient):
    """
    [`all_pairs`] behind its first layer; the backward pass recomputes the tiles of a large batch. Not
    differentiable twice.
    """

    @staticmethod
    def forward(
        left: torch.Tensor,
        right: torch.Tensor,
        counted: torch.Tensor,
        lengths: list[int] | None,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        batch_size, length, width = left.shape
        size = batch_size * length**2 * width * left.element_size() * (1 + len(parameters) // 2)
        kept: list[torch.Tensor] = []
        pooled = torch.zeros_like(left)
        with without_autocast(left.device):
            for tile in pair_tiles(left, lengths):
                states = tile_states(tile, left, right, parameters)
                pooled[tile.rows, tile.words] = pool(states[-1], tile, counted)
                if size <= KEPT_PAIRS:
                    kept += states
        return pooled, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        left, right, counted, lengths, *parameters = inputs
        ctx.lengths, ctx.count = lengths, len(parameters)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(left, right, counted, *parameters, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, *of_kept: None) -> Any:
        if gradient is None:
            return (None,) * (4 + ctx.count)
        compute = functools.partial(PairTiles.gradients, ctx.lengths, ctx.count)
        with without_autocast(gradient.device):
            return final_gradients(compute, gradient, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        lengths: list[int] | None,
        count: int,
        gradient: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        counted: torch.Tensor,
        *rest: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        parameters, kept = rest[:count], iter(rest[count:])
        layers = len(parameters) // 2
        # Half-precision gradients of many tiles are summed in float32.
        wide = torch.float32 if left.dtype in (torch.float16, torch.bfloat16) else left.dtype
        grad_parameters = [torch.zeros_like(parameter, dtype=wide) for parameter in parameters]
        grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right, dtype=wide)
        for tile in pair_tiles(left, lengths):
            states = list(itertools.islice(kept, layers + 1)) or tile_states(tile, left, right, parameters)
            pooled = gradient[tile.rows, tile.words]
            sentences, words = pooled.shape[:2]
            inner = (pooled[:, :, None] * counted[tile.rows, : tile.length][:, None, :, None]).flatten(0, 2)
            for layer in reversed(range(layers)):
                inner = through_leaky_relu(inner, states[layer + 1])
                add_product(grad_parameters[2 * layer], inner.t(), states[layer])
                grad_parameters[2 * layer + 1] += inner.sum(dim=0)
                inner = wide_product(inner, parameters[2 * layer])
            inner = through_leaky_relu(inner, states[0]).view(sentences, words, -1, left.shape[-1])
            grad_left[tile.rows, tile.words] = inner.sum(dim=2)
            grad_right[tile.rows, : tile.length] += inner.sum(dim=1)
        grad_parameters = [made.to(given.dtype) for made, given in zip(grad_parameters, parameters, strict=True)]
        return grad_left, grad_right.to(right.dtype), None, None, *grad_parameters


def through_leaky_relu(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The gradient before a leaky ReLU from that after it, in place; its output has the sign of its input."""
    return torch.ops.aten.leaky_relu_backward.grad_input(gradient, output, SLOPE, True, grad_input=gradient)
