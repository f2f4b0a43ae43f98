"""Translate, score and align text with any backend: text to token ids, backend, token ids to text."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import dropwhile, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._plain_text import control_ids, is_blank
from ..data.records import ParsedSentence, Sentence, SourceText, TokenRows, Tokens
from ..data.tags import source_tags, tag_ids
from ..data.tokenizer_checks import vocabulary_sizes
from ..data.tokenizer_pair import TokenizerPair
from ..data.tree_inputs import Relations, tree_options
from ..errors import UserError, short_repr
from .attention_links import attention_rows, links_of_tokens
from .backends.protocol import Backend, SearchRequest, SearchResult, TranslatesOnly
from .backends.torch_model import TorchBackend
from .batching import batches_by_tokens, run_batches
from .languages import Direction, Languages, find_languages
from .loading import load_backend
from .model_settings import end_ids
from .model_task import ModelTask
from .options import DecodingOptions, decoding_options, unusual_settings
from .results import Hypothesis, SentenceScore, Translation
from .splitting import join_pieces, split_sentences, split_text
from .translation_warnings import TranslationWarnings


__all__ = ["DecodingOptions", "Hypothesis", "PreparedSentence", "SentenceScore", "Translation", "Translator"]


@dataclass
class PreparedSentence:
    """Tokens of a sentence or of a text of several sentences."""

    text: str
    pieces: list[Tokens]  # of each part that is translated by itself; empty for blank text
    separators: list[str]  # text that joins the translation of each piece to the one before
    prefix: list[int] = field(default_factory=list)  # token ids that the translation begins with
    direction: Direction = field(default_factory=Direction)  # the languages


class Translator:
    """
    Translates sentences with a trained model, in batches by number of tokens and in the given order. It also scores and
    aligns translations.

    Args:
        model (`PreTrainedModel`): An encoder-decoder with `generate`.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the source, and of the target unless that has its own.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the target.
        check (`bool`, *optional*, defaults to `True`): Whether to reject weights that are not finite and tokenizers of
            other models ([`~recnmt_hf.data.TokenizerPair.check`]).
        relations ([`~recnmt_hf.data.Relations`], *optional*): Of a model that reads dependency trees.

    Attributes:
        languages ([`~recnmt_hf.inference.languages.Languages`]): How the model is told source and target language.
        source_lang, target_lang (`str`, *optional*): Codes of the languages of calls that do not pass any.
        backend ([`~recnmt_hf.inference.backends.protocol.Backend`]): Runs the model.
        task ([`ModelTask`]): Task that the model was trained for, if known.
        trees ([`~recnmt_hf.data.TreeEncoder`], *optional*): Encodes dependency trees, if the model reads them.

    Raises:
        ValueError: The weights are not finite, or a tokenizer is not the model's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        check: bool = True,
        relations: Relations | None = None,
    ):
        self.set_backend(TorchBackend(model, TokenizerPair(tokenizer, target_tokenizer, relations), check), ModelTask())

    def set_backend(self, backend: Backend, task: ModelTask) -> None:
        """Set the backend and everything that depends on its tokenizers and configuration."""
        self.backend, self.task = backend, task
        self.source_lang: str | None = None
        self.target_lang: str | None = None
        self.trees = self.tokenizers.tree_encoder(self.model.config)
        self.languages: Languages = find_languages(self.tokenizers, self.model)
        self.directions: dict[tuple[Any, ...], Direction] = {}
        self.control_ids = [control_ids(tokenizer) | self.languages.control_ids for tokenizer in self.tokenizers]
        self.tag_ids = tag_ids(self.tokenizers.target)
        self.source_tags = source_tags(self.tokenizers.source)

    @classmethod
    def from_backend(cls, backend: Backend, task: ModelTask | None = None) -> Translator:
        """Create a translator for a [`~recnmt_hf.inference.backends.protocol.Backend`] and a [`ModelTask`]."""
        translator = cls.__new__(cls)
        translator.set_backend(backend, task or ModelTask())
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
        source_lang: str | None = None,
        target_lang: str | None = None,
        **kwargs: Any,
    ) -> Translator:
        """
        Load model and tokenizers from a folder that training or `recnmt convert` wrote, or from the Hub.

        Args:
            path (`str` or `Path`, or a list of them): Folder or model id. A list loads an ensemble: several models of
                one vocabulary, whose log-probabilities are averaged token by token. The subfolder `target_tokenizer`
                holds the target's tokenizer if it has its own.
            device (`str` or `torch.device`, *optional*): Defaults to CUDA if available, else the CPU.
            dtype (`torch.dtype` or `str`, *optional*): Data type of the weights; defaults to the saved one. `"fastest"`
                is bfloat16 where the processor or GPU has instructions for it and the model is at least 128 wide, else
                float32.
            check (`bool`, *optional*, defaults to `True`): Whether to check weights and tokenizers.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code in the model's files may run.
            quantization (`str`, *optional*): `"int8"`: dynamic quantization of linear layers, on the CPU
                ([`~recnmt_hf.inference.quantization.quantize_model`]).
            source_lang, target_lang (`str`, *optional*): Codes of the languages, for a model of several
                ([`DecodingOptions`]); `src_lang` and `tgt_lang` are other names of these.
            **kwargs: Passed on to `from_pretrained`, e.g. `revision=...`.

        Raises:
            FileNotFoundError: A local path does not exist or holds no model.
            ValueError: The files are damaged or do not belong together
                ([`~recnmt_hf.inference.loading.load_model`]), or an argument is not supported for them.
        """
        names = {"source_lang": source_lang, "target_lang": target_lang}
        names = {name: code for name, code in names.items() if code is not None}
        names |= {name: code for name in ("src_lang", "tgt_lang") if (code := kwargs.pop(name, None)) is not None}
        languages = decoding_options(None, names)
        backend, task = load_backend(path, device, dtype, check, trust_remote_code, quantization, **kwargs)
        translator = cls.from_backend(backend, task)
        translator.source_lang, translator.target_lang = languages.source_lang, languages.target_lang
        if names:
            translator.direction(languages)  # reject unknown codes
        return translator

    @property
    def model(self) -> Any:
        """The model; of an exported one its `config`, `generation_config` and `name_or_path`."""
        return self.backend.model

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

    @property
    def reads_trees(self) -> bool:
        """Whether the model reads the dependency trees of sources."""
        return tree_options(self.model.config) is not None

    @property
    def source_langs(self) -> list[str]:
        """Codes of the source languages of a model that must be told one; else an empty list."""
        return list(self.languages.sources)

    @property
    def target_langs(self) -> list[str]:
        """Codes of the target languages among which `target_lang` chooses; an empty list for a model of one."""
        return list(self.languages.targets)

    def inspected_model(self) -> Any:
        """Return the PyTorch model for inspection; `ValueError` for an exported model or an ensemble."""
        return self.backend.inspected_model()

    # -- translating ---------------------------------------------------------------------------------------------------

    def __call__(
        self, sentences: SourceText | Iterable[SourceText], prefixes: str | Iterable[str] | None = None, **options: Any
    ) -> list[Translation]:
        """Translate a sentence or several, as [`translate`] does."""
        prefixes = [prefixes] if isinstance(prefixes, str) else prefixes
        sentences = [sentences] if isinstance(sentences, (str, ParsedSentence)) else sentences
        return list(self.translate(sentences, None, prefixes, **options))

    def translate(
        self,
        sentences: Iterable[SourceText],
        options: DecodingOptions | None = None,
        prefixes: Iterable[str] | None = None,
        scores: bool = True,
        warn_short: bool = True,
        first: int = 1,
        warnings: TranslationWarnings | None = None,
        **changes: Any,
    ) -> Iterator[Translation]:
        """
        Translate a stream of sentences. A blank sentence produces an empty translation. A text of several sentences is
        translated sentence by sentence (`split_sentences`), and the translations are joined by the white space between
        the sentences. Warnings report a share of unknown tokens above 1%, and translations with less than a quarter of
        the letters of their source.

        Args:
            sentences (iterable of `str` or [`~recnmt_hf.data.ParsedSentence`]): Sentences, for a model that reads
                dependency trees with these; read in buffers, so files may have any size.
            options ([`DecodingOptions`], *optional*): Defaults to those of the class.
            prefixes (iterable of `str`, *optional*): Text that each translation begins with; may be empty.
            scores (`bool`, *optional*, defaults to `True`): Whether to score hypotheses, which takes another pass of
                the model; otherwise scores are NaN, and hypotheses are in the order of the search.
            warn_short (`bool`, *optional*, defaults to `True`): Whether to warn of translations that are far too short.
                There is no warning with `on_long="truncate"`, nor for a model for summaries.
            first (`int`, *optional*, defaults to 1): Number of the first sentence, in messages and for the draws of
                sampling with a seed. Parts with a multiple of `options.buffer` sentences draw as the whole text.
            warnings (`TranslationWarnings`, *optional*): Counts for a caller that reports them; nothing is logged.
            **changes: Fields of [`DecodingOptions`] that replace those of `options`, or transformers' names:
                `num_beams`, `max_new_tokens`, and other settings of `generate`.

        Raises:
            ValueError: A sentence is not a string, or is too long and `on_long="error"`; the message gives its number.
                The numbers of prefixes and sentences differ.
        """
        options = decoding_options(options, changes)
        for name, value in (("sentences", sentences), ("prefixes", [] if prefixes is None else prefixes)):
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise UserError(f"{name} must be several sentences, got {short_repr(value)}.", field=name)
        pairs = enumerate(pair_with_prefixes(sentences, prefixes, first - 1), start=first)
        own_warnings = warnings or TranslationWarnings(self.tokenizer)
        while chunk := list(islice(pairs, options.buffer)):
            first = chunk[0][0]
            prepared = [self.prepare(text, options, prefix, f"Sentence {number}") for number, (text, prefix) in chunk]
            translations = self.search(prepared, options, own_warnings, first - 1, scores)
            if warn_short and not self.is_summarizing(options):
                own_warnings.check_lengths(translations, first)
            yield from translations
        if warnings is None:
            own_warnings.log()

    def prepare(
        self, sentence: SourceText, options: DecodingOptions, prefix: str = "", place: str = "The sentence"
    ) -> PreparedSentence:
        """
        Encode a sentence or a text of several sentences, split as the options say. `prefix` is the beginning of the
        translation, `place` the name of the sentence in messages. Raise `UserError` if the sentence is not a string or
        is too long, or the prefix is not possible.
        """
        source, direction = self.read_source(sentence, options, place)
        whole = Tokens() if is_blank(source.text) else self.encode_source(source, direction)
        prefix_ids = self.prefix_ids(prefix, f"{place}: prefix", direction) if prefix else []
        prepared = PreparedSentence(str(sentence), [], [], prefix_ids, direction)
        if self.is_empty(whole, direction):
            if prepared.prefix:
                raise UserError(
                    f"{place} is empty, so its translation cannot begin with {short_repr(prefix)}.", field=place
                )
            return prepared
        parts = [("", source, whole)]
        splits_by_default = not prepared.prefix and not self.is_summarizing(options)
        splits = options.split_sentences == "always" or (options.split_sentences == "auto" and splits_by_default)
        if splits and whole.tree is None:  # a tree is that of one sentence
            parts = self.encode_sentences(source, whole, options, direction)
        space = ""
        for number, (separator, part, tokens) in enumerate(parts, start=1):
            name = place if len(parts) == 1 else f"{place}, part {number}"
            for space_before, piece in self.limit_length(part, tokens, options, name, separator, direction):
                space += space_before
                if not self.is_empty(piece, direction):
                    prepared.pieces.append(piece)
                    prepared.separators.append(space)
                    space = ""
        return prepared

    def is_summarizing(self, options: DecodingOptions) -> bool:
        """Return whether a text is one input and may have a much shorter output, as for summaries."""
        return options.on_long == "truncate" or self.task.summarizes

    def encode_sentences(
        self, source: Sentence, whole: Tokens, options: DecodingOptions, direction: Direction
    ) -> list[tuple[str, Sentence, Tokens]]:
        """Return the white space before each sentence of a text, the sentence and its tokens."""
        sentences = split_sentences(source.text, direction.source)
        if len(sentences) < 2:
            return [("", source, whole)]
        encoded = [(space, Sentence(part), self.encode_source(part, direction)) for space, part in sentences]
        ids = [id for _, _, tokens in encoded for id in self.drop_control_tokens(tokens)]
        # The positions of alignments are those of the whole text.
        if options.alignments and ids != self.drop_control_tokens(whole):
            return [("", source, whole)]
        return encoded

    def limit_length(
        self,
        sentence: Sentence,
        tokens: Tokens,
        options: DecodingOptions,
        place: str,
        separator: str,
        direction: Direction,
    ) -> list[tuple[str, Tokens]]:
        """Return a sentence's white space and tokens, or those of its parts, none of them too long for the model."""
        limits = (options.max_source_length, self.backend.limits.source)
        limit = min((limit for limit in limits if limit), default=None)
        if limit is None or len(tokens) <= limit:
            return [(separator, tokens)]
        if options.on_long == "truncate":
            return [(separator, self.languages.truncate(tokens, limit, direction))]
        if options.on_long != "split":
            raise UserError(
                f"{place} has {len(tokens)} tokens; the maximum is {limit}: {short_repr(sentence.text)}. Shorten it, "
                "or set on_long (--on-long) to split or truncate.",
                field=place,
            )
        encode = partial(self.encode_source, direction=direction)
        texts = split_text(sentence.text.strip(), limit, lambda part: len(encode(part)), separator)
        spaces, parts_of_text = zip(*texts, strict=True)
        parts = list(zip(spaces, map(encode, sentence.parts(parts_of_text)), strict=True))
        if any(len(part) > limit and not self.is_empty(part, direction) for _, part in parts):
            raise UserError(
                f"{place} has a character of more than {limit} tokens. Raise max_source_length.", field=place
            )
        return parts

    def prefix_ids(self, prefix: str, place: str, direction: Direction | None = None) -> list[int]:
        """Return the token ids of a prefix, without the end of the sentence."""
        check_text(prefix, place)
        ids = [] if is_blank(prefix) else self.encode_target(prefix, direction).ids
        while ids and ids[-1] in self.end_ids():
            ids = ids[:-1]
        limit = self.backend.limits.target
        if limit is not None and len(ids) >= limit:
            raise UserError(f"{place} has {len(ids)} tokens, but the model can generate only {limit}.", field=place)
        return ids

    def search(
        self,
        prepared: Sequence[PreparedSentence],
        options: DecodingOptions,
        warnings: TranslationWarnings | None = None,
        offset: int = 0,
        scores: bool = True,
    ) -> list[Translation]:
        """
        Translate prepared sentences, in batches of similar length. `warnings` counts the unknown tokens of the sources;
        `offset`, the number of earlier sentences, is added to the seed of sampling.
        """
        sources = [piece for sentence in prepared for piece in sentence.pieces]
        prefixes = [
            one.direction.opening(() if number else one.prefix) for one in prepared for number in range(len(one.pieces))
        ]
        if warnings is not None:
            warnings.count_tokens(sources)

        seed = None if options.seed is None else options.seed + offset
        with self.backend.seeded(seed):  # once for all batches, or all of them would draw the same numbers
            numbers = [offset + i for i, sentence in enumerate(prepared) for _ in sentence.pieces]
            remaining = iter(self.search_tokens(sources, prefixes, options, scores, numbers))
        translations = []
        for sentence in prepared:
            parts = list(islice(remaining, len(sentence.pieces)))
            if len(parts) > 1:
                lengths = [len(self.drop_control_tokens(piece)) for piece in sentence.pieces]
                best = join_pieces(parts, options.penalty(), sentence.separators, lengths)
            else:
                best = parts[0] if parts else [Hypothesis("", 0.0, 0.0, alignment=[] if options.alignments else None)]
            translations.append(Translation(sentence.text, best))
        return translations

    def search_tokens(
        self,
        sources: TokenRows,
        prefixes: TokenRows,
        options: DecodingOptions,
        scores: bool = True,
        numbers: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """
        Translate token ids in batches. Return the hypotheses of each source, best first. `numbers` are those of the
        sentences that the sources belong to, for `prefix_allowed_tokens_fn`.
        """
        numbers = range(len(sources)) if numbers is None else numbers
        if options.shortlist is not None and isinstance(self.backend, TranslatesOnly):
            raise UserError(
                f"shortlist is not supported by a model that is {self.backend.kind}. Use a model in PyTorch, or omit "
                "it.",
                field="shortlist",
            )
        most = options.max_tokens // max(options.beams, options.num_hypotheses)
        batches = list(batches_by_tokens(list(map(len, sources)), most))
        requests = []
        for batch in batches:
            own_sources, own_prefixes = [sources[i] for i in batch], [prefixes[i] for i in batch]
            max_lengths = self.max_lengths(own_sources, own_prefixes, options)
            own_numbers = [numbers[i] for i in batch]
            requests.append(SearchRequest(own_sources, own_prefixes, max_lengths, options, own_numbers))
        results = self.backend.search(requests) if requests else []
        hypotheses: dict[int, list[Hypothesis]] = {}
        for batch, request, result in zip(batches, requests, results, strict=True):
            hypotheses.update(zip(batch, self.read_result(request, result, scores), strict=True))
        return [hypotheses[i] for i in range(len(sources))]

    def read_result(self, request: SearchRequest, result: SearchResult, scores: bool) -> list[list[Hypothesis]]:
        """Return the hypotheses of each source of a batch, best first."""
        per_source = len(result.tokens) // len(request.sources)
        tokens: list[Tokens] = []
        for number, row in enumerate(result.tokens):
            source = number // per_source
            prefix = request.prefixes[source]
            stripped = self.strip(row[: request.max_lengths[source]])
            tokens.append(replace(prefix, ids=stripped, given=min(prefix.given, len(stripped))))
        hypotheses = self.make_hypotheses(request.sources, tokens, request.options, scores, result.log_probs)
        return [of_source[: request.options.num_hypotheses] for of_source in hypotheses]

    def max_lengths(self, sources: TokenRows, prefixes: TokenRows, options: DecodingOptions) -> list[int]:
        """Return the maximum number of new tokens for each source, prefix and end token included."""
        lengths = [max(1, int(options.max_length_factor * len(ids)) + options.max_length_extra) for ids in sources]
        lengths = [max(length, len(ids) + bool(ids)) for length, ids in zip(lengths, prefixes, strict=True)]
        limit = self.backend.limits.target
        return lengths if limit is None else [min(length, limit) for length in lengths]

    def strip(self, row: list[int]) -> list[int]:
        """
        Return a generated row up to its end token or, without one, up to its padding. Truncate the row to its limit
        first: beam search may fill up truncated hypotheses with end tokens.
        """
        ends, length = self.end_ids(), len(row)
        for i, token in enumerate(row):
            if token in ends:
                return row[: i + 1]
        while length and row[length - 1] == self.pad_id():
            length -= 1
        return row[:length]

    def make_hypotheses(
        self,
        sources: TokenRows,
        tokens: TokenRows,
        options: DecodingOptions,
        scores: bool,
        log_probs: Sequence[float] | None = None,
    ) -> list[list[Hypothesis]]:
        """
        Create the hypotheses of each source, the same number in consecutive rows of `tokens`, best first.
        With `scores`, their log-probabilities come from another pass of the model; `log_probs` are those of the search,
        if it reports them, and then decide the order.
        """
        per_source, penalty = len(tokens) // len(sources), options.penalty()
        repeated = [source for source in sources for _ in range(per_source)]
        found = log_probs  # of the search
        # generate reports its scores only along with those of the whole vocabulary at every step; another pass over the
        # finished hypotheses costs less than storing those, and computes the same as `score`.
        if scores:
            log_probs = [sum(row) for row in self.score_tokens(repeated, tokens, options.max_tokens)]
        elif log_probs is None:
            log_probs = [math.nan] * len(tokens)
        alignments: list[Any] = [None] * len(tokens)
        if options.alignments:
            alignments = self.align_tokens(repeated, tokens, options.alignment_layer, options.max_tokens)
        # The token of a language, or a tag such as >>de<<, is not part of the text that follows.
        names = self.tag_ids | self.languages.control_ids
        shown = [[*dropwhile(names.__contains__, row.ids)] for row in tokens]
        texts = self.target_tokenizer.batch_decode(shown, skip_special_tokens=True)
        ends = self.end_ids()
        hypotheses = []
        for text, log_prob, row, alignment in zip(texts, log_probs, tokens, alignments, strict=True):
            score, finished = log_prob / max(len(row), 1) ** penalty, bool(row.ids) and row.ids[-1] in ends
            hypotheses.append(Hypothesis(text.strip(), score, log_prob, row.ids, finished, alignment))
        ranks = [one.score for one in hypotheses]
        if found is not None:
            ranks = [total / max(len(row), 1) ** penalty for total, row in zip(found, tokens, strict=True)]
        elif not scores or (self.changes_scores(options) and not options.generate.get("do_sample")):
            # Settings such as repetition_penalty change the scores of the search alone, so its order is the right one.
            ranks = [0.0] * len(tokens)
        places = [range(i, i + per_source) for i in range(0, len(tokens), per_source)]
        return [[hypotheses[i] for i in sorted(own, key=lambda i: -ranks[i])] for own in places]

    def changes_scores(self, options: DecodingOptions) -> bool:
        """Return whether options or the model have settings of `generate` that the log-probabilities leave out."""
        own = getattr(self.model, "generation_config", None)
        return bool(options.generate or (own is not None and unusual_settings(own)))

    # -- scoring and aligning ------------------------------------------------------------------------------------------

    def score(
        self,
        sources: Sequence[SourceText],
        targets: Sequence[str | Sequence[int]],
        options: DecodingOptions | None = None,
        places: Sequence[str] | None = None,
        **changes: Any,
    ) -> list[SentenceScore]:
        """
        Return the model's log-probabilities of given translations, as `translate` reports them.

        Args:
            sources (sequence of `str` or [`~recnmt_hf.data.ParsedSentence`]): Source sentences.
            targets (sequence of `str`, or of token ids as in [`Hypothesis`]): Their translations.
            options ([`DecodingOptions`], *optional*): Length penalty and batch size.
            places (sequence of `str`, *optional*): Name of each pair in messages; defaults to its number.
            **changes: As for [`translate`].

        Raises:
            ValueError: The numbers of sources and targets differ, or a source is empty.
        """
        options = decoding_options(options, changes)
        source_ids, target_ids = self.encode_pairs(sources, targets, options, places)
        warnings = TranslationWarnings(self.tokenizer)
        warnings.count_tokens(source_ids)
        warnings.log()
        penalty = options.penalty()
        log_probs = self.score_tokens(source_ids, target_ids, options.max_tokens)
        return [SentenceScore(sum(row) / max(len(row), 1) ** penalty, sum(row), row) for row in log_probs]

    def encode_pairs(
        self,
        sources: Sequence[SourceText],
        targets: Sequence[str | Sequence[int]],
        options: DecodingOptions,
        places: Sequence[str] | None = None,
    ) -> tuple[list[Tokens], list[Tokens]]:
        """Return the tokens of sources and translations; arguments and errors as of [`score`]."""
        check_counts(sources, targets)
        source_ids: list[Tokens] = []
        target_ids: list[Tokens] = []
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
            place = f"Pair {number}" if places is None else places[number - 1]
            sentence, direction = self.read_source(source, options, f"{place}: source")
            tokens = Tokens() if is_blank(sentence.text) else self.encode_source(sentence, direction)
            if self.is_empty(tokens, direction):
                raise UserError(
                    f"{place}: source is empty, so it cannot be scored or aligned.", field=f"{place}: source"
                )
            source_ids.append(tokens)
            target_ids.append(self.target_ids(target, f"{place}: translation", direction))
            self.check_lengths(len(tokens), len(target_ids[-1]), place)
        return source_ids, target_ids

    def score_tokens(self, sources: TokenRows, targets: TokenRows, max_tokens: int = 4096) -> list[list[float]]:
        """Return the log-probability of each target token, in batches of `max_tokens`; 0 for tokens that are given."""
        rows = run_batches(self.backend.score, sources, targets, max_tokens)
        return [[0.0] * target.given + row[target.given :] for target, row in zip(targets, rows, strict=True)]

    def align_tokens(
        self, sources: TokenRows, targets: TokenRows, layer: int | str | None = None, max_tokens: int = 4096
    ) -> list[list[tuple[int, int]]]:
        """
        Return links between tokens, at most one for each target token: to the source token with the largest attention,
        that of the head in the configuration's `alignment_head`, or averaged over the heads of a decoder layer. The
        rule is that of [`align_pairs`], with each token as a word. There is no link to the source's end token, and none
        for the target's.
        """
        controls = self.control_ids[0], self.control_ids[1] | self.end_ids()
        rows = zip(self.attention(sources, targets, layer, None, max_tokens), sources, targets, strict=True)
        return [links_of_tokens(weights, source.ids, target.ids, controls) for weights, source, target in rows]

    def attention(
        self, sources: TokenRows, targets: TokenRows, layer: int | str | None, head: int | None, max_tokens: int
    ) -> list[np.ndarray]:
        """
        Return for each pair the cross-attention under teacher forcing, `(target tokens, source tokens)`; `layer` and
        `head` as in [`~recnmt_hf.inference.attention_links.choose_attention`]. Without both it is that of the head in
        the configuration's `alignment_head`, if there is one.
        """
        if layer is None and head is None:
            layer, head = getattr(self.model.config, "alignment_head", None) or (None, None)

        def run(sources: TokenRows, targets: TokenRows) -> list[np.ndarray]:
            return attention_rows(self.backend.attention(sources, targets), sources, targets, layer, head)

        return run_batches(run, sources, targets, max_tokens)

    # -- text and token ids --------------------------------------------------------------------------------------------

    def direction(self, options: DecodingOptions | None = None) -> Direction:
        """Return the languages that options, translator, tokenizer and the model's files name, in this order."""
        source, target, forced, instruction = self.source_lang, self.target_lang, None, None
        if options is not None:
            source, target = options.source_lang or source, options.target_lang or target
            forced, instruction = options.generate.get("forced_bos_token_id"), options.source_prefix
            if forced is not None and options.target_lang is not None and self.target_langs:
                raise UserError("target_lang and forced_bos_token_id set the same option.", field="target_lang")
        # Reading configurations for each sentence takes as long as encoding it.
        key = (source, target, forced, instruction, self.task, *self.languages.state())
        if key not in self.directions:
            direction = self.languages.direction(source, target, self.task, forced)
            if instruction is not None and direction.instruction:
                raise UserError("source_prefix and target_lang set the same option.", field="source_prefix")
            self.directions[key] = direction if instruction is None else replace(direction, instruction=instruction)
        return self.directions[key]

    def read_source(self, sentence: SourceText, options: DecodingOptions, place: str) -> tuple[Sentence, Direction]:
        """
        Return a source without the name of the target language and other tags at its beginning, and its direction,
        which has them. Raise `UserError` if it is not text, the options name another language, or the target language
        is missing.
        """
        if not isinstance(sentence, ParsedSentence):
            check_text(sentence, place)
        source, direction = Sentence.of(sentence), self.direction(options)
        target, text = self.languages.read_target(source.text)
        if target is None or (direction.target is not None and target not in self.target_langs):
            if not is_blank(source.text):
                self.languages.require_target(direction)
        elif direction.target not in (None, target):
            raise UserError(
                f"the sentence itself names the target language {short_repr(target)}, but target_lang is "
                f"{direction.target}.",
                field=place,
            )
        else:
            source, direction = Sentence(text), self.direction(replace(options, target_lang=target))
        tags = [] if source.tree is not None else self.source_tags
        while (found := next((tag for tag in tags if source.text.lstrip().startswith(tag[0])), None)) is not None:
            source = Sentence(source.text.lstrip().removeprefix(found[0]).lstrip())
            direction = replace(direction, tag=(*direction.tag, found[1]))
        return source, direction

    def encode_source(self, sentence: Sentence | SourceText, direction: Direction | None = None) -> Tokens:
        """
        Return the tokens of a source sentence, in which `</s>` and the like are text. They have the edges of the
        sentence's tree, if it has one and the model reads it.
        """
        direction, source = direction or self.direction(), Sentence.of(sentence)
        if source.tree is not None and self.reads_trees:
            if self.trees is None:
                raise UserError(
                    f"{self.model.name_or_path or type(self.model).__name__} reads dependency trees, but its "
                    "relations.json is missing.",
                    field=self.model.name_or_path or type(self.model).__name__,
                )
            return self.trees([source.tree])[0]
        return self.languages.encode_source(source.text, direction)

    def encode_target(self, sentence: str, direction: Direction | None = None) -> Tokens:
        """Return the tokens of a target sentence, in which `</s>` and the like are text."""
        return self.languages.encode_target(sentence, direction or self.direction())

    def target_ids(self, target: str | Sequence[int], place: str, direction: Direction | None = None) -> Tokens:
        """Return the tokens of a translation, given as text or token ids; `ValueError` for ids that do not exist."""
        if isinstance(target, str):
            check_text(target, place)
            return self.encode_target(target, direction)
        _, size = vocabulary_sizes(self.model.config)
        ids = []
        for value in target if isinstance(target, Iterable) else [target]:
            is_id = hasattr(value, "__index__") and not isinstance(value, bool)
            ids.append(operator.index(value) if is_id else -1)
            if not 0 <= ids[-1] < size:
                raise UserError(f"{short_repr(value)} is not a token id from 0 to {size - 1}.", field=place)
        return self.languages.target_tokens(ids, direction or self.direction())

    def is_empty_source(self, sentence: SourceText) -> bool:
        """Return whether a sentence has no visible character, or none that its tokenizer keeps."""
        return is_blank(str(sentence)) or self.is_empty(self.encode_source(sentence))

    def is_empty(self, source: Tokens, direction: Direction | None = None) -> bool:
        """Return whether the tokens of a source are only control tokens, and the instruction of a direction."""
        return not self.languages.has_words(source.ids, self.control_ids[0], direction or Direction())

    def drop_control_tokens(self, source: Tokens) -> list[int]:
        """Return the token ids of a source without control tokens."""
        return [id for id in source.ids if id not in self.control_ids[0]]

    def check_lengths(self, source: int, target: int, place: str) -> None:
        """Raise `ValueError` if a sentence pair has more tokens than the model has positions."""
        limits = self.backend.limits
        # The decoder does not read the last target token.
        target_limit = None if limits.target is None else limits.target + 1
        for side, length, limit in (("source", source, limits.source), ("target", target, target_limit)):
            if limit is not None and length > limit:
                raise UserError(f"{place} has {length} {side} tokens; the model's maximum is {limit}.", field=place)

    def pad_id(self) -> int:
        """Return the id of the target's padding token."""
        return self.target_tokenizer.pad_token_id

    def end_ids(self) -> set[int]:
        """Return the ids of the tokens that end a translation."""
        return end_ids(self.model)


def check_text(sentence: object, place: str) -> None:
    """Raise `UserError` unless a sentence is text that UTF-8 can encode; `place` is its name in the message."""
    if not isinstance(sentence, str):
        raise UserError(f"{place} is {short_repr(sentence)}.", field=place)
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{short_repr(error.object[error.start])} is an unpaired surrogate.", field=place) from error


def check_counts(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Raise `UserError` unless sources and translations are lists of the same length."""
    for name, values in (("sources", sources), ("translations", targets)):
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise UserError(f"{name} must be several sentences, got {short_repr(values)}.", field=name)
    if len(sources) != len(targets):
        raise UserError(
            f"translations has {short_repr(len(targets))} entries, but sources has {len(sources)}.",
            field="translations",
        )


def pair_with_prefixes(
    sentences: Iterable[SourceText], prefixes: Iterable[str] | None, before: int = 0
) -> Iterator[tuple[SourceText, str]]:
    """Yield each sentence with its prefix; raise `UserError` if their numbers differ, after `before` earlier ones."""
    if prefixes is None:
        yield from ((sentence, "") for sentence in sentences)
        return
    missing: Any = object()
    for number, (sentence, prefix) in enumerate(zip_longest(sentences, prefixes, fillvalue=missing), before):
        if sentence is missing or prefix is missing:
            field, other = ("sentences", "prefixes") if sentence is missing else ("prefixes", "sentences")
            raise UserError(f"There are only {short_repr(number)} {field}, but more {other}.", field=field)
        yield sentence, prefix
