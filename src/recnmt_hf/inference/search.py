"""
Greedy and beam search that drop finished sentences from the batch, with the results of transformers' own search, in
which every sentence stays until the whole batch is finished. The last sentences of several batches go on together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import EncoderDecoderCache

from ..models.decoder_cache import can_concat, concat, concat_rows
from ..models.seq2seq_outputs import CACHE
from .decoding import PerSentence


SHARE_FINISHED = 0.1  # of a batch, which is then made smaller: moving the others takes time too
# Score of a missing hypothesis. That of transformers, -1e9, is not less than all scores with a negative penalty.
MISSING_SCORE = -1.0e30
COLUMNS = 64  # of the vocabulary in a group: `best_continuations` reads only the groups with the highest maxima
SCORES_AT_A_TIME = 2**20  # compared at a time, so that they stay in a processor's cache
MODEL_INPUTS = ("encoder_outputs", "attention_mask")  # those that stay the same from step to step
# A search waits when it has at most this many rows, and this share of a batch's tokens.
FEW_ROWS, SMALL_SHARE = 64, 1 / 8
WAITING_SHARE = 1 / 2  # most tokens of all that wait, as a share of a batch's, so that they do not need much memory


class ModelRows:
    """Decoder rows of the unfinished sentences of a model, which [`GreedySearch`] advances; as many for each."""

    returns_log_probs = False  # whether next_logits returns log-probabilities already

    def __init__(self, model: Any, inputs: dict[str, Any], rows: int, sentences: int):
        self.model = model
        self.inputs = {name: value for name, value in inputs.items() if name in MODEL_INPUTS}
        self.cache: Any = inputs.get(CACHE)  # the first step may create it
        self.rows, self.sentences = rows, sentences

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read `(rows, length)` tokens that the cache does not contain yet; return `(rows, vocab_size)` in float32."""
        outputs = self.model(
            decoder_input_ids=tokens, use_cache=True, return_dict=True, **{CACHE: self.cache}, **self.inputs
        )
        self.cache = getattr(outputs, CACHE)
        return outputs.logits[:, -1].float()

    def first_logits(self, tokens: torch.Tensor, beams: int) -> torch.Tensor:
        """Compute `next_logits` of the first step with one beam per sentence, because all its beams are the same."""
        if beams == 1:
            return self.next_logits(tokens)
        inputs, first = self.inputs, torch.arange(0, self.rows, beams, device=tokens.device)
        self.select_inputs({self.rows: first})
        logits = self.next_logits(tokens.index_select(0, first))
        self.inputs = inputs
        self.cache.batch_repeat_interleave(beams)
        return logits.repeat_interleave(beams, dim=0)

    def reorder(self, rows: torch.Tensor) -> None:
        """Replace row `i` by row `rows[i]` of the same sentence: keys and values of the source stay as they are."""
        is_pair = isinstance(self.cache, EncoderDecoderCache)
        (self.cache.self_attention_cache if is_pair else self.cache).reorder_cache(rows)

    def select(self, rows: torch.Tensor, sentences: torch.Tensor) -> None:
        """Keep these rows, in this order, and the sentences that they belong to, each index once."""
        self.cache.reorder_cache(rows)
        self.select_inputs({self.rows: rows, self.sentences: sentences})
        self.rows, self.sentences = rows.shape[0], sentences.shape[0]

    def select_inputs(self, indices: dict[int, torch.Tensor]) -> None:
        """Keep those rows of each tensor of the inputs that `indices` gives for their number."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            rows = indices.get(tensor.shape[0]) if tensor.dim() else None
            return tensor if rows is None else tensor.index_select(0, rows)

        self.inputs = map_tensors(chosen, self.inputs)

    def concat(self, other: ModelRows) -> None:
        """Add the rows of another batch, which have read as many tokens."""
        concat(self.cache, other.cache)
        self.inputs = map_tensors(concat_rows, self.inputs, other.inputs)
        self.rows, self.sentences = self.rows + other.rows, self.sentences + other.sentences


def map_tensors(change: Callable[..., torch.Tensor], value: Any, *others: Any) -> Any:
    """Return a model's input with `change` of each of its tensors, and of the same tensors of the other inputs."""
    if isinstance(value, torch.Tensor):
        return change(value, *others)
    if isinstance(value, dict):  # an encoder's output is one, too
        parts = {name: map_tensors(change, part, *(other[name] for other in others)) for name, part in value.items()}
        return type(value)(**parts)
    if isinstance(value, tuple):
        return tuple(map_tensors(change, *parts) for parts in zip(value, *others, strict=True))
    return value


def best_continuations(scores: torch.Tensor, before: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """
    Return the `count` best values of `scores` `(sentences, beams, vocab_size)` plus `before` `(sentences, beams)` of
    each sentence, best first, with their beams and tokens, each `(sentences, count)`. They are among the `count` groups
    of columns with the highest maxima, which are found much faster than by sorting the vocabulary.
    """
    sentences, beams, vocabulary = scores.shape
    groups = vocabulary // COLUMNS
    if beams * groups <= 2 * count:
        best, places = (scores + before[:, :, None]).flatten(1).topk(count, dim=1)
        return best, places // vocabulary, places % vocabulary
    grouped = scores[:, :, : groups * COLUMNS].unflatten(2, (groups, COLUMNS))
    highest = grouped.amax(3) + before[:, :, None]
    chosen = highest.flatten(1).topk(count, dim=1, sorted=False).indices
    beam, group = chosen // groups, chosen % groups
    sentence = torch.arange(sentences, device=scores.device)[:, None]
    candidates = grouped[sentence, beam, group] + before.gather(1, beam)[:, :, None]
    # Less than a group is left at the end of the vocabulary.
    rest = scores[:, :, groups * COLUMNS :] + before[:, :, None]
    best, places = torch.cat([candidates.flatten(1), rest.flatten(1)], 1).topk(count, dim=1)
    place = places.clamp(max=count * COLUMNS - 1) // COLUMNS
    source, tokens = beam.gather(1, place), group.gather(1, place) * COLUMNS + places % COLUMNS
    if width := rest.shape[2]:
        late = places - count * COLUMNS
        source = torch.where(late < 0, source, late // width)
        tokens = torch.where(late < 0, tokens, groups * COLUMNS + late % width)
    return best, source, tokens


def start_search(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    rows_class: Callable[..., ModelRows] = ModelRows,
    **model_kwargs: Any,
) -> GreedySearch:
    """
    Return a search for [`search_all`], which `generate(custom_generate=start_search)` returns in turn. `input_ids` are
    the decoder's prompts `(rows, prompt_length)`, one for each beam; the processors and criteria must treat each row
    separately.
    """
    beams = generation_config.num_beams or 1
    rows = rows_class(model, model_kwargs, input_ids.shape[0], input_ids.shape[0] // beams)
    kind = BeamSearch if beams > 1 else GreedySearch
    return kind(rows, input_ids, logits_processor, stopping_criteria, generation_config)


def search_all(searches: Iterable[GreedySearch], max_tokens: int) -> list[torch.Tensor]:
    """
    Run the searches of several batches. Return tokens `(hypotheses, length)` for each sentence, in their order. A step
    takes nearly as long for a few rows as for many, so a search with few rows left waits until another one reaches its
    length: from there on both are one batch of at most `max_tokens` source tokens, padding and beams included.
    """
    new, sentences = iter(searches), 0
    waiting: dict[int, GreedySearch] = {}  # by length
    found: dict[int, torch.Tensor] = {}
    while (search := next(new, None)) is not None or waiting:
        may_wait = search is not None
        if search is None:
            search = waiting.pop(min(waiting))
        else:
            search.numbers = [sentences + number for number in search.numbers]
            sentences += len(search.numbers)
        while search.advance():
            other = waiting.get(search.length)
            if other is not None and tokens_of(search, other) <= max_tokens:
                search = join_searches(search, waiting.pop(search.length))
            if may_wait and is_small(search, waiting, max_tokens):
                waiting[search.length] = search
                break
        else:
            found |= search.found
    return [found[number] for number in range(sentences)]


def is_small(search: GreedySearch, waiting: dict[int, GreedySearch], max_tokens: int) -> bool:
    """Return whether a search is small enough to wait, beside those that wait already, and can be joined to others."""
    return (
        len(search.numbers) * search.beams <= FEW_ROWS
        and type(search.rows) is ModelRows
        and search.length not in waiting
        and tokens_of(search) <= SMALL_SHARE * max_tokens
        and tokens_of(search, *waiting.values()) <= WAITING_SHARE * max_tokens
        and search.config.early_stopping != "never"  # a rule for the longest sentence of a batch
        and can_concat(search.rows.cache)
    )


def tokens_of(*searches: GreedySearch) -> int:
    """Return the number of source tokens of one batch of these searches, padding and beams included."""
    widths = [search.rows.inputs["attention_mask"].shape[1] for search in searches]
    return max(widths) * sum(len(search.numbers) * search.beams for search in searches)


def join_searches(first: GreedySearch, second: GreedySearch) -> GreedySearch:
    """Add the sentences of one search to the other, which has the same length, and return that."""
    if first.running.shape[-1] < second.running.shape[-1]:
        first, second = second, first  # its rules hold up to its own maximum length; sentences have their own, too
    for name in first.state:
        setattr(first, name, concat_rows(getattr(first, name), getattr(second, name), first.padding))
    for part, other in zip(first.per_sentence, second.per_sentence, strict=True):
        part.add_sentences(other)
    first.numbers = first.numbers + second.numbers
    first.found |= second.found
    first.rows.concat(second.rows)
    return first


class GreedySearch:
    """Greedy search; the arguments are those of [`start_search`]."""

    state: tuple[str, ...] = ("running",)  # tensors with a row for each unfinished sentence
    output = "running"  # that of the hypotheses `(sentences, beams, max_length)`, best first

    def __init__(
        self, rows: ModelRows, input_ids: torch.Tensor, processors: Any, criteria: Any, config: GenerationConfig
    ):
        self.rows, self.processors, self.criteria, self.config = rows, processors, criteria, config
        self.prompt_length = self.length = input_ids.shape[1]
        self.beams = config.num_beams or 1
        ends = config.eos_token_id
        self.ends = list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
        self.padding = next(int(id) for id in (config.pad_token_id, *self.ends, -1) if id is not None)
        self.numbers = list(range(rows.sentences))  # of the unfinished sentences
        self.found: dict[int, torch.Tensor] = {}  # hypotheses of the finished ones, best first
        self.per_sentence = [part for part in (*processors, *criteria) if isinstance(part, PerSentence)]
        shape = (rows.sentences, self.beams, int(config.max_length or 0))
        self.running = input_ids.new_full(shape, self.padding)
        self.running[..., : self.prompt_length] = input_ids.view(*shape[:2], -1)

    def advance(self) -> bool:
        """Append a token to all hypotheses and drop finished sentences; return whether any are left."""
        tokens = self.running.flatten(0, 1)[:, : self.length]
        is_first = self.length == self.prompt_length
        logits = self.rows.first_logits(tokens, self.beams) if is_first else self.rows.next_logits(tokens[:, -1:])
        rows, done = self.step(logits, self.length)
        self.length += 1
        finished = int(done.sum())  # the only host synchronization of the step
        if finished == len(self.numbers) or self.length >= self.running.shape[-1]:
            self.collect(torch.arange(len(self.numbers), device=done.device))
            return False
        if finished >= SHARE_FINISHED * len(self.numbers):
            self.drop_finished(rows, done)
        elif rows is not None:
            self.rows.reorder(rows)
        return True

    def step(self, logits: torch.Tensor, length: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Append a token to each row. Return the rows that they continue, and which sentences are finished."""
        tokens = self.running[:, 0, :length]
        if self.processors:
            logits = self.processors(tokens, logits)
        self.running[:, 0, length] = logits.argmax(-1)
        return None, self.criteria(self.running[:, 0, : length + 1], logits)

    def drop_finished(self, rows: torch.Tensor | None, done: torch.Tensor) -> None:
        """Store the results of finished sentences and remove them from the batch."""
        stay = (~done).nonzero()[:, 0]
        self.collect(done.nonzero()[:, 0])
        if rows is None:
            rows = torch.arange(done.shape[0] * self.beams, device=done.device)
        self.rows.select(rows.view(-1, self.beams).index_select(0, stay).flatten(), stay)
        self.numbers = [self.numbers[place] for place in stay.tolist()]
        for name in self.state:
            setattr(self, name, getattr(self, name).index_select(0, stay))
        for part in self.per_sentence:
            part.keep_sentences(stay)

    def collect(self, places: torch.Tensor) -> None:
        """Store the results of the sentences at these indices of the batch."""
        results = getattr(self, self.output)[:, : self.config.num_return_sequences or 1].index_select(0, places)
        self.found.update(zip((self.numbers[place] for place in places.tolist()), results, strict=True))


class BeamSearch(GreedySearch):
    """
    Beam search by transformers' rules. Among the `(1 + end tokens) * beams` best continuations, the `beams` best
    unfinished ones are continued, and finished ones are collected if they are among the `beams` best. A sentence is
    finished when no running hypothesis can exceed its worst finished one, by the length penalty at the current length.
    """

    state = ("running", "running_scores", "finished", "finished_scores", "is_finished", "can_improve")
    output = "finished"

    def __init__(self, *args: Any):
        super().__init__(*args)
        device, shape = self.running.device, self.running.shape[:2]
        self.running_scores = torch.zeros(shape, device=device)
        self.running_scores[:, 1:] = MISSING_SCORE  # all beams start with the same tokens
        self.finished = self.running.clone()
        self.finished_scores = torch.full(shape, MISSING_SCORE, device=device)
        self.is_finished = torch.zeros(shape, dtype=torch.bool, device=device)
        self.can_improve = torch.ones(shape[0], dtype=torch.bool, device=device)
        self.continuations = max(2, 1 + len(self.ends)) * self.beams

    def step(self, logits: torch.Tensor, length: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        sentences, beams = self.running.shape[:2]
        are_log_probs = self.rows.returns_log_probs
        if self.processors:
            scores = logits if are_log_probs else logits.log_softmax(-1)
            logits, are_log_probs = self.processors(self.running.flatten(0, 1)[:, :length], scores), True
        vocabulary = logits.shape[-1]
        at_a_time = max(SCORES_AT_A_TIME // (beams * vocabulary), 1) if logits.device.type == "cpu" else sentences

        def continue_part(part: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = part if are_log_probs else part.log_softmax(-1)
            return best_continuations(scores.view(-1, beams, vocabulary), before, self.continuations)

        found = map(continue_part, logits.split(at_a_time * beams), self.running_scores.split(at_a_time))
        best, source, tokens = (torch.cat(column) for column in zip(*found, strict=True))
        continued = self.running.gather(1, source[:, :, None].expand(-1, -1, self.running.shape[2]))
        continued[:, :, length] = tokens
        ended = self.criteria(continued[:, :, : length + 1].flatten(0, 1), logits).view(sentences, -1)

        self.running_scores, chosen = (best + ended * MISSING_SCORE).topk(beams, dim=1)
        self.running = continued.gather(1, chosen[:, :, None].expand(-1, -1, continued.shape[2]))
        first = torch.arange(sentences, device=source.device)[:, None] * beams
        rows = (source.gather(1, chosen) + first).flatten()

        penalty, new_tokens = self.config.length_penalty, length + 1 - self.prompt_length
        just_finished = ended.clone()
        just_finished[:, beams:] = False
        if just_finished.device.type != "cpu" or just_finished.any():  # an accelerator would have to be waited for
            self.merge(continued, best / new_tokens**penalty, just_finished)
        stop_early = self.config.early_stopping
        never = stop_early == "never" and penalty > 0
        counted = self.running.shape[2] - self.prompt_length if never else new_tokens
        worst = torch.where(self.is_finished, self.finished_scores.amin(1, keepdim=True), MISSING_SCORE)
        self.can_improve &= (self.running_scores[:, :1] / counted**penalty > worst).any(1)
        done = ~self.can_improve | ended.all(1)
        if stop_early is True:
            done |= self.is_finished.all(1)
        return rows, done

    def merge(self, continued: torch.Tensor, scores: torch.Tensor, just_finished: torch.Tensor) -> None:
        """Keep the best finished hypotheses, old and new."""
        closed = ~self.can_improve
        if self.config.early_stopping is True:
            closed = closed | self.is_finished.all(1)
        scores = scores + (~just_finished) * MISSING_SCORE + closed[:, None] * MISSING_SCORE
        self.finished_scores, best = torch.cat([self.finished_scores, scores], 1).topk(self.beams, dim=1)
        all_finished = torch.cat([self.finished, continued], 1)
        self.finished = all_finished.gather(1, best[:, :, None].expand(-1, -1, all_finished.shape[2]))
        self.is_finished = torch.cat([self.is_finished, just_finished], 1).gather(1, best)
