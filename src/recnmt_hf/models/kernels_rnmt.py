"""
Fast path of RNMT (Zhang et al., 2018): the relation layer over all pairs of words (Eqs. 8-9). The plain reference is in
`modeling_rnmt.py`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .kernels_cpu_matmuls import add_product, fast_linear, fast_product
from .kernels_shared import Mask, OnceDifferentiable, is_transformed, on_cpu, wide_type, with_autocast


SLOPE = 0.1  # of the leaky ReLU
# Bytes of a batch's pairs that a relation layer keeps for its backward pass; above them they are recomputed tile by
# tile, which costs another third of its FLOPs.
STORED_PAIR_BYTES = 2**28


def counted_pairs(features: Tensor, attention_mask: Mask) -> tuple[Tensor, Tensor]:
    """Return which j are real tokens, `(batch_size, length)`, and their number, `(batch_size, 1, 1)`."""
    if attention_mask is None:
        count = torch.full((features.shape[0], 1, 1), float(features.shape[1]), device=features.device)
        return features.new_ones(features.shape[:2]), count
    real = attention_mask != 0
    return real.to(features.dtype), real.sum(dim=1).clamp(min=1)[:, None, None].float()


def all_pairs(layers: Iterable[Any], features: Tensor, attention_mask: Mask) -> Tensor:
    """
    Compute [`~.modeling_rnmt.all_pairs_reference`] with memory for a tile of pairs only. The first layer costs two
    matmuls per word, `W [c_i; c_j] = W_a c_i + W_b c_j`. The others run over a tile of pairs at a time, which fits the
    processor's cache; for a large batch the backward pass recomputes each tile.
    """
    first, *rest = layers
    width = features.shape[-1]
    left = fast_linear(features, first.weight[:, :width], first.bias)
    right = fast_linear(features, first.weight[:, width:])
    real, count = counted_pairs(left, attention_mask)
    lengths = None
    is_readable = on_cpu(left) and not torch.compiler.is_compiling() and not is_transformed()
    if attention_mask is not None and is_readable:  # elsewhere reading them would wait for the device
        lengths = (attention_mask != 0).sum(dim=1).tolist()
    parameters = [parameter.to(left.dtype) for layer in rest for parameter in (layer.weight, layer.bias)]
    needs_gradient = any(tensor.requires_grad for tensor in (left, right, *parameters))
    if torch.is_grad_enabled() and needs_gradient and not torch.compiler.is_compiling():
        pooled, *_ = PairTiles.apply(left, right, real, lengths, *parameters)
    else:
        pooled = torch.zeros_like(left)
        # A graph must not depend on the batch's size and length, and tiles its loops itself.
        whole = Tile(slice(None), slice(None), left.shape[1])
        for tile in [whole] if torch.compiler.is_compiling() else pair_tiles(left, lengths):
            pooled[tile.rows, tile.words] = pool(tile_states(tile, left, right, parameters)[-1], tile, real)
    pooled = pooled / count.to(pooled.dtype)
    if attention_mask is not None:
        pooled = pooled.masked_fill(attention_mask[:, :, None] == 0, 0.0)
    return pooled


class Tile(NamedTuple):
    """Pairs `(i, j)` of some sentences: `rows` of the batch, the words `i`, and the words `j` before `length`."""

    rows: slice | list[int]
    words: slice
    length: int


def pair_tiles(states: Tensor, lengths: list[int] | None = None) -> Iterator[Tile]:
    """
    Cut the pairs of a batch into tiles: several short sentences, or some words of a long one. With `lengths`, the real
    words of each sentence, most pairs with padding are skipped.
    """
    batch_size, longest, width = states.shape
    counts = [longest] * batch_size if lengths is None else lengths
    # On CPU the layers of a tile should fit into the cache; on GPU a tile should be enough work for one launch.
    size = 2**20 if on_cpu(states) else 2**26
    pairs = max(size // (width * states.element_size()), 1)
    order = sorted((row for row in range(batch_size) if counts[row]), key=lambda row: -counts[row])
    while order:
        length = counts[order[0]]
        # At most a quarter of a tile for padding.
        group = [row for row in order[: max(pairs // length**2, 1)] if 4 * counts[row] ** 2 >= 3 * length**2]
        order = order[len(group) :]
        words = length if len(group) > 1 else min(max(pairs // length, 1), length)
        rows = slice(group[0], group[-1] + 1) if lengths is None else group
        for word in range(0, length, words):
            yield Tile(rows, slice(word, min(word + words, length)), length)


def tile_states(tile: Tile, left: Tensor, right: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of all layers for a tile of pairs, one row for each pair."""
    pairs = left[tile.rows, tile.words][:, :, None] + right[tile.rows, : tile.length][:, None]
    states = [nn.functional.leaky_relu(pairs, SLOPE, inplace=True).flatten(0, 2)]
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        states.append(nn.functional.leaky_relu(fast_linear(states[-1], weight, bias), SLOPE, inplace=True))
    return states


def pool(states: Tensor, tile: Tile, real: Tensor) -> Tensor:
    """Return the sum over the real j of a tile's last states, `(sentences, words, m)`."""
    real = real[tile.rows, : tile.length]
    sentences, length = real.shape
    states = states.view(sentences, -1, length, states.shape[-1])
    return torch.matmul(real[:, None, None, :], states)[:, :, 0]


class PairTiles(OnceDifferentiable):
    """The part of [`all_pairs`] after its first layer, with its backward pass."""

    @staticmethod
    def forward(
        left: Tensor, right: Tensor, real: Tensor, lengths: list[int] | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        batch_size, length, width = left.shape
        size = batch_size * length**2 * width * left.element_size() * (1 + len(parameters) // 2)
        saved: list[Tensor] = []
        pooled = torch.zeros_like(left)
        with with_autocast(left.device, None):
            for tile in pair_tiles(left, lengths):
                states = tile_states(tile, left, right, parameters)
                pooled[tile.rows, tile.words] = pool(states[-1], tile, real)
                if size <= STORED_PAIR_BYTES:
                    saved += states
        return pooled, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        left, right, real, lengths, *parameters = inputs
        ctx.lengths, ctx.count = lengths, len(parameters)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(left, right, real, *parameters, *output[1:])

    @staticmethod
    def gradients(
        ctx: Any, gradient: Tensor, left: Tensor, right: Tensor, real: Tensor, *rest: Tensor
    ) -> tuple[Tensor | None, ...]:
        parameters, saved, layers = rest[: ctx.count], iter(rest[ctx.count :]), ctx.count // 2
        wide = wide_type(left.dtype)  # of sums over many tiles
        grad_parameters = [torch.zeros_like(parameter, dtype=wide) for parameter in parameters]
        grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right, dtype=wide)
        for tile in pair_tiles(left, ctx.lengths):
            states = list(itertools.islice(saved, layers + 1)) or tile_states(tile, left, right, parameters)
            pooled = gradient[tile.rows, tile.words]
            sentences, words = pooled.shape[:2]
            inner = (pooled[:, :, None] * real[tile.rows, : tile.length][:, None, :, None]).flatten(0, 2)
            for layer in reversed(range(layers)):
                inner = leaky_relu_gradient(inner, states[layer + 1])
                add_product(grad_parameters[2 * layer], inner.t(), states[layer])
                grad_parameters[2 * layer + 1] += inner.sum(dim=0)
                inner = fast_product(inner, parameters[2 * layer])
            inner = leaky_relu_gradient(inner, states[0]).view(sentences, words, -1, left.shape[-1])
            grad_left[tile.rows, tile.words] = inner.sum(dim=2)
            grad_right[tile.rows, : tile.length] += inner.sum(dim=1)
        grad_parameters = [total.to(left.dtype) for total in grad_parameters]
        return grad_left, grad_right.to(right.dtype), None, None, *grad_parameters


def leaky_relu_gradient(gradient: Tensor, output: Tensor) -> Tensor:
    """Return the gradient before a leaky ReLU from that after it, in place; input and output have the same sign."""
    return torch.ops.aten.leaky_relu_backward.grad_input(gradient, output, SLOPE, True, grad_input=gradient)
