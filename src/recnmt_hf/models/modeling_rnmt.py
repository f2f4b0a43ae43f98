"""
Recurrent encoder-decoder with relation networks (RNMT; Zhang et al., 2018, "Refining Source Representations with
Relation Networks for Neural Machine Translation", COLING), and its baselines RNNsearch (Bahdanau et al., 2015) and
RNNsearch* (with a conditional GRU, as in dl4mt).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from .additive_attention import AdditiveAttention
from .configuration_rnmt import RNMTConfig
from .decoder_cache import read_source_memory, recurrent_layer, spread_over_beams
from .kernels_attentional_steps import run_steps
from .kernels_cpu_matmuls import fast_linear, project
from .kernels_rnmt import SLOPE, all_pairs, counted_pairs
from .kernels_shared import Mask, allowed, dropout, is_plain, wide_type
from .recurrent_layers import MaskedRNN, inverse, left_aligned, masked_mean, reversed_order, take
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Initialization, Seq2SeqPreTrainedModel
from .seq2seq_outputs import Memories, Memory, Seq2SeqEncoderOutput
from .seq2seq_stacks import Seq2SeqDecoder, Seq2SeqEncoder, records_states


@dataclass
class RNMTEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of the encoder.

    Args:
        last_hidden_state (`torch.Tensor` of shape `(batch_size, source_length, d_model or 2 * d_model)`): Annotations.
        relation_scores (tuple of `torch.Tensor` of shape `(batch_size, source_length, source_length)`, *optional*):
            With `output_attentions=True`: for each relation layer the length of r_ij (Eq. 8), which measures the effect
            of word j on word i; 0 for padding.
    """

    relation_scores: tuple[Tensor, ...] | None = None


class MaskedBatchNorm(nn.BatchNorm1d):
    """
    Batch norm over the real tokens of a batch (Ioffe and Szegedy, 2015), in at least float32. Each process of a
    distributed run normalizes by its own batch; DDP broadcasts the running averages of the first one.

    With `renormalizes` it is batch renormalization (Ioffe, 2017, algorithm 1): the output is that of the running
    averages in training too, up to a factor of 3 and 5 deviations. Gradients flow through the batch's statistics.
    """

    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def __init__(self, num_features: int, renormalizes: bool = False):
        super().__init__(num_features)
        self.renormalizes = renormalizes
        self.num_batches_tracked = None

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)  # torch's own adds a count of batches to files without a version

    def initialize(self, start: Initialization) -> None:
        init.ones_(self.weight)
        init.zeros_(self.bias)
        init.zeros_(self.running_mean)
        init.ones_(self.running_var)

    def forward(self, states: Tensor, attention_mask: Mask = None) -> Tensor:
        """Normalize states `(batch_size, length, num_features)`; mask `(batch_size, length)`, 1 keeps."""
        wide = states.to(wide_type(states.dtype))
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            return ((wide - self.running_mean) * scale + self.bias).to(states.dtype)
        real = wide.new_ones(wide.shape[:2]) if attention_mask is None else attention_mask.to(wide.dtype)
        real, count = real[:, :, None], real.sum().clamp(min=1)
        mean = (wide * real).sum(dim=(0, 1)) / count
        centred = wide - mean
        var = (centred * real).square().sum(dim=(0, 1)) / count
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift: Tensor = self.bias
        if self.renormalizes:
            running = torch.rsqrt(self.running_var + self.eps)
            offset = ((mean.detach() - self.running_mean) * running).clamp(-5, 5)
            scale = scale * ((var.detach() + self.eps).sqrt() * running).clamp(1 / 3, 3)
            shift = shift + self.weight * offset
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return (centred * scale + shift).to(states.dtype)


class RelationConvolutions(nn.Module):
    """`c_i = leaky_relu(BN(W [x_{i-(k-1)/2}; ..; x_{i+(k-1)/2}] + b))`, Eq. 7, zeros outside the sentence."""

    def __init__(self, config: RNMTConfig):
        super().__init__()
        self.is_parallel = config.relation_conv_mode == "parallel"
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        width = config.d_model
        for kernel, channels in zip(config.relation_conv_kernels, config.relation_conv_channels, strict=True):
            self.convolutions.append(nn.Conv1d(width, channels, kernel, padding=kernel // 2))
            norm = MaskedBatchNorm(channels, renormalizes=config.relation_batch_norm == "renormalized")
            self.norms.append(norm if config.relation_batch_norm else nn.Identity())
            width = config.d_model if self.is_parallel else channels

    @staticmethod
    def width(config: RNMTConfig) -> int:
        """Return f, the channels of the output."""
        channels = config.relation_conv_channels
        return sum(channels) if config.relation_conv_mode == "parallel" else channels[-1]

    def forward(self, states: Tensor, attention_mask: Mask) -> Tensor:
        """Map left-aligned states `(batch_size, length, d_model)` to `(batch_size, length, f)`."""
        outputs = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            masked = states if attention_mask is None else states.masked_fill(attention_mask[:, :, None] == 0, 0.0)
            output = convolution(masked.transpose(1, 2)).transpose(1, 2)
            if not isinstance(norm, nn.Identity):
                output = norm(output, attention_mask)
            output = nn.functional.leaky_relu(output, SLOPE)
            outputs.append(output)
            states = states if self.is_parallel else output
        return torch.cat(outputs, dim=-1) if self.is_parallel else outputs[-1]


class RelationPropagation(GradientCheckpointingLayer):
    """
    Graph propagation and the perceptron after it (Eqs. 8-10):

        r_ij = MLP([c_i; c_j]),   r_i = 1/l sum_j r_ij,   o_i = MLP'(r_i)       j over real tokens, i among them

    Pairs run as [`all_pairs`], or as [`all_pairs_reference`].
    """

    read_layers: tuple[str, ...] = ("pair_layers",)  # `quantize_model` spares them

    def __init__(self, config: RNMTConfig):
        super().__init__()
        width, hidden = 2 * RelationConvolutions.width(config), config.relation_hidden_size
        sizes = [width, *[hidden] * config.relation_gp_layers]
        self.pair_layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
        sizes = [*[hidden] * config.relation_mlp_layers, config.d_model]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])

    def forward(
        self, features: Tensor, attention_mask: Mask, output_scores: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Map c `(batch_size, length, f)` to o; return with it, for `output_scores`, the lengths of r_ij."""
        fast = allowed() and not output_scores and all(is_plain(layer, nn.Linear) for layer in self.pair_layers)
        if fast:
            states, scores = all_pairs(self.pair_layers, features, attention_mask), None
        else:
            states, scores = all_pairs_reference(self.pair_layers, features, attention_mask)
        for layer in self.layers:
            states = nn.functional.leaky_relu(layer(states), SLOPE)
        return states, scores if output_scores else None


def all_pairs_reference(layers: nn.ModuleList, features: Tensor, attention_mask: Mask) -> tuple[Tensor, Tensor]:
    """Return r_i of Eq. 9 `(batch_size, length, m)`, and the length of each r_ij, as in the equations."""
    length = features.shape[1]
    pairs = torch.cat(
        [features[:, :, None].expand(-1, -1, length, -1), features[:, None].expand(-1, length, -1, -1)], dim=-1
    )
    for layer in layers:
        pairs = nn.functional.leaky_relu(layer(pairs), SLOPE)
    if attention_mask is not None:
        real = attention_mask != 0
        pairs = pairs.masked_fill(~(real[:, :, None] & real[:, None, :])[..., None], 0.0)
    counted, count = counted_pairs(pairs[:, 0], attention_mask)
    return (pairs * counted[:, None, :, None]).sum(dim=2) / count.to(pairs.dtype), pairs.norm(dim=-1)


class RelationLayer(nn.Module):
    """The relation-network layer: CNN, graph propagation, perceptron (Eqs. 7-10)."""

    def __init__(self, config: RNMTConfig):
        super().__init__()
        # Not in the checkpointed module: a second forward pass would count a batch twice in the norms.
        self.convolutions = RelationConvolutions(config)
        self.propagation = RelationPropagation(config)

    def forward(
        self, states: Tensor, mask: Mask, view: "InputOrder", output_attentions: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map left-aligned states; return with them the scores of [`RNMTEncoderOutput`], or `None`."""
        features = self.convolutions(states, mask)
        states, scores = self.propagation(features, mask, output_attentions)
        return states, None if scores is None else view.restore_pairs(scores)


class RNMTRecurrentLayer(GradientCheckpointingLayer):
    """A layer over left-aligned sentences: `"concat"` is `[forward; backward]` (Eq. 1), `"stacked"` one of them."""

    def __init__(self, input_size: int, hidden_size: int, layout: str, is_backward: bool):
        super().__init__()
        self.is_mirrored = layout == "stacked" and is_backward
        self.rnn = MaskedRNN("gru", input_size, hidden_size, bidirectional=layout == "concat")

    def forward(self, states: Tensor, attention_mask: Mask) -> Tensor:
        """Map `(batch_size, length, input_size)` to `(batch_size, length, hidden_size or 2 * hidden_size)`."""
        if not self.is_mirrored:
            return self.rnn(states, attention_mask)[0]
        if attention_mask is None:
            return self.rnn(states.flip(1), None)[0].flip(1)
        mirror = reversed_order((attention_mask != 0).sum(dim=1), states.shape[1])
        return take(self.rnn(take(states, mirror), attention_mask)[0], mirror)


class InputOrder:
    """Converts between the order of the input and left-aligned tokens, whose mask this is; no `order`: all are real."""

    def __init__(self, order: Tensor | None, attention_mask: Mask):
        self.back = None if order is None else inverse(order)
        self.padding: Any = None if attention_mask is None else attention_mask[:, :, None] == 0

    def restore(self, states: Tensor) -> Tensor:
        """Put left-aligned states `(batch_size, length, d)` into the order of the input, zero at padding."""
        return states if self.back is None else take(states.masked_fill(self.padding, 0.0), self.back)

    def restore_pairs(self, scores: Tensor) -> Tensor:
        """Put both axes of `(batch_size, length, length)` into the order of the input."""
        if self.back is None:
            return scores
        return take(take(scores, self.back).transpose(1, 2), self.back).transpose(1, 2)


class RNMTPreTrainedModel(Seq2SeqPreTrainedModel):
    """Base class of the RNMT models: configuration, initialization and loading."""

    config: RNMTConfig
    # Not the whole relation layer: sharding may checkpoint a module that it wraps, and norms must see a batch once.
    _no_split_modules = ["RNMTRecurrentLayer", "RelationPropagation"]
    # Additive attention has no dot products for these kernels.
    _supports_flash_attn = False
    _supports_flex_attn = False

    @property
    def initialization(self) -> Initialization:
        return Initialization(self.config.d_model, self.config.init_std, self.config.init_uniform)


class RNMTEncoder(RNMTPreTrainedModel, Seq2SeqEncoder):
    """
    Recurrent layers and relation layers in turn, with residual and dense connections; usable alone through
    `get_encoder()`. With e the embeddings and h_in^1 = e (Eqs. 11-12):

        h^l = h_in^l + layer_l(h_in^l),   h_in^{l+1} = W^l [e; h^1; ..; h^l] + b^l,   annotations h_in^{L+1}
    """

    output_class = RNMTEncoderOutput
    _can_record_outputs = {"relation_scores": OutputRecorder(RelationLayer, index=1)}

    def __init__(self, config: RNMTConfig):
        super().__init__(config)
        self.layers = nn.ModuleList()
        self.relation_layers = nn.ModuleList()
        width = config.d_model
        for index in range(config.encoder_layers):
            self.layers.append(self.build_layer(config, index, width))
            width = config.annotation_size
            if index < config.relation_layers:
                self.relation_layers.append(RelationLayer(config))
        self.is_residual = config.connects_layers and config.relation_residual
        self.dense_maps = None
        if config.connects_layers and config.relation_dense_connection:
            total = config.encoder_layers + config.relation_layers
            below = 1 if config.relation_dense_include_embeddings else 0
            self.dense_maps = nn.ModuleList(
                [nn.Linear((below + count) * config.d_model, config.d_model) for count in range(1, total + 1)]
            )
        self.post_init()

    def build_layer(self, config: Any, index: int, input_size: int) -> nn.Module:
        """Return the layer with this index; it maps left-aligned states of this width and their mask."""
        layout = config.encoder_rnn_layout
        return RNMTRecurrentLayer(input_size, config.d_model, layout, is_backward=index % 2 == 1)

    def run(self, hidden_states: Tensor, token_mask: Mask, **kwargs: Any) -> list[Tensor]:
        """Run all layers; `output_hidden_states` adds e and each h_in before the annotations, in the input's order."""
        states, order = hidden_states, None
        if token_mask is not None:
            # Real tokens first: directions are reversed within a sentence, and convolutions see no gap.
            order = left_aligned(token_mask)
            token_mask = token_mask.gather(1, order)
            states = take(states, order).masked_fill(token_mask[:, :, None] == 0, 0.0)
        view = InputOrder(order, token_mask)
        records_all = records_states(kwargs.get("output_hidden_states", self.config.output_hidden_states))
        recorded: list[Tensor] = []

        def record(states: Tensor) -> Tensor:
            if not records_all:
                return states
            recorded.append(view.restore(states))
            # So that gradients reach the recorded states.
            return recorded[-1] if order is None else take(recorded[-1], order)

        states = record(states)
        below = [states] if self.config.relation_dense_include_embeddings else []
        for index, layer in enumerate(self.layers):
            states = self.connect(states, layer(states, token_mask), below)
            if index < len(self.relation_layers):
                states = record(states)
                output, _ = self.relation_layers[index](states, token_mask, view, **kwargs)
                states = self.connect(states, output, below)
            states = record(self.drop(states, index))
        return recorded if records_all else [view.restore(states)]

    def drop(self, states: Tensor, index: int) -> Tensor:
        """Apply dropout to the states after the recurrent layer with this index and its relation layer."""
        return dropout(states, self.config.dropout, self.training)

    def connect(self, inputs: Tensor, output: Tensor, below: list[Tensor]) -> Tensor:
        """Return the next layer's input from a layer's input and output; append h^l to `below`."""
        if self.is_residual:
            output = inputs + output
        if self.dense_maps is None:
            return output
        below.append(output)
        index = len(below) - 1 - int(self.config.relation_dense_include_embeddings)
        return self.dense_maps[index](torch.cat(below, dim=-1))


class ReadOut(nn.Module):
    """`t_j = maxout(W_s s_j + W_y y_{j-1} + W_c a_j + b)` of pairs of channels (Goodfellow et al., 2013), or `tanh`."""

    def __init__(self, config: RNMTConfig):
        super().__init__()
        self.is_maxout = config.readout == "maxout"
        self.dropout = config.readout_dropout
        self.size = (2 if self.is_maxout else 1) * config.d_model
        self.state_proj = nn.Linear(config.d_model, self.size)
        self.word_proj = nn.Linear(config.d_model, self.size, bias=False)
        self.context_proj = nn.Linear(config.annotation_size, self.size, bias=False)

    def forward(self, states: Tensor, words: Tensor, contexts: Tensor) -> Tensor:
        """Return t_j from s_j and y_{j-1} `(batch_size, target_length, d_model)` and W_c a_j `(.., size)`."""
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

    The steps run as [`run_steps`] on projected annotations, or as [`run_steps_reference`].
    """

    context_cell_class: type[nn.GRUCell] = nn.GRUCell
    read_layers: tuple[str, ...] = ("attention.q_proj", "attention.k_proj", "attention.score", "readout.context_proj")

    def __init__(self, config: RNMTConfig):
        super().__init__()
        width, annotation = config.d_model, config.annotation_size
        self.is_conditional = config.decoder_type == "conditional_gru"
        self.attention = AdditiveAttention(width, annotation, width)
        if self.is_conditional:
            self.word_cell = nn.GRUCell(width, width)
        size = annotation if self.is_conditional else width + annotation
        self.context_cell = self.context_cell_class(size, width)
        self.readout = ReadOut(config)
        self.step_layers: Any = None  # of a quantized copy: matmuls of its steps, by name

    def is_fast(self) -> bool:
        """Return whether all parameters may be read instead of calling their modules."""
        own: list[Any] = [(self.attention, AdditiveAttention), (self.context_cell, self.context_cell_class)]
        own += [(self.word_cell, nn.GRUCell)] if self.is_conditional else []
        layers = ((self.get_submodule(name), nn.Linear) for name in self.read_layers)
        return allowed() and all(is_plain(module, kind) for module, kind in (*own, *layers))

    def project_memory(self, annotations: Tensor) -> tuple[Tensor, Tensor]:
        """Return for all steps keys `U h_i + b`, and as values the gates' `W h_i` beside the read-out's `W_c h_i`."""
        if self.step_layers is not None:
            keys, values = (project(self.step_layers[name], annotations) for name in ("source_keys", "source_values"))
        else:
            keys = project(self.attention.k_proj, annotations)
            gates = fast_linear(annotations, self.context_cell.weight_ih[:, -annotations.shape[-1] :])
            values = torch.cat([gates, project(self.readout.context_proj, annotations)], -1)
        # Under autocast the steps read them in the parameters' type.
        dtype = self.context_cell.weight_hh.dtype
        return keys[:, None].to(dtype), values[:, None].to(dtype)

    def forward(
        self, words: Tensor, keys: Tensor, values: Tensor | None, visible: Mask, state: Tensor, token_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Run over words y_{j-1} `(batch_size, target_length, d_model)`; `token_mask` 0 leaves the state unchanged. `keys`
        and `values` are those of [`project_memory`], or the annotations and `None`. Return states, attention weights
        `(batch_size, 1, target_length, source_length)` and read-out.
        """
        if values is None:
            states, weights, contexts, *_ = run_steps_reference(self, words, keys, visible, state, token_mask)
            return states, weights, self.readout(states, words, self.readout.context_proj(contexts))
        width = state.shape[-1]
        gate_values, readout_values = values[:, 0, :, : 3 * width], values[:, 0, :, 3 * width :]
        states, weights = run_steps(self, words, keys[:, 0], gate_values, visible, state, token_mask)
        # The read-out of all steps at once, from weights in rows of their source.
        grouped = weights[:, 0].reshape(keys.shape[0], -1, keys.shape[2])
        contexts = torch.matmul(grouped.to(values.dtype), readout_values).view(*words.shape[:2], -1)
        return states, weights, self.readout(states, words, contexts)

    def further_part(
        self, j: int, query: Tensor, word: Tensor, context: Tensor, *further: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return further inputs of the second GRU at step j, and further results of the step, for a variant."""
        return (), ()


def run_steps_reference(
    recurrence: DecoderRecurrence,
    words: Tensor,
    annotations: Tensor,
    visible: Mask,
    state: Tensor,
    token_mask: Mask,
    *further: Tensor | None,
) -> tuple[Tensor, ...]:
    """Run the steps as in the equations; return states, attention weights, contexts and results of `further_part`."""
    group = words.shape[0] // annotations.shape[0]
    annotations = annotations.repeat_interleave(group, dim=0)
    visible = None if visible is None else visible[:, 0].repeat_interleave(group, dim=0)
    results: list[tuple[Tensor, ...]] = []
    for j in range(words.shape[1]):
        word, query = words[:, j], state
        if recurrence.is_conditional:
            query = recurrence.word_cell(word, state)
        context, weight = recurrence.attention(query, annotations, visible)
        inputs = context if recurrence.is_conditional else torch.cat([word, context], dim=-1)
        more_inputs, more_results = recurrence.further_part(j, query, word, context, *further)
        new = recurrence.context_cell(inputs, query, *more_inputs)
        state = new if token_mask is None else torch.where(token_mask[:, j, None] != 0, new, state)
        results.append((state, weight, context, *more_results))
    states, weights, *others = (torch.stack(column, 1) for column in zip(*results, strict=True))
    return states, weights[:, None], *others


class RNMTDecoder(RNMTPreTrainedModel, Seq2SeqDecoder):
    """
    Recurrent decoder with additive attention; the cache stores its state.

    `last_hidden_state` is the read-out t_j, the input of the output matrix; `hidden_states` are the embeddings y_{j-1},
    the states s_j and the read-out; `cross_attentions` has the shape `(batch_size, 1, target_length, source_length)`.
    """

    recurrence_class: type[DecoderRecurrence] = DecoderRecurrence
    _can_record_outputs = {"cross_attentions": OutputRecorder(DecoderRecurrence, index=1)}

    def __init__(self, config: RNMTConfig):
        super().__init__(config)
        self.initial_state = nn.Linear(config.annotation_size, config.d_model)
        self.recurrence = self.recurrence_class(config)
        self.post_init()

    def source_attention(self, layer: int) -> nn.Module:
        return self.recurrence

    def prepare_mask(self, states: Tensor, token_mask: Mask) -> Tensor | None:
        return None if token_mask is None else (token_mask != 0)[:, None]

    def run(  # type: ignore[override]  # no kernel mask
        self, words: Tensor, _: Any, token_mask: Mask, memories: Memories, cache: Cache | None, **kwargs: Any
    ) -> list[Tensor]:
        memory, project_memory = memories["encoder"], self.recurrence.project_memory
        return [words, *self.advance(words, token_mask, memory, cache, project_memory, cache)]

    def advance(
        self,
        words: Tensor,
        token_mask: Mask,
        memory: Memory,
        cache: Cache | None,
        project_memory: Callable[[Tensor], tuple[Tensor, Tensor]],
        projections: Cache | None,
        *further: Tensor | None,
    ) -> tuple[Any, ...]:
        """
        Run the recurrence over new words from the state in the cache, which stores the new one; `projections` keeps
        what `project_memory` returns. Return states, read-out, and the further results of the recurrence.
        """
        layer, rows = recurrent_layer(cache), words.shape[0]
        state = None if layer is None else layer.get_state()
        if state is None:  # s_0 = tanh(W_init mean_i h_i + b)
            state = torch.tanh(self.initial_state(masked_mean(memory.states, memory.token_mask)))
            state = spread_over_beams(state, rows)
        keys, values, visible = memory.states, None, memory.kernel_mask
        if self.recurrence.is_fast():
            keys, values, visible = read_source_memory("encoder", 0, project_memory, keys, visible, projections, rows)
        if token_mask is not None:
            token_mask = token_mask[:, -words.shape[1] :]
        states, _, *results = self.recurrence(words, keys, values, visible, state, token_mask, *further)
        if layer is not None:
            layer.update_states(state=states)
        return states, *results


class RNMTModel(RNMTPreTrainedModel, Seq2SeqModelBase):
    """RNNsearch, RNNsearch* or RNMT without the output matrix (Zhang et al., 2018)."""

    encoder_class = RNMTEncoder
    decoder_class = RNMTDecoder


class RNMTForConditionalGeneration(RNMTPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    """RNNsearch, RNNsearch* or RNMT with its output matrix: `generate` translates, `labels` train."""

    model_class = RNMTModel


__all__ = ["RNMTForConditionalGeneration", "RNMTModel", "RNMTPreTrainedModel"]
