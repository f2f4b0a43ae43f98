"""Recurrent layers over padded batches whose results do not depend on the padding."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .fast_paths import dropout


CELLS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def masked_mean(states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """
    Mean over real tokens.

    Args:
        states (`torch.Tensor` of shape `(batch_size, length, d)`).
        attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.

    Returns:
        `torch.Tensor` of shape `(batch_size, d)`; zeros for a row without real tokens.
    """
    if attention_mask is None:
        return states.mean(dim=1)
    total = states.masked_fill(attention_mask[:, :, None] == 0, 0.0).sum(dim=1)
    # Half precision does not count beyond some hundred.
    wide = torch.float64 if states.dtype == torch.float64 else torch.float32
    count = (attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    return (total.to(wide) / count).to(states.dtype)


def left_aligned(attention_mask: torch.Tensor) -> torch.LongTensor:
    """
    For each row the order of columns that puts real tokens first, in their order, and padding behind.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch_size, length)`): 1 keeps; padding may stand anywhere.

    Returns:
        `torch.LongTensor` of shape `(batch_size, length)`.
    """
    return torch.argsort((attention_mask == 0).to(torch.uint8), dim=1, stable=True)


def reversed_order(lengths: torch.Tensor, length: int) -> torch.LongTensor:
    """
    Reverses the first `lengths[b]` columns of each row and leaves the rest in place; it is its own inverse.

    Returns:
        `torch.LongTensor` of shape `(batch_size, length)`.
    """
    columns = torch.arange(length, device=lengths.device)[None, :]
    mirrored = lengths[:, None] - 1 - columns
    return torch.where(mirrored >= 0, mirrored, columns)


def take(states: torch.Tensor, order: torch.LongTensor) -> torch.Tensor:
    """Columns of `(batch_size, length, d)` in the order `(batch_size, length)`."""
    return states.gather(1, order[:, :, None].expand(-1, -1, states.shape[2]))


class MaskedRNN(nn.Module):
    """
    A one- or two-directional recurrent layer with a masked carry: `state = m new + (1 - m) old`.

    The forward direction runs over the left-aligned batch, the backward direction over a copy reversed within each
    sentence, so it starts, with its initial state, at the last real token. This equals packed sequences, needs no
    lengths on the host, and takes padding on either side. Outputs at padding are zero.

    Args:
        cell (`str`): `"rnn"` (tanh), `"gru"` or `"lstm"`.
        input_size (`int`): Width of the input.
        hidden_size (`int`): Width of each direction.
        bidirectional (`bool`, *optional*, defaults to `False`): Adds the backward direction.
    """

    def __init__(self, cell: str, input_size: int, hidden_size: int, bidirectional: bool = False):
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"There is no recurrent cell {cell!r}; choose one of {', '.join(sorted(CELLS))}.")
        self.hidden_size = hidden_size
        self.forward_rnn = CELLS[cell](input_size, hidden_size, batch_first=True)
        self.backward_rnn = CELLS[cell](input_size, hidden_size, batch_first=True) if bidirectional else None

    def forward(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        initial_states: tuple[torch.Tensor | None, ...] = (None, None),
    ) -> torch.Tensor:
        """
        Args:
            inputs (`torch.Tensor` of shape `(batch_size, length, input_size)`).
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
            initial_states (pair of `torch.Tensor` of shape `(batch_size, hidden_size)`, *optional*):
                The hidden state before the first step of the forward and of the backward direction; `None`: zeros.

        Returns:
            `torch.Tensor` of shape `(batch_size, length, hidden_size or 2 * hidden_size)`, forward states first.
        """
        if attention_mask is None:
            outputs = [self.run(self.forward_rnn, inputs, initial_states[0])]
            if self.backward_rnn is not None:
                outputs.append(self.run(self.backward_rnn, inputs.flip(1), initial_states[1]).flip(1))
            return torch.cat(outputs, dim=-1)
        order = left_aligned(attention_mask)
        lengths = (attention_mask != 0).sum(dim=1)
        aligned = take(inputs, order)
        # Zeroed padding: whatever stands there (NaN included) must not reach the products of real rows' gradients.
        real = torch.arange(inputs.shape[1], device=inputs.device)[None, :] < lengths[:, None]
        aligned = aligned.masked_fill(~real[:, :, None], 0.0)
        outputs = [self.run(self.forward_rnn, aligned, initial_states[0])]
        if self.backward_rnn is not None:
            mirror = reversed_order(lengths, inputs.shape[1])
            outputs.append(take(self.run(self.backward_rnn, take(aligned, mirror), initial_states[1]), mirror))
        states = torch.cat(outputs, dim=-1).masked_fill(~real[:, :, None], 0.0)
        return take(states, torch.argsort(order, dim=1))

    @staticmethod
    def run(rnn: nn.RNNBase, inputs: torch.Tensor, initial_state: torch.Tensor | None) -> torch.Tensor:
        if initial_state is None:
            return rnn(inputs)[0]
        state = initial_state[None].contiguous()
        if isinstance(rnn, nn.LSTM):
            return rnn(inputs, (state, torch.zeros_like(state)))[0]
        return rnn(inputs, state)[0]


class RecurrentEncoderLayer(GradientCheckpointingLayer):
    """
    A recurrent layer in the frame of the Transformer: `LN(x + Drop(W_p [forward(x); backward(x)] + b_p))`, or pre-norm
    `x + Drop(W_p [..](LN(x)) + b_p)`.

    Args:
        cell (`str`): As in [`MaskedRNN`].
        d_model (`int`): Width of input and output.
        hidden_size (`int`): Width of each direction.
        bidirectional (`bool`): Adds the backward direction.
        dropout (`float`): Dropout of the projected states.
        layer_norm_eps (`float`): Epsilon of the norm.
        normalize_before (`bool`): Pre-norm instead of post-norm.
    """

    def __init__(
        self,
        cell: str,
        d_model: int,
        hidden_size: int,
        bidirectional: bool,
        dropout: float,
        layer_norm_eps: float,
        normalize_before: bool,
    ):
        super().__init__()
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.rnn = MaskedRNN(cell, d_model, hidden_size, bidirectional)
        self.out_proj = nn.Linear((1 + bidirectional) * hidden_size, d_model)
        self.rnn_layer_norm = nn.LayerNorm(d_model, eps=layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, length, d_model)`).
            attention_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): 1 keeps.
        """
        inputs = self.rnn_layer_norm(hidden_states) if self.normalize_before else hidden_states
        outputs = dropout(self.out_proj(self.rnn(inputs, attention_mask)), self.dropout, self.training)
        outputs = hidden_states + outputs
        return outputs if self.normalize_before else self.rnn_layer_norm(outputs)
