"""Recurrences that can replace self-attention, by configuration name."""

from typing import Any

from torch import Tensor, nn

from .configuration_nmt_transformer import NMTTransformerConfig
from .kernels_shared import Mask
from .light_decoders import AverageAttention, SimplerSimpleRecurrentUnit
from .matrix_memories import MLSTM, GatedDeltaNet, Mamba2, MinGRU


RECURRENCES: dict[str, type[nn.Module]] = {
    "ssru": SimplerSimpleRecurrentUnit,
    "average_attention": AverageAttention,
    "mingru": MinGRU,
    "mlstm": MLSTM,
    "mamba2": Mamba2,
    "gated_delta": GatedDeltaNet,
}


class BothDirections(nn.Module):
    """Two layers of one kind in an encoder, one from left to right and one from right to left; outputs are summed."""

    def __init__(self, config: NMTTransformerConfig, kind: type[nn.Module]):
        super().__init__()
        self.ahead, self.back = kind(config, None), kind(config, None)

    def forward(self, hidden_states: Tensor, attention_mask: Mask = None, **kwargs: Any) -> tuple[Tensor, None]:
        """Run over `(batch_size, length, d_model)` with the token mask `(batch_size, length)`."""
        ahead, _ = self.ahead(hidden_states, attention_mask)
        back, _ = self.back(hidden_states.flip(1), None if attention_mask is None else attention_mask.flip(1))
        return ahead + back.flip(1), None


def build_recurrence(config: NMTTransformerConfig, side: str, index: int) -> nn.Module:
    """Build the recurrence of a layer of `"encoder"` or `"decoder"`."""
    kind = RECURRENCES[config.mixers(side)[index]]
    return kind(config, index) if side == "decoder" else BothDirections(config, kind)
