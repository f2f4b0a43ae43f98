"""Translate, score and align text with any backend: text to token ids, backend, token ids to text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, repeat, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.batching import batches_by_tokens, run_batches
from ..data.records import ParsedSentence, SourceText, TokenRows, Tokens
from ..data.tokenizer_pair import TokenizerPair
from ..data.tree_inputs import Relations
from ..errors import UserError
from .backends.protocol import Backend, SearchRequest, SearchResult
from .backends.torch_model import TorchBackend
from .codec import Codec, Request, refuse_text
from .decoding import SeededDraws
from .loading import load_backend
from .model_settings import ModelTask, end_ids
from .options import DecodingOptions, decoding_options, unusual_settings
from .results import (
    Hypothesis,
    SentenceScore,
    Translation,
    TranslationWarnings,
    WordAlignment,
    choose_attention,
    links_of_matrix,
    word_matrix,
)


def delegated(path: str, doc: str) -> Any:
    """Return a property that reads and writes an attribute of the backend or the codec."""
    place, _, name = path.rpartition(".")
    return property(attrgetter(path), lambda self, value: setattr(attrgetter(place)(self), name, value), doc=doc)


class Translator:
    """
    Translates sentences with a trained model, in batches by number of tokens and in the given order. It also scores and
    aligns translations.

    Args:
        model (`PreTrainedModel`): An encoder-decoder with `generate`.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the source, and of the target unless that has its own.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the target.
        check (`bool`, *optional*, defaults to `True`): Whether to reject weights that are not finite and tokenizers of
            other models ([`~recnmt_hf.data.TokenizerPair.check`]), with a `ValueError`.
        relations ([`~recnmt_hf.data.Relations`], *optional*): Of a model that reads dependency trees.

    Attributes:
        backend ([`~recnmt_hf.inference.backends.protocol.Backend`]): Runs the model.
        codec ([`~recnmt_hf.inference.codec.Codec`]): Turns text into token ids and back.
    """

    model = delegated("backend.model", "The model; if exported, `config`, `generation_config`, `name_or_path` only.")
    tokenizers = delegated("backend.tokenizers", "The tokenizers of source and target.")
    tokenizer = delegated("backend.tokenizers.source", "The tokenizer of the source.")
    target_tokenizer = delegated("backend.tokenizers.target", "The tokenizer of the target.")
    inspected_model = delegated("backend.inspected_model", "Return the PyTorch model; exported ones raise `UserError`.")
    source_langs = delegated("codec.languages.sources", "Codes of the source languages, if the model must be told one.")
    target_langs = delegated("codec.languages.targets", "Codes of the target languages, if the model has several.")
    source_lang = delegated("codec.source_lang", "Code of the source language of calls that do not pass any.")
    target_lang = delegated("codec.target_lang", "Code of the target language of calls that do not pass any.")
    task = delegated("codec.languages.task", "Task that the model was trained for ([`ModelTask`]), if known.")
    prepare = delegated("codec.encode", "Return a text as the model reads it ([`~recnmt_hf.inference.codec.Request`]).")
    encode_source = delegated("codec.encode_source", "Return the tokens of a source sentence.")
    encode_target = delegated("codec.encode_target", "Return the tokens of a translation.")

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        check: bool = True,
        relations: Relations | None = None,
    ):
        self.backend: Backend = TorchBackend(model, TokenizerPair(tokenizer, target_tokenizer, relations), check)
        self.codec = Codec(self.backend, ModelTask())

    @classmethod
    def from_backend(cls, backend: Backend, task: ModelTask | None = None) -> Translator:
        """Create a translator for a [`~recnmt_hf.inference.backends.protocol.Backend`] and a [`ModelTask`]."""
        translator = cls.__new__(cls)
        translator.backend, translator.codec = backend, Codec(backend, task or ModelTask())
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
                ([`~recnmt_hf.inference.devices.quantize_model`]).
            source_lang, target_lang (`str`, *optional*): Codes of the languages, for a model of several
                ([`DecodingOptions`]); `src_lang` and `tgt_lang` are other names of these.
            **kwargs: Passed on to `from_pretrained`, e.g. `revision=...`.

        Raises:
            FileNotFoundError: A local path does not exist or holds no model.
            ValueError: The files are damaged or do not belong together, or an argument is not supported for them.
        """
        names = {"source_lang": source_lang, "target_lang": target_lang}
        names |= {name: kwargs.pop(name, None) for name in ("src_lang", "tgt_lang")}
        languages = decoding_options(None, {name: code for name, code in names.items() if code is not None})
        backend, task = load_backend(
            path, device, dtype, check, quantization, trust_remote_code=trust_remote_code, **kwargs
        )
        translator = cls.from_backend(backend, task)
        translator.source_lang, translator.target_lang = languages.source_lang, languages.target_lang
        if any(names.values()):
            translator.codec.direction()  # reject unknown codes
        return translator

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
        trace: Callable[[dict[str, Any]], Any] | None = None,
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
            warn_short (`bool`, *optional*, defaults to `True`): Whether to warn of translations that are far too short;
                not with `on_long="truncate"`, nor for a model for summaries.
            first (`int`, *optional*, defaults to 1): Number of the first sentence, in messages and for the draws of
                sampling with a seed. Parts with a multiple of `options.buffer` sentences draw as the whole text.
            warnings (`TranslationWarnings`, *optional*): Counts for a caller that reports them; nothing is logged.
            trace (function, *optional*): Called for each sentence with what the model read and wrote, by the names of
                `recnmt translate --trace`.
            **changes: Fields of [`DecodingOptions`] that replace those of `options`, or transformers' names:
                `num_beams`, `max_new_tokens`, and other settings of `generate`.

        Raises:
            ValueError: A sentence is not text, or is too long and `on_long="error"`, or the number of prefixes differs.
        """
        options = decoding_options(options, changes)
        refuse_text(sentences=sentences, prefixes=prefixes)
        pairs = zip(sentences, repeat("")) if prefixes is None else zip_longest(sentences, prefixes)
        numbered = enumerate(pairs, start=first)
        counts = warnings or TranslationWarnings(self.tokenizer)
        while chunk := list(islice(numbered, options.buffer)):
            requests, first = [], chunk[0][0]
            for number, (text, prefix) in chunk:
                if text is None or prefix is None:
                    raise UserError("The numbers of sentences and prefixes differ.", field="prefixes")
                requests.append(self.codec.encode(text, options, prefix, f"Sentence {number}"))
            yield from self.translate_requests(requests, options, counts, first, scores, warn_short, trace)
        if warnings is None:
            counts.log()

    def translate_requests(
        self,
        requests: Sequence[Request],
        options: DecodingOptions,
        warnings: TranslationWarnings,
        first: int = 1,
        scores: bool = True,
        warn_short: bool = True,
        trace: Callable[[dict[str, Any]], Any] | None = None,
    ) -> list[Translation]:
        """Translate encoded sentences; the arguments are as of [`translate`]."""
        rows = self.search(requests, options, first - 1, scores)
        found = [self.codec.decode(*pair, options) for pair in zip(requests, rows, strict=True)]
        if trace is not None:
            for number, pair in enumerate(zip(requests, rows, found, strict=True), start=first):
                trace(self.codec.trace(number, *pair))
        warnings.count_tokens([piece for request in requests for piece in request.pieces])
        if warn_short and not self.codec.is_summarizing(options):
            warnings.check_lengths(found, first)
        return found

    def search(
        self, requests: Sequence[Request], options: DecodingOptions, offset: int = 0, scores: bool = True
    ) -> list[list[list[Hypothesis]]]:
        """Return the rows that the model writes for each piece; `offset` earlier sentences are added to the seed."""
        numbers = [offset + i for i, request in enumerate(requests) for _ in request.pieces]
        sources = [piece for request in requests for piece in request.pieces]
        openings = [opening for request in requests for opening in request.openings]
        most = options.max_tokens // max(options.beams, options.num_hypotheses)
        batches = list(batches_by_tokens(list(map(len, sources)), most))
        searches = []
        for batch in batches:
            own = [sources[i] for i in batch], [openings[i] for i in batch]
            searches.append(SearchRequest(*own, self.max_lengths(*own, options), options, [numbers[i] for i in batch]))
        draws = nullcontext() if options.seed is None else SeededDraws(options.seed + offset)
        with draws:  # once for all batches, or all of them would draw the same numbers
            results = self.backend.search(searches) if searches else []
        rows: dict[int, list[Hypothesis]] = {}
        for batch, search, result in zip(batches, searches, results, strict=True):
            rows.update(zip(batch, self.rank(search, result, scores), strict=True))
        in_order = (rows[i] for i in range(len(sources)))
        return [list(islice(in_order, len(request.pieces))) for request in requests]

    def max_lengths(self, sources: TokenRows, prefixes: TokenRows, options: DecodingOptions) -> list[int]:
        """Return the maximum number of new tokens for each source, prefix and end token included."""
        lengths = [max(1, int(options.max_length_factor * len(ids)) + options.max_length_extra) for ids in sources]
        lengths = [max(length, len(ids) + bool(ids)) for length, ids in zip(lengths, prefixes, strict=True)]
        limit = self.backend.limits.target
        return lengths if limit is None else [min(length, limit) for length in lengths]

    def rank(self, search: SearchRequest, result: SearchResult, scores: bool) -> list[list[Hypothesis]]:
        """Return the rows of each source, best first; with `scores` log-probabilities are those of the model."""
        options, per_source = search.options, len(result.tokens) // len(search.sources)
        sources = [source for source in search.sources for _ in range(per_source)]
        targets: list[Tokens] = []
        for number, ids in enumerate(result.tokens):
            opening, limit = search.prefixes[number // per_source], search.max_lengths[number // per_source]
            ids = self.codec.strip(ids[:limit])
            targets.append(replace(opening, ids=ids, given=min(opening.given, len(ids))))
        log_probs: Sequence[float] = result.log_probs or [math.nan] * len(targets)
        # generate reports its scores only along with those of the whole vocabulary at every step; another pass over the
        # finished hypotheses costs less than storing those, and computes the same as `score`.
        if scores:
            log_probs = [sum(row) for row in self.score_tokens(sources, targets, options.max_tokens)]
        links: list[Any] = [None] * len(targets)
        if options.alignments:
            links = self.align_tokens(sources, targets, options.alignment_layer, options.max_tokens)
        divisors = [max(len(target), 1) ** options.penalty() for target in targets]
        ends = end_ids(self.model)
        rows = [
            Hypothesis("", log_prob / divisor, log_prob, target.ids, not ends.isdisjoint(target.ids[-1:]), own)
            for target, log_prob, divisor, own in zip(targets, log_probs, divisors, links, strict=True)
        ]
        ranks = [row.score for row in rows]
        # Settings such as repetition_penalty change the scores of the search alone, so its order is the right one.
        has_settings = options.generate or unusual_settings(self.model.generation_config)
        if result.log_probs is not None:
            ranks = [total / divisor for total, divisor in zip(result.log_probs, divisors, strict=True)]
        elif not scores or (has_settings and not options.generate.get("do_sample")):
            ranks = [0.0] * len(rows)
        places = [range(i, i + per_source) for i in range(0, len(rows), per_source)]
        return [[rows[i] for i in sorted(own, key=lambda i: -ranks[i])[: options.num_hypotheses]] for own in places]

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
        pairs = self.codec.encode_pairs(sources, targets, options, places)
        source_ids, target_ids = [pair.source for pair in pairs], [pair.target for pair in pairs]
        warnings = TranslationWarnings(self.tokenizer)
        warnings.count_tokens(source_ids)
        warnings.log()
        penalty = options.penalty()
        log_probs = self.score_tokens(source_ids, target_ids, options.max_tokens)
        return [SentenceScore(sum(row) / max(len(row), 1) ** penalty, sum(row), row) for row in log_probs]

    def score_tokens(self, sources: TokenRows, targets: TokenRows, max_tokens: int) -> list[list[float]]:
        """Return the log-probability of each target token, in batches of `max_tokens`; 0 for tokens that are given."""
        rows = run_batches(self.backend.score, sources, targets, max_tokens)
        return [[0.0] * target.given + row[target.given :] for target, row in zip(targets, rows, strict=True)]

    def align_tokens(
        self, sources: TokenRows, targets: TokenRows, layer: int | str | None, max_tokens: int
    ) -> list[list[tuple[int, int]]]:
        """Return links between tokens, at most one for each target token; the rule is that of [`align_pairs`]."""
        attention = self.attention(sources, targets, layer, None, max_tokens)
        controls = self.codec.control_ids[0], self.codec.control_ids[1] | end_ids(self.model)
        links = []
        for weights, *pair in zip(attention, sources, targets, strict=True):
            sides = zip(pair, controls, strict=True)
            read, written = ([None if id in ids else i for i, id in enumerate(side.ids)] for side, ids in sides)
            links.append(links_of_matrix(word_matrix(weights, read, written, (len(read), len(written)))))
        return links

    def attention(
        self, sources: TokenRows, targets: TokenRows, layer: int | str | None, head: int | None, max_tokens: int
    ) -> list[np.ndarray]:
        """Return the attention of each pair, `(target tokens, source tokens)`, by default of `alignment_head`."""
        if layer is None and head is None:
            layer, head = getattr(self.model.config, "alignment_head", None) or (None, None)

        def run(sources: TokenRows, targets: TokenRows) -> list[np.ndarray]:
            weights = choose_attention(self.backend.attention(sources, targets), layer, head).float().cpu().numpy()
            sides = zip(weights, sources, targets, strict=True)
            return [row[: len(target), : len(source)] for row, source, target in sides]  # without padding

        return run_batches(run, sources, targets, max_tokens)


def align_pairs(
    translator: Translator,
    sources: Sequence[SourceText],
    targets: Sequence[str],
    layer: int | str | None = None,
    head: int | None = None,
    options: DecodingOptions | None = None,
    first: int = 1,
) -> Iterator[WordAlignment]:
    """
    Align sentences with their translations: the model is given the translation, and each of its words is linked to the
    source word with the largest attention.

    Args:
        translator ([`Translator`]): Model and tokenizers.
        sources, targets (sequence of `str`): Text whose words are separated by spaces; sources as in
            [`Translator.score`].
        layer (`int` or `"mean"`, *optional*), head (`int`, *optional*): As in [`choose_attention`].
        options ([`DecodingOptions`], *optional*): Batch size, and the languages for a model of several.
        first (`int`, *optional*, defaults to 1): Number of the first pair in messages.

    Raises:
        ValueError: A sentence is empty, or the model does not attend to source words.
    """
    places = [f"Pair {number}" for number in range(first, first + len(sources))]
    options = options or DecodingOptions()
    pairs = translator.codec.encode_pairs(sources, targets, options, places, with_words=True)
    rows = [pair.source for pair in pairs], [pair.target for pair in pairs]
    for i, weights in enumerate(translator.attention(*rows, layer, head, options.max_tokens)):
        words, translated = str(sources[i]).split(), targets[i].split()
        sizes = len(words), len(translated)
        matrix = word_matrix(weights, pairs[i].source_words, pairs[i].target_words, sizes)
        yield WordAlignment(words, translated, links_of_matrix(matrix), matrix)
