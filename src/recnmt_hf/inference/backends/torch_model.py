"""Backend for encoder-decoder models in PyTorch."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..._values import shown
from ...data.tokenizer_pair import TokenizerPair
from ...models.user_errors import UserError
from ..batching import pad_rows
from ..decoding import MaxLengthPerSentence, PrefixPerSentence
from ..eval_mode import eval_mode
from ..model_checks import check_weights
from ..model_settings import LengthLimits, length_limits, start_id
from ..options import PYTHON_ARGUMENTS, DecodingOptions, reason
from ..search import ModelRows, SearchRows, search
from ..seeded_draws import SeededDraws
from .protocol import EncodedSources, SearchRequest, SearchResult


# Arguments of `generate` with which finished sentences may leave the batch: they treat each row by itself.
ROWWISE_ARGUMENTS = {
    *("do_sample", "length_penalty", "num_return_sequences", "early_stopping", "no_repeat_ngram_size"),
    *("repetition_penalty", "min_new_tokens", "min_length", "bad_words_ids", "suppress_tokens"),
}
# Settings in a model's generation_config.json that keep sentences together, with the values that disable them.
BATCHWISE_SETTINGS = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "cache_implementation": (None, "dynamic"),
    "use_cache": (None, True),
    "prompt_lookup_num_tokens": (None,),
    "low_memory": (None, False),
}


class TorchBackend:
    """
    Runs a model of this package or of transformers; see [`Backend`].

    Args:
        model (`PreTrainedModel`): An encoder-decoder with `generate`.
        tokenizers ([`TokenizerPair`]): Its tokenizers.
        check (`bool`, *optional*, defaults to `True`): Whether to refuse weights that are not finite and tokenizers of
            other models.

    Raises:
        ValueError: The weights are not finite, or a tokenizer is not the model's.
    """

    def __init__(self, model: PreTrainedModel, tokenizers: TokenizerPair, check: bool = True):
        if check:
            check_weights(model)
        tokenizers.check(model, strict=check)
        self.model: Any = model  # PreTrainedModel alone has no `generate`
        self.tokenizers = tokenizers

    @property
    def limits(self) -> LengthLimits:
        return length_limits(self.model.config)

    def inspected_model(self) -> Any:
        return self.model

    def as_ensemble_member(self) -> TorchBackend:
        return self

    def seeded(self, seed: int | None) -> AbstractContextManager[Any]:
        return nullcontext() if seed is None else SeededDraws(seed)

    def encode(self, sources: Sequence[Sequence[int]]) -> EncodedSources:
        self.inspected_model()
        return self.run_encoder(sources)

    def run_encoder(self, sources: Sequence[Sequence[int]]) -> EncodedSources:
        """Run the encoder; [`encode`] without asking whether its output can be inspected."""
        input_ids, attention_mask = self.pad_sources(sources)
        with eval_mode(self.model):
            output = self.model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        return EncodedSources(output, input_ids, attention_mask)

    def search(self, request: SearchRequest) -> SearchResult:
        options = request.options
        input_ids, attention_mask = self.pad_sources(request.sources)
        settings: dict[str, Any] = {"do_sample": False, **options.generate}
        settings |= {"length_penalty": options.penalty()} if options.beams > 1 else {}
        if options.beams > 1 or options.num_hypotheses > 1:
            settings["num_return_sequences"] = options.num_hypotheses
        processors = LogitsProcessorList(settings.pop("logits_processor", None) or [])
        if any(request.prefixes):
            processors.append(PrefixPerSentence(request.prefixes))
        max_lengths = torch.tensor(request.max_lengths, device=self.model.device)
        if settings.get("stop_strings"):
            settings["tokenizer"] = self.tokenizers.target
        if can_drop_finished(settings, options, self.model.generation_config):
            settings["custom_generate"] = search
        with eval_mode(self.model), explained_generation(options):
            outputs = self.model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                num_beams=options.beams,
                max_length=1 + max(request.max_lengths),
                max_new_tokens=None,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([MaxLengthPerSentence(max_lengths)]),
                **settings,
            )
        return SearchResult(outputs[:, 1:].tolist())

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        input_ids, attention_mask = self.pad_sources(sources)
        labels = self.pad_targets(targets)
        with eval_mode(self.model):
            logits = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=shift_right(self.model, labels),
                use_cache=False,
            ).logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = logits.gather(-1, labels[:, :, None])[:, :, 0] - logits.logsumexp(dim=-1)
        return [row[: len(target)] for row, target in zip(log_probs.tolist(), targets, strict=True)]

    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        # The encoder runs by itself, without attentions and other optional outputs: they may be large.
        encoded = self.encode(sources)
        with eval_mode(self.model):
            attentions = self.model(
                encoder_outputs=encoded.output,
                attention_mask=encoded.attention_mask,
                decoder_input_ids=shift_right(self.model, self.pad_targets(targets)),
                use_cache=False,
                output_attentions=True,
            ).cross_attentions
        if not attentions or attentions[0] is None:
            if getattr(self.model.config, "attends_source_words", True):
                raise UserError(
                    "The model returns no attention to source words to align by. Remedy: load it with "
                    "attn_implementation='eager'."
                )
            raise UserError(
                "The model's decoder does not attend to source words, so there is nothing to align by: its "
                "configuration gives it another memory. Remedy: use a model whose decoder attends to the encoder's "
                "states."
            )
        return attentions

    def start_rows(self, sources: Sequence[Sequence[int]], beams: int) -> SearchRows:
        encoded = self.run_encoder(sources)
        # The model repeats what it does not share between the beams of a source, as in `generate`.
        _, inputs = self.model._expand_inputs_for_generation(
            expand_size=beams,
            is_encoder_decoder=True,
            encoder_outputs=encoded.output,
            attention_mask=encoded.attention_mask,
        )
        inputs["past_key_values"] = self.new_cache()
        return ModelRows(self.model, inputs, len(sources) * beams, len(sources))

    def new_cache(self) -> Any:
        """Return an empty cache for the decoder."""
        config = self.model.config.get_text_config(decoder=True)
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    def pad_sources(self, sources: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return padded token ids and their mask, on the model's device."""
        return pad_rows(sources, self.tokenizers.source.pad_token_id, self.model.device)

    def pad_targets(self, targets: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return padded token ids, on the model's device."""
        return pad_rows(targets, self.tokenizers.target.pad_token_id, self.model.device)[0]


def shift_right(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """Return the decoder's input for labels, both `(batch_size, target_length)`, as `generate` starts it."""
    start = labels.new_full((labels.shape[0], 1), start_id(model))
    return torch.cat([start, labels[:, :-1]], dim=1)


def can_drop_finished(settings: dict[str, Any], options: DecodingOptions, model_settings: GenerationConfig) -> bool:
    """Return whether [`search`] can replace the search of `generate`: no sampling, row by row, with a growing cache."""
    if settings["do_sample"] or not set(settings) <= ROWWISE_ARGUMENTS or set(options.generate) & set(PYTHON_ARGUMENTS):
        return False
    return all(getattr(model_settings, name, None) in off for name, off in BATCHWISE_SETTINGS.items())


@contextmanager
def explained_generation(options: DecodingOptions) -> Iterator[None]:
    """Raise a [`UserError`] where transformers rejects settings that the user passed on to `generate`."""
    try:
        yield
    except (ValueError, TypeError, IndexError, AttributeError, ImportError) as error:
        files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, UserError) or not options.generate or "transformers" not in files[-1].parts:
            raise
        raise UserError(
            f"generate={shown(options.generate)} was rejected by transformers ({type(error).__name__}: "
            f"{reason(error)}). Remedy: correct it, or leave it out."
        ) from error
