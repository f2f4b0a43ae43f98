"""Backend for several models that translate together: it averages their log-probabilities token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    ForcedBOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from ...data.records import TokenRows
from ...data.tokenizer_checks import stamp, vocabulary_sizes
from ...data.tree_inputs import tree_options
from ...errors import UserError, short_repr
from ..decoding import EndPerSentence, MaxLengthPerSentence, PrefixPerSentence
from ..model_settings import LengthLimits, end_ids, setting
from ..options import DecodingOptions, reject_unsupported
from ..search import BeamSearch, GreedySearch, ModelRows, search_all
from .protocol import Backend, SearchRequest, SearchResult, TranslatesOnly, noted_settings
from .torch_model import TorchBackend, eval_mode, start_ids


# Supported arguments of `generate` besides early_stopping, with their processors, in the order of `generate`.
PROCESSORS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "repetition_penalty": lambda value, ends: RepetitionPenaltyLogitsProcessor(value),
    "no_repeat_ngram_size": lambda value, ends: NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": NoBadWordsLogitsProcessor,
    "min_length": lambda value, ends: MinLengthLogitsProcessor(value, ends, str(ends.device)),
    "min_new_tokens": lambda value, ends: MinNewTokensLengthLogitsProcessor(1, value, ends, str(ends.device)),
    "suppress_tokens": lambda value, ends: SuppressTokensLogitsProcessor(value, str(ends.device)),
    "forced_bos_token_id": lambda value, ends: ForcedBOSTokenLogitsProcessor(value),
}


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


class EnsembleBackend(TranslatesOnly):
    """Runs two or more models of one vocabulary, in PyTorch or ONNX; see [`Backend`]. It translates and scores."""

    kind = "part of an ensemble"

    def __init__(self, members: Sequence[Backend]):
        if len(members) < 2:
            raise UserError(f"An ensemble needs at least two models, got {short_repr(len(members))}.")
        self.members = [member for member in members if isinstance(member, TorchBackend)]
        if others := [member for member in members if not isinstance(member, TorchBackend)]:
            name = f"{others[0].model.name_or_path} ({type(others[0]).__name__})"
            raise UserError(f"{name} is not supported in an ensemble. Use models in PyTorch or ONNX.")
        check_compatible(self.members)
        readers = (member for member in self.members if tree_options(member.model.config) is not None)
        first = next(readers, self.members[0])  # the one whose inputs are encoded
        self.model, self.tokenizers = first.model, first.tokenizers

    @property
    def limits(self) -> LengthLimits:
        sides = zip(*(member.limits for member in self.members), strict=True)
        return LengthLimits(*(min((limit for limit in side if limit is not None), default=None) for side in sides))

    def seeded(self, seed: int | None) -> AbstractContextManager[Any]:
        return self.members[0].seeded(seed)

    def search_batch(self, request: SearchRequest) -> SearchResult:
        options, device, ends = request.options, self.model.device, sorted(end_ids(self.model))
        config = GenerationConfig(
            num_beams=options.beams,
            num_return_sequences=options.num_hypotheses,
            length_penalty=options.penalty(),
            max_length=1 + max(request.max_lengths),
            pad_token_id=self.tokenizers.target.pad_token_id,
            eos_token_id=ends,
            early_stopping=options.generate.get("early_stopping", setting(self.model, "early_stopping") or False),
        )
        max_lengths, end_tokens = (torch.tensor(ids, device=device) for ids in (request.max_lengths, ends))
        criteria = StoppingCriteriaList([MaxLengthPerSentence(max_lengths), EosTokenCriteria(end_tokens)])
        for member in self.members:
            check_beams: Any = getattr(member.model, "check_beams", None)
            if check_beams is not None:
                check_beams(options.beams, "beams")
        starts = torch.tensor(start_ids(self.model, request.prefixes), device=device)
        start = starts.repeat_interleave(options.beams)[:, None]
        with noted_settings(options), eval_mode(*(member.model for member in self.members)):
            processors = self.processors(options)
            if any(request.prefixes):
                own = request.prefixes
                processors.append(PrefixPerSentence([row.ids for row in own], given=[row.given for row in own]))
            if (end := setting(self.model, "forced_eos_token_id")) is not None:
                processors.append(EndPerSentence(end, request.max_lengths))
            rows = EnsembleRows([member.start_rows(request.sources, options.beams) for member in self.members])
            kind = BeamSearch if options.beams > 1 else GreedySearch
            found = search_all([kind(rows, start, processors, criteria, config)], options.max_tokens)
        return SearchResult([row for rows in found for row in rows[:, 1:].tolist()])

    def processors(self, options: DecodingOptions) -> LogitsProcessorList:
        """Return the processors that `generate` makes of arguments and settings; `UserError` for unsupported ones."""
        settings = {name: getattr(self.model.generation_config, name, None) for name in PROCESSORS}
        settings = {name: value for name, value in (settings | options.generate).items() if value is not None}
        settings.pop("early_stopping", None)
        settings = {name: value for name, value in settings.items() if value or name == "forced_bos_token_id"}
        if unsupported := sorted(set(settings) - set(PROCESSORS)):
            raise UserError(f"generate.{unsupported[0]} is not supported by an ensemble.")
        reject_unsupported(self.model.generation_config, "an ensemble")
        ends = torch.tensor(sorted(end_ids(self.model)), device=self.model.device)
        return LogitsProcessorList(
            [make(settings[name], ends) for name, make in PROCESSORS.items() if name in settings]
        )

    def score(self, sources: TokenRows, targets: TokenRows) -> list[list[float]]:
        scores = [member.score(sources, targets) for member in self.members]
        return [[sum(values) / len(values) for values in zip(*rows, strict=True)] for rows in zip(*scores, strict=True)]


def check_compatible(members: Sequence[Backend]) -> None:
    """Raise `UserError` if the tokenizers or control tokens of models differ, or the trees that some of them read."""
    expected: dict[str, tuple[Any, Backend]] = {}
    for member in members:
        for name, value in shared_settings(member).items():
            known, first = expected.setdefault(name, (value, member))
            if value != known:
                names = (backend.model.name_or_path for backend in (member, first))
                raise UserError(f"{' and '.join(names)} differ in {name}, so they cannot be an ensemble.")


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
