"""Backend for several models that translate together: it averages their log-probabilities token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...data.records import TokenRows
from ...data.tokenizer_pair import stamp, vocabulary_sizes
from ...data.tree_inputs import tree_options
from ...errors import UserError
from ..model_settings import LengthLimits, end_ids, setting
from ..search import ModelRows
from .protocol import Backend, SearchRequest, SearchResult, TranslatesOnly
from .torch_model import TorchBackend, eval_mode


class EnsembleRows(ModelRows):
    """Rows of several models: the mean of their log-probabilities, `log p = mean_k log p_k`."""

    returns_log_probs = True

    def __init__(self, members: Sequence[ModelRows]):
        self.members, self.sentences = members, members[0].sentences

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mean([member.next_logits(tokens) for member in self.members])

    def first_logits(self, tokens: torch.Tensor, beams: int) -> torch.Tensor:
        return self.mean([member.first_logits(tokens, beams) for member in self.members])

    def mean(self, logits: Sequence[torch.Tensor]) -> torch.Tensor:
        log_probs = [own.log_softmax(-1) for own in logits]
        return sum(log_probs[1:], start=log_probs[0]) / len(log_probs)

    def reorder(self, rows: torch.Tensor) -> None:
        for member in self.members:
            member.reorder(rows)

    def select(self, rows: torch.Tensor, sentences: torch.Tensor) -> None:
        for member in self.members:
            member.select(rows, sentences)


class EnsembleBackend(TranslatesOnly, TorchBackend):
    """
    Runs two or more models of one vocabulary, in PyTorch or ONNX; see [`Backend`]. It translates and scores. The first
    model's `generate` prepares the search, in which all of them compute the next tokens.
    """

    kind = "part of an ensemble"
    needs_own_search = True

    def __init__(self, members: Sequence[Backend]):
        self.members: list[Any] = list(members)
        expected: dict[str, tuple[Any, str]] = {}
        for member in members:
            name = member.model.name_or_path
            if not isinstance(member, TorchBackend) or isinstance(member, EnsembleBackend):
                raise UserError(f"{name} cannot be part of an ensemble, only PyTorch and ONNX.")
            for what, value in shared_settings(member).items():
                known, first = expected.setdefault(what, (value, name))
                if value != known:
                    raise UserError(f"{name} and {first} differ in {what}, so they cannot be an ensemble.")
        # The first one is that whose inputs are encoded.
        self.members.sort(key=lambda member: tree_options(member.model.config) is None)
        self.model, self.tokenizers = self.members[0].model, self.members[0].tokenizers

    @property
    def limits(self) -> LengthLimits:
        sides = zip(*(member.limits for member in self.members), strict=True)
        return LengthLimits(*(min((limit for limit in side if limit is not None), default=None) for side in sides))

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        for member in self.members:
            if hasattr(member.model, "check_beams"):
                member.model.check_beams(requests[0].options.beams, "beams")
        with eval_mode(*(member.model for member in self.members)):
            return TorchBackend.search(self, requests)

    def rows_class(self, request: SearchRequest) -> Callable[..., ModelRows]:
        def start(model: Any, inputs: dict[str, Any], rows: int, sentences: int) -> EnsembleRows:
            others = [member.start_rows(request.sources, request.options.beams) for member in self.members[1:]]
            return EnsembleRows([ModelRows(model, inputs, rows, sentences), *others])

        return start

    def score(self, sources: TokenRows, targets: TokenRows) -> list[list[float]]:
        scores = [member.score(sources, targets) for member in self.members]
        return [[sum(values) / len(values) for values in zip(*rows, strict=True)] for rows in zip(*scores, strict=True)]


def shared_settings(backend: Backend) -> dict[str, Any]:
    """Return the settings that must be the same for all models of an ensemble that have them."""
    source, target = backend.tokenizers
    trees = tree_options(backend.model.config)
    return {
        "the source tokenizer": stamp(source),
        "the target tokenizer": stamp(target, is_target=True),
        "the rows of the output matrix": vocabulary_sizes(backend.model.config)[1],
        "the padding token": target.pad_token_id,
        "the end tokens": end_ids(backend.model),
        "the start token": setting(backend.model, "decoder_start_token_id"),
        **({} if trees is None else {"the relations of dependency trees": (backend.tokenizers.relations, trees)}),
    }
