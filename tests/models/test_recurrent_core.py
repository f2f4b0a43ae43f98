"""The shared core of recurrent models: masked recurrent layers, cache layers, memories and outputs by name."""

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer
from user_errors import rejects

from recnmt_hf.models.decoder_cache import (
    RecurrentStateLayer,
    StaticRecurrentStateLayer,
    complete_cache,
    read_source_memory,
)
from recnmt_hf.models.recurrent_layers import CachedRecurrence, MaskedRNN, RecurrentLayer, masked_mean
from recnmt_hf.models.seq2seq_loading import Initialization


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_masked_rnn_equals_each_sentence_alone(cell, bidirectional, initial):
    """Padding on either side, in the middle too, and NaN in it; gradients reach the real tokens only."""
    torch.manual_seed(1)
    layer = MaskedRNN(cell, 5, 4, bidirectional).double()
    rows = [torch.randn(n, 5, dtype=torch.float64) for n in (6, 3, 1)]
    starts = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)] if initial else [None, None]
    columns = [[0, 1, 2, 3, 4, 5], [2, 3, 5], [0]]
    inputs = torch.full((3, 6, 5), float("nan"), dtype=torch.float64)
    mask = torch.zeros(3, 6, dtype=torch.long)
    for i, (row, places) in enumerate(zip(rows, columns, strict=True)):
        inputs[i, places] = row
        mask[i, places] = 1
    inputs.requires_grad_()
    outputs, last = layer(inputs, mask, tuple(starts))
    for i, (row, places) in enumerate(zip(rows, columns, strict=True)):
        own = tuple(None if start is None else start[i : i + 1] for start in starts)
        (alone,), (end,) = layer(row[None], None, own)
        torch.testing.assert_close(outputs[i, places], alone, atol=1e-12, rtol=0)
        torch.testing.assert_close(last[i], end, atol=1e-12, rtol=0)
        ends = [alone[-1, :4], alone[0, 4:]] if bidirectional else [alone[-1]]
        torch.testing.assert_close(end, torch.cat(ends), atol=0, rtol=0)
        if bidirectional:  # the backward direction by hand, from the last real token
            run = getattr(nn, cell.upper())(5, 4, batch_first=True).double()  # torch's own
            run.load_state_dict(layer.backward_rnn.state_dict())
            state = torch.zeros(1, 1, 4, dtype=torch.float64) if own[1] is None else own[1][None]
            state = (state, torch.zeros_like(state)) if cell == "lstm" else state
            for t in reversed(range(len(row))):
                output, state = run(row[None, t : t + 1], state)
                torch.testing.assert_close(alone[t, 4:], output[0, 0], atol=1e-12, rtol=0)
    assert (outputs[mask == 0] == 0).all()
    outputs.sum().backward()
    assert torch.isfinite(inputs.grad).all() and (inputs.grad[mask == 0] == 0).all()


class Summing(nn.Module):
    """A cell class of one's own: sums up what it reads."""

    state_names = ("state",)

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.linear = nn.Linear(input_size, hidden_size)

    def forward(self, inputs, initial_state=None):
        summed = self.linear(inputs).cumsum(dim=1)
        return summed if initial_state is None else summed + initial_state[:, None]


def test_a_recurrence_takes_any_cell():
    layer = MaskedRNN(Summing, 3, 2, bidirectional=True).double()
    inputs, mask = torch.randn(2, 4, 3, dtype=torch.float64), torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]])
    _, last = layer(inputs, mask)
    real = inputs * mask[:, :, None]
    count = mask.sum(1, keepdim=True)
    for half, rnn in ((last[:, :2], layer.forward_rnn), (last[:, 2:], layer.backward_rnn)):
        torch.testing.assert_close(half, real.sum(1) @ rnn.linear.weight.T + count * rnn.linear.bias)


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm", Summing])
def test_a_cached_recurrence_continues_where_it_stopped(cell):
    """In one call, word by word, in pieces with padding on either side: the same states; rolled back too."""
    torch.manual_seed(2)
    recurrence = CachedRecurrence(cell, 3, 4).double()
    words = torch.randn(2, 6, 3, dtype=torch.float64)
    expected = recurrence(words)
    for pieces in ([6], [1] * 6, [2, 1, 3]):
        cache = DynamicCache()
        complete_cache(cache, ["recnmt_recurrent"], 1)
        cache.activate_past_recording()
        found = [recurrence(piece, None, cache) for piece in words.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-12, rtol=0)
        assert cache.get_seq_length() == 6
        cache.crop(-2)
        again = recurrence(words[:, 4:], None, cache)
        torch.testing.assert_close(again, expected[:, 4:], atol=1e-12, rtol=0)
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    cache = DynamicCache()
    complete_cache(cache, ["recnmt_recurrent"], 1)
    padded = torch.full((2, 4, 3), float("nan"), dtype=torch.float64)
    padded[mask != 0] = words[:, :2].flatten(0, 1)
    found = recurrence(padded, mask, cache)
    torch.testing.assert_close(found[mask != 0], expected[:, :2].flatten(0, 1), atol=1e-12, rtol=0)
    assert not found[0, 0].any(), "before the first word"
    following = recurrence(words[:, 2:], torch.ones(2, 8), cache)
    torch.testing.assert_close(following, expected[:, 2:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_layers_run_under_autocast(cell):
    """On what a layer below made in half precision, too."""
    layer, inputs = RecurrentLayer(cell, 3, 4), torch.randn(2, 5, 3)
    expected = layer(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (inputs, inputs.bfloat16()):
            torch.testing.assert_close(layer(given).float(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_parameters_start_gate_by_gate(cell):
    """Orthogonal, Xavier-uniform, zero but for the forget gate; loaded ones and those of children stay as they are."""
    torch.manual_seed(4)
    layer, start = cell(6, 4), Initialization(d_model=4)
    layer.child = nn.Linear(3, 3)
    before = layer.child.weight.clone()
    start.recurrent_(layer)
    for gate in layer.weight_hh_l0.split(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(4))
    bound = (6 / sum(layer.weight_ih_l0.shape)) ** 0.5
    assert 0.9 * bound < layer.weight_ih_l0.abs().max() <= bound
    forget_gate = torch.zeros_like(layer.bias_ih_l0)
    if cell is nn.LSTM:
        forget_gate[4:8] = 1.0
    assert torch.equal(layer.bias_ih_l0, forget_gate) and (layer.bias_hh_l0 == 0).all()
    assert torch.equal(layer.child.weight, before)
    Initialization(d_model=4, uniform=0.01).recurrent_(layer)
    for name, parameter in layer.named_parameters(recurse=False):
        assert parameter.abs().max() <= 0.01 and (parameter.dim() == 1 or parameter.std() > 0.004), name
        nn.init.constant_(parameter, 7.0)._is_hf_initialized = True
    start.recurrent_(layer)
    assert all((parameter == 7).all() for parameter in layer.parameters(recurse=False))


def test_matrices_and_tables_start_from_the_models_distribution():
    torch.manual_seed(4)

    def drawn(method, start, *args):
        tensor = torch.empty(300, 100)
        getattr(start, method)(tensor, *args)
        return tensor

    given, xavier, uniform = Initialization(25, std=0.5), Initialization(25), Initialization(25, uniform=0.1)
    for tensor, std in (
        (drawn("matrix_", given), 0.5),
        (drawn("table_", given, 3.0), 0.5),
        (drawn("table_", given), 0.5),
        (drawn("matrix_", xavier), (2 / 400) ** 0.5),
        (drawn("table_", xavier, 3.0), 3.0),
        (drawn("table_", xavier), 0.2),
        (drawn("matrix_", uniform), 0.1 / 3**0.5),
        (drawn("table_", uniform, 3.0), 0.1 / 3**0.5),
    ):
        assert abs(tensor.mean()) < 0.03 * std and abs(tensor.std() / std - 1) < 0.03


def test_masked_mean_ignores_padding():
    states = torch.tensor([[[1.0], [3.0], [float("nan")]], [[5.0], [7.0], [9.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_mean(states, mask).tolist() == [[2.0], [0.0]]


def test_recurrent_layer_rolls_back_what_it_recorded():
    layer = RecurrentStateLayer()
    states = torch.arange(12.0).view(1, 6, 2)
    layer.update_states(state=states[:, :2])
    with rejects("Call activate_past_recording() before"):
        layer.crop(-1)
    layer.activate_past_recording()
    layer.update_states(state=states[:, 2:5])
    assert layer.get_seq_length() == 5
    layer.crop(-2)
    assert layer.get_seq_length() == 3 and torch.equal(layer.states.get("state"), states[:, 2])
    layer.update_states(state=states[:, 3:4])
    assert torch.equal(layer.states.get("state"), states[:, 3])
    with rejects("Call activate_past_recording() before"):
        layer.roll_back(3)  # one of them came before
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.states.get("state") is None and layer.keys is None


@pytest.mark.parametrize("layer_class", [RecurrentStateLayer, StaticRecurrentStateLayer])
def test_rolling_back_nothing_and_everything(layer_class):
    layer = layer_class(max_cache_len=9) if layer_class is StaticRecurrentStateLayer else layer_class()
    layer.roll_back(0)
    layer.activate_past_recording()
    layer.roll_back(0)
    layer.roll_back(3)  # nothing was seen yet
    states = torch.randn(1, 3, 2)
    layer.update_states(state=states)
    layer.roll_back(0)
    assert layer.get_seq_length() == 3 and torch.equal(layer.states.get("state"), states[:, -1])
    layer.roll_back(3)
    assert layer.get_seq_length() == 0 and layer.states.get("state") is None
    layer.update_states(state=states[:, :2])
    layer.roll_back(1)
    assert layer.get_seq_length() == 1 and torch.equal(layer.states.get("state"), states[:, 0])
    layer.roll_back(1)
    assert layer.get_seq_length() == 0


def test_keys_and_states_are_cut_and_moved_together():
    layer = RecurrentStateLayer()
    layer.activate_past_recording()
    states, keys = torch.randn(3, 6, 2), torch.randn(3, 1, 6, 2)

    def check(rows, length):
        assert layer.get_seq_length() == length
        assert torch.equal(layer.keys, keys[rows, :, :length]) and torch.equal(layer.values, -layer.keys)
        assert torch.equal(layer.states.get("state"), states[rows, length - 1])

    layer.update(keys, -keys)
    layer.update_states(state=states)
    for tokens_to_remove, length in ((0, 6), (9, 6), (5, 5), (-1, 4)):  # a positive number is a length to keep
        layer.crop(tokens_to_remove)
        check([0, 1, 2], length)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    layer.batch_select_indices(torch.tensor([0, 1]))
    layer.batch_repeat_interleave(2)
    check([2, 2, 0, 0], 4)
    layer.crop(1)  # what was recorded has moved too
    check([2, 2, 0, 0], 1)


@pytest.mark.parametrize("static", [False, True])
def test_memories_in_foreign_caches_have_a_row_for_each_beam(static):
    """Projected once; a static layer is as long as the source; other memories than the encoder's are not cached."""
    layer = StaticLayer(4) if static else DynamicLayer()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    cache.cross_attention_cache.layers.append(layer)
    states, mask, projected = torch.randn(2, 3, 4), torch.tensor([[True], [False]]), []

    def project(states):
        projected.append(states)
        return states[:, None], -states[:, None]

    for _ in range(2):
        key, value, found = read_source_memory("encoder", 0, project, states, mask, cache, 4)
        assert torch.equal(key, states[[0, 0, 1, 1], None]) and torch.equal(value, -key)
        assert found[:, 0].tolist() == [True, True, False, False]
    assert len(projected) == 1 and cache.is_updated[0]
    for _ in range(2):
        key, value, found = read_source_memory("recurrence", 0, project, states + 1, mask, cache, 4)
        assert torch.equal(key, states[:, None] + 1) and torch.equal(value, -key) and found is mask
    assert len(projected) == 3
