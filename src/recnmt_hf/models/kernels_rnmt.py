"""
Fast paths of RNMT (Zhang et al., 2018): the relation layer over all pairs of words (Eqs. 8-9) and the steps of the
decoder with additive attention (Eqs. 2-5, 13). The plain references are in `modeling_rnmt.py`.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from .attention import masked_softmax
from .kernels_recurrent_layers import StepMatmuls
from .kernels_shared import (
    CustomGradient,
    add_product,
    final_gradients,
    graph_operator,
    is_exporting,
    is_transformed,
    wide_linear,
    wide_product,
    without_autocast,
)
from .recurrent_layers import scan_steps


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


class StepWeights(NamedTuple):
    """The parameters that the steps read; `word_weight` and `word_bias` are `None` for RNNsearch."""

    word_weight: Any  # (3 d, d) of the first GRU's state
    word_bias: torch.Tensor | None  # (3 d,)
    query_weight: torch.Tensor  # (d, d)
    score: torch.Tensor  # (d,)
    context_weight: torch.Tensor  # (3 d, d) of the second GRU's state
    context_bias: torch.Tensor  # (3 d,)
    gate_bias: torch.Tensor  # (3 d,) of the second GRU's input


def run_steps(
    recurrence: Any,
    words: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The same as [`run_steps_reference`] with all that can leave the loop outside it: the words' part of the gates is one
    matmul for all steps; keys and values are given. What remains of a step are two or three matmuls with the state,
    the attention's scores, and the elements of the gates. In training the backward pass is written out
    ([`AttentionalSteps`]): gradients of the weights are formed once after all steps, and nothing of the size steps x
    source_length x d_model is kept.

    Returns:
        States `(batch_size, target_length, d_model)` and weights `(batch_size, 1, target_length, source_length)`.
    """
    width, cell = state.shape[-1], recurrence.context_cell
    if recurrence.is_conditional:
        first = recurrence.word_cell
        gates = wide_linear(words.transpose(0, 1), first.weight_ih, first.bias_ih)
    else:
        first = None
        gates = wide_linear(words.transpose(0, 1), cell.weight_ih[:, :width])
    weights = StepWeights(
        None if first is None else first.weight_hh,
        None if first is None else first.bias_hh,
        recurrence.attention.q_proj.weight,
        recurrence.attention.score.weight[0],
        cell.weight_hh,
        cell.bias_hh,
        cell.bias_ih,
    )
    # Under autocast the state and its gates stay in the parameters' type; only matmuls are made in the lower one.
    dtype = cell.weight_hh.dtype
    gates, keys, state = gates.to(dtype), keys.to(dtype), state.to(dtype)
    of_gates = values[..., : 3 * width].to(dtype)
    kept = None if kept is None else (kept != 0).t()[:, :, None]
    states, attention = attentional_states(gates, keys, of_gates, visible, state, kept, *weights)
    return states.transpose(0, 1), attention.transpose(0, 1)[:, None]


def attentional_shapes(gates: torch.Tensor, keys: torch.Tensor, *rest: torch.Tensor | None) -> Any:
    steps, rows = gates.shape[:2]
    return [((steps, rows, keys.shape[2]), keys.dtype), ((steps, rows, keys.shape[1]), keys.dtype)]


@graph_operator(attentional_shapes)
def attentional_states(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """States and attention of all steps; the arguments are those of [`AttentionalSteps`]."""
    if torch.is_grad_enabled() and not is_exporting():
        return list(AttentionalSteps.apply(KeptSteps(), *tensors))
    gates, keys, values, visible, state, kept, *weights = tensors
    found = steps_forward(gates, keys, values, visible, state, kept, StepWeights(*weights))  # type: ignore[arg-type]
    return list(found)


def attend(query: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor | None, score: torch.Tensor) -> torch.Tensor:
    """
    Weights of additive attention.

    Args:
        query (`torch.Tensor` of shape `(num_sources * g, d)`): `W s`.
        keys (`torch.Tensor` of shape `(num_sources, source_length, d)`): `U h_i + b`.

    Returns:
        `torch.Tensor` of shape `(num_sources, g, source_length)`.
    """
    sources, _, width = keys.shape
    energies = query.view(sources, -1, 1, width) + keys[:, None]
    return masked_softmax(torch.matmul(energies.tanh_(), score), visible, keys.dtype)


def step_matmuls(weights: StepWeights, steps: int) -> tuple[Any, StepMatmuls, StepMatmuls]:
    """Of the first GRU's state (`None` for RNNsearch), of the query, and of the second GRU's state."""
    return (
        None if weights.word_weight is None else StepMatmuls(weights.word_weight, weights.word_bias, steps),
        StepMatmuls(weights.query_weight, calls=steps),
        StepMatmuls(weights.context_weight, weights.context_bias, steps),
    )


def steps_forward(
    gates: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    kept: torch.Tensor | None,
    weights: StepWeights,
    saved: list[tuple[torch.Tensor | None, ...]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    All steps without gradients.

    Args:
        gates (`torch.Tensor` of shape `(steps, batch_size, 3 * d)`): The words' part of the (first) GRU's gates.
        keys, values (`torch.Tensor` of shape `(num_sources, source_length, d)` and `(.., 3 * d)`).
        kept (`torch.BoolTensor` of shape `(steps, batch_size, 1)`, *optional*).
        saved (`list`, *optional*): Filled with what [`AttentionalSteps`] needs of each step.

    Returns:
        States `(steps, batch_size, d)` and attention weights `(steps, batch_size, source_length)`.
    """
    _, length, width = keys.shape
    is_conditional = weights.word_weight is not None
    of_word, of_query, of_context = step_matmuls(weights, gates.shape[0])
    states, attentions = [], []

    def advance(gate: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first: tuple[torch.Tensor | None, ...] = (None, None, None)
        middle = state
        if is_conditional:
            recurrent = of_word(state)
            middle, both, new = gru_step(gate, recurrent, state)
            first = (both, new, recurrent[:, 2 * width :].clone() if saved is not None else None)
        query = of_query(middle)
        attention = attend(query, keys, visible, weights.score)
        read = torch.matmul(attention, values).view(-1, 3 * width) + weights.gate_bias
        recurrent = of_context(middle)
        following, both, new = gru_step(read if is_conditional else read + gate, recurrent, middle)
        if saved is not None:
            saved.append((state, middle, query, *first, both, new, recurrent[:, 2 * width :].clone()))
        return following, attention.view(-1, length)

    def one_step(carry: Sequence[torch.Tensor], given: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        following, attention = advance(given[:, : 3 * width], carry[0])
        if kept is not None:
            following = torch.where(given[:, 3 * width :] != 0, following, carry[0])
        return [following], [following, attention]

    with without_autocast(keys.device):
        if is_exporting():  # any number of steps
            given = gates if kept is None else torch.cat([gates, kept.to(gates.dtype)], dim=-1)
            every_state, every_attention = scan_steps(one_step, [state], given)
            return every_state, every_attention
        for j, gate in enumerate(gates.unbind(0)):
            following, attention = advance(gate, state)
            state = following if kept is None else torch.where(kept[j], following, state)
            states.append(state)
            attentions.append(attention)
    return torch.stack(states), torch.stack(attentions)


class KeptSteps:
    """Tensors that [`steps_forward`] saves for each step; there are too many to return them."""

    tensors: tuple[torch.Tensor | None, ...] = ()


class AttentionalSteps(CustomGradient):
    """[`steps_forward`] with its backward pass, which recomputes the attention's energies. Not differentiable twice."""

    @staticmethod
    def forward(
        saved: KeptSteps,
        gates: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor | None,
        state: torch.Tensor,
        kept: torch.Tensor | None,
        *weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps: list[tuple[torch.Tensor | None, ...]] = []
        found = steps_forward(gates, keys, values, visible, state, kept, StepWeights(*weights), steps)  # type: ignore[arg-type]
        saved.tensors = tuple(part for step in steps for part in step)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        saved, gates, keys, values, visible, state, kept, *weights = inputs
        device = keys.device.type
        is_low = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ctx.autocast_dtype = torch.get_autocast_dtype(device) if is_low else None
        ctx.has_steps = bool(saved.tensors)
        parts = saved.tensors if ctx.has_steps else (gates, visible, state)
        ctx.save_for_backward(keys, values, kept, output[1], *weights, *parts)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], saved: KeptSteps, *inputs: Any) -> Any:
        return super().vmap(info, in_dims, KeptSteps(), *inputs)  # of several samples: the backward pass repeats them

    @staticmethod
    def backward(ctx: Any, grad_states: torch.Tensor, grad_attention: torch.Tensor) -> Any:
        compute = functools.partial(AttentionalSteps.gradients, ctx.autocast_dtype, ctx.has_steps)
        with without_autocast(grad_states.device):
            return None, *final_gradients(compute, grad_states, grad_attention, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        autocast_dtype: torch.dtype | None,
        has_steps: bool,
        grad_states: torch.Tensor,
        grad_attention: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: torch.Tensor | None,
        attention: torch.Tensor,
        *rest: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        weights, parts, count = StepWeights(*rest[:7]), rest[7:], len(attention)
        device = keys.device.type
        with nullcontext() if autocast_dtype is None else torch.autocast(device, autocast_dtype):
            of_word, of_query, of_context = step_matmuls(weights, count)
            steps: list[Any] = []
            if not has_steps:
                gates, visible, state = parts
                steps_forward(gates, keys, values, visible, state, kept, weights, steps)
        if has_steps:
            size = len(parts) // count
            steps = [parts[j * size : (j + 1) * size] for j in range(count)]
        sources, length, width = keys.shape
        rows = grad_states.shape[1]
        group = rows // sources
        is_conditional = weights.word_weight is not None
        new = grad_states.new_empty
        grad_gates = new(count, rows, 3 * width)
        grad_first: Any = new(count, rows, 3 * width) if is_conditional else None  # of its recurrent part
        grad_read, grad_second = new(count, rows, 3 * width), new(count, rows, 3 * width)
        grad_queries = new(count, rows, width)
        squares = torch.zeros_like(keys)  # sum over steps of (gradient of the score) * tanh^2
        grad_scores_total = keys.new_zeros(sources, length)
        grad_score_vector = torch.zeros_like(weights.score)
        transposed = values.transpose(1, 2)
        gradient = torch.zeros_like(grad_states[0])
        for j in reversed(range(count)):
            state, middle, query, both1, new1, inner1, both2, new2, inner2 = steps[j]
            gradient = gradient + grad_states[j]
            held = None
            if kept is not None:
                held = gradient.masked_fill(kept[j], 0.0)
                gradient = gradient.masked_fill(~kept[j], 0.0)
            # s_j = GRU(a_j, s~_j)
            grad_middle = gru_step_backward(gradient, middle, both2, new2, inner2, grad_read[j], grad_second[j])
            grad_middle += of_context.backward(grad_second[j])
            # the softmax over e_ij
            weight = attention[j].view(sources, group, length)
            grad_weight = torch.matmul(grad_read[j].view(sources, group, -1), transposed)
            grad_weight += grad_attention[j].view(sources, group, length)
            grad_score = weight * (grad_weight - (weight * grad_weight).sum(dim=-1, keepdim=True))  # (S, g, n)
            # e_ij = v^T tanh(q_j + k_i): d tanh = 1 - tanh^2
            energies = (query.view(sources, group, 1, width) + keys[:, None]).tanh_()  # (S, g, n, d)
            row = grad_score.reshape(rows, 1, length)
            grad_score_vector += torch.matmul(row, energies.view(rows, length, width)).sum(dim=(0, 1))
            energies.square_()
            inner = torch.matmul(row, energies.view(rows, length, width))[:, 0]
            torch.mul(row.sum(dim=-1) - inner, weights.score, out=grad_queries[j])
            if group == 1:
                squares.addcmul_(grad_score.view(sources, length, 1), energies[:, 0])
            else:
                squares += (grad_score[..., None] * energies).sum(dim=1)
            grad_scores_total += grad_score.sum(dim=1)
            grad_middle += of_query.backward(grad_queries[j])
            # s~_j = GRU(y_{j-1}, s_{j-1})
            if is_conditional:
                gradient = gru_step_backward(grad_middle, state, both1, new1, inner1, grad_gates[j], grad_first[j])
                gradient += of_word.backward(grad_first[j])
            else:
                gradient = grad_middle
            if held is not None:
                gradient += held
        grad_keys = (grad_scores_total[:, :, None] - squares) * weights.score
        # All steps' part of the weights in one matmul each.
        middles = torch.stack([step[1] for step in steps])
        if is_conditional:
            grad_word_weight = of_word.weight_gradient(grad_first, torch.stack([step[0] for step in steps]))
            grad_word_bias = grad_first.sum(dim=(0, 1))
        else:
            grad_gates, grad_word_weight, grad_word_bias = grad_read, None, None
        by_source = attention.view(count, sources, group, length).permute(1, 3, 0, 2).flatten(2)  # (S, n, T g)
        grad_reads = grad_read.view(count, sources, group, -1).transpose(0, 1).flatten(1, 2)
        return (
            grad_gates,
            grad_keys,
            torch.matmul(by_source, grad_reads),
            None,
            gradient,
            None,
            grad_word_weight,
            grad_word_bias,
            of_query.weight_gradient(grad_queries, middles),
            grad_score_vector,
            of_context.weight_gradient(grad_second, middles),
            grad_second.sum(dim=(0, 1)),
            grad_read.sum(dim=(0, 1)),
        )


def gru_step(
    gates: torch.Tensor, recurrent: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The elements of a GRU: `r, z = sigmoid(..)`, `n = tanh(W x + b + r (U h + b'))`, `h' = (1 - z) n + z h`.

    Args:
        gates, recurrent (`torch.Tensor` of shape `(batch_size, 3 * d)`): `W x + b` and `U h + b'` of r, z and n.

    Returns:
        h', and for the backward pass `[r; z]` and n.
    """
    width = state.shape[-1]
    both = torch.sigmoid(gates[:, : 2 * width] + recurrent[:, : 2 * width])
    new = torch.tanh(torch.addcmul(gates[:, 2 * width :], both[:, :width], recurrent[:, 2 * width :]))
    return torch.lerp(new, state, both[:, width:]), both, new


def gru_step_backward(
    gradient: torch.Tensor,
    state: torch.Tensor,
    both: torch.Tensor,
    new: torch.Tensor,
    recurrent: torch.Tensor,
    grad_gates: torch.Tensor,
    grad_recurrent: torch.Tensor,
) -> torch.Tensor:
    """
    Backward through [`gru_step`]; fills `grad_gates` and `grad_recurrent` `(batch_size, 3 * d)`.

    Args:
        recurrent (`torch.Tensor` of shape `(batch_size, d)`): `U h + b'` of n.

    Returns:
        The part of the old state's gradient that does not go through `recurrent`.
    """
    width = state.shape[-1]
    reset, update = both[:, :width], both[:, width:]
    through_new = gradient * (1 - update) * (1 - new * new)
    grad_gates[:, 2 * width :] = through_new
    torch.mul(through_new, recurrent, out=grad_gates[:, :width])
    torch.mul(gradient, state - new, out=grad_gates[:, width : 2 * width])
    grad_gates[:, : 2 * width] *= both * (1 - both)
    grad_recurrent[:, : 2 * width] = grad_gates[:, : 2 * width]
    torch.mul(through_new, reset, out=grad_recurrent[:, 2 * width :])
    return gradient * update
