"""
The Transformer with recurrent positional embeddings (Chen et al., 2019, "Recurrent Positional Embedding for Neural
Machine Translation", EMNLP).

The input of each side is split by channels: one part of every word's embedding gets its position embedding as usual,
the other is the input of a recurrence, whose states represent the position of a word in its sentence. In the order of
the paper: recurrent positional embeddings (Eq. 6), RPEHead and MPRHead (Eqs. 7-11), and the projections of heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import OutputRecorder

from .configuration_rpe_transformer import RPETransformerConfig
from .kernels_cpu_matmuls import project
from .kernels_shared import dropout, graph_operator, is_plain, scan_steps
from .modeling_nmt_transformer import NMTTransformerDecoder, NMTTransformerEncoder, NMTTransformerPreTrainedModel
from .recurrent_layers import CachedRecurrence, MaskedRNN, RecurrentLayer, cell_shapes, cell_step
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Initialization, is_loaded
from .seq2seq_outputs import Seq2SeqDecoderOutput, Seq2SeqEncoderOutput
from .seq2seq_stacks import TokenAndPositionInput
from .simple_recurrent_unit import SimpleRecurrentUnit
from .transformer_layers import TransformerStack


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class RPETransformerEncoderOutput(Seq2SeqEncoderOutput):
    """
    Output of the encoder.

    Args:
        source_recurrent_positions (tuple of one `torch.Tensor` of shape `(batch_size, source_length, rpe_dim)`,
            *optional*): With `output_attentions=True`: R of Eq. 6, before dropout.
    """

    source_recurrent_positions: tuple[Tensor, ...] | None = None


@dataclass
class RPETransformerDecoderOutput(Seq2SeqDecoderOutput):
    """
    Output of the decoder.

    Args:
        target_recurrent_positions (tuple of one `torch.Tensor` of shape `(batch_size, target_length, rpe_dim)`,
            *optional*): With `output_attentions=True`: R of Eq. 6, before dropout.
    """

    target_recurrent_positions: tuple[Tensor, ...] | None = None


# -- recurrent positional embeddings (Eq. 6) ---------------------------------------------------------------------------


class ProjectedRecurrentLayer(RecurrentLayer):
    """
    Eq. 6 literally: `r_j = tanh(W_r RNN(x_j, r_{j-1}) + b_r)`, where r itself is carried to the next step and is
    the output; an LSTM also carries its memory.
    """

    read_layers: tuple[str, ...] = ("out_proj",)  # `quantize_model` spares it

    def __init__(self, cell: str, input_size: int, hidden_size: int):
        super().__init__(cell, input_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, inputs: Tensor, *initial: Tensor | None, with_all: bool = False) -> Any:
        states = self.steps(inputs, [state for state in initial if state is not None])
        return states if with_all else states[0]

    def run_steps(self, gates: Tensor, carry: list[Tensor]) -> list[Tensor]:
        recurrent = (self.weight_hh_l0, self.bias_hh_l0)
        if is_plain(self.out_proj, nn.Linear):
            return projected_states(gates, *recurrent, self.out_proj.weight, self.out_proj.bias, *carry, cell=self.cell)
        return run_projected_steps(self.cell, gates, recurrent, self.out_proj, carry)


def run_projected_steps(
    cell: str,
    gates: Tensor,
    recurrent: tuple[Tensor, Tensor],
    out_proj: Callable[[Tensor], Tensor],
    carry: Sequence[Tensor],
) -> list[Tensor]:
    """Run the steps of a [`ProjectedRecurrentLayer`] with its recurrent weight and bias."""

    def step(carry: Sequence[Tensor], gate: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        state, *rest = cell_step(cell, carry, gate, *recurrent)
        states = [torch.tanh(out_proj(state)), *rest]
        return states, states

    return scan_steps(step, carry, gates)


def projected_shapes(gates: Tensor, *tensors: Tensor, cell: str) -> Any:
    return cell_shapes(gates, *tensors[:2], *tensors[4:], cell=cell)


@graph_operator(projected_shapes)
def projected_states(gates: Tensor, *tensors: Tensor, cell: str) -> list[Tensor]:
    """Run [`run_projected_steps`] with recurrent weight and bias, those of the projection, and the carry."""
    weight, bias, out_weight, out_bias, *carry = tensors
    project_out = partial(nn.functional.linear, weight=out_weight, bias=out_bias)
    return run_projected_steps(cell, gates, (weight, bias), project_out, carry)


def build_cell(config: RPETransformerConfig) -> str | Callable[[int, int], Any]:
    """Return the cell for [`MaskedRNN`] and [`CachedRecurrence`]."""
    if config.rpe_recurrence == "projected":
        return partial(ProjectedRecurrentLayer, config.rpe_cell)
    return SimpleRecurrentUnit if config.rpe_cell == "sru" else config.rpe_cell


class RecurrentPositions(nn.Module):
    """
    Recurrent positional embeddings R of one side, from its share x^r of the words' embeddings (Eq. 6):

        source   f_j = RNN(x^r_j, f_{j-1}),  b_j = RNN(x^r_j, b_{j+1}),   r_j = tanh(W_r [f_j; b_j] + b_r)
        target   s_j = RNN(x^r_j, s_{j-1}),                               r_j = tanh(W_r s_j + b_r)

    With `rpe_recurrence="projected"` r_{j-1} replaces s_{j-1}, on both sides ([`ProjectedRecurrentLayer`]).
    """

    build_recurrence: Callable[..., nn.Module]

    def __init__(self, config: RPETransformerConfig):
        super().__init__()
        self.projected = config.rpe_recurrence == "projected"
        self.recurrence = self.build_recurrence(build_cell(config), config.rpe_dim)
        self.out_proj = None if self.projected else nn.Linear(config.rpe_dim, config.rpe_dim)

    def read_out(self, states: Tensor) -> Tensor:
        return states if self.out_proj is None else torch.tanh(project(self.out_proj, states))


class SourceRecurrentPositions(RecurrentPositions):
    """R of the source: two directions of half the width, unless r recurs."""

    def build_recurrence(self, cell: str | Callable[[int, int], Any], width: int) -> nn.Module:
        return MaskedRNN(cell, width, width if self.projected else width // 2, bidirectional=not self.projected)

    def forward(self, embeddings: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Map embeddings to R, both `(batch_size, source_length, rpe_dim)`."""
        return self.read_out(self.recurrence(embeddings, attention_mask)[0])


class TargetRecurrentPositions(RecurrentPositions):
    """R of the target, which continues from word to word: the cache stores its state."""

    def build_recurrence(self, cell: str | Callable[[int, int], Any], width: int) -> nn.Module:
        return CachedRecurrence(cell, width, width)

    def forward(self, embeddings: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Map new words' embeddings to R `(batch_size, target_length, rpe_dim)`; the mask includes earlier words."""
        return self.read_out(self.recurrence(embeddings, attention_mask, cache))


# -- RPEHead and MPRHead (Eqs. 7-11) -----------------------------------------------------------------------------------


class RecurrentPositionInput(TokenAndPositionInput):
    """
    The input of a stack from P (the first `d_model - rpe_dim` channels of the embeddings, plus positions of that width)
    and R (the recurrence over the other channels), instead of embeddings plus positions (Eqs. 7-11):

        RPEHead   T_j = [p_j; r_j]
        MPRHead   M_j = [p_j^1; r_j^1; ..; p_j^H; r_j^H], both cut into H equal slices

    `side` is `"encoder"` or `"decoder"`, and `positions` the class of [`RecurrentPositions`] of that side.
    """

    def __init__(self, config: RPETransformerConfig, side: str, positions: type[RecurrentPositions]):
        plain = config.d_model - config.rpe_dim
        has_positions = plain > 0 and getattr(config, f"{side}_position_embeddings")
        super().__init__(config, config.position_embedding_type if has_positions else "none", plain)
        self.sizes = (plain, config.rpe_dim)
        self.slices = getattr(config, f"{side}_attention_heads") if config.rpe_type == "mprhead" else 1
        self.recurrent_positions = positions(config) if config.has_recurrence(side) else None

    def forward(
        self,
        embeddings: Tensor,
        attention_mask: Tensor | None = None,
        offset: int | Tensor = 0,
        cache: Cache | None = None,
        add_positions: bool = True,
    ) -> Tensor:
        plain, recurrent = embeddings.split(self.sizes, dim=-1)
        if add_positions:
            plain = self.with_positions(plain, attention_mask, offset)
            if self.recurrent_positions is not None:
                recurrent = self.recurrent_positions(recurrent, attention_mask, cache)
        parts = [part.unflatten(-1, (self.slices, part.shape[-1] // self.slices)) for part in (plain, recurrent)]
        return dropout(torch.cat(parts, dim=-1).flatten(-2), self.dropout, self.training)


# -- projections of heads ----------------------------------------------------------------------------------------------


class TypedProjection(nn.Module):
    """
    Queries, keys or values of heads of two types: the first heads project P, `[d_k, d_p]`, the last ones R, `[d_k,
    d_r]` (`rpe_head_partition="typed"`).
    """

    def __init__(self, plain: int, recurrent: int):
        super().__init__()
        self.plain_proj = nn.Linear(plain, plain)
        self.recurrent_proj = nn.Linear(recurrent, recurrent)

    def forward(self, states: Tensor) -> Tensor:
        plain, recurrent = states.split((self.plain_proj.in_features, self.recurrent_proj.in_features), dim=-1)
        return torch.cat([project(self.plain_proj, plain), project(self.recurrent_proj, recurrent)], dim=-1)


class SlicedProjection(nn.Module):
    """Queries, keys or values where each head projects its own d_k channels (`rpe_head_partition="slice"`)."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_dim, head_dim))
        self.bias = nn.Parameter(torch.empty(heads * head_dim))

    def initialize(self, start: Initialization) -> None:
        init.zeros_(self.bias)
        if not is_loaded(self.weight):  # its views do not have this mark
            for matrix in self.weight:
                start.matrix_(matrix)

    def forward(self, states: Tensor) -> Tensor:
        heads, head_dim, _ = self.weight.shape
        slices = states.reshape(-1, heads, head_dim).transpose(0, 1)
        projected = torch.bmm(slices, self.weight.transpose(1, 2)).transpose(0, 1)
        return projected.reshape(*states.shape[:-1], heads * head_dim) + self.bias


def partition_heads(config: RPETransformerConfig, attention: Any) -> None:
    """Replace the projections of the first layer's self-attention according to `rpe_head_partition`."""
    for name in ("q_proj", "k_proj", "v_proj"):
        if config.rpe_head_partition == "slice":
            setattr(attention, name, SlicedProjection(attention.num_heads, attention.head_dim))
        elif config.rpe_dim < config.d_model:  # with recurrent heads alone there is one type
            setattr(attention, name, TypedProjection(config.d_model - config.rpe_dim, config.rpe_dim))


# -- model -------------------------------------------------------------------------------------------------------------


class RPETransformerPreTrainedModel(NMTTransformerPreTrainedModel):
    config: RPETransformerConfig


class RecurrentPositionStack(RPETransformerPreTrainedModel, TransformerStack):
    """A stack whose input is split, with `positions`, the class of [`RecurrentPositions`] of its side."""

    positions: type[RecurrentPositions]

    def build_input(self, config: RPETransformerConfig) -> nn.Module:
        if config.splits_input(self.side):
            return RecurrentPositionInput(config, self.side, self.positions)
        return super().build_input(config)

    def build_layer(self, config: Any, index: int) -> nn.Module:
        layer: Any = super().build_layer(config, index)
        if index == 0 and config.rpe_head_partition != "none" and config.splits_input(self.side):
            partition_heads(config, layer.self_attn)
        return layer


class RPETransformerEncoder(RecurrentPositionStack, NMTTransformerEncoder):
    """Transformer encoder with recurrent positional embeddings; usable alone through `get_encoder()`."""

    output_class = RPETransformerEncoderOutput
    positions = SourceRecurrentPositions
    _can_record_outputs = {
        **NMTTransformerEncoder._can_record_outputs,
        "source_recurrent_positions": OutputRecorder(SourceRecurrentPositions),
    }

    def __init__(self, config: RPETransformerConfig):
        super().__init__(config)
        self.needs_token_mask = config.has_recurrence("encoder")
        self.post_init()


class RPETransformerDecoder(RecurrentPositionStack, NMTTransformerDecoder):
    """Transformer decoder with recurrent positional embeddings; each new word costs one step of the recurrence."""

    output_class = RPETransformerDecoderOutput
    positions = TargetRecurrentPositions
    _can_record_outputs = {
        **NMTTransformerDecoder._can_record_outputs,
        "target_recurrent_positions": OutputRecorder(TargetRecurrentPositions),
    }


class RPETransformerModel(RPETransformerPreTrainedModel, Seq2SeqModelBase):
    """The Transformer with recurrent positional embeddings, without an output layer (Chen et al., 2019)."""

    encoder_class = RPETransformerEncoder
    decoder_class = RPETransformerDecoder


class RPETransformerForConditionalGeneration(
    RPETransformerPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin
):
    """
    The Transformer with recurrent positional embeddings and its output layer: `generate` translates, `labels` train.

    Example:

    ```python
    >>> import torch
    >>> from recnmt_hf import RPETransformerConfig, RPETransformerForConditionalGeneration
    >>> model = RPETransformerForConditionalGeneration(RPETransformerConfig.from_preset("tiny", vocab_size=100))
    >>> encoded = model.get_encoder()(torch.tensor([[5, 6, 7, 2]]), output_attentions=True)
    >>> encoded.source_recurrent_positions[0].shape  # batch, words, half of the channels
    torch.Size([1, 4, 64])

    ```
    """

    model_class = RPETransformerModel


RPETransformerModel.register_for_auto_class("AutoModel")
RPETransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = ["RPETransformerForConditionalGeneration", "RPETransformerModel", "RPETransformerPreTrainedModel"]
