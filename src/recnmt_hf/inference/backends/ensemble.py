"""Backend for several models that translate together: it averages their log-probabilities token by token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from ...data.tokenizer_checks import stamp
from ...models.user_errors import UserError
from ..decoding import MaxLengthPerSentence, PrefixPerSentence
from ..eval_mode import eval_mode
from ..model_settings import LengthLimits, end_ids, start_id, target_vocabulary_size
from ..options import DecodingOptions
from ..search import SearchRows, run_search
from .protocol import Backend, SearchRequest, SearchResult
from .torch_model import explained_generation


# Arguments of `generate` that are supported, besides early_stopping.
ENSEMBLE_ARGUMENTS = (
    *("no_repeat_ngram_size", "repetition_penalty", "min_new_tokens"),
    *("bad_words_ids", "suppress_tokens"),
)


class EnsembleRows:
    """[`SearchRows`] of several models: the mean of their log-probabilities, `log p = mean_k log p_k`."""

    returns_log_probs = True

    def __init__(self, members: Sequence[SearchRows]):
        self.members = list(members)

    @property
    def sentences(self) -> int:
        return self.members[0].sentences

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        log_probs = [member.next_logits(tokens).log_softmax(-1) for member in self.members]
        return sum(log_probs[1:], start=log_probs[0]) / len(log_probs)

    def reorder(self, rows: torch.Tensor) -> None:
        for member in self.members:
            member.reorder(rows)

    def select(self, rows: torch.Tensor, sentences: torch.Tensor) -> None:
        for member in self.members:
            member.select(rows, sentences)


class EnsembleBackend:
    """
    Runs several models of one vocabulary, of any families; see [`Backend`]. It translates and scores.

    Args:
        members (sequence of [`Backend`]): At least two.

    Raises:
        ValueError: There are fewer, their tokenizers or control tokens differ, or one was exported to CTranslate2.
    """

    def __init__(self, members: Sequence[Backend]):
        if len(members) < 2:
            raise UserError("An ensemble has at least two models. Remedy: name more, or translate with the one.")
        self.members = [member.as_ensemble_member() for member in members]
        check_compatible(self.members)
        self.model, self.tokenizers = self.members[0].model, self.members[0].tokenizers

    @property
    def limits(self) -> LengthLimits:
        limits = [member.limits for member in self.members]
        return LengthLimits(
            min((limit.source for limit in limits if limit.source is not None), default=None),
            min((limit.target for limit in limits if limit.target is not None), default=None),
        )

    def seeded(self, seed: int | None) -> AbstractContextManager[Any]:
        return self.members[0].seeded(seed)

    def search(self, request: SearchRequest) -> SearchResult:
        options, device, ends = request.options, self.model.device, sorted(end_ids(self.model))
        config = GenerationConfig(
            num_beams=options.beams,
            num_return_sequences=options.num_hypotheses,
            length_penalty=options.penalty(),
            max_length=1 + max(request.max_lengths),
            pad_token_id=self.tokenizers.target.pad_token_id,
            eos_token_id=ends,
            early_stopping=options.generate.get("early_stopping", False),
        )
        criteria = StoppingCriteriaList(
            [
                MaxLengthPerSentence(torch.tensor(request.max_lengths, device=device)),
                EosTokenCriteria(torch.tensor(ends, device=device)),
            ]
        )
        start = torch.full((len(request.sources) * options.beams, 1), start_id(self.model), device=device)
        with explained_generation(options), eval_mode(*(member.model for member in self.members)):
            processors = self.processors(options)
            if any(request.prefixes):
                processors.append(PrefixPerSentence(request.prefixes))
            rows = EnsembleRows([member.start_rows(request.sources, options.beams) for member in self.members])
            tokens = run_search(rows, start, processors, criteria, config)
        return SearchResult(tokens[:, 1:].tolist())

    def processors(self, options: DecodingOptions) -> LogitsProcessorList:
        """
        Return the logits processors that `generate` would create for its arguments.

        Raises:
            UserError: An argument is not supported.
        """
        settings = {name: value for name, value in options.generate.items() if name != "early_stopping" and value}
        if unsupported := sorted(set(settings) - set(ENSEMBLE_ARGUMENTS)):
            raise UserError(f"An ensemble has no {unsupported[0]}. Remedy: leave it out, or translate with one model.")
        device = self.model.device
        ends = torch.tensor(sorted(end_ids(self.model)), device=device)
        processors: list[Any] = []
        if "repetition_penalty" in settings:
            processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
        if "no_repeat_ngram_size" in settings:
            processors.append(NoRepeatNGramLogitsProcessor(settings["no_repeat_ngram_size"]))
        if "bad_words_ids" in settings:
            processors.append(NoBadWordsLogitsProcessor(settings["bad_words_ids"], ends))
        if "min_new_tokens" in settings:
            processors.append(MinNewTokensLengthLogitsProcessor(1, settings["min_new_tokens"], ends, str(device)))
        if "suppress_tokens" in settings:
            processors.append(SuppressTokensLogitsProcessor(settings["suppress_tokens"], str(device)))
        return LogitsProcessorList(processors)

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        scores = [member.score(sources, targets) for member in self.members]
        return [[sum(values) / len(values) for values in zip(*rows, strict=True)] for rows in zip(*scores, strict=True)]

    def inspected_model(self) -> NoReturn:
        raise UserError("An ensemble gives no alignments, attentions or states. Remedy: use one of its models.")

    def encode(self, sources: Sequence[Sequence[int]]) -> NoReturn:
        self.inspected_model()

    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> NoReturn:
        self.inspected_model()

    def as_ensemble_member(self) -> NoReturn:
        raise UserError("An ensemble cannot be part of another one. Remedy: name all models in one ensemble.")


def check_compatible(members: Sequence[Backend]) -> None:
    """
    Check that models can be in one ensemble.

    Raises:
        UserError: Their tokenizers or control tokens differ.
    """
    first, *others = members
    expected = shared_settings(first)
    for member in others:
        for name, value in shared_settings(member).items():
            if value != expected[name]:
                raise UserError(
                    f"{member.model.name_or_path} and {first.model.name_or_path} differ in {name}, but the models of "
                    "an ensemble must predict the same tokens. Remedy: give models that were trained with the same "
                    "tokenizers (tokenizer.source, or model.init_from)."
                )


def shared_settings(backend: Backend) -> dict[str, Any]:
    """Return what must be the same for all models of an ensemble."""
    source, target = backend.tokenizers
    return {
        "the source tokenizer": stamp(source),
        "the target tokenizer": stamp(target, is_target=True),
        "the rows of the output matrix": target_vocabulary_size(backend.model.config),
        "the padding token": target.pad_token_id,
        "the tokens that end a sentence": end_ids(backend.model),
        "the token that starts one": start_id(backend.model),
    }
