"""
The ground that recurrent models stand on: masked recurrent layers, cache layers, extra memories through beams.

A small model with a GRU decoder, a second memory and its state in the cache takes the whole contract.
"""

from dataclasses import dataclass

import pytest
import torch
from model_contract import ModelContract
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from recnmt_hf.models.attention import MultiHeadAttention, source_mask
from recnmt_hf.models.configuration_seq2seq import Seq2SeqConfig
from recnmt_hf.models.recurrent_cache import (
    RecurrentStateLayer,
    SourceMemoryLayer,
    recurrent_layer,
    use_source_memory,
)
from recnmt_hf.models.recurrent_layers import MaskedRNN, masked_mean
from recnmt_hf.models.seq2seq_base import (
    Seq2SeqConditionalGeneration,
    Seq2SeqEncoderOutput,
    Seq2SeqModelBase,
    Seq2SeqPreTrainedModel,
    embed,
)


class GRUToyConfig(Seq2SeqConfig):
    model_type = "gru_toy"

    def cache_layer_types(self):
        return ["recnmt_recurrent"] * self.decoder_layers

    def default_position_embedding_type(self):
        return "none"


@dataclass
class GRUToyEncoderOutput(Seq2SeqEncoderOutput):
    summary: torch.FloatTensor | None = None


class GRUToyEncoder(Seq2SeqPreTrainedModel):
    output_class = GRUToyEncoderOutput

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.rnn = MaskedRNN("gru", config.d_model, config.d_model // 2, bidirectional=True)
        self.summarise = nn.Linear(config.d_model, 3 * config.d_model)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        states = self.rnn(embed(self.embed_tokens, input_ids, inputs_embeds), attention_mask)
        summary = self.summarise(masked_mean(states, attention_mask)).unflatten(-1, (3, -1))
        return GRUToyEncoderOutput(last_hidden_state=states, summary=summary)


class GRUToyDecoder(Seq2SeqPreTrainedModel):
    _can_record_outputs = {
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config):
        super().__init__(config)
        width, heads = config.d_model, config.decoder_attention_heads
        self.embed_tokens = nn.Embedding(config.decoder_vocab_size, width, config.pad_token_id)
        self.initial = nn.Linear(width, width)
        self.cell_input, self.cell_state = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.encoder_attn = MultiHeadAttention(config, width, heads, layer_idx=0, memory="encoder")
        self.summary_attn = MultiHeadAttention(config, width, heads, layer_idx=0, memory="summary")
        self.post_init()

    def step(self, x, state):
        reset_x, update_x, new_x = self.cell_input(x).chunk(3, -1)
        reset_h, update_h, new_h = self.cell_state(state).chunk(3, -1)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        return (1 - update) * new + update * state

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        memories=(),
        **kwargs,
    ):
        embedded = embed(self.embed_tokens, input_ids, inputs_embeds)
        if past_key_values is None and use_cache:
            config = self.config.get_text_config(decoder=True)
            past_key_values = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        use_source_memory(past_key_values, 1)
        layer = recurrent_layer(past_key_values)
        state = layer.get_state() if layer is not None else None
        if state is None:
            group = embedded.shape[0] // encoder_hidden_states.shape[0]
            mask = None if encoder_attention_mask is None else encoder_attention_mask
            if mask is not None and mask.shape[0] != encoder_hidden_states.shape[0]:
                mask = mask[::group]
            state = torch.tanh(self.initial(masked_mean(encoder_hidden_states, mask))).repeat_interleave(group, 0)
        keep = None
        if attention_mask is not None and attention_mask.dim() == 2:
            keep = attention_mask[:, -embedded.shape[1] :, None].to(embedded.dtype)
        states = []
        for t in range(embedded.shape[1]):
            new = self.step(embedded[:, t], state)
            state = new if keep is None else keep[:, t] * new + (1 - keep[:, t]) * state
            states.append(state)
        states = torch.stack(states, 1)
        if layer is not None:
            layer.update_states(state=states)
        source = source_mask(self.config, encoder_hidden_states, encoder_attention_mask)
        context, _ = self.encoder_attn(states, encoder_hidden_states, source, past_key_values, **kwargs)
        summary, _ = self.summary_attn(states, memories[0], None, past_key_values, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=states + context + summary, past_key_values=past_key_values
        )


class GRUToyModel(Seq2SeqModelBase):
    config: GRUToyConfig
    encoder_class = GRUToyEncoder
    decoder_class = GRUToyDecoder

    def memories(self, encoder_outputs):
        return (encoder_outputs.summary,)


class GRUToyForConditionalGeneration(Seq2SeqConditionalGeneration, GenerationMixin):
    config: GRUToyConfig
    model_class = GRUToyModel


class TestGRUToy(ModelContract):
    config_class = GRUToyConfig
    model_class = GRUToyForConditionalGeneration

    # Made for the tests only: not registered, and its code does not travel.
    test_saved_model_loads_bit_equal = None
    test_a_subclass_is_saved_with_code_that_loads = None
    test_gradients_of_hidden_states_can_be_kept = None  # gives none
    test_hub_code_loads_without_the_package = None
    test_gradient_checkpointing_changes_nothing = None  # has no layers to checkpoint
    test_attentions_come_on_request = None  # one cross-attention, whatever decoder_layers says
    test_learns_short_sequences = None

    def config(self, **fields):
        return super().config(**{"decoder_layers": 1, **fields})

    def test_a_reset_cache_starts_anew(self):
        model = self.model()
        first, second = torch.randint(4, 30, (2, 6)), torch.randint(4, 30, (2, 4))
        start = torch.ones(2, 1, dtype=torch.long)
        cache = model(first, decoder_input_ids=start, use_cache=True).past_key_values
        cache.reset()
        assert cache.get_seq_length() == 0
        found = model(second, decoder_input_ids=start, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, model(second, decoder_input_ids=start).logits, atol=1e-10, rtol=0)

    def test_memories_stay_one_row_per_source(self):
        model = self.model()
        seen = []
        project = MultiHeadAttention.project_memory

        def watch(self, states):
            seen.append(tuple(states.shape[:2]))
            return project(self, states)

        MultiHeadAttention.project_memory = watch
        try:
            model.generate(torch.randint(4, 30, (2, 6)), num_beams=5, max_new_tokens=6)
        finally:
            MultiHeadAttention.project_memory = project
        assert sorted(seen) == [(2, 3), (2, 6)], "each memory is projected once, for two sources"


# -- recurrent layers ---


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
    outputs = layer(inputs, mask, tuple(starts))
    for i, (row, places) in enumerate(zip(rows, columns, strict=True)):
        own = tuple(None if start is None else start[i : i + 1] for start in starts)
        alone = layer(row[None], None, own)[0]
        torch.testing.assert_close(outputs[i, places], alone, atol=1e-12, rtol=0)
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


def test_masked_mean_ignores_padding():
    states = torch.tensor([[[1.0], [3.0], [float("nan")]], [[5.0], [7.0], [9.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_mean(states, mask).tolist() == [[2.0], [0.0]]


def test_unknown_cell():
    with pytest.raises(ValueError, match="no recurrent cell 'qrnn'; choose one of gru, lstm, rnn"):
        MaskedRNN("qrnn", 2, 2)


# -- cache layers ---


def test_recurrent_layer_rolls_back_what_it_recorded():
    layer = RecurrentStateLayer()
    states = torch.arange(12.0).view(1, 6, 2)
    layer.update_states(state=states[:, :2])
    with pytest.raises(ValueError, match=r"past was not recorded.*activate_past_recording"):
        layer.crop(-1)
    layer.activate_past_recording()
    layer.update_states(state=states[:, 2:5])
    assert layer.get_seq_length() == 5
    layer.crop(-2)
    assert layer.get_seq_length() == 3 and torch.equal(layer.get_state(), states[:, 2])
    layer.update_states(state=states[:, 3:4])
    assert torch.equal(layer.get_state(), states[:, 3])
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.get_state() is None


def test_recurrent_layer_moves_its_states():
    layer = RecurrentStateLayer()
    states = torch.arange(6.0).view(3, 1, 2)
    layer.update_states(h=states, c=-states)
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(layer.get_state("c"), -states[[2, 2, 0], 0])
    layer.batch_repeat_interleave(2)
    assert layer.get_state("h").shape == (6, 2)
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(layer.get_state("h"), states[[2, 0], 0])


def test_source_memory_is_not_moved_within_a_source():
    layer = SourceMemoryLayer()
    keys = torch.randn(2, 1, 3, 4)
    layer.store("encoder", keys, keys, None, decoder_rows=6)
    layer.reorder_cache(torch.tensor([1, 1, 0, 5, 3, 3]))
    assert layer.keys is keys
    layer.reorder_cache(torch.tensor([3, 1, 0, 5, 3, 3]))
    assert torch.equal(layer.keys, keys[[1, 0, 0, 1, 1, 1]])


def test_encoder_output_is_rebuilt_with_all_its_fields():
    output = GRUToyEncoderOutput(last_hidden_state=torch.zeros(1), summary=torch.ones(1))
    assert GRUToyEncoderOutput.rebuild(output) is output
    assert torch.equal(GRUToyEncoderOutput.rebuild(dict(output)).summary, output.summary)
    plain = Seq2SeqEncoderOutput(last_hidden_state=torch.zeros(1))
    assert GRUToyEncoderOutput.rebuild(plain).summary is None
    layers = (torch.zeros(1),) * 2
    for values in (
        output.to_tuple(),
        (*output.to_tuple()[:1], layers, output.summary),
        (layers[0], None, None, *output.to_tuple()[1:]),
    ):
        assert torch.equal(GRUToyEncoderOutput.rebuild(values).summary, output.summary)
    assert GRUToyEncoderOutput.rebuild(layers[:1]).summary is None
