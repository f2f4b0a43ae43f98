"""
Beam search and greedy search from which finished sentences leave: the same translations as transformers' own, which
carry every sentence on until the last one of the batch is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import ModelOutput


# A batch is made smaller once this share of its sentences is finished: moving the others takes time too.
SHARE_FINISHED = 0.1
# Stands for no score, as in transformers.
NONE = -1.0e9


class Rows:
    """
    What a model is called with at each step, for the sentences that are still searched.

    Args:
        model (`PreTrainedModel`): An encoder-decoder.
        model_kwargs (`dict`): As `generate` prepares them: the encoder's outputs, the mask, the cache.
        rows (`int`): Of the decoder, the same number for each sentence.
        sentences (`int`): How many.
    """

    def __init__(self, model: Any, model_kwargs: dict[str, Any], rows: int, sentences: int):
        self.model, self.model_kwargs = model, model_kwargs
        self.rows, self.sentences = rows, sentences
        self.gives_log_probs = getattr(model, "gives_log_probs", False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last logits `(rows, vocab_size)`, in float32, after tokens that the cache does not have yet."""
        given = {name: value for name, value in self.model_kwargs.items() if name in USED}
        outputs = self.model(decoder_input_ids=tokens, use_cache=True, return_dict=True, **given)
        self.model_kwargs["past_key_values"] = outputs.past_key_values
        return outputs.logits[:, -1].float()

    def reorder(self, rows: torch.Tensor) -> None:
        """Row `i` becomes what row `rows[i]` was; no sentence leaves."""
        self.model_kwargs["past_key_values"].reorder_cache(rows)

    def keep(self, rows: torch.Tensor, sentences: torch.Tensor) -> None:
        """Of the rows these stay, in this order; `sentences` are theirs, each once."""
        self.model_kwargs["past_key_values"].batch_select_indices(rows)
        places = {self.rows: rows, self.sentences: sentences}
        for name, value in self.model_kwargs.items():
            if name != "past_key_values":
                self.model_kwargs[name] = selected(value, places)
        self.rows, self.sentences = rows.shape[0], sentences.shape[0]


USED = ("encoder_outputs", "attention_mask", "past_key_values")


def selected(value: Any, places: dict[int, torch.Tensor]) -> Any:
    """Tensors with one entry for each row, or for each sentence, without those that leave."""
    if isinstance(value, torch.Tensor):
        return value.index_select(0, places[value.shape[0]]) if value.dim() and value.shape[0] in places else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: selected(each, places) for name, each in value.items()})
    if isinstance(value, tuple):
        return tuple(selected(each, places) for each in value)
    return value


def tell(parts: Sequence[Any], sentences: torch.Tensor) -> None:
    """Tells processors and criteria that know of sentences which ones stay."""
    for part in parts:
        if hasattr(part, "keep_sentences"):
            part.keep_sentences(sentences)


def search(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> torch.Tensor:
    """
    What `generate(custom_generate=search)` calls in the place of its own search: beams, or greedy where there is one.

    Args:
        model (`PreTrainedModel`): An encoder-decoder with a growing cache, or what is called as one.
        input_ids (`torch.LongTensor` of shape `(rows, prompt_length)`): The decoder's prompts, one for each beam.
        logits_processor, stopping_criteria: They look at each row by itself, or have `keep_sentences(indices)`.
        generation_config (`GenerationConfig`): `num_beams`, `num_return_sequences`, `length_penalty`,
            `early_stopping`, the control tokens and `max_length`.

    Returns:
        `torch.LongTensor` of shape `(sentences * num_return_sequences, length)`, as transformers' own search gives it.
    """
    beams = generation_config.num_beams or 1
    rows = Rows(model, model_kwargs, input_ids.shape[0], input_ids.shape[0] // beams)
    state = Beams if beams > 1 else Greedy
    return state(rows, input_ids, logits_processor, stopping_criteria, generation_config).run()


class Greedy:
    """Greedy search; see [`search`]."""

    def __init__(
        self,
        rows: Rows,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ):
        self.rows, self.config = rows, config
        self.processors: Any = logits_processor
        self.criteria: Any = stopping_criteria
        self.prompt_length = input_ids.shape[1]
        self.beams = config.num_beams or 1
        self.padding = padding_of(config)
        self.sentences = torch.arange(rows.sentences, device=input_ids.device)  # those that are still searched
        shape = (rows.sentences, self.beams, int(config.max_length or 0))
        self.running = input_ids.new_full(shape, self.padding)
        self.running[..., : self.prompt_length] = input_ids.view(*shape[:2], -1)
        self.found = self.running.clone()

    def run(self) -> torch.Tensor:
        length, unread = self.prompt_length, self.running.flatten(0, 1)[:, : self.prompt_length]
        while True:
            logits = self.rows.logits(unread)
            rows, done = self.step(logits, length)
            length += 1
            left = 1 - float(done.float().mean())  # the one look at the device for both questions
            if left == 0 or length >= self.running.shape[-1]:
                self.collect(torch.arange(done.shape[0], device=done.device))
                break
            if 1 - left >= SHARE_FINISHED:
                rows = self.leave(rows, done)
            elif rows is not None:
                self.rows.reorder(rows)
            unread = self.running.flatten(0, 1)[:, length - 1 : length]
        kept = self.config.num_return_sequences or 1
        return self.found[:, :kept, :length].flatten(0, 1)

    def step(self, logits: torch.Tensor, length: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Adds a token to each row; returns where the rows come from, and which sentences are finished."""
        tokens = self.running[:, 0, :length]
        scores = self.processors(tokens, logits)
        self.running[:, 0, length] = scores.argmax(-1)
        return None, self.criteria(self.running[:, 0, : length + 1], scores)

    def leave(self, rows: torch.Tensor | None, done: torch.Tensor) -> torch.Tensor | None:
        """Finished sentences leave the batch, with their results."""
        stay = (~done).nonzero()[:, 0]
        self.collect(done.nonzero()[:, 0])
        if rows is None:
            rows = torch.arange(done.shape[0] * self.beams, device=done.device)
        kept = rows.view(-1, self.beams).index_select(0, stay).flatten()
        self.rows.keep(kept, stay)
        self.sentences = self.sentences.index_select(0, stay)
        self.running = self.running.index_select(0, stay)
        tell([*self.processors, *self.criteria], stay)
        self.forget(stay)
        return None

    def collect(self, places: torch.Tensor) -> None:
        """Puts what was found for these places of the batch where it is returned from."""
        self.found[self.sentences.index_select(0, places)] = self.results().index_select(0, places)

    def results(self) -> torch.Tensor:
        """Tokens `(sentences in the batch, beams, max_length)`, best first."""
        return self.running

    def forget(self, stay: torch.Tensor) -> None:
        """Drops what is kept of sentences that have left."""


class Beams(Greedy):
    """
    Beam search with transformers' rules: of the `(1 + end tokens) * beams` best continuations the `beams` best
    unfinished ones go on, and finished ones count that are among the `beams` best; a sentence is finished when no
    running one can become better than its worst finished one, by their length penalty at the present length.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        device, shape = self.running.device, self.running.shape[:2]
        self.running_scores = torch.zeros(shape, device=device)
        self.running_scores[:, 1:] = NONE  # all beams begin alike
        self.finished = self.running.clone()
        self.finished_scores = torch.full(shape, NONE, device=device)
        self.is_finished = torch.zeros(shape, dtype=torch.bool, device=device)
        self.can_improve = torch.ones(shape[0], dtype=torch.bool, device=device)
        ends = self.config.eos_token_id
        count = len(ends) if isinstance(ends, (list, tuple)) else int(ends is not None)
        self.continuations = max(2, 1 + count) * self.beams

    def step(self, logits: torch.Tensor, length: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        sentences, beams = self.running.shape[:2]
        scores = logits if self.rows.gives_log_probs else logits.log_softmax(-1)
        if self.processors:
            scores = self.processors(self.running.flatten(0, 1)[:, :length], scores)
        scores = scores.view(sentences, beams, -1) + self.running_scores[:, :, None]
        vocabulary = scores.shape[-1]
        best, places = scores.flatten(1).topk(self.continuations, dim=1)
        source, tokens = places // vocabulary, places % vocabulary
        continued = self.running.gather(1, source[:, :, None].expand(-1, -1, self.running.shape[2]))
        continued[:, :, length] = tokens
        ended = self.criteria(continued[:, :, : length + 1].flatten(0, 1), scores)
        ended = ended.view(sentences, -1)

        self.running_scores, chosen = (best + ended * NONE).topk(beams, dim=1)
        self.running = continued.gather(1, chosen[:, :, None].expand(-1, -1, continued.shape[2]))
        first = torch.arange(sentences, device=source.device)[:, None] * beams
        rows = (source.gather(1, chosen) + first).flatten()

        penalty, made = self.config.length_penalty, length + 1 - self.prompt_length
        just_finished = ended.clone()
        just_finished[:, beams:] = False
        if bool(just_finished.any()):
            self.merge(continued, best / made**penalty, just_finished)
        stop_early = self.config.early_stopping
        counted = made
        if stop_early == "never" and penalty > 0:
            counted = self.running.shape[2] - self.prompt_length
        worst = torch.where(self.is_finished, self.finished_scores.amin(1, keepdim=True), NONE)
        self.can_improve &= (self.running_scores[:, :1] / counted**penalty > worst).any(1)
        done = ~self.can_improve | ended.all(1)
        if stop_early is True:
            done |= self.is_finished.all(1)
        return rows, done

    def merge(self, continued: torch.Tensor, scores: torch.Tensor, just_finished: torch.Tensor) -> None:
        """Keeps the best of the finished hypotheses, old and new ones."""
        closed = ~self.can_improve
        if self.config.early_stopping is True:
            closed = closed | self.is_finished.all(1)
        scores = scores + (~just_finished) * NONE + closed[:, None] * NONE
        self.finished_scores, best = torch.cat([self.finished_scores, scores], 1).topk(self.beams, dim=1)
        all_finished = torch.cat([self.finished, continued], 1)
        self.finished = all_finished.gather(1, best[:, :, None].expand(-1, -1, all_finished.shape[2]))
        self.is_finished = torch.cat([self.is_finished, just_finished], 1).gather(1, best)

    def results(self) -> torch.Tensor:
        return self.finished

    def forget(self, stay: torch.Tensor) -> None:
        for name in ("running_scores", "finished", "finished_scores", "is_finished", "can_improve"):
            setattr(self, name, getattr(self, name).index_select(0, stay))


def padding_of(config: GenerationConfig) -> int:
    """What stands behind the end of a hypothesis."""
    ends = config.eos_token_id
    end = ends[0] if isinstance(ends, (list, tuple)) else ends
    return next(int(id) for id in (config.pad_token_id, end, -1) if id is not None)
