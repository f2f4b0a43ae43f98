"""Translating and scoring with any encoder-decoder of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.utils import has_file

from .._values import Range, check_value, hints_of
from ..models.user_errors import MissingFileError, UserError
from .decoding import MaxLengthPerSentence, length_penalty


TARGET_TOKENIZER = "target_tokenizer"


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
            cross-attention, as (source, target) positions.
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


DECODING_RANGES: dict[str, Range | None] = {
    "beams": Range(least=1, most=10000),
    "num_hypotheses": Range(least=1),
    "length_penalty_type": None,
    "length_penalty": None,
    "max_length_factor": Range(least=0),
    "max_length_extra": Range(least=0),
    "max_tokens": Range(least=1),
    "on_long": None,
    "max_source_length": Range(least=1),
    "alignments": None,
    "alignment_layer": Range(least=-1000, most=1000),
    "buffer": Range(least=1),
}


@dataclass
class DecodingOptions:
    """
    How to translate.

    Args:
        beams (`int`, *optional*, defaults to 4): Beam size; 1 is greedy search.
        num_hypotheses (`int`, *optional*, defaults to 1): Hypotheses of each sentence, at most `beams`.
        length_penalty_type (`str`, *optional*, defaults to `"vaswani"`): `"vaswani"`: `((5 + len) / 6) ** alpha`;
            `"hf"`: `len ** alpha`.
        length_penalty (`float`, *optional*, defaults to 0.6): alpha.
        max_length_factor (`float`, *optional*, defaults to 1.0),
        max_length_extra (`int`, *optional*, defaults to 50):
            Most new tokens: `factor * source tokens + extra`, sentence by sentence.
        max_tokens (`int`, *optional*, defaults to 4096): Source tokens of a batch, times beams.
        on_long (`str`, *optional*, defaults to `"error"`): What to do with a source that is longer than the model's
            positions: `"error"` or `"split"` (at punctuation, else between words).
        max_source_length (`int`, *optional*): That limit in tokens; `None`: what the model's positions allow.
        alignments (`bool`, *optional*, defaults to `False`): Adds alignments from the cross-attention.
        alignment_layer (`int`, *optional*): Decoder layer to read them from; `None`: the one below the top.
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
    alignment_layer: int | None = None
    buffer: int = 2000

    def __post_init__(self) -> None:
        hints = hints_of(DecodingOptions)
        for name, allowed in DECODING_RANGES.items():
            setattr(self, name, check_value(name, getattr(self, name), hints[name], allowed))
        if self.num_hypotheses > self.beams:
            raise UserError(
                f"num_hypotheses={self.num_hypotheses} is more than beams={self.beams}. Remedy: use as many beams as "
                "hypotheses, or more."
            )
        if self.on_long not in ("error", "split"):
            raise UserError(
                f'on_long={self.on_long!r} is not allowed; it must be "error" or "split". Remedy: choose one of them.'
            )
        if self.max_length_factor + self.max_length_extra <= 0:
            raise UserError(
                f"max_length_factor={self.max_length_factor} and max_length_extra={self.max_length_extra} are not "
                "allowed; one must be above 0. Remedy: set max_length_extra to 50."
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


class Translator:
    """
    Translates sentences with a trained model, batched by tokens and in the order given.

    Args:
        model (`PreTrainedModel`): An encoder-decoder with `generate`.
        tokenizer (`PreTrainedTokenizerBase`): Of the source, and of the target unless that has its own.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the target.

    Raises:
        ValueError: A tokenizer's vocabulary does not fit the model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer or tokenizer
        check_vocabulary(self.tokenizer, model.config.vocab_size, "source")
        target_size = getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size
        check_vocabulary(self.target_tokenizer, target_size, "target")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        **kwargs,
    ) -> Translator:
        """
        Loads model and tokenizers from a folder written by training, or from the Hub.

        Args:
            path (`str` or `Path`): Folder or model id. A target tokenizer of its own stands in the subfolder
                `target_tokenizer`.
            device (`str` or `torch.device`, *optional*): `None`: CUDA if there is any, else the CPU.
            dtype (`torch.dtype`, *optional*): Weights' data type; `None`: as saved.
            **kwargs: Passed on to `from_pretrained`, e.g. `trust_remote_code=True`, `revision=...`.

        Raises:
            FileNotFoundError: A local path does not exist or holds no model.
            ValueError: Tokenizer and model do not fit.
        """
        path = str(path)
        if looks_local(path) and not (Path(path) / "config.json").is_file():
            raise MissingFileError(
                f"{path} holds no model (config.json is missing). Remedy: give the folder that training or "
                "save_pretrained wrote, or a model id of the Hub."
            )
        settings = {"dtype": dtype} if dtype is not None else {}
        try:
            model = AutoModelForSeq2SeqLM.from_pretrained(path, use_safetensors=True, **settings, **kwargs)
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise UserError(
                f"The weights in {path} cannot be read ({error}). The file is cut short or damaged. Remedy: copy it "
                "again, or use an earlier checkpoint."
            ) from error
        tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
        target = load_target_tokenizer(path, **kwargs)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model.to(device).eval(), tokenizer, target)

    # -- translation -------------------------------------------------------------------------------------------------

    def __call__(self, sentences: str | Iterable[str], **options) -> list[Translation]:
        """Translates a sentence or several; see [`DecodingOptions`] for the options."""
        return list(self.translate([sentences] if isinstance(sentences, str) else sentences, **options))

    def translate(
        self, sentences: Iterable[str], options: DecodingOptions | None = None, **changes
    ) -> Iterator[Translation]:
        """
        Translates a stream of sentences; an empty one gives an empty translation.

        Args:
            sentences (iterable of `str`): Read a buffer at a time, so files of any size will do.
            options ([`DecodingOptions`], *optional*): How.
            **changes: Fields of [`DecodingOptions`] in place of `options`.

        Raises:
            ValueError: A sentence is too long for the model and `on_long="error"`; the message says which.
        """
        options = replace(options, **changes) if options else DecodingOptions(**changes)
        sentences = iter(sentences)
        first = 1
        while chunk := list(islice(sentences, options.buffer)):
            yield from self._translate_chunk(chunk, options, first)
            first += len(chunk)

    def _translate_chunk(self, sentences: list[str], options: DecodingOptions, first: int) -> list[Translation]:
        limit = options.max_source_length or self.longest_source()
        pieces: list[tuple[int, list[int]]] = []  # (sentence, token ids), several of a split sentence
        for i, sentence in enumerate(sentences):
            if not sentence.strip():
                continue
            ids = self.encode_source(sentence)
            if limit is None or len(ids) <= limit:
                pieces.append((i, ids))
            elif options.on_long == "split":
                pieces += [(i, part) for part in self.split_source(sentence, limit)]
            else:
                raise UserError(
                    f"Sentence {first + i} has {len(ids)} tokens, the model takes {limit}: {sentence[:60]!r}... "
                    'Remedy: shorten it, or have it split with on_long="split" (--on-long split).'
                )
        parts: list[list[Hypothesis]] = [[] for _ in pieces]
        for batch in batches_by_tokens([len(ids) for _, ids in pieces], options.max_tokens // options.beams):
            found = self._generate([pieces[k][1] for k in batch], options)
            for k, hypotheses in zip(batch, found, strict=True):
                parts[k] = hypotheses
        results = [[Hypothesis("", 0.0, 0.0)] for _ in sentences]
        by_sentence: dict[int, list[list[Hypothesis]]] = {}
        for (i, _), hypotheses in zip(pieces, parts, strict=True):
            by_sentence.setdefault(i, []).append(hypotheses)
        for i, found in by_sentence.items():
            results[i] = found[0] if len(found) == 1 else join_pieces(found, options.penalty())
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
            alignments = self.align_tokens(repeated, tokens, options.alignment_layer)
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
        **changes,
    ) -> list[SentenceScore]:
        """
        The model's log-probabilities of given translations, as `translate` reports them.

        Args:
            sources (sequence of `str`): Source sentences.
            targets (sequence of `str`, or of token ids as in [`Hypothesis`]): Their translations.
            options ([`DecodingOptions`], *optional*): Length penalty and batch size.

        Raises:
            ValueError: There are not as many sources as targets, or a source is empty.
        """
        options = replace(options, **changes) if options else DecodingOptions(**changes)
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources and {len(targets)} translations: there must be one for each.")
        source_ids = []
        for number, source in enumerate(sources, start=1):
            if not source.strip():
                raise UserError(f"Source {number} is empty and has no probability. Remedy: remove the pair.")
            source_ids.append(self.encode_source(source))
        target_ids = [self.encode_target(target) if isinstance(target, str) else list(target) for target in targets]
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
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], layer: int | None = None
    ) -> list[list[tuple[int, int]]]:
        """
        One link per target token, the end token left out: to the source token with the largest attention, averaged
        over the heads of a decoder layer (the one below the top by default, as Garg et al., 2019, found best).
        """
        attentions = self.attention(sources, targets)
        weights = attentions[max(len(attentions) - 2, 0) if layer is None else layer].float().mean(dim=1)
        ends = self.end_ids()
        links = []
        for row, source, target in zip(weights, sources, targets, strict=True):
            count = len(target) - (1 if target and target[-1] in ends else 0)
            real = max(len(source) - 1, 1)  # the source's own end token is no word
            best = row[:count, :real].argmax(dim=-1).tolist()
            links.append([(i, j) for j, i in enumerate(best)])
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
        return self.tokenizer(sentence, truncation=False, verbose=False)["input_ids"]

    def encode_target(self, sentence: str) -> list[int]:
        return self.target_tokenizer(text_target=sentence, truncation=False, verbose=False)["input_ids"]

    def split_source(self, sentence: str, limit: int) -> list[list[int]]:
        """
        Token ids of the parts of a long sentence, cut after punctuation where possible, else between words, else
        between characters, each time as near to the middle as possible.
        """
        return [self.encode_source(part) for part in self._parts_within(sentence.strip(), limit)]

    def _parts_within(self, text: str, limit: int) -> list[str]:
        if len(self.encode_source(text)) <= limit or len(text) < 2:
            return [text]
        # A mark within a number, a time or an address is not followed by a space and no place to cut.
        for pattern in (r"[.!?;:,]\s+|[。！？；：，、]\s*", r"\s+", r"."):
            cuts = [found.end() for found in re.finditer(pattern, text) if 0 < found.end() < len(text)]
            if cuts:
                cut = min(cuts, key=lambda place: abs(place - len(text) / 2))
                halves = text[:cut].strip(), text[cut:].strip()
                return [part for half in halves if half for part in self._parts_within(half, limit)]
        return [text]

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


def looks_local(path: str) -> bool:
    """Whether a model's name is a path: an existing one, or one that a model id cannot be."""
    return Path(path).exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def load_target_tokenizer(path: str, **kwargs) -> PreTrainedTokenizerBase | None:
    """
    The target tokenizer of a model whose target has a vocabulary of its own; `None` where one serves both sides.

    Args:
        path: Folder or model id.
        **kwargs: Those of `from_pretrained`.

    Raises:
        ValueError: It is there and cannot be loaded.
    """
    try:
        if looks_local(path):
            is_there = (Path(path) / TARGET_TOKENIZER).is_dir()
        else:
            known = {"revision", "token", "cache_dir", "local_files_only"}
            place = {name: value for name, value in kwargs.items() if name in known}
            is_there = has_file(path, f"{TARGET_TOKENIZER}/tokenizer.json", **place)
        if not is_there:
            return None
        # Without a configuration it would be looked for in the subfolder, which of the Hub's files is an error.
        return AutoTokenizer.from_pretrained(path, subfolder=TARGET_TOKENIZER, config=PreTrainedConfig(), **kwargs)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The target tokenizer of {path} cannot be loaded ({str(error).strip().splitlines()[0]}). Remedy: see that "
            f"{TARGET_TOKENIZER}/tokenizer.json is whole there and may be read, or load it yourself and pass it as "
            "target_tokenizer."
        ) from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, side: str) -> None:
    """Raises `ValueError` when the tokenizer has ids that the model's embedding has not."""
    if len(tokenizer) > rows:
        raise UserError(
            f"The {side} tokenizer has {len(tokenizer)} symbols, the model's {side} embedding only {rows} rows. "
            "Remedy: use the tokenizer the model was trained with, or resize the embeddings."
        )


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first, each within `max_tokens` including padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(lengths[order[start]], 1))
        yield order[start : start + size]
        start += size


def join_pieces(found: Sequence[Sequence[Hypothesis]], penalty: float) -> list[Hypothesis]:
    """The hypotheses of a split sentence from those of its parts, rank by rank."""
    joined = []
    for parts in zip(*found, strict=True):
        log_prob = sum(part.log_prob for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        joined.append(
            Hypothesis(
                " ".join(part.text for part in parts),
                log_prob / max(len(tokens), 1) ** penalty,
                log_prob,
                tokens,
                all(part.finished for part in parts),
            )
        )
    return joined
