"""A recurrent encoder with a second, shorter memory, and a recurrent decoder that attends both."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention
from .configuration_gru_toy import GRUToyConfig
from .decoder_cache import spread_over_beams
from .recurrent_layers import CachedRecurrence, MaskedRNN, RecurrentEncoderLayer, masked_mean
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_loading import Seq2SeqPreTrainedModel
from .seq2seq_outputs import Seq2SeqEncoderOutput, memory_states
from .seq2seq_stacks import Seq2SeqDecoder, Seq2SeqEncoder


@dataclass
class GRUToyEncoderOutput(Seq2SeqEncoderOutput):
    summary_hidden_state: torch.Tensor | None = field(default=None, metadata=memory_states("summary"))


class GRUToyPreTrainedModel(Seq2SeqPreTrainedModel):
    config: GRUToyConfig


class GRUToyEncoder(GRUToyPreTrainedModel, Seq2SeqEncoder):
    output_class = GRUToyEncoderOutput
    needs_token_mask = True

    def __init__(self, config):
        super().__init__(config)
        width = config.d_model
        rnn = MaskedRNN("gru", width, width // 2, bidirectional=True)
        self.layers = nn.ModuleList([RecurrentEncoderLayer(config, rnn)])
        self.summarize = nn.Linear(width, 3 * width)
        self.post_init()

    def finish(self, states, embeddings, token_mask, **kwargs):
        outputs = super().finish(states, embeddings, token_mask)
        summary = self.summarize(masked_mean(outputs.last_hidden_state, token_mask))
        outputs.summary_hidden_state = summary.unflatten(-1, (3, -1))
        return outputs


class GRUToyDecoder(GRUToyPreTrainedModel, Seq2SeqDecoder):
    _can_record_outputs = {"cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="encoder_attn")}

    def __init__(self, config):
        super().__init__(config)
        width, heads = config.d_model, config.decoder_attention_heads
        self.initial = nn.Linear(width, width)
        self.recurrence = CachedRecurrence("gru", width, width)
        self.encoder_attn = MultiHeadAttention(config, width, heads, layer_idx=0, memory="encoder")
        self.summary_attn = MultiHeadAttention(config, width, heads, layer_idx=0, memory="summary")
        self.post_init()

    def run(self, hidden_states, kernel_mask, token_mask, memories, cache, **kwargs):
        source, summary = memories["encoder"], memories["summary"]

        def initial():
            mean = masked_mean(source.states, source.token_mask)
            return spread_over_beams(torch.tanh(self.initial(mean)), hidden_states.shape[0])

        states = self.recurrence(hidden_states, token_mask, cache, initial)
        context, _ = self.encoder_attn(states, source.states, source.kernel_mask, cache, **kwargs)
        further, _ = self.summary_attn(states, summary.states, summary.kernel_mask, cache, **kwargs)
        return [hidden_states, states + context + further]


class GRUToyModel(GRUToyPreTrainedModel, Seq2SeqModelBase):
    encoder_class, decoder_class = GRUToyEncoder, GRUToyDecoder


class GRUToyForConditionalGeneration(GRUToyPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    model_class = GRUToyModel


GRUToyModel.register_for_auto_class("AutoModel")
GRUToyForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
