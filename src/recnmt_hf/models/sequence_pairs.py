"""Classification of sentence pairs: an encoder, a vector for each sentence, and a classifier over both vectors."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from .attention import masked_softmax
from .kernels_shared import Mask
from .recurrent_layers import left_aligned, masked_mean, take
from .seq2seq_loading import Initialization, Seq2SeqPreTrainedModel
from .seq2seq_loss import smoothed_cross_entropy
from .seq2seq_stacks import Seq2SeqEncoder
from .user_errors import UserError


class QueryPooling(nn.Module):
    """Attention of a learned query over a sentence's states, in several heads (Tran et al., 2018)."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Parameter(torch.empty(num_heads, d_model // num_heads))
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def initialize(self, start: Initialization) -> None:
        init.normal_(self.query)

    def forward(self, states: Tensor, attention_mask: Mask) -> Tensor:
        """Return vectors `(batch_size, d_model)` of states `(batch_size, length, d_model)`; zeros for padding alone."""
        keys, values = (project(states).unflatten(-1, (self.num_heads, -1)) for project in (self.k_proj, self.v_proj))
        scores = torch.einsum("blhd,hd->bhl", keys, self.query) * self.query.shape[1] ** -0.5
        visible = None
        if attention_mask is not None:
            visible = (attention_mask != 0)[:, None]
            values = values.masked_fill(~visible.transpose(1, 2)[..., None], 0.0)
        weights = masked_softmax(scores, visible, values.dtype)
        pooled = self.out_proj(torch.einsum("bhl,blhd->bhd", weights, values).flatten(1))
        if attention_mask is not None:
            pooled = pooled.masked_fill((attention_mask == 0).all(dim=1)[:, None], 0.0)
        return pooled


def last_states(states: Tensor, attention_mask: Mask) -> Tensor:
    """Return the states `(batch_size, d)` of the last real tokens of `(batch_size, length, d)`, or zeros."""
    if attention_mask is None:
        return states[:, -1]
    lengths = (attention_mask != 0).sum(dim=1)
    last = left_aligned(attention_mask).gather(1, (lengths - 1).clamp(min=0)[:, None])
    return take(states, last)[:, 0].masked_fill((lengths == 0)[:, None], 0.0)


class PairClassifier(nn.Module):
    """Two hidden layers (Tran et al., 2018) over [u; v], `"compared"`: [u; v; u * v; |u - v|] (Shen et al., 2019)."""

    def __init__(self, d_model: int, features: str, num_labels: int, dropout: float):
        super().__init__()
        self.features = features
        self.dense = nn.Linear((2 if features == "both" else 4) * d_model, d_model)
        self.dense2 = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, num_labels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return logits `(batch_size, num_labels)` of vectors `(batch_size, d_model)`."""
        parts = [first, second]
        if self.features == "compared":
            parts += [first * second, (first - second).abs()]
        hidden = torch.relu(self.dense(self.dropout(torch.cat(parts, dim=-1))))
        hidden = torch.relu(self.dense2(self.dropout(hidden)))
        return self.out_proj(self.dropout(hidden))


class SequencePairClassification(Seq2SeqPreTrainedModel):
    """An encoder (`encoder_class`), which reads both sentences in one batch, and a [`PairClassifier`]."""

    encoder_class: type[Seq2SeqEncoder]
    further_inputs = ("pair_input_ids",)

    def __init__(self, config: Any):
        super().__init__(config)
        self.encoder = self.encoder_class(config)
        is_learned = config.pair_pooling == "attention"
        self.pooling = QueryPooling(config.d_model, config.pair_pooling_heads) if is_learned else None
        sizes = config.d_model, config.pair_features, config.num_labels
        self.classifier = PairClassifier(*sizes, config.classifier_dropout)
        self.post_init()

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        return {"AutoModelForSequenceClassification": f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.encoder.embed_tokens = value

    def pool(self, states: Tensor, attention_mask: Mask) -> Tensor:
        """Return the vectors `(batch_size, d_model)` of sentences with states `(batch_size, length, d_model)`."""
        if self.pooling is not None:
            return self.pooling(states, attention_mask)
        return (last_states if self.config.pair_pooling == "last" else masked_mean)(states, attention_mask)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Mask = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Mask = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, pair_input_ids (`torch.LongTensor` of shape `(batch_size, length)`): First and second sentences.
            attention_mask, pair_attention_mask (`torch.Tensor` of the same shapes, *optional*): 1 keeps, 0 is padding.
            labels (`torch.LongTensor`, *optional*): Classes; -100 is ignored. `num_items_in_batch` divides the loss.

        Returns:
            `SequenceClassifierOutput` with `logits` of shape `(batch_size, num_labels)`. Its `hidden_states` and
            `attentions` are the encoder's, of `2 * batch_size` rows: first sentences first.
        """
        if input_ids is None or pair_input_ids is None or len(input_ids) != len(pair_input_ids):
            rows = [0 if ids is None else len(ids) for ids in (input_ids, pair_input_ids)]
            raise UserError(f"pair_input_ids has {rows[1]} rows, but input_ids has {rows[0]}.", field="pair_input_ids")
        both, mask = self.stack((input_ids, attention_mask), (pair_input_ids, pair_attention_mask))
        encoded = self.encoder(input_ids=both, attention_mask=mask, **{**kwargs, "return_dict": True})
        first, second = self.pool(encoded.last_hidden_state, mask).chunk(2)
        logits = self.classifier(first, second)
        loss = None
        if labels is not None:
            loss = smoothed_cross_entropy(logits, labels, num_items_in_batch=num_items_in_batch)
        return SequenceClassifierOutput(loss, logits, encoded.hidden_states, encoded.attentions)

    def stack(self, *sides: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Concatenate token ids of both sides along the batch, padded on the right to one length, and their masks."""
        if all(mask is None for _, mask in sides) and len({ids.shape[1] for ids, _ in sides}) == 1:
            return torch.cat([ids for ids, _ in sides]), None
        masks = [torch.ones_like(ids) if mask is None else mask.to(ids.dtype) for ids, mask in sides]
        length, padding = max(ids.shape[1] for ids, _ in sides), self.config.pad_token_id or 0
        padded = [nn.functional.pad(ids, (0, length - ids.shape[1]), value=padding) for ids, _ in sides]
        return torch.cat(padded), torch.cat([nn.functional.pad(mask, (0, length - mask.shape[1])) for mask in masks])
