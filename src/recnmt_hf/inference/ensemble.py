"""Several models that translate together: their log-probabilities are averaged, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
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

from ..data.tokenizer_checks import stamp
from ..models.user_errors import UserError
from .decoding import MaxLengthPerSentence, PrefixPerSentence
from .eval_mode import eval_mode
from .options import DecodingOptions
from .results import Hypothesis
from .search import search
from .translator import Translator, explained_generation


# What else `generate` shall do, as far as an ensemble does it.
SETTINGS = ("no_repeat_ngram_size", "repetition_penalty", "min_new_tokens", "bad_words_ids", "suppress_tokens")


class Caches:
    """The caches of several models, moved together."""

    def __init__(self, members: Sequence[Any]):
        self.members: list[Any] = list(members)

    def reorder_cache(self, rows: torch.Tensor) -> None:
        for cache in self.members:
            cache.reorder_cache(rows)

    def batch_select_indices(self, rows: torch.Tensor) -> None:
        for cache in self.members:
            cache.batch_select_indices(rows)


class Members:
    """Models that answer as one for [`search`]: with the mean of their log-probabilities, `log p = mean_k log p_k`."""

    gives_log_probs = True

    def __init__(self, models: Sequence[Any]):
        self.models = list(models)

    def __call__(
        self,
        decoder_input_ids: torch.Tensor,
        encoder_outputs: tuple[Any, ...],
        attention_mask: torch.Tensor,
        past_key_values: Caches,
        **kwargs: Any,
    ) -> Any:
        total: torch.Tensor | None = None
        for model, encoded, cache in zip(self.models, encoder_outputs, past_key_values.members, strict=True):
            logits = model(
                decoder_input_ids=decoder_input_ids,
                encoder_outputs=encoded,
                attention_mask=attention_mask,
                past_key_values=cache,
                **kwargs,
            ).logits[:, -1:]
            log_probs = logits.float().log_softmax(-1)
            total = log_probs if total is None else total + log_probs
        assert total is not None, "there are members"
        return SimpleNamespace(logits=total / len(self.models), past_key_values=past_key_values)


class EnsembleTranslator(Translator):
    """
    Translates and scores with several models of one vocabulary, of whatever families: a token's log-probability is the
    mean of theirs. It has no attention to align by.

    Args:
        members (sequence of [`Translator`]): At least two, each with its model of the zoo or of transformers.

    Raises:
        ValueError: There are fewer, their tokenizers or control tokens differ, or one was exported to CTranslate2.
    """

    def __init__(self, members: Sequence[Translator]):
        if len(members) < 2:
            raise UserError("An ensemble has at least two models. Remedy: name more, or translate with the one.")
        for each in members:
            if not hasattr(each.model, "get_encoder"):
                raise UserError(
                    f"{each.model.name_or_path} was exported to {each.model.exported_to}, which is not supported in an "
                    "ensemble. Remedy: use the model that it was exported from."
                )
        first = members[0]
        self.members = list(members)
        self.model, self.tokenizers, self.control_ids = first.model, first.tokenizers, first.control_ids
        self.origin = first.origin
        own = signature_of(first)
        for each in members[1:]:
            for name, value in signature_of(each).items():
                if value != own[name]:
                    raise UserError(
                        f"{each.model.name_or_path} and {first.model.name_or_path} differ in {name}, and the models of "
                        "an ensemble say the same tokens. Remedy: give models that were trained with the same "
                        "tokenizers (tokenizer.source, or model.init_from)."
                    )

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> EnsembleTranslator:
        """
        Loads the models of an ensemble.

        Args:
            path (sequence of `str` or `Path`): Folders or model ids.
            *args, **kwargs: Those of [`Translator.from_pretrained`].
        """
        paths = [path] if isinstance(path, (str, Path)) else list(path)
        return cls([Translator.from_pretrained(each, *args, **kwargs) for each in paths])

    def _generate(
        self,
        sources: Sequence[Sequence[int]],
        options: DecodingOptions,
        prefixes: Sequence[Sequence[int]],
        scores: bool = True,
    ) -> list[list[Hypothesis]]:
        if options.alignments:
            raise UserError("An ensemble gives no alignments. Remedy: align with one of its models.")
        models = [each.model for each in self.members]
        input_ids, attention_mask = self.pad(sources, self.tokenizer.pad_token_id)
        limits, penalty = self.limits(sources, prefixes, options), options.penalty()
        config = GenerationConfig(
            num_beams=options.beams,
            num_return_sequences=options.num_hypotheses,
            length_penalty=penalty,
            max_length=1 + max(limits),
            pad_token_id=self.pad_id(),
            eos_token_id=sorted(self.end_ids()),
            early_stopping=options.generate.get("early_stopping", False),
        )
        criteria = StoppingCriteriaList(
            [
                MaxLengthPerSentence(torch.tensor(limits, device=self.model.device)),
                EosTokenCriteria(torch.tensor(sorted(self.end_ids()), device=self.model.device)),
            ]
        )
        start = self.shift(input_ids[:, :1])
        with explained_generation(options), eval_mode(*models):
            processors = self.processors(options)
            if any(prefixes):
                processors.append(PrefixPerSentence(prefixes))
            found = search(
                Members(models),
                start.repeat_interleave(options.beams, 0),
                processors,
                criteria,
                config,
                encoder_outputs=tuple(encoded(model, input_ids, attention_mask, options.beams) for model in models),
                attention_mask=attention_mask.repeat_interleave(options.beams, 0),
                past_key_values=Caches([empty_cache(model) for model in models]),
            )
        kept = options.num_hypotheses
        rows = [
            self.strip(row[: limits[number // kept]]) for number, row in enumerate(found[:, start.shape[1] :].tolist())
        ]
        return self.hypotheses_of(sources, rows, options, scores)

    def processors(self, options: DecodingOptions) -> LogitsProcessorList:
        """What `generate` would make of the settings that an ensemble knows."""
        given = {name: value for name, value in options.generate.items() if name != "early_stopping" and value}
        if unknown := sorted(set(given) - set(SETTINGS)):
            raise UserError(f"An ensemble has no {unknown[0]}. Remedy: leave it out, or translate with one model.")
        made: list[Any] = []
        if "repetition_penalty" in given:
            made.append(RepetitionPenaltyLogitsProcessor(given["repetition_penalty"]))
        if "no_repeat_ngram_size" in given:
            made.append(NoRepeatNGramLogitsProcessor(given["no_repeat_ngram_size"]))
        ends = torch.tensor(sorted(self.end_ids()), device=self.model.device)
        if "bad_words_ids" in given:
            made.append(NoBadWordsLogitsProcessor(given["bad_words_ids"], ends))
        if "min_new_tokens" in given:
            made.append(MinNewTokensLengthLogitsProcessor(1, given["min_new_tokens"], ends, str(self.model.device)))
        if "suppress_tokens" in given:
            made.append(SuppressTokensLogitsProcessor(given["suppress_tokens"], str(self.model.device)))
        return LogitsProcessorList(made)

    def score_tokens(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 4096
    ) -> list[list[float]]:
        """The mean of the models' log-probabilities of every target token."""
        of_members = [each.score_tokens(sources, targets, max_tokens) for each in self.members]
        return [
            [sum(values) / len(values) for values in zip(*rows, strict=True)] for rows in zip(*of_members, strict=True)
        ]

    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Any:
        raise UserError("An ensemble gives no alignments. Remedy: align with one of its models.")

    def positions(self, side: str) -> int | None:
        """Of the model that has fewest."""
        found = [each.positions(side) for each in self.members]
        return min((each for each in found if each is not None), default=None)


def signature_of(translator: Translator) -> dict[str, Any]:
    """What the models of an ensemble have in common."""
    config = translator.model.config
    rows = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    return {
        "the source tokenizer": stamp(translator.tokenizer),
        "the target tokenizer": stamp(translator.target_tokenizer, is_target=True),
        "the rows of the output matrix": rows,
        "the padding token": translator.pad_id(),
        "the tokens that end a sentence": translator.end_ids(),
        "the token that starts one": int(translator.shift(torch.zeros(1, 1, dtype=torch.long))[0, 0]),
    }


def encoded(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, beams: int) -> Any:
    """A model's encoder output, one row for each beam where the model does not share it between them."""
    outputs = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
    if hasattr(model, "init_from_baseline"):  # the zoo's decoders fold beams themselves
        return outputs
    return type(outputs)(**{name: value.repeat_interleave(beams, 0) for name, value in outputs.items()})


def empty_cache(model: Any) -> Any:
    if hasattr(model, "new_cache"):  # one of ONNX
        return model.new_cache()
    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
