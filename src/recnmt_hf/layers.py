"""
The papers' mechanisms as ordinary `torch.nn.Module`s, for use in models of your own.

Inputs have the shape `(batch_size, length, channels)`, masks the shape `(batch_size, length)`, 1 keeps. Padding, on
either side (for [`RelationLayer`] on the right), does not change the results.

Example:

```python
>>> import torch
>>> from recnmt_hf.layers import ONLSTM, AttentiveRecurrentNetwork, CapsuleRouting
>>> inputs, mask = torch.randn(2, 5, 32), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
>>> states, last = ONLSTM(chunk_size=4, input_size=32, hidden_size=64, bidirectional=True)(inputs, mask)
>>> states.shape, last.shape
(torch.Size([2, 5, 128]), torch.Size([2, 128]))
>>> states, _, attentions = AttentiveRecurrentNetwork(32, steps=4)(inputs, mask, output_attentions=True)
>>> states.shape, attentions.shape  # batch, directions, heads, steps, words
(torch.Size([2, 4, 32]), torch.Size([2, 1, 8, 4, 5]))
>>> capsules, couplings = CapsuleRouting(32, num_capsules=8)(inputs, mask)
>>> capsules.shape, couplings.shape
(torch.Size([2, 8, 32]), torch.Size([2, 8, 5]))

```
"""

import math
from typing import Any, Literal

import torch
from torch import nn

from .errors import UserError
from .models.configuration_biarn_transformer import BiARNTransformerConfig
from .models.configuration_gret import GRETConfig
from .models.configuration_nmt_transformer import NMTTransformerConfig
from .models.configuration_rnmt import RNMTConfig
from .models.configuration_rpe_transformer import RPETransformerConfig
from .models.light_decoders import AverageAttention as ModelAverageAttention
from .models.light_decoders import SimplerSimpleRecurrentUnit
from .models.matrix_memories import MLSTM as ModelMLSTM
from .models.matrix_memories import GatedDeltaNet as ModelGatedDeltaNet
from .models.matrix_memories import Mamba2 as ModelMamba2
from .models.matrix_memories import MinGRU as ModelMinGRU
from .models.modeling_biarn_transformer import AttentiveRecurrence
from .models.modeling_gret import CapsuleLayer
from .models.modeling_onlstm_transformer import ONLSTM as ModelONLSTM
from .models.modeling_rnmt import InputOrder
from .models.modeling_rnmt import RelationLayer as ModelRelationLayer
from .models.modeling_rpe_transformer import RecurrentPositions as ModelRecurrentPositions
from .models.recurrent_layers import MaskedRNN
from .models.seq2seq_loading import Initialization


__all__ = [
    "MLSTM",
    "ONLSTM",
    "SSRU",
    "AttentiveRecurrentNetwork",
    "AverageAttention",
    "CapsuleRouting",
    "GatedDeltaNet",
    "Mamba2",
    "MaskedRNN",
    "MinGRU",
    "RecurrentPositions",
    "RelationLayer",
]


HEADS: dict[str, Any] = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}  # of modules without heads


class ONLSTM(ModelONLSTM):
    """
    ON-LSTM (Shen et al., 2019).

    Args:
        chunk_size (`int`): Channels that share a master gate; a divisor of `hidden_size`, below it.
        input_size (`int`): Channels of the inputs.
        hidden_size (`int`): Channels of the states in each direction.
        bidirectional (`bool`, *optional*, defaults to `False`): Add a second direction, which runs backward.

    Raises:
        UserError: `chunk_size` leaves fewer than two master gates, or does not divide `hidden_size`.
    """

    def __init__(self, chunk_size: int, input_size: int, hidden_size: int, bidirectional: bool = False):
        if chunk_size < 1 or hidden_size % chunk_size or hidden_size == chunk_size:
            message = f"chunk_size={chunk_size} must be a divisor of hidden_size={hidden_size}, below it."
            raise UserError(message, field="chunk_size")
        super().__init__(chunk_size, input_size, hidden_size, bidirectional)
        bound = 1 / math.sqrt(hidden_size)  # like torch's layers; models initialize theirs later
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class AttentiveRecurrentNetwork(AttentiveRecurrence):
    """
    Attentive recurrent network (Hao et al., 2019, Eqs. 12-13): steps of attention to all inputs, driven by the state of
    the network.

    Args:
        d_model (`int`): Channels of inputs and outputs.
        hidden_size (`int`, *optional*): Channels of the state; defaults to `d_model`.
        steps (`int`, *optional*, defaults to 8): Number of steps; `None`: one for each input.
        num_heads (`int`, *optional*, defaults to 8): Attention heads.
        bidirectional (`bool`, *optional*, defaults to `False`): Add a second network whose steps run backward.
        cell (`"gru"` or `"lstm"`, *optional*, defaults to `"gru"`): Recurrent cell.
        dropout (`float`, *optional*, defaults to 0.0): Dropout of the attention weights.
    """

    def __init__(
        self,
        d_model: int,
        hidden_size: int | None = None,
        steps: int | None = 8,
        num_heads: int = 8,
        bidirectional: bool = False,
        cell: Literal["gru", "lstm"] = "gru",
        dropout: float = 0.0,
    ):
        config = BiARNTransformerConfig(
            d_model=d_model,
            encoder_attention_heads=num_heads,
            decoder_attention_heads=num_heads,
            attention_dropout=dropout,
            recurrence_encoder_type="biarn" if bidirectional else "arn",
            recurrence_hidden_size=hidden_size or d_model,
            recurrence_steps=steps,
            recurrence_cell=cell,
        )
        super().__init__(config)


class CapsuleRouting(CapsuleLayer):
    """
    Dynamic routing of a sequence to a fixed number of capsules (Weng et al., 2020, Eqs. 2-6).

    Args:
        d_model (`int`): Channels of the inputs.
        num_capsules (`int`): Number of capsules.
        capsule_dim (`int`, *optional*): Channels of a capsule; defaults to `d_model`.
        iterations (`int`, *optional*, defaults to 3): Routing iterations.
    """

    def __init__(self, d_model: int, num_capsules: int, capsule_dim: int | None = None, iterations: int = 3):
        sizes: dict[str, Any] = {
            "num_capsules": num_capsules,
            "capsule_dim": capsule_dim or d_model,
            "routing_iterations": iterations,
        }
        super().__init__(GRETConfig(d_model=d_model, **sizes, **HEADS))


class RelationLayer(ModelRelationLayer):
    """
    Relation-network layer (Zhang et al., 2018, Eqs. 7-10): convolutions, a perceptron over all pairs of positions, and
    their mean for each position.

    Args:
        d_model (`int`): Channels of inputs and outputs.
        conv_channels (list of `int`): Channels of each convolution, one after the other.
        hidden_size (`int`): Channels of the perceptron over pairs.
        conv_kernels (list of `int`, *optional*): Width of each convolution, by default 3.
    """

    def __init__(self, d_model: int, conv_channels: list[int], hidden_size: int, conv_kernels: list[int] | None = None):
        config = RNMTConfig(
            d_model=d_model,
            relation_conv_channels=conv_channels,
            relation_conv_kernels=conv_kernels or [3] * len(conv_channels),
            relation_hidden_size=hidden_size,
        )
        super().__init__(config)

    def forward(  # type: ignore[override]
        self, states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map states `(batch_size, length, d_model)`, padded on the right, to outputs of the same shape."""
        return super().forward(states, attention_mask, InputOrder(None, attention_mask))[0]


class RecurrentPositions(ModelRecurrentPositions):
    """
    Recurrent positional embeddings (Chen et al., 2019, Eq. 6): a bidirectional recurrence over embeddings.

    Args:
        width (`int`): Channels of inputs and outputs.
        cell (`"rnn"`, `"gru"`, `"lstm"` or `"sru"`, *optional*, defaults to `"rnn"`): Recurrent cell.
    """

    def __init__(self, width: int, cell: Literal["rnn", "gru", "lstm", "sru"] = "rnn"):
        config = RPETransformerConfig(d_model=2 * width, rpe_dim=width, rpe_cell=cell, **HEADS)
        super().__init__(config, "encoder")

    def forward(  # type: ignore[override]
        self, embeddings: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map embeddings `(batch_size, length, width)` to positional embeddings of the same shape."""
        return super().forward(embeddings, attention_mask, None)


class CausalLayer(nn.Module):
    """Base class of layers of decoders without their cache."""

    def forward(self, inputs: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Map inputs `(batch_size, length, width)` to outputs of the same shape."""
        outputs: torch.Tensor = super().forward(inputs, attention_mask)[0]
        return outputs


class SSRU(CausalLayer, SimplerSimpleRecurrentUnit):  # type: ignore[misc]
    """
    Simpler simple recurrent unit (Kim et al., 2019), which runs from left to right.

    Args:
        width (`int`): Channels of inputs and outputs.
        projection (`bool`, *optional*, defaults to `False`): Add an output matrix.
    """

    def __init__(self, width: int, projection: bool = False):
        fields: dict[str, Any] = {"decoder_autoregression": "ssru", "decoder_recurrence_projection": projection}
        super().__init__(NMTTransformerConfig(d_model=width, **HEADS, **fields), layer_idx=0)


class AverageAttention(CausalLayer, ModelAverageAttention):  # type: ignore[misc]
    """
    Average attention (Zhang et al., 2018): the mean of all inputs so far, mapped and gated.

    Args:
        width (`int`): Channels of inputs and outputs.
        ffn_dim (`int`, *optional*): Inner width of a feed-forward block over the means; `None`: no such block.
        gate (`"joint"`, `"separate"` or `"none"`, *optional*, defaults to `"joint"`): Input of both gates: word and
            average together, one of them each, or no gates.
    """

    def __init__(self, width: int, ffn_dim: int | None = None, gate: Literal["joint", "separate", "none"] = "joint"):
        fields: dict[str, Any] = {"aan_ffn": ffn_dim is not None, "aan_ffn_dim": ffn_dim or width, "aan_gate": gate}
        config = NMTTransformerConfig(d_model=width, activation_dropout=0.0, **HEADS, **fields)
        super().__init__(config, layer_idx=0)


class LinearRecurrence(CausalLayer):
    """
    Base class of linear recurrences.

    Args:
        width (`int`): Channels of inputs and outputs.
        heads (`int`, *optional*, defaults to 4): Heads with a memory each; a divisor of `width / 4`.
    """

    def __init__(self, width: int, heads: int = 4):
        config = NMTTransformerConfig(d_model=width, encoder_attention_heads=1, decoder_attention_heads=heads)
        super().__init__(config, layer_idx=0)
        own: list[Any] = [module for module in self.modules() if hasattr(module, "initialize")]
        for module in own:
            module.initialize(Initialization(width))


class MinGRU(LinearRecurrence, ModelMinGRU):  # type: ignore[misc]
    """minGRU (Feng et al., 2024), whose gates read the input alone; `heads` is not used."""


class MLSTM(LinearRecurrence, ModelMLSTM):  # type: ignore[misc]
    """mLSTM (Beck et al., 2024), with a matrix memory and exponential gates in each head."""


class Mamba2(LinearRecurrence, ModelMamba2):  # type: ignore[misc]
    """Mamba-2 (Dao and Gu, 2024): a state space whose decay and input depend on the word."""


class GatedDeltaNet(LinearRecurrence, ModelGatedDeltaNet):  # type: ignore[misc]
    """Gated DeltaNet (Yang et al., 2024): a memory that is corrected at the key of each word, and decays."""
