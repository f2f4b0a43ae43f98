"""Translating and scoring with any encoder-decoder of transformers."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.utils import logging

from .._plain_text import is_blank
from .._values import MOST_BEAMS, Range, check_value
from ..data.tokenizer_pair import TARGET_TOKENIZER, TokenizerPair, load_target_tokenizer
from ..models.user_errors import UserError
from .attention_links import choose_attention, links_of_matrix, word_matrix
from .decoding import ALPHA, MaxLengthPerSentence, length_penalty
from .joining import glue_at, join_texts
from .loading import load_model, looks_local
from .model_checks import check_weights


__all__ = [
    "TARGET_TOKENIZER",
    "DecodingOptions",
    "Hypothesis",
    "SentenceScore",
    "Translation",
    "Translator",
    "load_target_tokenizer",
    "looks_local",
]

logger = logging.get_logger(__name__)

# Above this share of unknown tokens there is a warning.
UNKNOWN_SHARE = 0.01


@dataclass
class Hypothesis:
    """
    One translation of a sentence.

    Attributes:
        text (`str`): Plain text.
        score (`float`): Log-probability divided by the length penalty; hypotheses are ordered by it.
        log_prob (`float`): Natural log-probability of all tokens, end token included.
        tokens (`list[int]`): Token ids, with the end token unless the length limit came first.
        finished (`bool`): Whether the model ended the sentence itself.
        alignment (`list[tuple[int, int]]`, *optional*): For each target token the source token of largest
            cross-attention, as (source, target) positions; none where that is the source's end token, and none for
            end tokens of the target.
    """

    text: str
    score: float
    log_prob: float
    tokens: list[int] = field(default_factory=list)
    finished: bool = True
    alignment: list[tuple[int, int]] | None = None


@dataclass
class Translation:
    """A source sentence and its hypotheses, best first."""

    source: str
    hypotheses: list[Hypothesis]

    @property
    def text(self) -> str:
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        return self.hypotheses[0].score


@dataclass
class SentenceScore:
    """
    The model's probability of a given translation.

    Attributes:
        score (`float`): Log-probability divided by the length penalty.
        log_prob (`float`): Natural log-probability, end token included.
        token_log_probs (`list[float]`): Its summands.
    """

    score: float
    log_prob: float
    token_log_probs: list[float]


@dataclass
class DecodingOptions:
    """
    How to translate.

    Args:
        beams (`int`, *optional*, defaults to 4): Beam size, at most 1000; 1 is greedy search.
        num_hypotheses (`int`, *optional*, defaults to 1): Hypotheses of each sentence, at most `beams`.
        length_penalty_type (`str`, *optional*, defaults to `"vaswani"`): `"vaswani"`: `((5 + len) / 6) ** alpha`;
            `"hf"`: `len ** alpha`.
        length_penalty (`float`, *optional*, defaults to 0.6): alpha, from -100 to 100.
        max_length_factor (`float`, *optional*, defaults to 1.0),
        max_length_extra (`int`, *optional*, defaults to 50):
            Most new tokens: `factor * source tokens + extra`, sentence by sentence.
        max_tokens (`int`, *optional*, defaults to 4096): Source tokens of a batch, times beams.
        on_long (`str`, *optional*, defaults to `"error"`): What to do with a source that is longer than the model's
            positions: `"error"` or `"split"` (at punctuation, else between words).
        max_source_length (`int`, *optional*): That limit in tokens; `None`: what the model's positions allow.
        alignments (`bool`, *optional*, defaults to `False`): Adds alignments from the cross-attention.
        alignment_layer (`int` or `"mean"`, *optional*): Decoder layer to read them from, or the mean of all; `None`:
            the one below the top.
        buffer (`int`, *optional*, defaults to 2000): Sentences that are sorted and batched together.
    """

    beams: int = 4
    num_hypotheses: int = 1
    length_penalty_type: str = "vaswani"
    length_penalty: float = 0.6
    max_length_factor: float = 1.0
    max_length_extra: int = 50
    max_tokens: int = 4096
    on_long: str = "error"
    max_source_length: int | None = None
    alignments: bool = False
    alignment_layer: int | str | None = None
    buffer: int = 2000

    def __post_init__(self) -> None:
        for each in fields(self):
            hint, allowed = ALLOWED[each.name]
            value = check_value(each.name, getattr(self, each.name), hint, allowed, each.default)
            setattr(self, each.name, value)
        if self.num_hypotheses > self.beams:
            raise UserError(
                f"num_hypotheses={self.num_hypotheses} is more than beams={self.beams}. Remedy: use as many beams as "
                "hypotheses, or more."
            )
        if self.max_length_factor + self.max_length_extra <= 0:
            raise UserError(
                f"max_length_factor={self.max_length_factor} and max_length_extra={self.max_length_extra} are not "
                "allowed: they leave no token. Remedy: set one above 0."
            )
        if self.alignments and self.on_long == "split":
            raise UserError(
                'alignments=True and on_long="split" exclude each other: the parts of a split sentence have '
                'positions of their own. Remedy: use on_long="error", or split the sentences yourself.'
            )
        length_penalty(self.length_penalty_type, self.length_penalty)

    def penalty(self) -> float:
        """The value for `generate`'s `length_penalty`; `length ** penalty` is the divisor."""
        return length_penalty(self.length_penalty_type, self.length_penalty)


# Type and range of each option.
WHOLE = Range(least=1)
ALLOWED: dict[str, tuple[object, Range | None]] = {
    "beams": (int, Range(least=1, most=MOST_BEAMS)),
    "num_hypotheses": (int, Range(least=1, most=MOST_BEAMS)),
    "length_penalty_type": (str, None),
    "length_penalty": (float, ALPHA),
    "max_length_factor": (float, Range(least=0, most=1000)),
    "max_length_extra": (int, Range(least=0)),
    "max_tokens": (int, WHOLE),
    "on_long": (Literal["error", "split"], None),
    "max_source_length": (int | None, WHOLE),
    "alignments": (bool, None),
    "alignment_layer": (int | Literal["mean"] | None, Range(least=0)),
    "buffer": (int, WHOLE),
}


def decoding_options(options: DecodingOptions | None, changes: Mapping[str, object]) -> DecodingOptions:
    """Options with changes; `ValueError` names one that does not exist, and the nearest that does."""
    known = {each.name for each in fields(DecodingOptions)}
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}."
            raise UserError(f"There is no option {name!r} of decoding; {hint}")
    return replace(options, **changes) if options else DecodingOptions(**changes)


class Translator:
    """
    Translates sentences with a trained model, batched by tokens and in the order given.

    Args:
        model (`PreTrainedModel`): An encoder-decoder with `generate`.
        tokenizer (`PreTrainedTokenizerBase`): Of the source, and of the target unless that has its own.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the target.
        check (`bool`, *optional*, defaults to `True`): Whether weights that are not finite and tokenizers that are not
            the model's own are refused ([`~recnmt_hf.data.tokenizer_checks.check_tokenizers`] says how those are
            told); `False` leaves the looking to the caller.

    Raises:
        ValueError: The weights are not finite, or a tokenizer is not the model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        check: bool = True,
    ):
        self.model = model
        self.tokenizers = TokenizerPair(tokenizer, target_tokenizer)
        if check:
            check_weights(model)
        self.tokenizers.check(model, strict=check)
        self.control_ids = self.tokenizers.control_ids()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizers.source

    @property
    def target_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizers.target

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        check: bool = True,
        trust_remote_code: bool = False,
        **kwargs,
    ) -> Translator:
        """
        Loads model and tokenizers from a folder written by training, or from the Hub.

        Args:
            path (`str` or `Path`): Folder or model id. A target tokenizer of its own stands in the subfolder
                `target_tokenizer`.
            device (`str` or `torch.device`, *optional*): `None`: CUDA if there is any, else the CPU.
            dtype (`torch.dtype`, *optional*): Weights' data type; `None`: as saved.
            check (`bool`, *optional*, defaults to `True`): `False` takes weights and tokenizers as they are.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code that the model's files bring along
                may run.
            **kwargs: Passed on to `from_pretrained`, e.g. `revision=...`.

        Raises:
            FileNotFoundError: A local path does not exist or holds no model.
            ValueError: Something is wrong with the files, as in [`load_model`], or tokenizer and model do not fit.
        """
        path = str(path)
        model = load_model(path, device, dtype, trust_remote_code, check, **kwargs)
        tokenizers = TokenizerPair.load(path, trust_remote_code=trust_remote_code, **kwargs)
        return cls(model, *tokenizers, check)

    # -- translation -------------------------------------------------------------------------------------------------

    def __call__(self, sentences: str | Iterable[str], **options) -> list[Translation]:
        """Translates a sentence or several; see [`DecodingOptions`] for the options."""
        return list(self.translate([sentences] if isinstance(sentences, str) else sentences, **options))

    def translate(
        self, sentences: Iterable[str], options: DecodingOptions | None = None, **changes
    ) -> Iterator[Translation]:
        """
        Translates a stream of sentences; an empty one, or one without a visible character, gives an empty translation.
        A warning tells the share of unknown tokens where it is above 1%.

        Args:
            sentences (iterable of `str`): Read a buffer at a time, so files of any size will do.
            options ([`DecodingOptions`], *optional*): How.
            **changes: Fields of [`DecodingOptions`] in place of `options`.

        Raises:
            ValueError: A sentence is no text, or too long for the model and `on_long="error"`; the message says which.
        """
        options = decoding_options(options, changes)
        if isinstance(sentences, str) or not isinstance(sentences, Iterable):
            kind = "one text" if isinstance(sentences, str) else repr(sentences)
            raise UserError(f"translate takes several sentences, not {kind}. Remedy: put them into a list.")
        sentences = iter(sentences)
        first = 1
        unknown = UnknownTokens(self.tokenizer)
        while chunk := list(islice(sentences, options.buffer)):
            yield from self._translate_chunk(chunk, options, first, unknown)
            first += len(chunk)
        unknown.warn()

    def _translate_chunk(
        self, sentences: list[str], options: DecodingOptions, first: int, unknown: UnknownTokens
    ) -> list[Translation]:
        longest = self.longest_source()
        limit = min((each for each in (options.max_source_length, longest) if each is not None), default=None)
        pieces: list[tuple[int, list[int]]] = []  # (sentence, token ids), several of a split sentence
        glues: dict[int, list[str]] = {}  # of a split sentence
        for i, sentence in enumerate(sentences):
            self.check_text(sentence, f"Sentence {first + i}")
            ids = [] if is_blank(sentence) else self.encode_source(sentence)
            if self.is_empty(ids):
                continue
            unknown.count(ids)
            if limit is None or len(ids) <= limit:
                pieces.append((i, ids))
            elif options.on_long == "split":
                parts = self._parts_within(sentence.strip(), limit)
                encoded = [(glue, self.encode_source(text)) for glue, text in parts]
                encoded = [(glue, part) for glue, part in encoded if not self.is_empty(part)]
                if any(len(part) > limit for _, part in encoded):
                    raise UserError(
                        f"Sentence {first + i} cannot be split into parts of {limit} tokens: a single character takes "
                        "more. Remedy: raise max_source_length."
                    )
                pieces += [(i, part) for _, part in encoded]
                glues[i] = [glue for glue, _ in encoded]
            else:
                raise UserError(
                    f"Sentence {first + i} has {len(ids)} tokens, the model takes {limit}: {sentence[:60]!r}... "
                    'Remedy: shorten it, or have it split with on_long="split" (--on-long split).'
                )
        found_parts: list[list[Hypothesis]] = [[] for _ in pieces]
        for batch in batches_by_tokens([len(ids) for _, ids in pieces], options.max_tokens // options.beams):
            found = self._generate([pieces[k][1] for k in batch], options)
            for k, hypotheses in zip(batch, found, strict=True):
                found_parts[k] = hypotheses
        results = [[Hypothesis("", 0.0, 0.0, alignment=[] if options.alignments else None)] for _ in sentences]
        by_sentence: dict[int, list[list[Hypothesis]]] = {}
        for (i, _), hypotheses in zip(pieces, found_parts, strict=True):
            by_sentence.setdefault(i, []).append(hypotheses)
        for i, found in by_sentence.items():
            results[i] = found[0] if len(found) == 1 else join_pieces(found, options.penalty(), glues[i])
        return [Translation(sentence, found) for sentence, found in zip(sentences, results, strict=True)]

    @torch.no_grad()
    def _generate(self, sources: Sequence[Sequence[int]], options: DecodingOptions) -> list[list[Hypothesis]]:
        input_ids, attention_mask = self.pad(sources, self.tokenizer.pad_token_id)
        limits = [max(1, int(options.max_length_factor * len(source)) + options.max_length_extra) for source in sources]
        target_room = self.longest_target()
        if target_room is not None:
            limits = [min(limit, target_room) for limit in limits]
        penalty = options.penalty()
        beams, kept = options.beams, options.num_hypotheses
        beam_settings = {"length_penalty": penalty, "num_return_sequences": kept} if beams > 1 else {}
        outputs = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            num_beams=beams,
            do_sample=False,
            max_length=1 + max(limits),
            max_new_tokens=None,
            stopping_criteria=StoppingCriteriaList(
                [MaxLengthPerSentence(torch.tensor(limits, device=self.model.device))]
            ),
            **beam_settings,
        )
        limit_of_row = [limit for limit in limits for _ in range(kept)]
        tokens = [self.strip(row[:limit]) for row, limit in zip(outputs[:, 1:].tolist(), limit_of_row, strict=True)]
        repeated = [source for source in sources for _ in range(kept)]
        # generate tells its scores only along with those of the whole vocabulary at every step; a forced pass over the
        # finished hypotheses costs less than keeping those, and is what `score` computes.
        log_probs = [sum(each) for each in self.score_tokens(repeated, tokens, options.max_tokens)]
        scores = [total / len(row) ** penalty for total, row in zip(log_probs, tokens, strict=True)]
        alignments: list = [None] * len(tokens)
        if options.alignments:
            alignments = self.align_tokens(repeated, tokens, options.alignment_layer, options.max_tokens)
        texts = self.target_tokenizer.batch_decode(tokens, skip_special_tokens=True)
        ends = self.end_ids()
        hypotheses = [
            Hypothesis(text.strip(), score, log_prob, row, bool(row) and row[-1] in ends, alignment)
            for text, score, log_prob, row, alignment in zip(texts, scores, log_probs, tokens, alignments, strict=True)
        ]
        # The search adds in float32; among near-ties the order by the scores told here may differ.
        return [sorted(hypotheses[i : i + kept], key=lambda each: -each.score) for i in range(0, len(hypotheses), kept)]

    # -- scoring -----------------------------------------------------------------------------------------------------

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str] | Sequence[Sequence[int]],
        options: DecodingOptions | None = None,
        places: Sequence[str] | None = None,
        **changes,
    ) -> list[SentenceScore]:
        """
        The model's log-probabilities of given translations, as `translate` reports them.

        Args:
            sources (sequence of `str`): Source sentences.
            targets (sequence of `str`, or of token ids as in [`Hypothesis`]): Their translations.
            options ([`DecodingOptions`], *optional*): Length penalty and batch size.
            places (sequence of `str`, *optional*): Where each pair comes from, for messages; `None`: its number.

        Raises:
            ValueError: There are not as many sources as targets, or a source is empty.
        """
        options = decoding_options(options, changes)
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources and {len(targets)} translations: there must be one for each.")
        source_ids, target_ids = [], []
        unknown = UnknownTokens(self.tokenizer)
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
            names = [f"{side} {number}" for side in ("Source", "Translation", "Pair")]
            if places is not None:
                names = [f"{places[number - 1]}: {side}" for side in ("the source", "the translation", "the pair")]
            self.check_text(source, names[0])
            ids = [] if is_blank(source) else self.encode_source(source)
            if self.is_empty(ids):
                raise UserError(f"{names[0]} is empty and has no probability. Remedy: remove the pair.")
            unknown.count(ids)
            source_ids.append(ids)
            target_ids.append(self.target_ids(target, names[1]))
            self.check_lengths(len(ids), len(target_ids[-1]), names[2])
        unknown.warn()
        penalty = options.penalty()
        found = self.score_tokens(source_ids, target_ids, options.max_tokens)
        return [SentenceScore(sum(each) / max(len(each), 1) ** penalty, sum(each), each) for each in found]

    @torch.no_grad()
    def score_tokens(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 4096
    ) -> list[list[float]]:
        """Log-probability of every target token, by forced decoding of token ids in batches of bounded size."""
        results: list[list[float]] = [[] for _ in targets]
        lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
        for batch in batches_by_tokens(lengths, max_tokens):
            input_ids, attention_mask = self.pad([sources[i] for i in batch], self.tokenizer.pad_token_id)
            labels, _ = self.pad([targets[i] for i in batch], self.pad_id())
            logits = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=self.shift(labels),
                use_cache=False,
            ).logits
            logits = logits if logits.dtype == torch.float64 else logits.float()
            log_probs = logits.gather(-1, labels[:, :, None])[:, :, 0] - logits.logsumexp(dim=-1)
            for i, row in zip(batch, log_probs.tolist(), strict=True):
                results[i] = row[: len(targets[i])]
        return results

    @torch.no_grad()
    def align_tokens(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        layer: int | str | None = None,
        max_tokens: int = 4096,
    ) -> list[list[tuple[int, int]]]:
        """
        At most one link per target token, by the rule of [`align_pairs`] with each token as a word of its own: to the
        source token with the largest attention, averaged over the heads of a decoder layer; none where that is the
        source's end token, and none for the end token of the target.
        """
        links: list[list[tuple[int, int]]] = [[] for _ in targets]
        lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
        for batch in batches_by_tokens(lengths, max_tokens):
            attentions = self.attention([sources[i] for i in batch], [targets[i] for i in batch])
            chosen = choose_attention(attentions, layer).float().cpu().numpy()
            for row, i in zip(chosen, batch, strict=True):
                own = row[: len(targets[i]), : len(sources[i])]
                ends = self.control_ids[1] | self.end_ids()
                source = [None if id in self.control_ids[0] else place for place, id in enumerate(sources[i])]
                target = [None if id in ends else place for place, id in enumerate(targets[i])]
                links[i] = links_of_matrix(word_matrix(own, source, target, len(source), len(target)))
        return links

    @torch.no_grad()
    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """
        Cross-attention of forced decoding, for each decoder layer `(batch_size, num_heads, target_length,
        source_length)`; row j is that of the step which says target token j.

        Raises:
            ValueError: The model has no attention to source words.
        """
        input_ids, attention_mask = self.pad(sources, self.tokenizer.pad_token_id)
        labels, _ = self.pad(targets, self.pad_id())
        # The encoder's own attentions, and what else it would tell, are not asked for: they may be large.
        attentions = self.model(
            encoder_outputs=self.model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask),
            attention_mask=attention_mask,
            decoder_input_ids=self.shift(labels),
            use_cache=False,
            output_attentions=True,
        ).cross_attentions
        if not attentions or attentions[0] is None:
            raise UserError(
                "The model gives no attention to source words to align by. Remedy: load it with "
                "attn_implementation='eager', and not with decoder_memory='recurrence'."
            )
        return attentions

    # -- tokens ------------------------------------------------------------------------------------------------------

    def encode_source(self, sentence: str) -> list[int]:
        """Token ids, in which `</s>` and the like in the sentence are text."""
        return self.tokenizers.encode_source(sentence)

    def encode_target(self, sentence: str) -> list[int]:
        """Token ids, in which `</s>` and the like in the sentence are text."""
        return self.tokenizers.encode_target(sentence)

    def target_ids(self, target: str | Sequence[int], place: str) -> list[int]:
        """Token ids of a translation that is text or token ids; `ValueError` names those that do not exist."""
        if isinstance(target, str):
            self.check_text(target, place)
            return self.encode_target(target)
        rows = getattr(self.model.config, "decoder_vocab_size", None) or self.model.config.vocab_size
        ids = list(target) if isinstance(target, Iterable) else [target]
        for id in ids:
            if not hasattr(id, "__index__") or isinstance(id, float) or not 0 <= id < rows:
                raise UserError(f"{place}: {id!r} is no token id of 0 to {rows - 1}. Remedy: give the model's own ids.")
        return [operator.index(id) for id in ids]

    def says_nothing(self, sentence: str) -> bool:
        """Whether a source has no visible character, or none that its tokenizer keeps: its translation is empty."""
        return is_blank(sentence) or self.is_empty(self.encode_source(sentence))

    def is_empty(self, ids: Sequence[int]) -> bool:
        """Whether a source's encoding holds nothing but control tokens."""
        return all(id in self.control_ids[0] for id in ids)

    def check_text(self, sentence: object, place: str) -> None:
        """Raises `ValueError` for what is no text, or text that no file can hold."""
        if not isinstance(sentence, str):
            raise UserError(f"{place} is no text but {sentence!r}. Remedy: give sentences.")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{place} holds half a character ({error.object[error.start]!a}): {sentence[:60]!a}. Remedy: correct "
                "how the text was read; UTF-8 has no such characters."
            ) from error

    def check_lengths(self, source: int, target: int, place: str) -> None:
        """Raises `ValueError` where a pair of sentences has more tokens than the model positions."""
        most = self.longest_source(), self.longest_target()
        for side, length, limit in zip(("source", "target"), (source, target), most, strict=True):
            limit = None if limit is None else limit + (side == "target")  # the last one is not read any more
            if limit is not None and length > limit:
                raise UserError(f"{place} has {length} {side} tokens, the model takes {limit}. Remedy: shorten it.")

    def split_source(self, sentence: str, limit: int) -> list[list[int]]:
        """
        Token ids of the parts of a long sentence, cut after punctuation where possible, else between words, else
        between characters, each time as near to the middle as possible.
        """
        return [self.encode_source(part) for _, part in self._parts_within(sentence.strip(), limit)]

    def _parts_within(self, text: str, limit: int, glue: str = "") -> list[tuple[str, str]]:
        """The parts, each behind what joins its translation to the one before."""
        if len(self.encode_source(text)) <= limit or len(text) < 2:
            return [(glue, text)]
        # A mark within a number, a time or an address is not followed by a space and no place to cut.
        for pattern in (r"[.!?;:,]\s+|[。！？；：，、]\s*", r"\s+", r"."):
            cuts = [found.end() for found in re.finditer(pattern, text) if 0 < found.end() < len(text)]
            if cuts:
                cut = min(cuts, key=lambda place: abs(place - len(text) / 2))
                left, right = self._parts_within(text[:cut].strip(), limit, glue), text[cut:].strip()
                return left + self._parts_within(right, limit, glue_at(text, cut))
        return [(glue, text)]

    def pad(self, rows: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Right-padded ids and their mask, on the model's device."""
        width = max(max(map(len, rows)), 1)
        ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return ids.to(self.model.device), mask.to(self.model.device)

    def shift(self, labels: torch.LongTensor) -> torch.LongTensor:
        """The decoder's input for labels `(batch_size, target_length)`."""
        start = self.model.generation_config.decoder_start_token_id
        start = self.model.config.decoder_start_token_id if start is None else start
        return torch.cat([labels.new_full((labels.shape[0], 1), start), labels[:, :-1]], dim=1)

    def pad_id(self) -> int:
        return self.target_tokenizer.pad_token_id

    def end_ids(self) -> set[int]:
        end = self.model.generation_config.eos_token_id
        end = self.model.config.eos_token_id if end is None else end
        return set(end) if isinstance(end, (list, tuple)) else {end}

    def strip(self, row: list[int]) -> list[int]:
        """
        A generated row up to its end token; of one without, up to the padding. Rows are cut at their limit before:
        beam search may fill up cut hypotheses with end tokens.
        """
        ends = self.end_ids()
        for i, token in enumerate(row):
            if token in ends:
                return row[: i + 1]
        while row and row[-1] == self.pad_id():
            row = row[:-1]
        return row

    def longest_source(self) -> int | None:
        """Source tokens that the model's positions allow; `None`: any number."""
        config = self.model.config
        if getattr(config, "position_embedding_type", None) == "none":
            return None
        if getattr(config, "encoder_position_embeddings", True) is False:
            return None
        return getattr(config, "max_position_embeddings", None)

    def longest_target(self) -> int | None:
        """New target tokens that the model's positions allow; `None`: any number."""
        config = self.model.config
        if getattr(config, "position_embedding_type", None) == "none":
            return None
        if getattr(config, "decoder_position_embeddings", True) is False:
            return None
        limit = getattr(config, "max_position_embeddings", None)
        return None if limit is None else limit - 1


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first, each within `max_tokens` including padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(lengths[order[start]], 1))
        yield order[start : start + size]
        start += size


def join_pieces(found: Sequence[Sequence[Hypothesis]], penalty: float, glues: Sequence[str]) -> list[Hypothesis]:
    """The hypotheses of a split sentence from those of its parts, rank by rank."""
    joined = []
    for parts in zip(*found, strict=True):
        log_prob = sum(part.log_prob for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        joined.append(
            Hypothesis(
                join_texts([part.text for part in parts], glues),
                log_prob / max(len(tokens), 1) ** penalty,
                log_prob,
                tokens,
                all(part.finished for part in parts),
            )
        )
    return joined


class UnknownTokens:
    """Counts the tokens of a text that its tokenizer does not know."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.unknown_id = tokenizer.unk_token_id
        self.unknown = self.total = 0

    def count(self, ids: Sequence[int]) -> None:
        self.total += len(ids)
        self.unknown += ids.count(self.unknown_id)

    def warn(self) -> None:
        """Says so where it is more than a few."""
        if self.unknown > UNKNOWN_SHARE * self.total:
            logger.warning_once(
                f"{100 * self.unknown / self.total:.1f}% of the source tokens are unknown to the tokenizer, and the "
                "model cannot tell them apart. Remedy: a model whose tokenizer knows this language and script."
            )
