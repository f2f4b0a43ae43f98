"""
Recurrent encoder-decoder with relation networks (RNMT; Zhang et al., 2018, "Refining Source Representations with
Relation Networks for Neural Machine Translation", COLING), and its baselines RNNsearch (Bahdanau et al., 2015) and
RNNsearch* (with a conditional GRU, as in dl4mt).

The parts stand in the order of the paper: the relation-network layer (Eqs. 7-10), the encoder with its residual and
dense connections (Eqs. 1, 11-12), the decoder (Eqs. 2-5, 13).
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .additive_attention import AdditiveAttention
from .attention import masked_softmax, read_source_memory
from .configuration_rnmt import RNMTConfig
from .fast_paths import allowed, dropout, is_plain, project
from .recurrent_cache import recurrent_layer, use_source_memory
from .recurrent_layers import MaskedRNN, RecurrentLayer, left_aligned, masked_mean, reversed_order, take
from .seq2seq_base import (
    Seq2SeqConditionalGeneration,
    Seq2SeqEncoderOutput,
    Seq2SeqModelBase,
    Seq2SeqPreTrainedModel,
    TokenAndPositionInput,
    embed,
    holds_masks,
)
from .user_errors import UserError


SLOPE = 0.1  # of the leaky ReLU
# Bytes of a batch's pairs that a relation layer keeps for its backward pass; above it makes them anew, tile by tile,
# which costs another third of its products.
KEPT_PAIRS = 2**28


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class RNMTEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of the encoder.

    Args:
        last_hidden_state (`torch.Tensor` of shape `(batch_size, source_length, d_model or 2 * d_model)`):
            The annotations.
        relation_scores (tuple of `torch.Tensor` of shape `(batch_size, source_length, source_length)`, *optional*):
            With `output_attentions=True`: for each relation layer the length of r_ij (Eq. 8), how much word j says
            about word i; 0 for padding.
    """

    relation_scores: tuple[torch.Tensor, ...] | None = None


@dataclass
class RNMTModelOutput(Seq2SeqModelOutput):
    """[`~transformers.modeling_outputs.Seq2SeqModelOutput`] with `relation_scores` of [`RNMTEncoderOutput`]."""

    relation_scores: tuple[torch.Tensor, ...] | None = None


@dataclass
class RNMTLMOutput(Seq2SeqLMOutput):
    """[`~transformers.modeling_outputs.Seq2SeqLMOutput`] with `relation_scores` of [`RNMTEncoderOutput`]."""

    relation_scores: tuple[torch.Tensor, ...] | None = None


# -- relation-network layer (Eqs. 7-10) --------------------------------------------------------------------------------


class MaskedBatchNorm(nn.Module):
    """
    Batch norm over the real tokens of a batch (Ioffe and Szegedy, 2015): padding changes neither its statistics nor its
    output. Statistics are computed in at least float32. Each process of a distributed run normalises by its own batch;
    the running averages that DDP hands round, and that are saved, are those of the first process.

    Args:
        num_features (`int`): Channels.
        momentum (`float`, *optional*, defaults to 0.1): Weight of the newest batch in the running statistics.
        eps (`float`, *optional*, defaults to 1e-5): Added to the variance.
    """

    def __init__(self, num_features: int, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            states (`torch.Tensor` of shape `(batch_size, length, num_features)`).
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
        """
        wide = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
        if self.training:
            if attention_mask is None:
                kept, count = None, wide.new_tensor(wide.shape[0] * wide.shape[1])
            else:
                kept = attention_mask[:, :, None].to(wide.dtype)
                count = kept.sum().clamp(min=1)
            mean = (wide if kept is None else wide * kept).sum(dim=(0, 1)) / count
            centred = wide - mean
            var = (centred if kept is None else centred * kept).square().sum(dim=(0, 1)) / count
            with torch.no_grad():
                unbiased = var * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        else:
            centred, var = wide - self.running_mean, self.running_var
        return (centred * (self.weight * torch.rsqrt(var + self.eps)) + self.bias).to(states.dtype)


class RelationConvolutions(nn.Module):
    """
    CNN of the relation network, Eq. 7: `c_i = leaky_relu(BN(W [x_{i-(k-1)/2}; ..; x_{i+(k-1)/2}] + b))`, zeros outside
    the sentence; several convolutions one after the other, or side by side.
    """

    def __init__(self, config: RNMTConfig):
        super().__init__()
        self.is_parallel = config.relation_conv_mode == "parallel"
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        width = config.d_model
        for kernel, channels in zip(config.relation_conv_kernels, config.relation_conv_channels, strict=True):
            self.convolutions.append(nn.Conv1d(width, channels, kernel, padding=kernel // 2))
            self.norms.append(MaskedBatchNorm(channels) if config.relation_batch_norm else None)
            width = config.d_model if self.is_parallel else channels

    @staticmethod
    def width(config: RNMTConfig) -> int:
        """f, the channels of the output."""
        channels = config.relation_conv_channels
        return sum(channels) if config.relation_conv_mode == "parallel" else channels[-1]

    def forward(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """`(batch_size, length, d_model)` to `(batch_size, length, f)`; real tokens stand first in each row."""
        outputs = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            if attention_mask is not None:
                states_in = states.masked_fill(attention_mask[:, :, None] == 0, 0.0)
            else:
                states_in = states
            output = convolution(states_in.transpose(1, 2)).transpose(1, 2)
            if norm is not None:
                output = norm(output, attention_mask)
            output = nn.functional.leaky_relu(output, SLOPE)
            outputs.append(output)
            states = states if self.is_parallel else output
        return torch.cat(outputs, dim=-1) if self.is_parallel else outputs[-1]


class RelationPropagation(GradientCheckpointingLayer):
    """
    Graph propagation and the perceptron after it (Eqs. 8-10):

        r_ij = MLP([c_i; c_j]),   r_i = 1/l sum_j r_ij,   o_i = MLP'(r_i)       j over real tokens, i among them

    The pairs are computed as [`all_pairs`]; [`all_pairs_reference`] says the same plainly, and is taken with
    `RECNMT_FAST_PATHS=0` or where parameters are not plain (adapters, quantization).
    """

    def __init__(self, config: RNMTConfig):
        super().__init__()
        width, hidden = 2 * RelationConvolutions.width(config), config.relation_hidden_size
        sizes = [width, *[hidden] * config.relation_gp_layers]
        self.pair_layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
        sizes = [*[hidden] * config.relation_mlp_layers, config.d_model]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])

    def forward(
        self, features: torch.Tensor, attention_mask: torch.Tensor | None, output_scores: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            features (`torch.Tensor` of shape `(batch_size, length, f)`): c.
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
            output_scores (`bool`, *optional*): Whether to return the lengths of r_ij.

        Returns:
            o `(batch_size, length, d_model)`, and the lengths `(batch_size, length, length)` or `None`.
        """
        fast = allowed() and not output_scores and all(is_plain(layer, nn.Linear) for layer in self.pair_layers)
        if fast:
            states, scores = all_pairs(self.pair_layers, features, attention_mask), None
        else:
            states, scores = all_pairs_reference(self.pair_layers, features, attention_mask)
        for layer in self.layers:
            states = nn.functional.leaky_relu(layer(states), SLOPE)
        return states, scores if output_scores else None


def counted_pairs(features: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which j count in the mean over real tokens, `(batch_size, length)`, and how many do, `(batch_size, 1, 1)`."""
    if attention_mask is None:
        count = torch.full((features.shape[0], 1, 1), float(features.shape[1]), device=features.device)
        return features.new_ones(features.shape[:2]), count
    kept = attention_mask != 0
    return kept.to(features.dtype), kept.sum(dim=1).clamp(min=1)[:, None, None].float()


def all_pairs_reference(
    layers: nn.ModuleList, features: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    r_i of Eq. 9 as the equations have it, with every pair's vector in memory, and the length of each r_ij.

    Args:
        layers: Linear layers of the pairs' perceptron.
        features (`torch.Tensor` of shape `(batch_size, length, f)`).
        attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.

    Returns:
        `(batch_size, length, m)` and `(batch_size, length, length)`.
    """
    length = features.shape[1]
    pairs = torch.cat(
        [features[:, :, None].expand(-1, -1, length, -1), features[:, None].expand(-1, length, -1, -1)], dim=-1
    )
    for layer in layers:
        pairs = nn.functional.leaky_relu(layer(pairs), SLOPE)
    if attention_mask is not None:
        real = attention_mask != 0
        pairs = pairs.masked_fill(~(real[:, :, None] & real[:, None, :])[..., None], 0.0)
    kept, count = counted_pairs(pairs[:, 0], attention_mask)
    return (pairs * kept[:, None, :, None]).sum(dim=2) / count.to(pairs.dtype), pairs.norm(dim=-1)


def all_pairs(layers: nn.ModuleList, features: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """
    The same as [`all_pairs_reference`] with memory for a tile of pairs only.

    `W [c_i; c_j] = W_a c_i + W_b c_j`: the first layer costs two products per word instead of one per pair. The others
    run over a tile of pairs at a time, which stays in the processor's cache, and of a large batch the backward pass
    makes each tile anew.
    """
    first, rest = layers[0], list(layers)[1:]
    width = features.shape[-1]
    left = nn.functional.linear(features, first.weight[:, :width], first.bias)
    right = nn.functional.linear(features, first.weight[:, width:])
    kept, count = counted_pairs(left, attention_mask)
    lengths = None
    if attention_mask is not None and left.device.type == "cpu" and not torch.compiler.is_compiling():
        # Elsewhere knowing them would wait for the device.
        lengths = (attention_mask != 0).sum(dim=1).tolist()
    parameters = [parameter.to(left.dtype) for layer in rest for parameter in (layer.weight, layer.bias)]
    wants_gradient = any(tensor.requires_grad for tensor in (left, right, *parameters))
    if torch.is_grad_enabled() and wants_gradient and not torch.compiler.is_compiling():
        pooled = PairTiles.apply(left, right, kept, lengths, *parameters)
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
        groups = [(slice(row, row + count), count, longest) for row in range(0, batch_size, count)]
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
    tile: Tile, left: torch.Tensor, right: torch.Tensor, parameters: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs of all layers for a tile of pairs, one row for each pair."""
    pairs = left[tile.rows, tile.words][:, :, None] + right[tile.rows, : tile.length][:, None]
    states = [nn.functional.leaky_relu(pairs, SLOPE, inplace=True).flatten(0, 2)]
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        states.append(nn.functional.leaky_relu(nn.functional.linear(states[-1], weight, bias), SLOPE, inplace=True))
    return states


def pool(states: torch.Tensor, tile: Tile, kept: torch.Tensor) -> torch.Tensor:
    """The sum over the real j of a tile's last states, `(sentences, words, m)`."""
    kept = kept[tile.rows, : tile.length]
    sentences, length = kept.shape
    states = states.view(sentences, -1, length, states.shape[-1])
    return torch.matmul(kept[:, None, None, :], states)[:, :, 0]


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Autocast switched off, on devices that have it."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class PairTiles(torch.autograd.Function):
    """
    [`all_pairs`] behind its first layer; the backward pass makes the tiles of a large batch anew. Not differentiable
    twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left: torch.Tensor,
        right: torch.Tensor,
        counted: torch.Tensor,
        lengths: list[int] | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
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
        ctx.lengths, ctx.count = lengths, len(parameters)
        ctx.save_for_backward(left, right, counted, *parameters, *kept)
        return pooled

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        with without_autocast(gradient.device):
            return PairTiles.gradients(ctx, gradient)

    @staticmethod
    def gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        left, right, counted, *rest = ctx.saved_tensors
        parameters, kept = rest[: ctx.count], iter(rest[ctx.count :])
        layers = len(parameters) // 2
        # Half-precision gradients of many tiles are summed in float32.
        wide = torch.float32 if left.dtype in (torch.float16, torch.bfloat16) else left.dtype
        of_parameters = [torch.zeros_like(parameter, dtype=wide) for parameter in parameters]
        of_left, of_right = torch.zeros_like(left), torch.zeros_like(right, dtype=wide)
        for tile in pair_tiles(left, ctx.lengths):
            states = list(itertools.islice(kept, layers + 1)) or tile_states(tile, left, right, parameters)
            pooled = gradient[tile.rows, tile.words]
            sentences, words = pooled.shape[:2]
            inner = (pooled[:, :, None] * counted[tile.rows, : tile.length][:, None, :, None]).flatten(0, 2)
            for layer in reversed(range(layers)):
                inner = through_leaky_relu(inner, states[layer + 1])
                accumulate_product(of_parameters[2 * layer], inner, states[layer])
                of_parameters[2 * layer + 1] += inner.sum(dim=0)
                inner = torch.mm(inner, parameters[2 * layer])
            inner = through_leaky_relu(inner, states[0]).view(sentences, words, -1, left.shape[-1])
            of_left[tile.rows, tile.words] = inner.sum(dim=2)
            of_right[tile.rows, : tile.length] += inner.sum(dim=1)
        of_parameters = [made.to(given.dtype) for made, given in zip(of_parameters, parameters, strict=True)]
        return of_left, of_right.to(right.dtype), None, None, *of_parameters


def through_leaky_relu(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The gradient before a leaky ReLU from that after it, in place; its output has the sign of its input."""
    return torch.ops.aten.leaky_relu_backward.grad_input(gradient, output, SLOPE, True, grad_input=gradient)


def accumulate_product(total: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
    """`total += gradient.T @ inputs`, in the type of `total`."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), inputs)
    else:
        total += torch.mm(gradient.t(), inputs)


class RelationLayer(nn.Module):
    """The relation-network layer: CNN, graph propagation, perceptron (Eqs. 7-10)."""

    def __init__(self, config: RNMTConfig):
        super().__init__()
        # Apart from what may be checkpointed: a second forward pass would count a batch twice in the norms.
        self.convolutions = RelationConvolutions(config)
        self.propagation = RelationPropagation(config)

    def forward(
        self, states: torch.Tensor, attention_mask: torch.Tensor | None, output_scores: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(batch_size, length, d_model)` to the same shape, and the scores of [`RNMTEncoderOutput`] or `None`."""
        return self.propagation(self.convolutions(states, attention_mask), attention_mask, output_scores)


# -- encoder (Eqs. 1, 11-12) -------------------------------------------------------------------------------------------


class RNMTRecurrentLayer(GradientCheckpointingLayer):
    """
    A recurrent layer of the encoder over left-aligned sentences: two directions side by side, `[forward; backward]`
    (Eq. 1), or one of them.

    Args:
        input_size, hidden_size (`int`): Width of the input and of each direction.
        layout (`str`): `"concat"` or `"stacked"`.
        is_backward (`bool`): The direction of a `"stacked"` layer.
    """

    def __init__(self, input_size: int, hidden_size: int, layout: str, is_backward: bool):
        super().__init__()
        self.is_mirrored = layout == "stacked" and is_backward
        self.rnn = MaskedRNN("gru", input_size, hidden_size, bidirectional=layout == "concat")

    def forward(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """`(batch_size, length, input_size)` to `(batch_size, length, hidden_size or 2 * hidden_size)`."""
        if not self.is_mirrored:
            return self.rnn(states, attention_mask)
        if attention_mask is None:
            return self.rnn(states.flip(1), None).flip(1)
        mirror = reversed_order((attention_mask != 0).sum(dim=1), states.shape[1])
        return take(self.rnn(take(states, mirror), attention_mask), mirror)


class InputOrder:
    """
    The way between the tokens as they were given and the left-aligned sentences that the encoder runs over.

    Args:
        order (`torch.LongTensor` of shape `(batch_size, length)`, *optional*): Real tokens first ([`left_aligned`]).
            `None`: all tokens are real.
        attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): Of the left-aligned tokens.
    """

    def __init__(self, order: torch.LongTensor | None, attention_mask: torch.Tensor | None):
        self.order = order
        self.back = None if order is None else torch.argsort(order, dim=1)
        self.padding = None if attention_mask is None else attention_mask[:, :, None] == 0

    def align(self, states: torch.Tensor) -> torch.Tensor:
        """States `(batch_size, length, d)` as given, left-aligned."""
        return states if self.order is None else take(states, self.order)

    def restore(self, states: torch.Tensor) -> torch.Tensor:
        """Left-aligned states `(batch_size, length, d)` in the order given, zero at padding."""
        return states if self.back is None else take(states.masked_fill(self.padding, 0.0), self.back)

    def restore_pairs(self, scores: torch.Tensor) -> torch.Tensor:
        """Both axes of `(batch_size, length, length)` in the order given."""
        if self.back is None:
            return scores
        return take(take(scores, self.back).transpose(1, 2), self.back).transpose(1, 2)


class RNMTPreTrainedModel(Seq2SeqPreTrainedModel):
    config: RNMTConfig
    # Not the whole relation layer: what sharding wraps it may also checkpoint, and norms must see a batch once.
    _no_split_modules = ["RNMTRecurrentLayer", "RelationPropagation"]
    # Additive attention has no dot products for these kernels.
    _supports_flash_attn = False
    _supports_flex_attn = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MaskedBatchNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
            init.zeros_(module.running_mean)
            init.ones_(module.running_var)
            return
        bound = self.config.init_uniform
        if bound is None:
            if isinstance(module, nn.Conv1d):
                std = self.config.init_std
                if std is None:
                    init.xavier_uniform_(module.weight)
                else:
                    init.normal_(module.weight, mean=0.0, std=std)
                init.zeros_(module.bias)
            else:
                super()._init_weights(module)
        elif isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding, RecurrentLayer, nn.RNNCellBase)):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 1:
                    init.uniform_(parameter, -bound, bound)
                else:
                    init.zeros_(parameter)
            padded = isinstance(module, nn.Embedding) and module.padding_idx is not None
            if padded and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        else:
            super()._init_weights(module)


class RNMTEncoder(RNMTPreTrainedModel):
    """
    Recurrent layers and relation layers in turn, with residual and dense connections; usable alone through
    `get_encoder()`. With e the embeddings and h_in^1 = e (Eqs. 11-12):

        h^l = h_in^l + layer_l(h_in^l),   h_in^{l+1} = W^l [e; h^1; ..; h^l] + b^l,   annotations h_in^{L+1}
    """

    main_input_name = "input_ids"
    output_class = RNMTEncoderOutput

    def __init__(self, config: RNMTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embed_input = TokenAndPositionInput(config, "none")
        self.layers = nn.ModuleList()
        self.relation_layers = nn.ModuleList()
        width = config.d_model
        for index in range(config.encoder_layers):
            layout = config.encoder_rnn_layout
            self.layers.append(RNMTRecurrentLayer(width, config.d_model, layout, is_backward=index % 2 == 1))
            width = config.annotation_size
            if index < config.relation_layers:
                self.relation_layers.append(RelationLayer(config))
        self.is_residual = config.is_residual
        self.dense_maps = None
        if config.is_dense:
            total = config.encoder_layers + config.relation_layers
            below = 1 if config.relation_dense_include_embeddings else 0
            self.dense_maps = nn.ModuleList(
                [nn.Linear((below + count) * config.d_model, config.d_model) for count in range(1, total + 1)]
            )
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> RNMTEncoderOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, source_length)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch_size, source_length)`, *optional*): 1 keeps, 0 is padding.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, source_length, d_model)`, *optional*): Unscaled.

        Raises:
            ValueError: Token ids outside the vocabulary, or a mask that does not say which tokens are real.
        """
        embeddings = embed(self.embed_tokens, input_ids, inputs_embeds)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise UserError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but recurrence needs to know which tokens "
                "are real. Remedy: give a mask of shape (batch_size, source_length), 1 for tokens and 0 for padding."
            )
        states = self.embed_input(embeddings)
        order = None
        if attention_mask is not None:
            # Real tokens first: directions turn within a sentence, and convolutions see no gap.
            order = left_aligned(attention_mask)
            attention_mask = attention_mask.gather(1, order)
            states = take(states, order).masked_fill(attention_mask[:, :, None] == 0, 0.0)
        view = InputOrder(order, attention_mask)
        wanted = bool(kwargs.get("output_attentions", self.config.output_attentions))
        kept = [] if kwargs.get("output_hidden_states", self.config.output_hidden_states) else None
        states, scores = self.run(states, attention_mask, view, wanted, kept)
        return RNMTEncoderOutput(
            last_hidden_state=view.restore(states) if kept is None else kept[-1],
            hidden_states=None if kept is None else tuple(kept),
            relation_scores=tuple(view.restore_pairs(score) for score in scores) or None,
        )

    def run(
        self,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        view: "InputOrder",
        output_scores: bool,
        kept: list[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """
        All layers over left-aligned embeddings `(batch_size, source_length, d_model)`.

        Args:
            view ([`InputOrder`]): Of the tokens as they were given.
            output_scores (`bool`): Whether to return the relation layers' scores.
            kept (`list`, *optional*): Filled with e and the inputs h_in of the following layers, the annotations last,
                each in the order of the tokens given; the layers then go on from these.

        Returns:
            The annotations, left-aligned, and the scores.
        """

        def show(states: torch.Tensor) -> torch.Tensor:
            if kept is None:
                return states
            kept.append(view.restore(states))
            return view.align(kept[-1])

        states = show(states)
        below = [states] if self.config.relation_dense_include_embeddings else []
        scores: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            output = layer(states, attention_mask)
            states = self.connect(states, output, below)
            if index < len(self.relation_layers):
                states = show(states)
                output, score = self.relation_layers[index](states, attention_mask, output_scores)
                states = self.connect(states, output, below)
                scores += [] if score is None else [score]
            states = show(dropout(states, self.config.dropout, self.training))
        return states, scores

    def connect(self, inputs: torch.Tensor, output: torch.Tensor, below: list[torch.Tensor]) -> torch.Tensor:
        """The next layer's input from a layer's input and output; `below` grows by h^l."""
        if self.is_residual:
            output = inputs + output
        if self.dense_maps is None:
            return output
        below.append(output)
        place = len(below) - 1 - int(self.config.relation_dense_include_embeddings)
        return self.dense_maps[place](torch.cat(below, dim=-1))


# -- decoder (Eqs. 2-5, 13) --------------------------------------------------------------------------------------------


class ReadOut(nn.Module):
    """
    What the output matrix reads: `t_j = maxout(W_s s_j + W_y y_{j-1} + W_c a_j + b)` over pairs of channels
    (Goodfellow et al., 2013), or `tanh` of maps of single width.
    """

    def __init__(self, config: RNMTConfig):
        super().__init__()
        self.is_maxout = config.readout == "maxout"
        self.dropout = config.readout_dropout
        self.size = (2 if self.is_maxout else 1) * config.d_model
        self.state_proj = nn.Linear(config.d_model, self.size)
        self.word_proj = nn.Linear(config.d_model, self.size, bias=False)
        self.context_proj = nn.Linear(config.annotation_size, self.size, bias=False)

    def forward(self, states: torch.Tensor, words: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        """
        Args:
            states, words (`torch.Tensor` of shape `(batch_size, target_length, d_model)`): s_j and y_{j-1}.
            contexts (`torch.Tensor` of shape `(batch_size, target_length, size)`): W_c a_j.
        """
        mapped = project(self.state_proj, states) + project(self.word_proj, words) + contexts
        if self.is_maxout:
            mapped = torch.maximum(mapped[..., 0::2], mapped[..., 1::2])
        else:
            mapped = torch.tanh(mapped)
        return dropout(mapped, self.dropout, self.training)


class DecoderRecurrence(GradientCheckpointingLayer):
    """
    The decoder's recurrence with its attention. With s the state, y the previous word, h the annotations:

        RNNsearch    a_j = ATT(s_{j-1}, h),   s_j = GRU([y_{j-1}; a_j], s_{j-1})
        RNNsearch*   s~_j = GRU(y_{j-1}, s_{j-1}),   a_j = ATT(s~_j, h),   s_j = GRU(a_j, s~_j)        (Eq. 13)

    The steps run as [`run_steps`] on projected annotations; [`run_steps_reference`] says the same plainly, and is
    taken with `RECNMT_FAST_PATHS=0` or where parameters are not plain (adapters, quantization).
    """

    def __init__(self, config: RNMTConfig):
        super().__init__()
        width, annotation = config.d_model, config.annotation_size
        self.is_conditional = config.decoder_type == "conditional_gru"
        self.attention = AdditiveAttention(width, annotation, width)
        if self.is_conditional:
            self.word_cell = nn.GRUCell(width, width)
        self.context_cell = nn.GRUCell(annotation if self.is_conditional else width + annotation, width)
        self.readout = ReadOut(config)

    def is_fast(self) -> bool:
        """Whether all parameters may be read instead of calling their modules."""
        attention, readout = self.attention, self.readout
        linears = (attention.q_proj, attention.k_proj, attention.score, readout.context_proj)
        cells = [self.context_cell, *([self.word_cell] if self.is_conditional else [])]
        return (
            allowed()
            and is_plain(attention, AdditiveAttention)
            and all(is_plain(linear, nn.Linear) for linear in linears)
            and all(is_plain(cell, nn.GRUCell) for cell in cells)
        )

    def project_memory(self, annotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        What all steps read of the annotations: the attention's keys `U h_i + b`, and behind its weights, which may be
        summed after a linear map as well as before it, the gates' part `W h_i` and the read-out's `W_c h_i`.

        Returns:
            `(num_sources, 1, source_length, d_model)` and `(num_sources, 1, source_length, 3 * d_model + size)`.
        """
        keys = self.attention.k_proj(annotations)
        of_gates = self.context_cell.weight_ih[:, -annotations.shape[-1] :]
        values = torch.cat([nn.functional.linear(annotations, of_gates), self.readout.context_proj(annotations)], -1)
        # Under autocast in the parameters' type, as the steps read them.
        dtype = self.context_cell.weight_hh.dtype
        return keys[:, None].to(dtype), values[:, None].to(dtype)

    def forward(
        self,
        words: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        visible: torch.Tensor | None,
        state: torch.Tensor,
        kept: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            words (`torch.Tensor` of shape `(batch_size, target_length, d_model)`): y_{j-1}.
            keys (`torch.Tensor` of shape `(num_sources, 1, source_length, d_model)`): See [`project_memory`]; the
                annotations `(num_sources, source_length, annotation_size)` themselves where `values` is `None`.
            values (`torch.Tensor` of shape `(num_sources, 1, source_length, 3 * d_model + size)`, *optional*).
            visible (`torch.BoolTensor` of shape `(num_sources, 1, source_length)`, *optional*): `True` keeps.
            state (`torch.Tensor` of shape `(batch_size, d_model)`): s_0, or that after the last step seen.
            kept (`torch.Tensor` of shape `(batch_size, target_length)`, *optional*): Steps with 0 keep the old state.

        Returns:
            States `(batch_size, target_length, d_model)`, attention weights `(batch_size, 1, target_length,
            source_length)` and read-out `(batch_size, target_length, d_model)`.
        """
        if values is None:
            states, weights, contexts = run_steps_reference(self, words, keys, visible, state, kept)
            return states, weights, self.readout(states, words, self.readout.context_proj(contexts))
        states, weights = run_steps(self, words, keys[:, 0], values[:, 0], visible, state, kept)
        # The read-out of all steps at once, from weights in rows of their source.
        grouped = weights[:, 0].reshape(keys.shape[0], -1, keys.shape[2])
        contexts = torch.matmul(grouped.to(values.dtype), values[:, 0, :, 3 * state.shape[-1] :])
        contexts = contexts.view(*words.shape[:2], -1)
        return states, weights, self.readout(states, words, contexts)


def run_steps_reference(
    recurrence: DecoderRecurrence,
    words: torch.Tensor,
    annotations: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The steps of [`DecoderRecurrence`] as the equations have them, on the annotations `(num_sources, source_length,
    annotation_size)`; other arguments as there.

    Returns:
        States and attention weights as there, and the contexts `(batch_size, target_length, annotation_size)`.
    """
    group = words.shape[0] // annotations.shape[0]
    annotations = annotations.repeat_interleave(group, dim=0)
    visible = None if visible is None else visible[:, 0].repeat_interleave(group, dim=0)
    states, weights, contexts = [], [], []
    for j in range(words.shape[1]):
        word = words[:, j]
        if recurrence.is_conditional:
            middle = recurrence.word_cell(word, state)
            context, weight = recurrence.attention(middle, annotations, visible)
            new = recurrence.context_cell(context, middle)
        else:
            context, weight = recurrence.attention(state, annotations, visible)
            new = recurrence.context_cell(torch.cat([word, context], dim=-1), state)
        state = new if kept is None else torch.where(kept[:, j, None] != 0, new, state)
        states.append(state)
        weights.append(weight)
        contexts.append(context)
    return torch.stack(states, 1), torch.stack(weights, 1)[:, None], torch.stack(contexts, 1)


class StepWeights(NamedTuple):
    """The parameters that the steps read; `word_weight` and `word_bias` are `None` for RNNsearch."""

    word_weight: torch.Tensor | None  # (3 d, d) of the first GRU's state
    word_bias: torch.Tensor | None  # (3 d,)
    query_weight: torch.Tensor  # (d, d)
    score: torch.Tensor  # (d,)
    context_weight: torch.Tensor  # (3 d, d) of the second GRU's state
    context_bias: torch.Tensor  # (3 d,)
    gate_bias: torch.Tensor  # (3 d,) of the second GRU's input


def run_steps(
    recurrence: DecoderRecurrence,
    words: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    state: torch.Tensor,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The same as [`run_steps_reference`] with all that can leave the loop outside it: the words' part of the gates is one
    product for all steps; keys and values are given. What remains of a step are two or three products with the state,
    the attention's scores, and the elements of the gates. In training the backward pass is written out
    ([`AttentionalSteps`]): gradients of the weights are formed once after all steps, and nothing of the size steps x
    source_length x d_model is kept.

    Returns:
        States `(batch_size, target_length, d_model)` and weights `(batch_size, 1, target_length, source_length)`.
    """
    width, cell = state.shape[-1], recurrence.context_cell
    if recurrence.is_conditional:
        first = recurrence.word_cell
        gates = nn.functional.linear(words.transpose(0, 1), first.weight_ih, first.bias_ih)
    else:
        first = None
        gates = nn.functional.linear(words.transpose(0, 1), cell.weight_ih[:, :width])
    weights = StepWeights(
        None if first is None else first.weight_hh,
        None if first is None else first.bias_hh,
        recurrence.attention.q_proj.weight,
        recurrence.attention.score.weight[0],
        cell.weight_hh,
        cell.bias_hh,
        cell.bias_ih,
    )
    # Under autocast the state and its gates stay in the parameters' type; only products are made in the lower one.
    dtype = cell.weight_hh.dtype
    gates, keys, state = gates.to(dtype), keys.to(dtype), state.to(dtype)
    of_gates = values[..., : 3 * width].to(dtype)
    kept = None if kept is None else (kept != 0).t()[:, :, None]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        states, attention = AttentionalSteps.apply(gates, keys, of_gates, visible, state, kept, *weights)
    else:
        states, attention = steps_forward(gates, keys, of_gates, visible, state, kept, weights)
    return states.transpose(0, 1), attention.transpose(0, 1)[:, None]


class StepProducts:
    """
    `states @ weight.T + bias` in the type that autocast names, if it is on: weights are converted once for all steps.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        device = weight.device.type
        self.bias, self.dtype = bias, weight.dtype
        self.low = weight.dtype
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self.low = torch.get_autocast_dtype(device)
        self.weight = weight.to(self.low)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.low == self.dtype:
            if self.bias is None:
                return torch.mm(states, self.weight.t())
            return torch.addmm(self.bias, states, self.weight.t())
        mapped = torch.mm(states.to(self.low), self.weight.t()).to(self.dtype)
        return mapped if self.bias is None else mapped + self.bias

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the states."""
        return torch.mm(gradient.to(self.low), self.weight).to(self.dtype)

    def weight_gradient(self, gradients: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight from those of all steps `(steps, batch_size, ..)`."""
        gradients, inputs = gradients.flatten(0, 1).to(self.low), inputs.flatten(0, 1).to(self.low)
        return torch.mm(gradients.t(), inputs).to(self.dtype)


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
    of_gates: torch.Tensor,
    of_recurrent: torch.Tensor,
) -> torch.Tensor:
    """
    Backward through [`gru_step`]; fills `of_gates` and `of_recurrent` `(batch_size, 3 * d)`.

    Args:
        recurrent (`torch.Tensor` of shape `(batch_size, d)`): `U h + b'` of n.

    Returns:
        The part of the old state's gradient that does not go through `recurrent`.
    """
    width = state.shape[-1]
    reset, update = both[:, :width], both[:, width:]
    through_new = gradient * (1 - update) * (1 - new * new)
    of_gates[:, 2 * width :] = through_new
    torch.mul(through_new, recurrent, out=of_gates[:, :width])
    torch.mul(gradient, state - new, out=of_gates[:, width : 2 * width])
    of_gates[:, : 2 * width] *= both * (1 - both)
    of_recurrent[:, : 2 * width] = of_gates[:, : 2 * width]
    torch.mul(through_new, reset, out=of_recurrent[:, 2 * width :])
    return gradient * update


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
    of_word = StepProducts(weights.word_weight, weights.word_bias) if is_conditional else None
    of_query = StepProducts(weights.query_weight)
    of_context = StepProducts(weights.context_weight, weights.context_bias)
    states, attentions = [], []
    with without_autocast(keys.device):
        for j, gate in enumerate(gates.unbind(0)):
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
            state = following if kept is None else torch.where(kept[j], following, state)
            states.append(state)
            attentions.append(attention.view(-1, length))
    return torch.stack(states), torch.stack(attentions)


class AttentionalSteps(torch.autograd.Function):
    """[`steps_forward`] with its backward pass, which makes the attention's energies anew. Not differentiable twice."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor | None,
        state: torch.Tensor,
        kept: torch.Tensor | None,
        *weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps: list[tuple[torch.Tensor | None, ...]] = []
        weights = StepWeights(*weights)
        device = keys.device.type
        ctx.autocast = torch.is_autocast_enabled(device) if torch.amp.is_autocast_available(device) else False
        ctx.autocast_dtype = torch.get_autocast_dtype(device) if ctx.autocast else None
        states, attention = steps_forward(gates, keys, values, visible, state, kept, weights, steps)
        ctx.steps = len(steps)
        ctx.save_for_backward(keys, values, kept, attention, *weights, *(part for step in steps for part in step))
        return states, attention

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_states: torch.Tensor, of_attention: torch.Tensor):
        with without_autocast(of_states.device):
            return AttentionalSteps.gradients(ctx, of_states, of_attention)

    @staticmethod
    def gradients(ctx: Any, of_states: torch.Tensor, of_attention: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        keys, values, kept, attention, *rest = ctx.saved_tensors
        weights = StepWeights(*rest[:7])
        parts = rest[7:]
        size = len(parts) // ctx.steps
        steps = [parts[j * size : (j + 1) * size] for j in range(ctx.steps)]
        sources, length, width = keys.shape
        rows = of_states.shape[1]
        group = rows // sources
        is_conditional = weights.word_weight is not None
        device = keys.device.type
        with torch.autocast(device, ctx.autocast_dtype) if ctx.autocast else nullcontext():
            of_word = StepProducts(weights.word_weight, weights.word_bias) if is_conditional else None
            of_query = StepProducts(weights.query_weight)
            of_context = StepProducts(weights.context_weight, weights.context_bias)
        new = of_states.new_empty
        of_gates = new(ctx.steps, rows, 3 * width)
        of_first = new(ctx.steps, rows, 3 * width) if is_conditional else None  # of its recurrent part
        of_read, of_second = new(ctx.steps, rows, 3 * width), new(ctx.steps, rows, 3 * width)
        of_queries = new(ctx.steps, rows, width)
        squares = torch.zeros_like(keys)  # sum over steps of (gradient of the score) * tanh^2
        of_scores_total = keys.new_zeros(sources, length)
        of_score_vector = torch.zeros_like(weights.score)
        transposed = values.transpose(1, 2)
        gradient = torch.zeros_like(of_states[0])
        for j in reversed(range(ctx.steps)):
            state, middle, query, both1, new1, inner1, both2, new2, inner2 = steps[j]
            gradient = gradient + of_states[j]
            held = None
            if kept is not None:
                held = gradient.masked_fill(kept[j], 0.0)
                gradient = gradient.masked_fill(~kept[j], 0.0)
            # s_j = GRU(a_j, s~_j)
            of_middle = gru_step_backward(gradient, middle, both2, new2, inner2, of_read[j], of_second[j])
            of_middle += of_context.backward(of_second[j])
            # the softmax over e_ij
            weight = attention[j].view(sources, group, length)
            of_weight = torch.matmul(of_read[j].view(sources, group, -1), transposed)
            of_weight += of_attention[j].view(sources, group, length)
            of_score = weight * (of_weight - (weight * of_weight).sum(dim=-1, keepdim=True))  # (S, g, n)
            # e_ij = v^T tanh(q_j + k_i): d tanh = 1 - tanh^2
            energies = (query.view(sources, group, 1, width) + keys[:, None]).tanh_()  # (S, g, n, d)
            row = of_score.reshape(rows, 1, length)
            of_score_vector += torch.matmul(row, energies.view(rows, length, width)).sum(dim=(0, 1))
            energies.square_()
            inner = torch.matmul(row, energies.view(rows, length, width))[:, 0]
            torch.mul(row.sum(dim=-1) - inner, weights.score, out=of_queries[j])
            if group == 1:
                squares.addcmul_(of_score.view(sources, length, 1), energies[:, 0])
            else:
                squares += (of_score[..., None] * energies).sum(dim=1)
            of_scores_total += of_score.sum(dim=1)
            of_middle += of_query.backward(of_queries[j])
            # s~_j = GRU(y_{j-1}, s_{j-1})
            if is_conditional:
                gradient = gru_step_backward(of_middle, state, both1, new1, inner1, of_gates[j], of_first[j])
                gradient += of_word.backward(of_first[j])
            else:
                gradient = of_middle
            if held is not None:
                gradient += held
        of_keys = (of_scores_total[:, :, None] - squares) * weights.score
        # All steps' part of the weights in one product each.
        middles = torch.stack([step[1] for step in steps])
        if is_conditional:
            of_word_weight = of_word.weight_gradient(of_first, torch.stack([step[0] for step in steps]))
            of_word_bias = of_first.sum(dim=(0, 1))
        else:
            of_gates, of_word_weight, of_word_bias = of_read, None, None
        by_source = attention.view(ctx.steps, sources, group, length).permute(1, 3, 0, 2).flatten(2)  # (S, n, T g)
        of_reads = of_read.view(ctx.steps, sources, group, -1).transpose(0, 1).flatten(1, 2)
        return (
            of_gates,
            of_keys,
            torch.matmul(by_source, of_reads),
            None,
            gradient,
            None,
            of_word_weight,
            of_word_bias,
            of_query.weight_gradient(of_queries, middles),
            of_score_vector,
            of_context.weight_gradient(of_second, middles),
            of_second.sum(dim=(0, 1)),
            of_read.sum(dim=(0, 1)),
        )


class RNMTDecoder(RNMTPreTrainedModel):
    """Recurrent decoder with additive attention; its state stands in the cache."""

    main_input_name = "input_ids"
    _can_record_outputs = {
        "cross_attentions": OutputRecorder(DecoderRecurrence, index=1),
    }

    def __init__(self, config: RNMTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.decoder_vocab_size, config.d_model, config.pad_token_id)
        self.embed_input = TokenAndPositionInput(config, "none")
        self.initial_state = nn.Linear(config.annotation_size, config.d_model)
        self.recurrence = DecoderRecurrence(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        memories: tuple[torch.Tensor | None, ...] = (),
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, target_length)`, *optional*): Target tokens so far.
            attention_mask (`torch.Tensor` of shape `(batch_size, seen + target_length)`, *optional*): 1 keeps; steps
                with 0 leave the state as it is.
            encoder_hidden_states (`torch.Tensor` of shape `(num_sources, source_length, annotation_size)`):
                The annotations; `batch_size` is a multiple of `num_sources`, consecutive rows share a source.
            encoder_attention_mask (`torch.Tensor` of shape `(num_sources, source_length)`, *optional*): 1 keeps.
            past_key_values (`Cache`, *optional*): The state after earlier steps, and the projected annotations.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, target_length, d_model)`, *optional*): Unscaled.
            use_cache (`bool`, *optional*): Whether to fill and return a cache.

        Returns:
            `last_hidden_state` is the read-out t_j, what the output matrix reads; `hidden_states` are the embeddings
            y_{j-1}, the states s_j and the read-out; `cross_attentions` is the additive attention of shape
            `(batch_size, 1, target_length, source_length)`.
        """
        words = self.embed_input(embed(self.embed_tokens, input_ids, inputs_embeds))
        if past_key_values is None and use_cache:
            config = self.config.get_text_config(decoder=True)
            past_key_values = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        use_source_memory(past_key_values, 1)
        layer = recurrent_layer(past_key_values)
        if past_key_values is not None and layer is None:
            raise UserError(
                f"This {type(past_key_values).__name__} has no place for the decoder's recurrent state. Remedy: leave "
                "past_key_values out, or make its caches with config=model.config.get_text_config(decoder=True)."
            )
        mask = encoder_attention_mask
        if mask is not None:
            mask = mask[:: max(mask.shape[0] // encoder_hidden_states.shape[0], 1)]
        state = layer.get_state() if layer is not None else None
        if state is None:
            # s_0 = tanh(W_init mean_i h_i + b)
            state = torch.tanh(self.initial_state(masked_mean(encoder_hidden_states, mask)))
            state = state.repeat_interleave(words.shape[0] // state.shape[0], dim=0)
        visible = None if mask is None or holds_masks(past_key_values) else (mask != 0)[:, None]
        keys, values = encoder_hidden_states, None
        if self.recurrence.is_fast():
            keys, values, visible = read_source_memory(
                "encoder",
                0,
                self.recurrence.project_memory,
                encoder_hidden_states,
                visible,
                past_key_values,
                words.shape[0],
            )
        kept = None
        if attention_mask is not None and attention_mask.dim() == 2:
            kept = attention_mask[:, -words.shape[1] :]
        states, _, features = self.recurrence(words, keys, values, visible, state, kept)
        if layer is not None:
            layer.update_states(state=states)
        wanted = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=features,
            past_key_values=past_key_values,
            hidden_states=(words, states, features) if wanted else None,
        )


# -- model -------------------------------------------------------------------------------------------------------------


class RNMTModel(RNMTPreTrainedModel, Seq2SeqModelBase):
    """RNNsearch, RNNsearch* or RNMT without the output matrix (Zhang et al., 2018)."""

    encoder_class = RNMTEncoder
    decoder_class = RNMTDecoder

    def join(self, encoder_outputs: Any, decoder_outputs: Any) -> RNMTModelOutput:
        joined = super().join(encoder_outputs, decoder_outputs)
        return RNMTModelOutput(**joined, relation_scores=getattr(encoder_outputs, "relation_scores", None))


class RNMTForConditionalGeneration(RNMTPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    """
    RNNsearch, RNNsearch* or RNMT with its output matrix: `generate` translates, `labels` train.

    Example:

    ```python
    >>> import torch
    >>> from recnmt_hf import RNMTConfig, RNMTForConditionalGeneration
    >>> model = RNMTForConditionalGeneration(RNMTConfig.from_preset("tiny", vocab_size=100)).eval()
    >>> outputs = model(torch.tensor([[5, 6, 7, 2]]), decoder_input_ids=torch.tensor([[1, 8]]), output_attentions=True)
    >>> outputs.cross_attentions[0].shape, outputs.relation_scores[0].shape
    (torch.Size([1, 1, 2, 4]), torch.Size([1, 4, 4]))

    ```
    """

    model_class = RNMTModel

    def lm_output(
        self, loss: torch.Tensor | None, logits: torch.Tensor | None, outputs: RNMTModelOutput
    ) -> RNMTLMOutput:
        return RNMTLMOutput(**super().lm_output(loss, logits, outputs), relation_scores=outputs.relation_scores)


RNMTModel.register_for_auto_class("AutoModel")
RNMTForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = ["RNMTForConditionalGeneration", "RNMTModel", "RNMTPreTrainedModel"]
