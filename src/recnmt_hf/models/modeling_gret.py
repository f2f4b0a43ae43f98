"""
The Transformer with a global representation of the source (Weng et al., 2020, "GRET: Global Representation Enhanced
Transformer", AAAI).

One vector per sentence is computed from all encoder layers and added, through a gate, to the decoder's last states.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import OutputRecorder

from .attention import softmax
from .configuration_gret import GRETConfig
from .decoder_cache import cached_vector
from .kernels_cpu_matmuls import project
from .kernels_gret import couplings, route, saves_votes, squash
from .kernels_shared import Mask, allowed, is_plain, wide_type
from .modeling_nmt_transformer import NMTTransformerDecoder, NMTTransformerEncoder, NMTTransformerPreTrainedModel
from .recurrent_layers import RecurrentLayer, masked_mean
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_outputs import Memories, Seq2SeqDecoderOutput, Seq2SeqEncoderOutput


@dataclass
class GRETEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of the encoder. Tuples have one entry for each summarized layer: all layers, or the top one.

    Args:
        global_hidden_state (`torch.Tensor` of shape `(batch_size, d_model)`, *optional*):
            s^M, the vector of the whole source.
        capsules (tuple of `torch.Tensor` of shape `(batch_size, num_capsules, capsule_dim)`, *optional*):
            With `output_attentions=True`: U of each layer.
        routing_weights (tuple of `torch.Tensor` of shape `(batch_size, num_capsules, source_length)`, *optional*):
            With `output_attentions=True`: the coupling of each capsule with each word in the last iteration.
        pooling_weights (tuple of `torch.Tensor` of shape `(batch_size, num_capsules)`, *optional*):
            With `output_attentions=True` and attentive pooling: a of Eq. 8.
    """

    memory_fields = {"global": ("global_hidden_state",)}

    global_hidden_state: Tensor | None = None
    capsules: tuple[Tensor, ...] | None = None
    routing_weights: tuple[Tensor, ...] | None = None
    pooling_weights: tuple[Tensor, ...] | None = None


@dataclass
class GRETDecoderOutput(Seq2SeqDecoderOutput):
    """
    Output of the decoder.

    Args:
        global_gates (tuple of `torch.Tensor` of shape `(batch_size, target_length, d_model or 1)`, *optional*):
            With `output_attentions=True`: g of Eq. 11; 1 adds the whole vector to a target word's state.
    """

    global_gates: tuple[Tensor, ...] | None = None


def route_reference(votes: Tensor, attention_mask: Mask, iterations: int, axis: str) -> tuple[Tensor, Tensor]:
    """
    Dynamic routing (algorithm 1) of votes v `(rows, capsules, length, capsule_dim)`, from `b_ki = 0`:

        c_k = softmax(b_k),   u_k = squash(sum_i c_ki v_ki),   b_ki += v_ki . u_k

    The softmax is over `axis` `"positions"` or `"capsules"`. Return the capsules `(rows, capsules, capsule_dim)` in at
    least float32, and the last couplings c `(rows, capsules, length)`.
    """
    visible = None if attention_mask is None else (attention_mask != 0)[:, None]
    logits = votes.new_zeros(votes.shape[:3], dtype=wide_type(votes.dtype))
    for step in range(iterations):
        coupling = couplings(logits, visible, axis)
        capsules = squash(torch.matmul(coupling[:, :, None].to(votes.dtype), votes)[:, :, 0])
        if step < iterations - 1:
            logits = logits + torch.matmul(votes, capsules.to(votes.dtype)[..., None])[..., 0]
    return capsules, coupling


class CapsuleLayer(nn.Module):
    """
    The capsules of any layer: votes `W_k h_i` (Eq. 2), and dynamic routing to K capsules. It runs as
    [`~.kernels_gret.route`], or with votes as [`route_reference`], for the shortest sentences too.
    """

    read_layers: tuple[str, ...] = ("capsule_proj",)  # `quantize_model` spares it

    def __init__(self, config: GRETConfig):
        super().__init__()
        self.num_capsules, self.capsule_dim = config.num_capsules, config.capsule_dim
        self.iterations, self.axis = config.routing_iterations, config.routing_softmax_axis
        self.matrices = 1 if config.capsule_projection == "shared" else config.num_capsules
        self.capsule_proj = nn.Linear(config.d_model, self.matrices * config.capsule_dim, bias=False)

    def forward(self, states: Tensor, attention_mask: Mask) -> tuple[Tensor, Tensor]:
        """Map states `(rows, length, d_model)` to capsules `(rows, num_capsules, capsule_dim)` and their couplings."""
        sizes, (length, width) = (self.matrices, self.capsule_dim), states.shape[1:]
        saves = torch.compiler.is_compiling()  # one graph for all lengths
        saves = saves or saves_votes(length, self.num_capsules, self.capsule_dim, width, self.iterations)
        if saves and allowed() and is_plain(self.capsule_proj, nn.Linear):
            weight = self.capsule_proj.weight.unflatten(0, sizes).expand(self.num_capsules, -1, -1)
            capsules, coupling = route(states, weight, attention_mask, self.iterations, self.axis)
        else:
            votes = project(self.capsule_proj, states).unflatten(-1, sizes).transpose(1, 2)
            votes = votes.expand(-1, self.num_capsules, -1, -1)
            capsules, coupling = route_reference(votes, attention_mask, self.iterations, self.axis)
        return capsules.to(states.dtype), coupling


class GlobalFeedForward(nn.Module):
    """`W2 relu(W1 x + b1) + b2`."""

    def __init__(self, input_size: int, inner_size: int, output_size: int):
        super().__init__()
        self.fc1 = nn.Linear(input_size, inner_size)
        self.fc2 = nn.Linear(inner_size, output_size)

    def forward(self, states: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(states)))


class CapsulePooling(nn.Module):
    """
    One vector of the capsules of a layer:

        attentive   s = FFN((1/K) sum_k u_k) (Eq. 9),   a_k = softmax_k(s . u_k) (Eq. 8),   FFN(sum_k a_k u_k) (Eq. 7)
        mean        FFN((1/K) sum_k u_k)
        concat      FFN([u_1; ..; u_K])
    """

    def __init__(self, config: GRETConfig):
        super().__init__()
        self.kind = config.capsule_pooling
        size, inner = config.capsule_dim, config.global_ffn_dim
        self.query = GlobalFeedForward(size, inner, size) if self.kind == "attentive" else None
        read = size * config.num_capsules if self.kind == "concat" else size
        self.output = GlobalFeedForward(read, inner, config.d_model)

    def forward(self, capsules: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map capsules `(rows, K, c)` to vectors `(rows, d_model)` and the weights a `(rows, K)` or `None`."""
        if self.query is None:
            return self.output(capsules.flatten(1) if self.kind == "concat" else capsules.mean(dim=1)), None
        query = self.query(capsules.mean(dim=1))
        weights = softmax(torch.matmul(capsules, query[:, :, None])[:, :, 0])
        return self.output(torch.matmul(weights[:, None].to(capsules.dtype), capsules)[:, 0]), weights


class GlobalEncoder(nn.Module):
    """
    The vector of a source sentence: each layer summarized by capsules or by the mean of its words, and a GRU from the
    lowest layer to the top one, `s^m = GRU(x^m, s^{m-1})` (Eq. 10), or the top layer's own vector.
    """

    def __init__(self, config: GRETConfig):
        super().__init__()
        count = config.encoder_layers if config.global_aggregation else 1
        self.capsules = CapsuleLayer(config) if config.global_capsule else None
        self.summaries = nn.ModuleList()  # empty: the mean itself
        for _ in range(count):
            if config.global_capsule:
                self.summaries.append(CapsulePooling(config))
            elif config.global_aggregation:
                self.summaries.append(GlobalFeedForward(config.d_model, config.global_ffn_dim, config.d_model))
        self.aggregation = RecurrentLayer("gru", config.d_model, config.d_model) if config.global_aggregation else None

    def forward(self, states: list[Tensor], attention_mask: Mask) -> tuple[Tensor, dict[str, Any]]:
        """Return s^M `(batch_size, d_model)` and the other fields of [`GRETEncoderOutput`] from all layers' states."""
        states = states if self.aggregation is not None else states[-1:]
        evidence: dict[str, Any] = {}
        if self.capsules is None:
            vectors = [masked_mean(layer, attention_mask) for layer in states]
            if self.aggregation is not None:
                vectors = [ffn(vector) for ffn, vector in zip(self.summaries, vectors, strict=True)]
        else:
            # All layers in one call: they have the same W.
            mask = None if attention_mask is None else attention_mask.repeat(len(states), 1)
            # By an operation that other engines support too.
            capsules, routing_weights = (
                tuple(values.unflatten(0, (len(states), -1))[layer] for layer in range(len(states)))
                for values in self.capsules(torch.cat(states), mask)
            )
            pooled = [pooling(layer) for pooling, layer in zip(self.summaries, capsules, strict=True)]
            vectors = [vector for vector, _ in pooled]
            evidence = {"capsules": capsules, "routing_weights": routing_weights}
            evidence["pooling_weights"] = tuple(weight for _, weight in pooled if weight is not None) or None
        if self.aggregation is None:
            return vectors[0], evidence
        return self.aggregation(torch.stack(vectors, dim=1))[:, -1], evidence


class GlobalGate(nn.Module):
    """`g = sigmoid(W [r; s] + b)` (Eq. 11), with a module for either half of W; `"sum"`: `sigmoid(W (r + s) + b)`."""

    def __init__(self, config: GRETConfig):
        super().__init__()
        size = 1 if config.global_gate_type == "scalar" else config.d_model
        self.source_proj = nn.Linear(config.d_model, size) if config.global_gate_type != "sum" else None
        self.state_proj = nn.Linear(config.d_model, size, bias=self.source_proj is None)

    def project_source(self, vector: Tensor) -> Tensor:
        """Project a sentence's vector for the gate, `(num_sources, d_model or 1)`."""
        return vector if self.source_proj is None else self.source_proj(vector)

    def forward(self, states: Tensor, source: Tensor) -> Tensor:
        """Return g from states `(batch_size, target_length, d_model)` and projected sources `(batch_size, 1, ..)`."""
        if self.source_proj is None:
            return torch.sigmoid(project(self.state_proj, states + source))
        return torch.sigmoid(project(self.state_proj, states) + source)


class GRETPreTrainedModel(NMTTransformerPreTrainedModel):
    """Base class of the GRET models: configuration, initialization and loading."""

    config: GRETConfig


class GRETEncoder(GRETPreTrainedModel, NMTTransformerEncoder):
    """Transformer encoder that also returns a vector of the whole source; usable alone through `get_encoder()`."""

    output_class = GRETEncoderOutput
    _can_record_outputs = NMTTransformerEncoder._can_record_outputs

    def __init__(self, config: GRETConfig):
        super().__init__(config)
        self.global_encoder = GlobalEncoder(config) if config.use_global_state else None
        self.post_init()

    def finish(self, states: list[Tensor], embeddings: Tensor, token_mask: Mask, **kwargs: Any) -> GRETEncoderOutput:
        outputs: Any = super().finish(states, embeddings, token_mask)
        if self.global_encoder is None:
            return outputs
        # Like the decoder, take the top layer's states after the last norm of a pre-norm Transformer.
        vector, evidence = self.global_encoder([*states[1:-1], outputs.last_hidden_state], token_mask)
        if not kwargs.get("output_attentions", self.config.output_attentions):
            evidence = {}
        # Strict export loses values that are set on an object made before a loop of the graph.
        return self.output_class(last_hidden_state=outputs.last_hidden_state, global_hidden_state=vector, **evidence)


class GRETDecoder(GRETPreTrainedModel, NMTTransformerDecoder):
    """Transformer decoder that adds the vector of the source to its last states, through a gate or unchanged."""

    output_class = GRETDecoderOutput
    _can_record_outputs = {**NMTTransformerDecoder._can_record_outputs, "global_gates": OutputRecorder(GlobalGate)}

    def __init__(self, config: GRETConfig):
        super().__init__(config)
        self.global_gate = GlobalGate(config) if config.use_global_state and config.global_gate else None
        self.post_init()

    def finish(self, states: list[Tensor], memories: Memories, cache: Cache | None) -> Tensor:
        """Return `r_j + g_j * s^M` (Eqs. 12-13), after the last layer and its norm."""
        last = super().finish(states, memories, cache)
        if not self.config.use_global_state:
            return last
        vector, gate, rows = memories["global"].states, self.global_gate, last.shape[0]
        if gate is None:
            return last + cached_vector(cache, "global", lambda: vector, rows)[:, None]
        cached = cached_vector(cache, "global", lambda: torch.cat([vector, gate.project_source(vector)], dim=-1), rows)
        cached, width = cached[:, None], vector.shape[-1]
        return torch.addcmul(last, gate(last, cached[..., width:]), cached[..., :width])


class GRETModel(GRETPreTrainedModel, Seq2SeqModelBase):
    """The Transformer with a global representation, without an output layer (Weng et al., 2020)."""

    encoder_class = GRETEncoder
    decoder_class = GRETDecoder


class GRETForConditionalGeneration(GRETPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    """The Transformer with a global representation and its output layer: `generate` translates, `labels` train."""

    model_class = GRETModel


__all__ = ["GRETForConditionalGeneration", "GRETModel", "GRETPreTrainedModel"]
