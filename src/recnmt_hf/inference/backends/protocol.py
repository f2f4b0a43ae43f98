"""Interface between the translator and a backend: token ids in, token ids and log-probabilities out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...data.records import TokenRows
from ...data.tokenizer_pair import TokenizerPair
from ...errors import UserError
from ..model_settings import LengthLimits, length_limits
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


class Backend(ABC):
    """
    Base class: a model with its tokenizers. Methods take batches without padding. A backend with a `kind`, which is
    part of the message, translates and scores, but does not give access to attention, states or weights.
    """

    kind = ""
    model: Any  # or a description of an exported one, with `config`, `generation_config` and `name_or_path`
    tokenizers: TokenizerPair

    @property
    def limits(self) -> LengthLimits:
        """Numbers of source and target tokens that the model's positions allow."""
        return length_limits(self.model.config)

    @abstractmethod
    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        """Translate one batch or several, all with the same options."""

    @abstractmethod
    def score(self, sources: TokenRows, targets: TokenRows) -> list[list[float]]:
        """Return the log-probability of every target token, one list per target."""

    def attention(self, sources: TokenRows, targets: TokenRows) -> tuple[torch.Tensor, ...]:
        """Return cross-attention by layer `(batch, heads, target_length, source_length)`; row j predicts token j."""
        self.inspected_model()
        raise NotImplementedError

    def inspected_model(self) -> Any:
        """Return the PyTorch model for reading attentions, states or weights; `UserError` if there is a `kind`."""
        if self.kind:
            raise UserError(f"{self.model.name_or_path} is {self.kind}, which gives no alignments or attention.")
        return self.model
