"""A Transformer encoder that sums up its layers in a vector for each source, which a gate lets into the decoder."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.utils.output_capturing import OutputRecorder

from .configuration_gate_toy import GateToyConfig
from .decoder_cache import cached_vector
from .modeling_nmt_transformer import NMTTransformerDecoder, NMTTransformerEncoder, NMTTransformerPreTrainedModel
from .recurrent_layers import masked_mean
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from .seq2seq_outputs import Seq2SeqDecoderOutput, Seq2SeqEncoderOutput


@dataclass
class GateToyEncoderOutput(Seq2SeqEncoderOutput):
    memory_fields = {"global": ("global_hidden_state",)}

    global_hidden_state: torch.Tensor | None = None


@dataclass
class GateToyDecoderOutput(Seq2SeqDecoderOutput):
    gates: tuple[torch.Tensor, ...] | None = None


class GateToyPreTrainedModel(NMTTransformerPreTrainedModel):
    config: GateToyConfig


class Gate(nn.Module):
    def forward(self, of_states, of_source):
        return torch.sigmoid(of_states + of_source)


class GateToyEncoder(GateToyPreTrainedModel, NMTTransformerEncoder):
    output_class = GateToyEncoderOutput

    def finish(self, states, embeddings, token_mask, **kwargs):
        outputs = super().finish(states, embeddings, token_mask)
        outputs.global_hidden_state = sum(masked_mean(each, token_mask) for each in states[1:])
        return outputs


class GateToyDecoder(GateToyPreTrainedModel, NMTTransformerDecoder):
    output_class = GateToyDecoderOutput
    _can_record_outputs = {**NMTTransformerDecoder._can_record_outputs, "gates": OutputRecorder(Gate)}

    def __init__(self, config):
        super().__init__(config)
        self.of_states, self.of_source = (nn.Linear(config.d_model, config.d_model) for _ in range(2))
        self.gate = Gate()
        self.post_init()

    def finish(self, states, memories, cache):
        last, vector = super().finish(states, memories, cache), memories["global"].states

        def project():
            return torch.cat([self.of_source(vector), vector], dim=-1)

        of_source, value = cached_vector(cache, "global", project, last.shape[0])[:, None].chunk(2, dim=-1)
        return last + self.gate(self.of_states(last), of_source) * value


class GateToyModel(GateToyPreTrainedModel, Seq2SeqModelBase):
    encoder_class, decoder_class = GateToyEncoder, GateToyDecoder


class GateToyForConditionalGeneration(GateToyPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    model_class = GateToyModel
