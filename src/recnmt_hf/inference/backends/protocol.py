"""Interface between the translator and a backend: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ...data.tokenizer_pair import TokenizerPair
from ..model_settings import LengthLimits
from ..options import DecodingOptions
from ..search import SearchRows


@dataclass
class SearchRequest:
    """
    Batch of sources to translate.

    Attributes:
        sources (sequence of sequences of `int`): Token ids of each source, with its end token.
        prefixes (sequence of sequences of `int`): Token ids that each translation begins with; may be empty.
        max_lengths (sequence of `int`): Maximum number of new tokens for each source, prefix and end token included.
        options ([`DecodingOptions`]): Beams, length penalty, number of hypotheses, arguments for `generate`.
    """

    sources: Sequence[Sequence[int]]
    prefixes: Sequence[Sequence[int]]
    max_lengths: Sequence[int]
    options: DecodingOptions


@dataclass
class SearchResult:
    """
    Hypotheses of a batch. Each source has the same number of them, in consecutive rows, best first.

    Attributes:
        tokens (`list[list[int]]`): New token ids of each hypothesis; tokens after its end or its limit are ignored.
        log_probs (`list[float]`, *optional*): Log-probability of each hypothesis, if the search reports it.
    """

    tokens: list[list[int]]
    log_probs: list[float] | None = None


class EncodedSources(NamedTuple):
    """
    Encoder output of a batch.

    Attributes:
        output (`ModelOutput`): As the model's encoder returns it; `last_hidden_state` is
            `(batch_size, source_length, d_model)`.
        input_ids (`torch.LongTensor` of shape `(batch_size, source_length)`): Padded token ids.
        attention_mask (`torch.LongTensor` of shape `(batch_size, source_length)`): 1 = token, 0 = padding.
    """

    output: Any
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


class Backend(Protocol):
    """
    A model with its tokenizers. All methods take one batch of token ids without padding. Methods that a format does not
    support raise a `UserError`.

    Attributes:
        model (`Any`): The model, or a description of an exported one; has `config`, `generation_config` and
            `name_or_path`.
        tokenizers ([`TokenizerPair`]): Tokenizers of the model.
    """

    model: Any
    tokenizers: TokenizerPair

    @property
    def limits(self) -> LengthLimits:
        """Numbers of source and target tokens that the model's positions allow."""
        ...

    def encode(self, sources: Sequence[Sequence[int]]) -> EncodedSources:
        """Run the encoder."""
        ...

    def search(self, request: SearchRequest) -> SearchResult:
        """Translate."""
        ...

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of every target token, one list per target."""
        ...

    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """
        Return the cross-attention under teacher forcing, per decoder layer `(batch_size, num_heads, target_length,
        source_length)`. Row j belongs to the step that predicts target token j.
        """
        ...

    def seeded(self, seed: int | None) -> AbstractContextManager[Any]:
        """Return a context in which `search` samples with a seed; `None`: without."""
        ...

    def as_ensemble_member(self) -> EnsembleMember:
        """Return the backend for an ensemble."""
        ...

    def inspected_model(self) -> Any:
        """Return the PyTorch model for reading its attentions, states or weights."""
        ...


class EnsembleMember(Backend, Protocol):
    """A backend that also decodes step by step beside others. Its model has a `device`."""

    def start_rows(self, sources: Sequence[Sequence[int]], beams: int) -> SearchRows:
        """Encode sources and start a search with `beams` consecutive rows for each."""
        ...
