"""Interface between the translator and a backend: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from ...data.records import TokenRows
from ...data.tokenizer_pair import TokenizerPair
from ...errors import UserError
from ..model_settings import LengthLimits
from ..options import DecodingOptions


@dataclass
class SearchRequest:
    """Batch of sources to translate."""

    sources: TokenRows  # each with its end token
    prefixes: TokenRows  # tokens that each translation begins with; may be empty
    max_lengths: Sequence[int]  # new tokens for each source, prefix and end token included
    options: DecodingOptions
    numbers: Sequence[int] = ()  # of the sentence of each source in the call, from 0


@dataclass
class SearchResult:
    """Hypotheses of a batch. Each source has the same number of them, in consecutive rows, best first."""

    tokens: list[list[int]]  # new tokens; those after the end token or the limit are ignored
    log_probs: list[float] | None = None  # if the search reports them


class EncodedSources(NamedTuple):
    """Output of the model's encoder for a batch, with padded token ids and mask `(batch_size, source_length)`."""

    output: Any  # `ModelOutput` with `last_hidden_state` `(batch_size, source_length, d_model)`
    input_ids: torch.Tensor
    attention_mask: torch.Tensor  # 1 = token, 0 = padding


class Backend(Protocol):
    """A model with its tokenizers. Methods take a batch without padding; what a format lacks is a `UserError`."""

    model: Any  # or a description of an exported one, with `config`, `generation_config` and `name_or_path`
    tokenizers: TokenizerPair

    @property
    def limits(self) -> LengthLimits:
        """Numbers of source and target tokens that the model's positions allow."""

    def encode(self, sources: TokenRows) -> EncodedSources:
        """Run the encoder."""

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        """Translate one batch or several, all with the same options."""

    def score(self, sources: TokenRows, targets: TokenRows) -> list[list[float]]:
        """Return the log-probability of every target token, one list per target."""

    def attention(self, sources: TokenRows, targets: TokenRows) -> tuple[torch.Tensor, ...]:
        """
        Return the cross-attention under teacher forcing, per decoder layer `(batch_size, num_heads, target_length,
        source_length)`. Row j belongs to the step that predicts target token j.
        """

    def seeded(self, seed: int | None) -> AbstractContextManager[Any]:
        """Return a context in which `search` samples with a seed; `None`: without."""

    def inspected_model(self) -> Any:
        """Return the PyTorch model for reading its attentions, states or weights."""


class TranslatesOnly:
    """Methods of backends that translate and score, without access to attentions, states or weights."""

    model: Any
    kind: str  # for the message

    def inspected_model(self) -> NoReturn:
        raise UserError(f"{self.model.name_or_path} is {self.kind}, which gives no alignments or attention.")

    def encode(self, sources: TokenRows) -> NoReturn:
        self.inspected_model()

    def attention(self, sources: TokenRows, targets: TokenRows) -> NoReturn:
        self.inspected_model()
