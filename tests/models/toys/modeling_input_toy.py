"""A Transformer whose decoder reads its words through a recurrence, in place of positions."""

from torch import nn
from transformers import GenerationMixin

from .configuration_input_toy import InputToyConfig
from .modeling_nmt_transformer import NMTTransformerDecoder, NMTTransformerEncoder, NMTTransformerPreTrainedModel
from .recurrent_layers import CachedRecurrence
from .seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase


class InputToyPreTrainedModel(NMTTransformerPreTrainedModel):
    config: InputToyConfig


class RecurrentInput(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.recurrence = CachedRecurrence(config.cell, config.d_model, config.d_model)

    def forward(self, embeddings, attention_mask=None, offset=0, cache=None):
        return embeddings + self.recurrence(embeddings, attention_mask, cache)


class InputToyEncoder(InputToyPreTrainedModel, NMTTransformerEncoder):
    pass


class InputToyDecoder(InputToyPreTrainedModel, NMTTransformerDecoder):
    def build_input(self, config):
        return RecurrentInput(config)


class InputToyModel(InputToyPreTrainedModel, Seq2SeqModelBase):
    encoder_class, decoder_class = InputToyEncoder, InputToyDecoder


class InputToyForConditionalGeneration(InputToyPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin):
    model_class = InputToyModel


InputToyModel.register_for_auto_class("AutoModel")
InputToyForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
