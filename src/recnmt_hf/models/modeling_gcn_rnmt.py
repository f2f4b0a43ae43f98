"""
Recurrent encoder-decoder with graph convolutions over the source's dependency tree (BiRNN+GCN; Bastings et al., 2017,
"Graph Convolutional Encoders for Syntax-aware Neural Machine Translation", EMNLP). The decoder is that of RNMT.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, utils
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from .configuration_gcn_rnmt import GCNRNMTConfig
from .kernels_cpu_matmuls import project
from .kernels_shared import Mask, allowed, dropout, wide_type
from .modeling_rnmt import RelationLayer, RNMTDecoder, RNMTEncoder, RNMTEncoderOutput, RNMTPreTrainedModel
from .recurrent_layers import take
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Initialization
from .seq2seq_stacks import TokenAndPositionInput


logger = utils.logging.get_logger(__name__)


@dataclass
class GCNRNMTEncoderOutput(RNMTEncoderOutput):
    """
    Output of the encoder.

    Args:
        edge_gates (tuple of `torch.Tensor` of shape `(batch_size, directions, source_length, K)`, *optional*):
            With `output_attentions=True`, trees and gates: for each graph-convolution layer the gates of the K edges to
            the heads of each word, 0 where there is no edge. The directions are `"in"` and `"out"`.
    """

    edge_gates: tuple[Tensor, ...] | None = None


class Edges(NamedTuple):
    """K edges of each word to its heads, all `(batch_size, source_length, K)`."""

    heads: Tensor  # positions, 0 where there is no edge
    relations: Tensor  # ids, 0 where there is no edge
    exists: Tensor

    @classmethod
    def from_columns(cls, heads: Tensor, relations: Tensor | None, token_mask: Mask) -> "Edges":
        """Return the edges within sentences; relations that are not given are the unknown one."""
        if heads.dim() == 2:
            heads = heads[:, :, None]
        relations = torch.zeros_like(heads) if relations is None else relations.view(heads.shape)
        exists = (heads >= 0) & (heads < heads.shape[1])
        heads = heads.masked_fill(~exists, 0).long()
        if token_mask is not None:
            real = token_mask != 0
            exists = exists & real[:, :, None] & real.gather(1, heads.flatten(1)).view(heads.shape)
            heads = heads.masked_fill(~exists, 0)
        return cls(heads, relations.masked_fill(~exists, 0).long(), exists)


class Messages(nn.Module):
    """Messages in one direction: `g_uv (W h_u + b_lab)` from u to v, with gates `g_uv = sigmoid(w . h_u + c_lab)`."""

    def __init__(self, width: int, biases: int, has_gates: bool, gate_bias: float | None = None):
        super().__init__()
        self.initial_gate_bias = gate_bias
        self.proj = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.empty(biases, width))
        self.gate_proj = self.gate_bias = None
        if has_gates:
            self.gate_proj = nn.Linear(width, 1, bias=False)
            self.gate_bias = nn.Parameter(torch.empty(biases))

    def initialize(self, start: Initialization) -> None:
        for parameter in self.parameters():
            init.normal_(parameter, std=0.01)
        if self.gate_bias is not None and self.initial_gate_bias is not None:
            init.constant_(self.gate_bias, self.initial_gate_bias)

    def forward(
        self, states: Tensor, edges: Edges | None = None, to_heads: bool = False, edge_dropout: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        """Return [`sum_messages`] and the gates of the edges, or without `edges` the words' messages to themselves."""
        wide = wide_type(states.dtype)
        own: Any = project(self.proj, states).to(wide) + self.bias if edges is None else None
        gates: Any = None if edges is None else edges.exists.to(wide)
        if self.gate_proj is not None and self.gate_bias is not None:
            logits = self.gate_proj(states)[:, :, 0].to(wide)
            if edges is None:
                gates = torch.sigmoid(logits + self.gate_bias)
            else:
                # The sender decides: the dependent itself, or its head.
                heads = edges.heads.flatten(1)
                logits = logits[:, :, None] if to_heads else logits.gather(1, heads).view(gates.shape)
                bias = self.gate_bias if self.gate_bias.shape[0] == 1 else self.gate_bias[edges.relations]
                gates = torch.sigmoid(logits + bias) * gates
        if edges is None:
            return own if gates is None else gates[:, :, None] * own, None
        kept = dropout(gates, edge_dropout, self.training)
        return (sum_messages if allowed() else sum_messages_reference)(self, states, edges, kept, to_heads), gates


def sum_messages(messages: Messages, states: Tensor, edges: Edges, gates: Tensor, to_heads: bool) -> Tensor:
    """
    Return `sum_u g_uv (W h_u + b_lab)` `(batch_size, source_length, width)` over the edges from dependents to heads
    (`to_heads`) or from heads to dependents, in at least float32. States and biases are summed first, and then mapped:

        W (sum_u g_uv h_u) + sum_lab (sum_u g_uv) b_lab
    """
    (batch, length, count), relations = edges.heads.shape, messages.bias.shape[0]
    labels = edges.relations if relations > 1 else torch.zeros_like(edges.relations)
    wide = states.to(gates.dtype)
    if to_heads:
        sent = (gates[..., None] * wide[:, :, None]).flatten(1, 2)
        rows = edges.heads.flatten(1)[:, :, None].expand(-1, -1, wide.shape[-1])
        sums = torch.zeros_like(wide).scatter_add(1, rows, sent)
        weights = gates.new_zeros(batch, length * relations)
        weights = weights.scatter_add(1, (edges.heads * relations + labels).flatten(1), gates.flatten(1))
        weights = weights.view(batch, length, relations)
    else:
        sent = take(wide, edges.heads.flatten(1)).view(batch, length, count, -1)
        sums = (gates[..., None] * sent).sum(dim=2)
        weights = gates.new_zeros(batch, length, relations).scatter_add(2, labels, gates)
    mapped = project(messages.proj, sums.to(states.dtype)).to(gates.dtype)
    return mapped + torch.matmul(weights.to(states.dtype), messages.bias)


def sum_messages_reference(messages: Messages, states: Tensor, edges: Edges, gates: Tensor, to_heads: bool) -> Tensor:
    """Compute [`sum_messages`] with one message for each edge, as in the equations."""
    length, labels = states.shape[1], edges.relations
    biases = messages.bias[labels if messages.bias.shape[0] > 1 else torch.zeros_like(labels)]
    mapped = messages.proj(states)
    if not to_heads:
        senders = take(mapped, edges.heads.flatten(1)).view(*edges.heads.shape, -1)
        return (gates[..., None] * (senders + biases)).sum(dim=2)
    sent = gates[..., None] * (mapped[:, :, None] + biases)
    receives = edges.heads[:, None] == torch.arange(length, device=states.device)[None, :, None, None]
    return torch.einsum("bvuk,bukd->bvd", receives.to(sent.dtype), sent)


class GraphConvolution(GradientCheckpointingLayer):
    """
    A graph-convolution layer over dependency trees. The word v receives messages from its dependents (`"in"`), its head
    (`"out"`) and itself (`"loop"`), each direction with parameters of its own:

        h'_v = relu(sum_(u,v) g_uv (W h_u + b_lab)) [+ h_v]

    Messages are summed as [`sum_messages`], or as [`sum_messages_reference`].
    """

    def __init__(self, config: GCNRNMTConfig):
        super().__init__()
        width = config.annotation_size
        relations = config.num_relations if config.gcn_label_biases else 1
        self.is_residual = config.gcn_residual == "always" or (bool(config.gcn_residual) and config.gcn_layers > 1)
        self.edge_dropout, directions = config.gcn_edge_dropout, config.gcn_directions
        self.in_messages = Messages(width, relations, config.gcn_gates) if "in" in directions else None
        self.out_messages = Messages(width, relations, config.gcn_gates) if "out" in directions else None
        self.loop_messages = Messages(width, 1, config.gcn_gates, gate_bias=1.0) if "loop" in directions else None

    def forward(
        self, states: Tensor, edges: Edges | None, token_mask: Mask, output_attentions: bool = False, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map states `(batch_size, source_length, width)`, 0 at padding, to new ones, with the gates or `None`."""
        total = torch.zeros_like(states, dtype=wide_type(states.dtype))
        if self.loop_messages is not None:
            total = total + self.loop_messages(states)[0]
        recorded = []
        for messages, to_heads in ((self.in_messages, True), (self.out_messages, False)):
            if messages is not None and edges is not None:
                sums, gates = messages(states, edges, to_heads, self.edge_dropout)
                total = total + sums
                if messages.gate_proj is not None:
                    recorded.append(gates)
        outputs = torch.relu(total).to(states.dtype)
        if self.is_residual:
            outputs = states + outputs
        if token_mask is not None:
            outputs = outputs.masked_fill(token_mask[:, :, None] == 0, 0.0)
        return outputs, torch.stack(recorded, dim=1) if output_attentions and recorded else None


class ConvolutionLayer(GradientCheckpointingLayer):
    """A convolution over words with a residual connection, zeros outside the sentence (Gehring et al., 2017)."""

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, kernel_size, padding=kernel_size // 2)

    def forward(self, states: Tensor, attention_mask: Mask) -> Tensor:
        """Map left-aligned states `(batch_size, length, width)` to states of the same shape."""
        if attention_mask is not None:
            states = states.masked_fill(attention_mask[:, :, None] == 0, 0.0)
        return states + self.convolution(states.transpose(1, 2)).transpose(1, 2)


class BagOfWords(nn.Module):
    """The words themselves, in place of a layer that reads their neighbours."""

    def forward(self, states: Tensor, attention_mask: Mask) -> Tensor:
        return states


class GCNRNMTPreTrainedModel(RNMTPreTrainedModel):
    """Base class of the GCNRNMT models: configuration, initialization and loading."""

    config: GCNRNMTConfig
    _no_split_modules = ["RNMTRecurrentLayer", "RelationPropagation", "ConvolutionLayer", "GraphConvolution"]


class GCNRNMTEncoder(GCNRNMTPreTrainedModel, RNMTEncoder):
    """A recurrent, convolutional or bag-of-words encoder, and graph convolutions over its output."""

    output_class = GCNRNMTEncoderOutput
    source_inputs = ("dependency_heads", "dependency_relations")
    _can_record_outputs = {
        "relation_scores": OutputRecorder(RelationLayer, index=1),
        "edge_gates": OutputRecorder(GraphConvolution, index=1),
    }

    def __init__(self, config: GCNRNMTConfig):
        super().__init__(config)
        self.gcn_layers = nn.ModuleList([GraphConvolution(config) for _ in range(config.gcn_layers)])
        self.post_init()

    def build_input(self, config: Any) -> nn.Module:
        return TokenAndPositionInput(config, "learned" if config.encoder_type == "cnn" else "none")

    def build_layer(self, config: Any, index: int, input_size: int) -> nn.Module:
        if config.encoder_type == "cnn":
            return ConvolutionLayer(input_size, config.cnn_kernel_size)
        if config.encoder_type == "bow":
            return BagOfWords()
        return super().build_layer(config, index, input_size)

    def run(
        self,
        hidden_states: Tensor,
        token_mask: Mask,
        dependency_heads: Tensor | None = None,
        dependency_relations: Tensor | None = None,
        **kwargs: Any,
    ) -> list[Tensor]:
        states = super().run(hidden_states, token_mask, **kwargs)
        if not self.gcn_layers:
            return states
        edges = None
        if self.config.reads_trees and dependency_heads is not None:
            edges = Edges.from_columns(dependency_heads, dependency_relations, token_mask)
        elif self.config.reads_trees and not torch.compiler.is_compiling():
            logger.warning_once(
                "This model reads dependency trees, but dependency_heads is missing: it encodes sources without "
                "them. Pass dependency_heads and dependency_relations (recnmt: --source-trees)."
            )
        for layer in self.gcn_layers:
            output, _ = layer(states[-1], edges, token_mask, **kwargs)
            states.append(output)
        states[-1] = dropout(states[-1], self.config.gcn_dropout, self.training)
        return states

    def drop(self, states: Tensor, index: int) -> Tensor:
        # Where graph convolutions follow, dropout applies to their output.
        is_last = index == self.config.encoder_layers - 1
        return states if is_last and self.gcn_layers else super().drop(states, index)


class GCNRNMTModel(GCNRNMTPreTrainedModel, Seq2SeqModelBase):
    """BiRNN+GCN, CNN+GCN or BoW+GCN without the output matrix (Bastings et al., 2017)."""

    encoder_class = GCNRNMTEncoder
    decoder_class = RNMTDecoder


class GCNRNMTForConditionalGeneration(GCNRNMTPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    """
    BiRNN+GCN, CNN+GCN or BoW+GCN with its output matrix: `generate` translates, `labels` train. Both take the source's
    dependency trees; without them words receive messages from themselves alone.

    Args:
        dependency_heads (`torch.LongTensor` of shape `(batch_size, source_length)`, *optional*): Position of each
            token's head in the same row, or -1. Positions outside of the row or of padding are ignored. With a third
            dimension, a token has several heads.
        dependency_relations (`torch.LongTensor` of the same shape, *optional*): Ids of the edges' relations, from 0
            (unknown) to `num_relations - 1`.
    """

    model_class = GCNRNMTModel


__all__ = ["GCNRNMTForConditionalGeneration", "GCNRNMTModel", "GCNRNMTPreTrainedModel"]
