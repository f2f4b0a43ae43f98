"""
The Transformer with a recurrence encoder (Hao et al., 2019, "Modeling Recurrence for Transformer", NAACL).

A second encoder reads the word embeddings; the decoder attends to its states and to those of the Transformer encoder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention, eager_attention_forward
from .configuration_biarn_transformer import BiARNTransformerConfig
from .kernels_biarn_transformer import AbsorbingAttention, attentive_steps
from .kernels_cpu_matmuls import project
from .kernels_shared import Mask, allowed, dropout, is_exporting, is_plain, scan_steps
from .modeling_nmt_transformer import (
    NMTTransformerDecoder,
    NMTTransformerEncoder,
    NMTTransformerPreTrainedModel,
    build_decoder_attention,
)
from .recurrent_layers import MaskedRNN, MultiColumn, masked_mean, reversed_order, take
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_outputs import Memories, Seq2SeqDecoderOutput, Seq2SeqEncoderOutput
from .seq2seq_stacks import records_states
from .transformer_layers import TransformerDecoderLayer, TransformerSublayers


@dataclass
class BiARNTransformerEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of both encoders. T is the number of steps of an ARN, or the source length of an RNN.

    Args:
        last_hidden_state (`torch.Tensor` of shape `(batch_size, source_length, d_model)`):
            H_e, the memory of the Transformer encoder, or its input if `decoder_memory="recurrence"` removes it.
        recurrence_hidden_state (`torch.Tensor` of shape `(batch_size, T, d_model)`, *optional*):
            H_r, the memory of the recurrence encoder.
        recurrence_attention_mask (`torch.Tensor` of shape `(batch_size, T)`, *optional*):
            1 where H_r is real; `None` if H_r has no padding.
        recurrence_hidden_states (tuple of `torch.Tensor` of shape `(batch_size, T, d_model)`, *optional*):
            With `output_hidden_states=True`: H_1 to H_r, the output of each layer of the recurrence encoder.
        recurrence_attentions (tuple of `torch.Tensor`, *optional*):
            With `output_attentions=True` and an ARN: for each layer `(batch_size, directions, num_heads, T, length)`,
            the attention of each step to the words (above the first layer: to the steps below). The steps of the
            backward direction are numbered like its states, last one first.
    """

    memory_fields = {"recurrence": ("recurrence_hidden_state", "recurrence_attention_mask")}

    recurrence_hidden_state: Tensor | None = None
    recurrence_attention_mask: Tensor | None = None
    recurrence_hidden_states: tuple[Tensor, ...] | None = None
    recurrence_attentions: tuple[Tensor, ...] | None = None


@dataclass
class BiARNTransformerDecoderOutput(Seq2SeqDecoderOutput):
    """
    Output of the decoder, with `output_attentions=True`:

    Args:
        recurrence_cross_attentions (tuple of `torch.Tensor`, *optional*):
            `(batch_size, num_heads, target_length, T)` for each decoder layer that attends to H_r. With
            `decoder_memory="recurrence"` they replace the `cross_attentions`.
        fusion_gates (tuple of `torch.Tensor`, *optional*):
            With `fusion_type="gated_sum"`: lambda of Eq. 18 for each of these layers, `(batch_size, target_length,
            d_model or 1)`; 1 selects the Transformer encoder's side alone.
    """

    recurrence_cross_attentions: tuple[Tensor, ...] | None = None
    fusion_gates: tuple[Tensor, ...] | None = None


class InitialState(nn.Module):
    """The state before the first step, from the mean of the layer's real inputs: `tanh(W mean + b)`, the mean, or 0."""

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        self.kind = config.recurrence_initial_state
        self.hidden_size = config.recurrence_hidden_size
        self.linear = nn.Linear(config.d_model, self.hidden_size) if self.kind == "mean_linear" else None

    def forward(self, mean: Tensor) -> Tensor:
        """Map `mean` `(batch_size, d_model)` to a state `(batch_size, hidden_size)` of the same type."""
        if self.kind == "zeros":
            return mean.new_zeros(mean.shape[0], self.hidden_size)
        return mean if self.linear is None else torch.tanh(self.linear(mean)).to(mean.dtype)


class Recurrence(nn.Module):
    """Base class of REC (Eq. 8): one direction, or two with parameters of their own, combined as `W_p [f; b] + b_p`."""

    # Returns the states `(batch_size, T, directions * hidden_size)`, their mask and the attentions.
    run: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        directions, width = config.recurrence_directions, config.recurrence_hidden_size
        self.initial_states = nn.ModuleList([InitialState(config) for _ in range(directions)])
        has_other_width = directions == 2 or width != config.d_model
        projected = config.recurrence_direction_combination == "project" and has_other_width
        self.out_proj = nn.Linear(directions * width, config.d_model) if projected else nn.Identity()

    def forward(
        self, inputs: Tensor, attention_mask: Mask, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """
        Map inputs `(batch_size, length, d_model)` to states `(batch_size, T, d_model)`, their mask or `None`, and the
        attentions `(batch_size, directions, num_heads, T, length)` or `None`.
        """
        mean = masked_mean(inputs, attention_mask)
        initial_states = [make_state(mean) for make_state in self.initial_states]
        states, mask, attentions = self.run(inputs, attention_mask, initial_states, output_attentions)
        return project(self.out_proj, states), mask, attentions


class WordRecurrence(Recurrence):
    """A recurrent network over the words (Eqs. 9-11): `f_j = GRU(x_j, f_{j-1})`, `b_j = GRU(x_j, b_{j+1})`."""

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        bidirectional = config.recurrence_directions == 2
        self.rnn = MaskedRNN(config.recurrence_cell, config.d_model, config.recurrence_hidden_size, bidirectional)

    def run(
        self, inputs: Tensor, attention_mask: Mask, initial_states: list[Tensor], output_attentions: bool
    ) -> tuple[Tensor, Tensor | None, None]:
        states, _ = self.rnn(inputs, attention_mask, (*initial_states, None)[:2])
        return states, attention_mask, None


class AttentiveRecurrentDirection(nn.Module):
    """A direction of an ARN, and one step of it: `c_t = ATT(h_{t-1}, x)`, `h_t = GRU(c_t, h_{t-1})` (Eqs. 12-13)."""

    read_layers: tuple[str, ...] = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj")

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        width, heads, dropout = config.recurrence_hidden_size, config.encoder_attention_heads, config.attention_dropout
        self.attn = MultiHeadAttention(config, config.d_model, heads, dropout, query_dim=width, memory="source")
        self.is_lstm = config.recurrence_cell == "lstm"
        self.cell_class = nn.LSTMCell if self.is_lstm else nn.GRUCell
        self.cell = self.cell_class(config.d_model, width)

    def forward(self, state: tuple[Tensor, ...], inputs: Tensor, mask: Mask) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the next state, h and for an LSTM c, and the attention `(batch_size, num_heads, length)`."""
        attn = self.attn
        query = attn.split_heads(attn.q_proj(state[0][:, None]))
        keys, values = attn.project_memory(inputs)
        probability = attn.dropout if attn.training else 0.0
        context, weights = eager_attention_forward(attn, query, keys, values, mask, attn.scaling, probability)
        context = attn.out_proj(context.flatten(2))[:, 0]
        next_state = self.cell(context, state) if self.is_lstm else (self.cell(context, state[0]),)
        return next_state, weights[:, :, 0]

    def is_plain(self) -> bool:
        """Return whether all parameters may be read instead of calling their modules."""
        own = (self, AttentiveRecurrentDirection), (self.attn, MultiHeadAttention), (self.cell, self.cell_class)
        layers = ((self.get_submodule(name), nn.Linear) for name in self.read_layers)
        return all(is_plain(module, kind) for module, kind in (*own, *layers))


class AttentiveRecurrence(Recurrence):
    """
    The attentive recurrent network (ARN): T steps of attention to all words, driven by its own state; the backward
    direction of a BiARN numbers its steps T, .., 1. They run as [`attentive_steps`] or [`attentive_steps_reference`].
    """

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        self.steps = config.recurrence_steps
        count = config.recurrence_directions
        self.directions = nn.ModuleList([AttentiveRecurrentDirection(config) for _ in range(count)])

    def run(
        self, inputs: Tensor, attention_mask: Mask, initial_states: list[Tensor], output_attentions: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        layers: Any = self.directions
        fast = allowed() and all(direction.is_plain() for direction in layers)
        fast = fast and not (self.steps is None and is_exporting())  # its loop has a fixed number of steps
        run_steps = attentive_steps if fast else attentive_steps_reference
        states, attentions = run_steps(layers, inputs, attention_mask, initial_states, self.steps)
        # T = length: steps beyond the length of a sentence are masked, and numbered from the end of the sentence.
        mask = order = None
        if self.steps is None and attention_mask is not None:
            steps, lengths = inputs.shape[1], (attention_mask != 0).sum(dim=1)
            mask = (torch.arange(steps, device=inputs.device)[None, :] < lengths[:, None]).to(attention_mask.dtype)
            order = reversed_order(lengths, steps)
        directions = list(states)
        if len(directions) == 2:
            directions[1] = states[1].flip(1) if order is None else take(states[1], order)
        joined = torch.cat(directions, dim=-1)
        if mask is not None:
            joined = joined.masked_fill(mask[:, :, None] == 0, 0.0)
        if not output_attentions:
            return joined, mask, None
        forward, *backward = attentions.movedim(0, 3)  # (B, H, T, J)
        weights = [forward]
        for each in backward:
            index = None if order is None else order[:, None, :, None].expand_as(each)
            weights.append(each.flip(2) if index is None else each.gather(2, index))
        return joined, mask, torch.stack(weights, dim=1)


def attentive_steps_reference(
    directions: Sequence[AttentiveRecurrentDirection],
    inputs: Tensor,
    attention_mask: Mask,
    initial_states: Sequence[Tensor],
    steps: int | None,
) -> tuple[Tensor, Tensor]:
    """
    Run T `steps` of an ARN as in the equations, or one for each word, one direction after the other. Return states
    `(directions, batch_size, T, hidden_size)` and attentions `(T, directions, batch_size, num_heads, length)`.
    """
    mask = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
    all_states, all_attentions = [], []
    for direction, initial in zip(directions, initial_states, strict=True):

        def step(state: Sequence[Tensor], _: Tensor, direction: AttentiveRecurrentDirection = direction) -> Any:
            state, weights = direction(tuple(state), inputs, mask)
            return state, (state[0], weights)

        state = (initial, torch.zeros_like(initial)) if direction.is_lstm else (initial,)
        states, attentions = scan_steps(step, state, inputs.new_zeros(inputs.shape[1] if steps is None else steps))
        all_states.append(states.transpose(0, 1))
        all_attentions.append(attentions)
    return torch.stack(all_states), torch.stack(all_attentions, dim=1)


class RecurrenceEncoderLayer(TransformerSublayers):
    """
    A layer of the recurrence encoder (Eqs. 7-8):

        C_n = LN(Drop(REC(H_{n-1})) + H_{n-1}),   H_n = LN(Drop(FFN(C_n)) + C_n)

    The first layer has no residual connection around REC, whose T states are not those of the J words.
    """

    def __init__(self, config: BiARNTransformerConfig, is_first: bool):
        super().__init__(config, config.encoder_ffn_dim)
        self.is_first = is_first
        attentive = config.recurrence_encoder_type in ("arn", "biarn")
        self.recurrence = (AttentiveRecurrence if attentive else WordRecurrence)(config)
        self.recurrence_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Mask = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return H_n `(batch_size, T, d_model)`, its mask, and the attentions; arguments as in [`Recurrence`]."""
        norm = self.recurrence_layer_norm
        inputs = self.prepare_input(hidden_states, norm)
        states, mask, attentions = self.recurrence(inputs, attention_mask, output_attentions)
        if self.is_first:
            states = dropout(states, self.dropout, self.training)
            states = states if self.normalize_before else norm(states)
        else:
            states = self.add_residual(states, hidden_states, norm)
        return self.feed_forward(states), mask, attentions


class RecurrenceEncoder(nn.Module):
    """Layers of [`RecurrenceEncoderLayer`]; pre-norm, with a norm after the last one."""

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__()
        count = config.recurrence_encoder_layers
        self.layers = nn.ModuleList([RecurrenceEncoderLayer(config, is_first=i == 0) for i in range(count)])
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None

    def forward(self, hidden_states: Tensor, attention_mask: Mask, output_attentions: bool) -> Any:
        """Return all layers' states and attentions, and the mask of the last one."""
        all_states, all_attentions = [], []
        for layer in self.layers:
            hidden_states, attention_mask, attentions = layer(hidden_states, attention_mask, output_attentions)
            all_states.append(hidden_states)
            all_attentions.append(attentions)
        if self.layer_norm is not None:
            all_states[-1] = self.layer_norm(hidden_states)
        return tuple(all_states), tuple(all_attentions), attention_mask


class BiARNTransformerPreTrainedModel(NMTTransformerPreTrainedModel):
    """Base class of the BiARNTransformer models: configuration, initialization and loading."""

    config: BiARNTransformerConfig
    _no_split_modules = [
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
        "RecurrenceFusionDecoderLayer",
        "RecurrenceEncoderLayer",
        "RecurrentEncoderLayer",
    ]


class BiARNTransformerEncoder(BiARNTransformerPreTrainedModel, NMTTransformerEncoder):
    """Transformer encoder and recurrence encoder on the same embeddings; usable alone through `get_encoder()`."""

    output_class = BiARNTransformerEncoderOutput
    _can_record_outputs = NMTTransformerEncoder._can_record_outputs

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        if config.decoder_memory == "recurrence" and config.recurrence_source == "embeddings":
            # The Transformer encoder is unused.
            self.layers, self.layer_norm = nn.ModuleList(), None
        self.multi_column = MultiColumn(config) if config.encoder_type == "multi_column" else None
        self.recurrence_encoder = RecurrenceEncoder(config) if config.recurrence_encoder_type is not None else None
        self.post_init()

    def finish(
        self, states: list[Tensor], embeddings: Tensor, token_mask: Mask, **kwargs: Any
    ) -> BiARNTransformerEncoderOutput:
        last = super().finish(states, embeddings, token_mask).last_hidden_state
        words = None
        if self.multi_column is not None or self.config.recurrence_source == "embeddings":
            positions = self.config.recurrence_position_embeddings
            words = self.embed_input(embeddings, token_mask, add_positions=positions)
        if self.multi_column is not None:
            last = self.multi_column(words, last, token_mask)
        if self.recurrence_encoder is None:
            return self.output_class(last_hidden_state=last)
        source = words if self.config.recurrence_source == "embeddings" else last
        output_attentions = bool(kwargs.get("output_attentions", self.config.output_attentions))
        recurrent, attentions, mask = self.recurrence_encoder(source, token_mask, output_attentions)
        output_states = records_states(kwargs.get("output_hidden_states", self.config.output_hidden_states))
        # Strict export loses values that are set on an object made before a loop of the graph.
        return self.output_class(
            last_hidden_state=last,
            recurrence_hidden_state=recurrent[-1],
            recurrence_attention_mask=mask,
            recurrence_hidden_states=recurrent if output_states else None,
            recurrence_attentions=None if attentions[0] is None else attentions,
        )


class FusionGate(nn.Module):
    """lambda = sigmoid(W [D; R] + b), Eq. 18: a weight for each channel or for each position."""

    def __init__(self, d_model: int, kind: str):
        super().__init__()
        self.linear = nn.Linear(2 * d_model, d_model if kind == "vector" else 1)

    def forward(self, attended: Tensor, recurrent: Tensor) -> Tensor:
        return torch.sigmoid(project(self.linear, torch.cat([attended, recurrent], dim=-1)))


class RecurrenceFusionDecoderLayer(TransformerDecoderLayer):
    """
    A decoder layer that also attends to H_r. With C the states after self-attention and D those after attention to H_e:

        stack      R = LN(Drop(ATT(D, H_r)) + D),   y = FFN sub-layer of R                           (Eqs. 14-15)
        gated sum  R = LN(Drop(ATT(C, H_r)) + C),   y = FFN sub-layer of lambda D + (1 - lambda) R   (Eqs. 16-19)
    """

    def __init__(self, config: BiARNTransformerConfig, self_attn: nn.Module, encoder_attn: nn.Module, layer_idx: int):
        super().__init__(config, self_attn, encoder_attn)
        sizes = (config.d_model, config.decoder_attention_heads, config.attention_dropout)
        self.recurrence_attn = AbsorbingAttention(config, *sizes, layer_idx=layer_idx, memory="recurrence")
        self.recurrence_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        gated = config.fusion_type == "gated_sum"
        self.fusion_gate = FusionGate(config.d_model, config.fusion_gate) if gated else None

    def fuse(
        self, own: Tensor, attended: Tensor, memories: Memories, keeps_recurrence: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Read H_r `(num_sources, T, d_model)`; `keeps_recurrence` `(batch_size, 1, 1)` is 0 where it is dropped."""
        norm, recurrence = self.recurrence_attn_layer_norm, memories["recurrence"]
        below = attended if self.fusion_gate is None else own
        queries = self.prepare_input(below, norm)
        output, _ = self.recurrence_attn(queries, recurrence.states, recurrence.kernel_mask, **kwargs)
        if self.fusion_gate is None:
            return self.add_residual(output if keeps_recurrence is None else output * keeps_recurrence, below, norm)
        recurrent = self.add_residual(output, below, norm)
        gate = self.fusion_gate(attended, recurrent)
        gate = gate if keeps_recurrence is None else 1 - keeps_recurrence * (1 - gate)
        return gate * attended + (1 - gate) * recurrent


class BiARNTransformerDecoder(BiARNTransformerPreTrainedModel, NMTTransformerDecoder):
    """Transformer decoder whose top layer, or every layer, also attends to the recurrence states."""

    output_class = BiARNTransformerDecoderOutput
    _can_record_outputs = {
        **NMTTransformerDecoder._can_record_outputs,
        "recurrence_cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="recurrence_attn"),
        "fusion_gates": OutputRecorder(FusionGate),
    }

    def __init__(self, config: BiARNTransformerConfig):
        super().__init__(config)
        if config.decoder_memory == "recurrence":
            self.attended = "recurrence_cross_attentions"
        self.post_init()

    def build_layer(self, config: Any, index: int) -> nn.Module:
        self_attn, encoder_attn = build_decoder_attention(config, index)
        fuses = config.recurrence_encoder_type is not None and config.decoder_memory == "both"
        if fuses and (config.fusion_layers == "all" or index == config.decoder_layers - 1):
            return RecurrenceFusionDecoderLayer(config, self_attn, encoder_attn, index)
        return TransformerDecoderLayer(config, self_attn, encoder_attn)

    def run(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
        config, rate = self.config, self.config.recurrence_memory_dropout
        fuses = config.recurrence_encoder_type is not None and config.decoder_memory == "both"
        if self.training and rate > 0 and fuses:
            draws = torch.rand(hidden_states.shape[0], 1, 1, device=hidden_states.device)
            kwargs["keeps_recurrence"] = (draws >= rate).to(hidden_states.dtype)
        return super().run(hidden_states, *args, **kwargs)


class BiARNTransformerModel(BiARNTransformerPreTrainedModel, Seq2SeqModelBase):
    """The Transformer with a recurrence encoder, without an output layer (Hao et al., 2019)."""

    encoder_class = BiARNTransformerEncoder
    decoder_class = BiARNTransformerDecoder

    def memories(self, encoder_outputs: Seq2SeqEncoderOutput, attention_mask: Mask) -> Memories:
        memories = super().memories(encoder_outputs, attention_mask)
        if self.config.decoder_memory == "recurrence":
            memories["encoder"] = memories["recurrence"]
            del memories["recurrence"]
        return memories


class BiARNTransformerForConditionalGeneration(
    BiARNTransformerPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin
):
    """The Transformer with a recurrence encoder and its output layer: `generate` translates, `labels` train."""

    model_class = BiARNTransformerModel


__all__ = ["BiARNTransformerForConditionalGeneration", "BiARNTransformerModel", "BiARNTransformerPreTrainedModel"]
