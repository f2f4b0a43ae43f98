"""The public layers: usable alone, trainable, and independent of padding."""

import pytest
import torch
from user_errors import rejects

from recnmt_hf import layers


BUILD = {
    "attentive": lambda: layers.AttentiveRecurrentNetwork(16, steps=4, num_heads=4, bidirectional=True),
    "attentive, LSTM": lambda: layers.AttentiveRecurrentNetwork(16, hidden_size=12, num_heads=2, cell="lstm"),
    "capsules": lambda: layers.CapsuleRouting(16, num_capsules=3),
    "masked GRU": lambda: layers.MaskedRNN("gru", 16, 8, bidirectional=True),
    "ON-LSTM": lambda: layers.ONLSTM(2, 16, 8),
    "positions": lambda: layers.RecurrentPositions(16, "lstm"),
    "positions, SRU": lambda: layers.RecurrentPositions(16, "sru"),
    "SSRU": lambda: layers.SSRU(16, projection=True),
    "average": lambda: layers.AverageAttention(16, ffn_dim=24),
    **{kind: lambda kind=kind: getattr(layers, kind)(16) for kind in ("MinGRU", "MLSTM", "Mamba2", "GatedDeltaNet")},
    "relations": lambda: layers.RelationLayer(16, conv_channels=[8], hidden_size=12),
    "relations, two convolutions": lambda: layers.RelationLayer(16, [8, 12], 12, conv_kernels=[1, 3]),
}
OF_SENTENCES = ("attentive", "attentive, LSTM", "capsules")


def run(layer, inputs, mask):
    found = layer(inputs, mask)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", BUILD)
def test_padding_changes_nothing_and_gradients_reach_all_parameters(name):
    torch.manual_seed(3)
    layer = BUILD[name]().double().eval()
    assert all(parameter.isfinite().all() and parameter.abs().max() < 7 for parameter in layer.parameters())
    inputs = torch.randn(2, 5, 16, dtype=torch.float64)
    padded = torch.cat([inputs, torch.full((2, 2, 16), 9.0, dtype=torch.float64)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 2] * 2)
    expected, found = run(layer, inputs, None), run(layer, padded, mask)
    if name not in OF_SENTENCES:
        found = found[:, :5]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    (expected * torch.randn_like(expected)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("chunk_size", [0, 3, 8])
def test_the_chunks_of_on_lstm(chunk_size):
    """With one master gate all states would be 0."""
    with rejects("a divisor of hidden_size=8, below it", field="chunk_size"):
        layers.ONLSTM(chunk_size, 16, 8)
