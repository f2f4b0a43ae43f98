"""Translate, score and align text with any backend: text to token ids, backend, token ids to text."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._plain_text import is_blank, truncated
from ..data.tokenizer_pair import TokenizerPair
from ..models.user_errors import UserError
from .attention_links import token_links
from .backends.protocol import Backend, SearchRequest
from .backends.torch_model import TorchBackend
from .batching import batches_by_tokens, batches_of_pairs
from .loading import load_backend
from .model_settings import end_ids, target_vocabulary_size
from .model_task import ModelTask
from .options import DecodingOptions, decoding_options
from .results import Hypothesis, SentenceScore, Translation
from .splitting import join_pieces, split_sentences, split_text
from .translation_warnings import ShortTranslations, UnknownTokens


__all__ = ["DecodingOptions", "Hypothesis", "PreparedSentence", "SentenceScore", "Translation", "Translator"]


@dataclass
class PreparedSentence:
    """
    Token ids of a sentence or of a text of several sentences.

    Attributes:
        text (`str`): The sentence or text.
        pieces (`list[list[int]]`): Token ids of each part that is translated by itself; empty for blank text.
        glues (`list[str]`): Text that joins the translation of each piece to the one before.
        prefix (`list[int]`): Token ids that the translation begins with.
    """

    text: str
    pieces: list[list[int]]
    glues: list[str]
    prefix: list[int] = field(default_factory=list)


class Translator:
    """
    Translates sentences with a trained model, in batches by number of tokens and in the given order. It also scores and
    aligns translations.

    Args:
        model (`PreTrainedModel`): An encoder-decoder with `generate`.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the source, and of the target unless that has its own.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the target.
        check (`bool`, *optional*, defaults to `True`): Whether to refuse weights that are not finite and tokenizers of
            other models ([`~recnmt_hf.data.tokenizer_checks.check_tokenizers`]).

    Attributes:
        backend ([`~recnmt_hf.inference.backends.protocol.Backend`]): Runs the model.
        task ([`ModelTask`]): Task that the model was trained for, as far as it is known.

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
        self.backend: Backend = TorchBackend(model, TokenizerPair(tokenizer, target_tokenizer), check)
        self.task = ModelTask()
        self.control_ids = self.tokenizers.control_ids()

    @classmethod
    def from_backend(cls, backend: Backend, task: ModelTask | None = None) -> Translator:
        """
        Create a translator for a backend.

        Args:
            backend ([`~recnmt_hf.inference.backends.protocol.Backend`]): Runs the model.
            task ([`ModelTask`], *optional*): Task that the model was trained for.
        """
        translator = cls.__new__(cls)
        translator.backend = backend
        translator.task = task or ModelTask()
        translator.control_ids = translator.tokenizers.control_ids()
        return translator

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Sequence[str | Path],
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        check: bool = True,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        **kwargs: Any,
    ) -> Translator:
        """
        Load model and tokenizers from a folder that training or `recnmt export` wrote, or from the Hub.

        Args:
            path (`str` or `Path`, or a list of them): Folder or model id. A list loads an ensemble: several models of
                one vocabulary, whose log-probabilities are averaged token by token. The subfolder `target_tokenizer`
                holds the target's tokenizer if it has its own.
            device (`str` or `torch.device`, *optional*): Defaults to CUDA if available, else the CPU.
            dtype (`torch.dtype`, *optional*): Data type of the weights; defaults to the saved one.
            check (`bool`, *optional*, defaults to `True`): Whether to check weights and tokenizers.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code in the model's files may run.
            quantization (`str`, *optional*): `"int8"`: dynamic quantization of linear layers, on the CPU
                ([`~recnmt_hf.inference.quantization.quantize_model`]).
            **kwargs: Passed on to `from_pretrained`, e.g. `revision=...`.

        Raises:
            FileNotFoundError: A local path does not exist or holds no model.
            ValueError: The files are damaged or do not belong together
                ([`~recnmt_hf.inference.loading.load_model`]), or an argument is not supported for them.
        """
        return cls.from_backend(*load_backend(path, device, dtype, check, trust_remote_code, quantization, **kwargs))

    @property
    def model(self) -> Any:
        """The model; of an exported one its `config`, `generation_config` and `name_or_path`."""
        return self.backend.model

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self.backend.model = model

    @property
    def tokenizers(self) -> TokenizerPair:
        """The tokenizers of source and target."""
        return self.backend.tokenizers

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the source."""
        return self.tokenizers.source

    @property
    def target_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the target."""
        return self.tokenizers.target

    def inspected_model(self) -> Any:
        """
        Return the PyTorch model for reading its attentions, states or weights.

        Raises:
            ValueError: It was exported, or it is an ensemble.
        """
        return self.backend.inspected_model()

    # -- translating ---------------------------------------------------------------------------------------------------

    def __call__(
        self, sentences: str | Iterable[str], prefixes: str | Iterable[str] | None = None, **options: Any
    ) -> list[Translation]:
        """Translate a sentence or several, as [`translate`] does."""
        prefixes = [prefixes] if isinstance(prefixes, str) else prefixes
        return list(self.translate([sentences] if isinstance(sentences, str) else sentences, None, prefixes, **options))

    def translate(
        self,
        sentences: Iterable[str],
        options: DecodingOptions | None = None,
        prefixes: Iterable[str] | None = None,
        scores: bool = True,
        warn_short: bool = True,
        **changes: Any,
    ) -> Iterator[Translation]:
        """
        Translate a stream of sentences. A blank sentence produces an empty translation. A text of several sentences is
        translated sentence by sentence (`split_sentences`), and the translations are joined by the white space between
        the sentences. Warnings report a share of unknown tokens above 1%, and translations with less than a quarter of
        the letters of their source.

        Args:
            sentences (iterable of `str`): Sentences; read in buffers, so files may have any size.
            options ([`DecodingOptions`], *optional*): Defaults to those of the class.
            prefixes (iterable of `str`, *optional*): Text that each translation begins with; may be empty.
            scores (`bool`, *optional*, defaults to `True`): Whether to score hypotheses, which takes another pass of
                the model; otherwise scores are NaN, and hypotheses are in the order of the search.
            warn_short (`bool`, *optional*, defaults to `True`): Whether to warn of translations that are far too short.
                There is no warning with `on_long="truncate"`, nor for a model for summaries.
            **changes: Fields of [`DecodingOptions`] that replace those of `options`, or transformers' names:
                `num_beams`, `max_new_tokens`, and other settings of `generate`.

        Raises:
            ValueError: A sentence is not a string, or is too long and `on_long="error"`; the message gives its number.
                The numbers of prefixes and sentences differ.
        """
        options = decoding_options(options, changes)
        for given, name in ((sentences, "translate"), ([] if prefixes is None else prefixes, "prefixes")):
            if isinstance(given, str) or not isinstance(given, Iterable):
                kind = "one text" if isinstance(given, str) else repr(given)
                raise UserError(f"{name} takes several sentences, not {kind}. Remedy: put them into a list.")
        pairs = pair_with_prefixes(sentences, prefixes)
        first = 1
        unknown, short = UnknownTokens(self.tokenizer), ShortTranslations()
        while chunk := list(islice(pairs, options.buffer)):
            prepared = [
                self.prepare(sentence, options, prefix, f"Sentence {number}")
                for number, (sentence, prefix) in enumerate(chunk, start=first)
            ]
            translations = self.search(prepared, options, unknown, first - 1, scores)
            if warn_short and not self.takes_whole_texts(options):
                for number, translation in enumerate(translations, start=first):
                    short.add(number, translation)
            yield from translations
            first += len(chunk)
        unknown.warn()
        short.warn()

    def prepare(
        self, sentence: str, options: DecodingOptions, prefix: str = "", place: str = "The sentence"
    ) -> PreparedSentence:
        """
        Encode a sentence, split where it is too long for the model and `on_long="split"`, or a text, split into
        sentences.

        Args:
            sentence (`str`): The sentence.
            options ([`DecodingOptions`]): How to split.
            prefix (`str`, *optional*): Text that the translation begins with.
            place (`str`, *optional*): Name of the sentence in messages.

        Raises:
            ValueError: It is not a string, or too long, or the prefix is not possible.
        """
        check_text(sentence, place)
        whole = [] if is_blank(sentence) else self.encode_source(sentence)
        forced = self.prefix_ids(prefix, place) if prefix else []
        if self.is_empty(whole):
            if forced:
                raise UserError(
                    f"{place} is empty, and its translation cannot begin with {prefix[:60]!r}. Remedy: give an empty "
                    "prefix too, or see that sentences and prefixes are in the same order."
                )
            return PreparedSentence(sentence, [], [])
        parts = [("", sentence, whole)]
        if self.splits_sentences(options, bool(forced)):
            parts = self.encode_sentences(sentence, whole, options)
        prepared = PreparedSentence(sentence, [], [], forced)
        space = ""
        for number, (glue, text, ids) in enumerate(parts, start=1):
            name = place if len(parts) == 1 else f"{place}, part {number},"
            for own_glue, piece in self.within_limit(text, ids, options, name, glue):
                space += own_glue
                if not self.is_empty(piece):
                    prepared.pieces.append(piece)
                    prepared.glues.append(space)
                    space = ""
        return prepared

    def takes_whole_texts(self, options: DecodingOptions) -> bool:
        """Return whether a text is one input and may have a much shorter output, as for summaries."""
        return options.on_long == "truncate" or self.task.summarizes

    def splits_sentences(self, options: DecodingOptions, has_prefix: bool) -> bool:
        """Return whether a text is translated sentence by sentence."""
        if options.split_sentences == "auto":
            return not has_prefix and not self.takes_whole_texts(options)
        return options.split_sentences == "always"

    def encode_sentences(
        self, text: str, whole: list[int], options: DecodingOptions
    ) -> list[tuple[str, str, list[int]]]:
        """
        Split a text into sentences.

        Args:
            text (`str`): The text.
            whole (`list[int]`): Its token ids.
            options ([`DecodingOptions`]): Language. With `alignments`, whose positions are those of the whole text, it
                is split only if its sentences have the same tokens.

        Returns:
            For each sentence the white space before it, the sentence and its token ids.
        """
        language = options.source_lang or self.task.source_lang or getattr(self.tokenizer, "source_lang", None)
        sentences = split_sentences(text, language)
        if len(sentences) < 2:
            return [("", text, whole)]
        encoded = [(glue, sentence, self.encode_source(sentence)) for glue, sentence in sentences]
        tokens = [id for _, _, ids in encoded for id in self.without_control(ids)]
        if options.alignments and tokens != self.without_control(whole):
            return [("", text, whole)]
        return encoded

    def within_limit(
        self, text: str, ids: list[int], options: DecodingOptions, place: str, glue: str
    ) -> list[tuple[str, list[int]]]:
        """Return a sentence's white space and token ids, or those of its parts, none of them too long for the model."""
        limits = (options.max_source_length, self.backend.limits.source)
        limit = min((limit for limit in limits if limit), default=None)
        if limit is None or len(ids) <= limit:
            return [(glue, ids)]
        if options.on_long == "truncate":
            return [(glue, truncated(ids, limit, self.end_ids()))]
        if options.on_long != "split":
            raise UserError(
                f"{place} has {len(ids)} tokens, the model takes {limit}: {text[:60]!r}... "
                'Remedy: shorten it, or have it split with on_long="split" (--on-long split), or cut off with '
                '"truncate".'
            )
        parts = [(own_glue, self.encode_source(part)) for own_glue, part in self.parts_within(text, limit, glue)]
        if any(len(part) > limit and not self.is_empty(part) for _, part in parts):
            raise UserError(
                f"{place} cannot be split into parts of {limit} tokens: a single character takes more. Remedy: raise "
                "max_source_length."
            )
        return parts

    def prefix_ids(self, prefix: str, place: str) -> list[int]:
        """Return the token ids of a prefix, without the end of the sentence."""
        check_text(prefix, f"{place}: the prefix")
        ids = [] if is_blank(prefix) else self.encode_target(prefix)
        while ids and ids[-1] in self.end_ids():
            ids = ids[:-1]
        limit = self.backend.limits.target
        if limit is not None and len(ids) >= limit:
            raise UserError(
                f"{place}: the prefix has {len(ids)} tokens, the model can generate {limit}. Remedy: shorten it."
            )
        return ids

    def split_source(self, sentence: str, limit: int) -> list[list[int]]:
        """Return the token ids of the parts of a long sentence, as [`split_text`] cuts it."""
        return [self.encode_source(part) for _, part in self.parts_within(sentence, limit)]

    def parts_within(self, sentence: str, limit: int, glue: str = "") -> list[tuple[str, str]]:
        """Return the white space and text of the parts of a long sentence, each of at most `limit` tokens."""
        return split_text(sentence.strip(), limit, lambda text: len(self.encode_source(text)), glue)

    def search(
        self,
        prepared: Sequence[PreparedSentence],
        options: DecodingOptions,
        unknown: UnknownTokens | None = None,
        offset: int = 0,
        scores: bool = True,
    ) -> list[Translation]:
        """
        Translate prepared sentences, in batches of similar length.

        Args:
            prepared (sequence of [`PreparedSentence`]): The sentences.
            options ([`DecodingOptions`]): How to translate.
            unknown ([`UnknownTokens`], *optional*): Counts the unknown tokens of the sources.
            offset (`int`, *optional*): Number of earlier sentences, which is added to the seed of sampling.
            scores (`bool`, *optional*, defaults to `True`): As for [`translate`].
        """
        pieces = [(i, piece) for i, sentence in enumerate(prepared) for piece in sentence.pieces]
        starts = [bool(k == 0 or pieces[k - 1][0] != i) for k, (i, _) in enumerate(pieces)]
        prefixes = [prepared[i].prefix if start else [] for (i, _), start in zip(pieces, starts, strict=True)]
        if unknown is not None:
            for _, ids in pieces:
                unknown.count(ids)
        by_piece: list[list[Hypothesis]] = [[] for _ in pieces]
        rows = max(options.beams, options.num_hypotheses)
        seed = None if options.seed is None else options.seed + offset
        with self.backend.seeded(seed):  # once for all batches, or all of them would draw the same numbers
            for batch in batches_by_tokens([len(ids) for _, ids in pieces], options.max_tokens // rows):
                hypotheses = self.search_batch(
                    [pieces[k][1] for k in batch], [prefixes[k] for k in batch], options, scores
                )
                for k, of_piece in zip(batch, hypotheses, strict=True):
                    by_piece[k] = of_piece
        by_sentence: list[list[list[Hypothesis]]] = [[] for _ in prepared]
        for (i, _), of_piece in zip(pieces, by_piece, strict=True):
            by_sentence[i].append(of_piece)
        translations = []
        for sentence, parts in zip(prepared, by_sentence, strict=True):
            if not parts:
                best = [Hypothesis("", 0.0, 0.0, alignment=[] if options.alignments else None)]
            else:
                lengths = [len(self.without_control(piece)) for piece in sentence.pieces]
                best = parts[0] if len(parts) == 1 else join_pieces(parts, options.penalty(), sentence.glues, lengths)
            translations.append(Translation(sentence.text, best))
        return translations

    def search_batch(
        self,
        sources: Sequence[Sequence[int]],
        prefixes: Sequence[Sequence[int]],
        options: DecodingOptions,
        scores: bool = True,
    ) -> list[list[Hypothesis]]:
        """Translate a batch of token ids. Return the hypotheses of each source, best first."""
        max_lengths = self.max_lengths(sources, prefixes, options)
        result = self.backend.search(SearchRequest(sources, prefixes, max_lengths, options))
        per_source = len(result.tokens) // len(sources)
        tokens = [self.strip(row[: max_lengths[number // per_source]]) for number, row in enumerate(result.tokens)]
        hypotheses = self.make_hypotheses(sources, tokens, options, scores, result.log_probs)
        return [of_source[: options.num_hypotheses] for of_source in hypotheses]

    def max_lengths(
        self, sources: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]], options: DecodingOptions
    ) -> list[int]:
        """Return the maximum number of new tokens for each source, prefix and end token included."""
        lengths = [max(1, int(options.max_length_factor * len(ids)) + options.max_length_extra) for ids in sources]
        lengths = [max(length, len(ids) + bool(ids)) for length, ids in zip(lengths, prefixes, strict=True)]
        limit = self.backend.limits.target
        return lengths if limit is None else [min(length, limit) for length in lengths]

    def strip(self, row: list[int]) -> list[int]:
        """
        Return a generated row up to its end token or, without one, up to its padding. Rows must be truncated to their
        limit before: beam search may fill up truncated hypotheses with end tokens.
        """
        ends = self.end_ids()
        for i, token in enumerate(row):
            if token in ends:
                return row[: i + 1]
        while row and row[-1] == self.pad_id():
            row = row[:-1]
        return row

    def make_hypotheses(
        self,
        sources: Sequence[Sequence[int]],
        tokens: Sequence[list[int]],
        options: DecodingOptions,
        scores: bool,
        log_probs: Sequence[float] | None = None,
    ) -> list[list[Hypothesis]]:
        """
        Create the hypotheses of each source, best first if their log-probabilities are known.

        Args:
            sources (sequence of sequences of `int`): Token ids.
            tokens (sequence of lists of `int`): Hypotheses, the same number in consecutive rows for each source.
            options ([`DecodingOptions`]): Penalty and alignments.
            scores (`bool`): Whether to compute log-probabilities in another pass of the model.
            log_probs (sequence of `float`, *optional*): Those of the search, for use without that pass.
        """
        per_source, penalty = len(tokens) // len(sources), options.penalty()
        repeated = [source for source in sources for _ in range(per_source)]
        is_scored = scores or log_probs is not None
        # generate reports its scores only along with those of the whole vocabulary at every step; another pass over the
        # finished hypotheses costs less than storing those, and computes the same as `score`.
        if scores:
            log_probs = [sum(row) for row in self.score_tokens(repeated, tokens, options.max_tokens)]
        elif log_probs is None:
            log_probs = [math.nan] * len(tokens)
        alignments: list[Any] = [None] * len(tokens)
        if options.alignments:
            alignments = self.align_tokens(repeated, tokens, options.alignment_layer, options.max_tokens)
        texts = self.target_tokenizer.batch_decode([*tokens], skip_special_tokens=True)
        ends = self.end_ids()
        hypotheses = [
            Hypothesis(
                text.strip(),
                log_prob / max(len(row), 1) ** penalty,
                log_prob,
                row,
                bool(row) and row[-1] in ends,
                alignment,
            )
            for text, log_prob, row, alignment in zip(texts, log_probs, tokens, alignments, strict=True)
        ]
        by_source = [hypotheses[i : i + per_source] for i in range(0, len(hypotheses), per_source)]
        # The search adds in float32; among near-ties the order by the scores reported here may differ.
        return [sorted(row, key=lambda one: -one.score) for row in by_source] if is_scored else by_source

    # -- scoring and aligning ------------------------------------------------------------------------------------------

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str | Sequence[int]],
        options: DecodingOptions | None = None,
        places: Sequence[str] | None = None,
        **changes: Any,
    ) -> list[SentenceScore]:
        """
        Return the model's log-probabilities of given translations, as `translate` reports them.

        Args:
            sources (sequence of `str`): Source sentences.
            targets (sequence of `str`, or of token ids as in [`Hypothesis`]): Their translations.
            options ([`DecodingOptions`], *optional*): Length penalty and batch size.
            places (sequence of `str`, *optional*): Name of each pair in messages; defaults to its number.
            **changes: As for [`translate`].

        Raises:
            ValueError: The numbers of sources and targets differ, or a source is empty.
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
            check_text(source, names[0])
            ids = [] if is_blank(source) else self.encode_source(source)
            if self.is_empty(ids):
                raise UserError(f"{names[0]} is empty and has no probability. Remedy: remove the pair.")
            unknown.count(ids)
            source_ids.append(ids)
            target_ids.append(self.target_ids(target, names[1]))
            self.check_lengths(len(ids), len(target_ids[-1]), names[2])
        unknown.warn()
        penalty = options.penalty()
        log_probs = self.score_tokens(source_ids, target_ids, options.max_tokens)
        return [SentenceScore(sum(row) / max(len(row), 1) ** penalty, sum(row), row) for row in log_probs]

    def score_tokens(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 4096
    ) -> list[list[float]]:
        """Return the log-probability of every target token, computed in batches of at most `max_tokens`."""
        log_probs: list[list[float]] = [[] for _ in targets]
        for batch in batches_of_pairs(sources, targets, max_tokens):
            rows = self.backend.score([sources[i] for i in batch], [targets[i] for i in batch])
            for i, row in zip(batch, rows, strict=True):
                log_probs[i] = row
        return log_probs

    def align_tokens(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        layer: int | str | None = None,
        max_tokens: int = 4096,
    ) -> list[list[tuple[int, int]]]:
        """
        Return links between tokens, at most one for each target token: to the source token with the largest attention,
        averaged over the heads of a decoder layer. The rule is that of [`align_pairs`], with each token as a word.
        There is no link to the source's end token, and none for the target's.
        """
        links: list[list[tuple[int, int]]] = [[] for _ in targets]
        controls = self.control_ids[0], self.control_ids[1] | self.end_ids()
        for batch in batches_of_pairs(sources, targets, max_tokens):
            batch_sources, batch_targets = [sources[i] for i in batch], [targets[i] for i in batch]
            attentions = self.attention(batch_sources, batch_targets)
            rows = token_links(attentions, batch_sources, batch_targets, controls, layer)
            for i, row in zip(batch, rows, strict=True):
                links[i] = row
        return links

    def attention(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """
        Return the cross-attention to the sources while the model is given the targets, per decoder layer `(batch_size,
        num_heads, target_length, source_length)`; row j belongs to the step that predicts target token j.

        Raises:
            ValueError: The model does not attend to source words, or its format returns no attention.
        """
        return self.backend.attention(sources, targets)

    # -- text and token ids --------------------------------------------------------------------------------------------

    def encode_source(self, sentence: str) -> list[int]:
        """Return the token ids of a source sentence, in which `</s>` and the like are text."""
        return self.tokenizers.encode_source(sentence)

    def encode_target(self, sentence: str) -> list[int]:
        """Return the token ids of a target sentence, in which `</s>` and the like are text."""
        return self.tokenizers.encode_target(sentence)

    def target_ids(self, target: str | Sequence[int], place: str) -> list[int]:
        """Return the token ids of a translation, given as text or token ids; `ValueError` for ids that do not exist."""
        if isinstance(target, str):
            check_text(target, place)
            return self.encode_target(target)
        size = target_vocabulary_size(self.model.config)
        ids = list(target) if isinstance(target, Iterable) else [target]
        for id in ids:
            if not hasattr(id, "__index__") or isinstance(id, float) or not 0 <= id < size:
                raise UserError(f"{place}: {id!r} is no token id of 0 to {size - 1}. Remedy: give the model's own ids.")
        return [operator.index(id) for id in ids]

    def is_empty_source(self, sentence: str) -> bool:
        """Return whether a sentence has no visible character, or none that its tokenizer keeps."""
        return is_blank(sentence) or self.is_empty(self.encode_source(sentence))

    def is_empty(self, ids: Sequence[int]) -> bool:
        """Return whether the token ids of a source are control tokens only."""
        return all(id in self.control_ids[0] for id in ids)

    def without_control(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of a source without control tokens."""
        return [id for id in ids if id not in self.control_ids[0]]

    def check_lengths(self, source: int, target: int, place: str) -> None:
        """Raise `ValueError` if a sentence pair has more tokens than the model has positions."""
        limits = self.backend.limits
        # The decoder does not read the last target token.
        target_limit = None if limits.target is None else limits.target + 1
        for side, length, limit in (("source", source, limits.source), ("target", target, target_limit)):
            if limit is not None and length > limit:
                raise UserError(f"{place} has {length} {side} tokens, the model takes {limit}. Remedy: shorten it.")

    def pad_id(self) -> int:
        """Return the id of the target's padding token."""
        return self.target_tokenizer.pad_token_id

    def end_ids(self) -> set[int]:
        """Return the ids of the tokens that end a translation."""
        return end_ids(self.model)


def check_text(sentence: object, place: str) -> None:
    """
    Check that a sentence is text that can be encoded in UTF-8.

    Args:
        sentence: The sentence.
        place (`str`): Name of the sentence in messages.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(sentence, str):
        raise UserError(f"{place} is no text but {sentence!r}. Remedy: give sentences.")
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place} holds half a character ({error.object[error.start]!a}): {sentence[:60]!a}. Remedy: correct "
            "how the text was read; UTF-8 has no such characters."
        ) from error


def pair_with_prefixes(sentences: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    """Yield each sentence with its prefix. Raises `UserError` if their numbers differ."""
    if prefixes is None:
        yield from ((sentence, "") for sentence in sentences)
        return
    missing: Any = object()
    for number, (sentence, prefix) in enumerate(zip_longest(sentences, prefixes, fillvalue=missing), start=1):
        if sentence is missing or prefix is missing:
            fewer, more = ("sentences", "prefixes") if sentence is missing else ("prefixes", "sentences")
            raise UserError(
                f"There are more {more} than {fewer}, which end after {number - 1}. Remedy: give one prefix for each "
                "sentence, and an empty one where its translation is free."
            )
        yield sentence, prefix
