"""
A variant outside of recnmt_hf: a Transformer that adds the mean of the encoder states to each encoder state.

Its fields and weights are saved and loaded like those of all models; with `register_for_auto_class`, its code is saved
too. Its layer is initialised like every `nn.Linear`. An own `nn.Parameter` needs a method `initialize(self, start)` of
its module, such as `init.zeros_(self.own_weight)` with `transformers.initialization`; without one it has no value after
loading a baseline, as in transformers.
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from recnmt_hf import NMTTransformerConfig, NMTTransformerPreTrainedModel
from recnmt_hf.models.modeling_nmt_transformer import NMTTransformerDecoder, NMTTransformerEncoder
from recnmt_hf.models.recurrent_layers import masked_mean
from recnmt_hf.models.seq2seq_base import Seq2SeqConditionalGeneration, Seq2SeqModelBase
from recnmt_hf.models.seq2seq_outputs import Seq2SeqEncoderOutput


class MeanTransformerConfig(NMTTransformerConfig):
    model_type = "mean_transformer"

    mean_bias: bool = True


class MeanTransformerPreTrainedModel(NMTTransformerPreTrainedModel):
    config: MeanTransformerConfig


class MeanTransformerEncoder(MeanTransformerPreTrainedModel, NMTTransformerEncoder):
    def __init__(self, config: MeanTransformerConfig):
        super().__init__(config)
        self.mean_proj = nn.Linear(config.d_model, config.d_model, bias=config.mean_bias)
        self.post_init()

    def finish(
        self, states: list[torch.Tensor], embeddings: torch.Tensor, token_mask: torch.Tensor | None, **kwargs: Any
    ) -> Seq2SeqEncoderOutput:
        outputs = super().finish(states, embeddings, token_mask, **kwargs)
        mean = masked_mean(outputs.last_hidden_state, token_mask)
        outputs.last_hidden_state = outputs.last_hidden_state + self.mean_proj(mean)[:, None]
        return outputs


class MeanTransformerModel(MeanTransformerPreTrainedModel, Seq2SeqModelBase):
    encoder_class, decoder_class = MeanTransformerEncoder, NMTTransformerDecoder


class MeanTransformerForConditionalGeneration(
    MeanTransformerPreTrainedModel, Seq2SeqConditionalGeneration, GenerationMixin
):
    model_class = MeanTransformerModel


MeanTransformerConfig.register_for_auto_class()
MeanTransformerModel.register_for_auto_class("AutoModel")
MeanTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
