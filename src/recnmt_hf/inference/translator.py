"""Translating with any encoder-decoder of transformers."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .._loading_errors import explained_loading, looks_local
from .._plain_text import is_blank, truncated
from .._values import shown
from ..data.tokenizer_pair import TARGET_TOKENIZER, TokenizerPair, load_target_tokenizer
from ..models.user_errors import UserError
from .decoding import MaxLengthPerSentence, PrefixPerSentence
from .eval_mode import eval_mode
from .forced_decoding import ForcedDecoder, UnknownTokens, batches_by_tokens
from .loading import load_model
from .options import PYTHON_ARGUMENTS, DecodingOptions, decoding_options, reason
from .origin import Origin, read_origin
from .quantization import check_quantization, quantized
from .results import Hypothesis, SentenceScore, Translation
from .search import search
from .seeded_draws import SeededDraws
from .short_translations import ShortTranslations
from .splitting import join_pieces, split_sentences, split_text


__all__ = [
    "TARGET_TOKENIZER",
    "DecodingOptions",
    "Hypothesis",
    "SentenceScore",
    "Translation",
    "Translator",
    "batches_by_tokens",
    "decoding_options",
    "load_target_tokenizer",
    "looks_local",
]


# Settings of `generate` with which finished sentences may leave a batch: each row is looked at by itself.
SEARCHED = {
    *("do_sample", "length_penalty", "num_return_sequences", "early_stopping", "no_repeat_ngram_size"),
    *("repetition_penalty", "min_new_tokens", "min_length", "bad_words_ids", "suppress_tokens"),
}
# Settings in a model's own generation_config.json with which they may not, and the values that switch them off.
KEPT_TOGETHER = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "cache_implementation": (None, "dynamic"),
    "use_cache": (None, True),
    "prompt_lookup_num_tokens": (None,),
    "low_memory": (None, False),
}


@dataclass
class PreparedSentence:
    """
    A sentence as the model takes it.

    Attributes:
        text (`str`): The sentence, or a text of several.
        pieces (`list[list[int]]`): Token ids: one list, several of a split text, none of one that shows nothing.
        glues (`list[str]`): What joins the translation of each piece to the one before.
        prefix (`list[int]`): Token ids that its translation begins with.
    """

    text: str
    pieces: list[list[int]]
    glues: list[str]
    prefix: list[int] = field(default_factory=list)


class Translator(ForcedDecoder):
    """
    Translates sentences with a trained model, batched by tokens and in the order given; scores and aligns too.

    Args:
        model (`PreTrainedModel`): An encoder-decoder with `generate`.
        tokenizer (`PreTrainedTokenizerBase`): Of the source, and of the target unless that has its own.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Of the target.
        check (`bool`, *optional*, defaults to `True`): Whether weights that are not finite and tokenizers that are not
            the model's own are refused.

    Raises:
        ValueError: The weights are not finite, or a tokenizer is not the model's.
    """

    # What the model was trained for, as far as it is known.
    origin = Origin()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        check: bool = True,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        **kwargs: Any,
    ) -> Translator:
        """
        Loads model and tokenizers from a folder written by training, or from the Hub.

        Args:
            path (`str` or `Path`): Folder or model id. A target tokenizer of its own stands in the subfolder
                `target_tokenizer`. A folder that [`~recnmt_hf.hub.engines.export_ctranslate2`] wrote gives an
                [`~recnmt_hf.inference.engine.EngineTranslator`], one of [`~recnmt_hf.hub.onnx_graphs.export_onnx`] a
                translator with an [`~recnmt_hf.inference.onnx_model.OnnxModel`].
            device (`str` or `torch.device`, *optional*): `None`: CUDA if there is any, else the CPU.
            dtype (`torch.dtype`, *optional*): Weights' data type; `None`: as saved.
            check (`bool`, *optional*, defaults to `True`): `False` takes weights and tokenizers as they are.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code that the model's files bring along
                may run.
            quantization (`str`, *optional*): `"int8"`: weights of linear layers as whole numbers, and their inputs at
                each call, on the CPU ([`~recnmt_hf.inference.quantization.quantized`]).
            **kwargs: Passed on to `from_pretrained`, e.g. `revision=...`.

        Raises:
            FileNotFoundError: A local path does not exist or holds no model.
            ValueError: Something is wrong with the files, as in [`load_model`], or tokenizer and model do not fit.
        """
        from .engine import EngineTranslator, engine_of

        path = str(path)
        engine = engine_of(path)
        if engine is not None:
            if quantization or dtype:
                raise UserError(
                    f"{path} was exported to an engine, with its type of weights. Remedy: leave --dtype and "
                    "--quantization out, or export it with another --quantization."
                )
            if engine == "onnx":
                from .onnx_model import OnnxModel

                with explained_loading(path):
                    tokenizers = TokenizerPair.load(path)
                translator = cls(OnnxModel(path, device), tokenizers.source, tokenizers.target, check)
                translator.origin = read_origin(path)
                return translator
            return EngineTranslator(path, device, check)
        if quantization is not None:
            check_quantization(quantization, device, dtype)
            device = "cpu"
        model = load_model(path, device, dtype, trust_remote_code, check, **kwargs)
        tokenizers = TokenizerPair.load(path, trust_remote_code=trust_remote_code, **kwargs)
        translator = cls(model, tokenizers.source, tokenizers.target, check)
        translator.origin = read_origin(path, **kwargs)
        if quantization is not None:
            translator.model = quantized(model)
        return translator

    def __call__(
        self, sentences: str | Iterable[str], prefixes: str | Iterable[str] | None = None, **options: Any
    ) -> list[Translation]:
        """Translates a sentence or several, as [`translate`] does."""
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
        Translates a stream of sentences; an empty one, or one without a visible character, gives an empty translation.
        A text of several sentences is translated sentence by sentence (`split_sentences`), and the translations are
        joined by the white space between the sentences. A warning reports the share of unknown tokens where it is above
        1%, and translations with less than a quarter of the letters of their source.

        Args:
            sentences (iterable of `str`): Read a buffer at a time, so files of any size will do.
            options ([`DecodingOptions`], *optional*): How.
            prefixes (iterable of `str`, *optional*): For each sentence what its translation must begin with; an empty
                text leaves it free.
            scores (`bool`, *optional*, defaults to `True`): Whether hypotheses have their scores, which takes a pass
                of the model over them; else these are NaN, and the hypotheses in the order of the search.
            warn_short (`bool`, *optional*, defaults to `True`): Whether to warn of translations that are far too short.
                There is no warning with `on_long="truncate"`, nor for a model for summaries.
            **changes: Fields of [`DecodingOptions`] in place of `options`, or transformers' names: `num_beams`,
                `max_new_tokens`, and what else `generate` has.

        Raises:
            ValueError: A sentence is no text, or too long for the model and `on_long="error"`; the message says which.
                There are not as many prefixes as sentences.
        """
        options = decoding_options(options, changes)
        for given, name in ((sentences, "translate"), ([] if prefixes is None else prefixes, "prefixes")):
            if isinstance(given, str) or not isinstance(given, Iterable):
                kind = "one text" if isinstance(given, str) else repr(given)
                raise UserError(f"{name} takes several sentences, not {kind}. Remedy: put them into a list.")
        pairs = paired(sentences, prefixes)
        first = 1
        unknown, short = UnknownTokens(self.tokenizer), ShortTranslations()
        while chunk := list(islice(pairs, options.buffer)):
            prepared = [
                self.prepare(sentence, options, prefix, f"Sentence {number}")
                for number, (sentence, prefix) in enumerate(chunk, start=first)
            ]
            found = self.search(prepared, options, unknown, first - 1, scores)
            if warn_short and not self.takes_whole_texts(options):
                for number, translation in enumerate(found, start=first):
                    short.add(number, translation)
            yield from found
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
            prefix (`str`, *optional*): What its translation must begin with.
            place (`str`, *optional*): Names the sentence in messages.

        Raises:
            ValueError: It is no text, or too long; its translation cannot begin so.
        """
        self.check_text(sentence, place)
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
            parts = self.encoded_sentences(sentence, whole, options)
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
        return options.on_long == "truncate" or self.origin.summarizes

    def splits_sentences(self, options: DecodingOptions, has_prefix: bool) -> bool:
        """Return whether a text is translated sentence by sentence."""
        if options.split_sentences == "auto":
            return not has_prefix and not self.takes_whole_texts(options)
        return options.split_sentences == "always"

    def encoded_sentences(
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
        language = options.source_lang or self.origin.source_lang or getattr(self.tokenizer, "source_lang", None)
        sentences = split_sentences(text, language)
        if len(sentences) < 2:
            return [("", text, whole)]
        found = [(glue, sentence, self.encode_source(sentence)) for glue, sentence in sentences]
        tokens = [id for _, _, ids in found for id in self.without_control(ids)]
        if options.alignments and tokens != self.without_control(whole):
            return [("", text, whole)]
        return found

    def without_control(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of a source without control tokens."""
        return [id for id in ids if id not in self.control_ids[0]]

    def within_limit(
        self, text: str, ids: list[int], options: DecodingOptions, place: str, glue: str
    ) -> list[tuple[str, list[int]]]:
        """Return a sentence's white space and token ids, or those of its parts, none of them too long for the model."""
        limit = min((each for each in (options.max_source_length, self.longest_source()) if each), default=None)
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
        """Token ids that a translation begins with: those of the text, without the end of the sentence."""
        self.check_text(prefix, f"{place}: the prefix")
        ids = [] if is_blank(prefix) else self.encode_target(prefix)
        while ids and ids[-1] in self.end_ids():
            ids = ids[:-1]
        most = self.longest_target()
        if most is not None and len(ids) >= most:
            raise UserError(f"{place}: the prefix has {len(ids)} tokens, the model can say {most}. Remedy: shorten it.")
        return ids

    def split_source(self, sentence: str, limit: int) -> list[list[int]]:
        """Token ids of the parts of a long sentence, as [`split_text`] cuts it."""
        return [self.encode_source(part) for _, part in self.parts_within(sentence, limit)]

    def parts_within(self, sentence: str, limit: int, glue: str = "") -> list[tuple[str, str]]:
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
        Translates prepared sentences, in batches of similar length.

        Args:
            prepared (sequence of [`PreparedSentence`]): The sentences.
            options ([`DecodingOptions`]): How.
            unknown ([`UnknownTokens`], *optional*): Counts the sources' unknown tokens.
            offset (`int`, *optional*): Sentences before these, of which sampling shall be independent.
            scores (`bool`, *optional*, defaults to `True`): As for [`translate`].
        """
        pieces = [(i, piece) for i, each in enumerate(prepared) for piece in each.pieces]
        starts = [bool(k == 0 or pieces[k - 1][0] != i) for k, (i, _) in enumerate(pieces)]
        prefixes = [prepared[i].prefix if start else [] for (i, _), start in zip(pieces, starts, strict=True)]
        if unknown is not None:
            for _, ids in pieces:
                unknown.count(ids)
        found: list[list[Hypothesis]] = [[] for _ in pieces]
        rows = max(options.beams, options.num_hypotheses)
        with self.seeded(options.seed, offset):  # once for all batches, or each would draw the same
            for batch in batches_by_tokens([len(ids) for _, ids in pieces], options.max_tokens // rows):
                hypotheses = self._generate(
                    [pieces[k][1] for k in batch], options, [prefixes[k] for k in batch], scores
                )
                for k, of_piece in zip(batch, hypotheses, strict=True):
                    found[k] = of_piece
        of_sentence: list[list[list[Hypothesis]]] = [[] for _ in prepared]
        for (i, _), of_piece in zip(pieces, found, strict=True):
            of_sentence[i].append(of_piece)
        results = []
        for each, parts in zip(prepared, of_sentence, strict=True):
            if not parts:
                best = [Hypothesis("", 0.0, 0.0, alignment=[] if options.alignments else None)]
            else:
                lengths = [len(self.without_control(piece)) for piece in each.pieces]
                best = parts[0] if len(parts) == 1 else join_pieces(parts, options.penalty(), each.glues, lengths)
            results.append(Translation(each.text, best))
        return results

    def seeded(self, seed: int | None, offset: int) -> AbstractContextManager[Any]:
        """Return the context in which sentences are sampled with a seed, after `offset` earlier sentences."""
        return nullcontext() if seed is None else SeededDraws(seed + offset)

    def limits(
        self, sources: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]], options: DecodingOptions
    ) -> list[int]:
        """Most new tokens of each sentence, prefix and end token included."""
        limits = [max(1, int(options.max_length_factor * len(source)) + options.max_length_extra) for source in sources]
        limits = [max(limit, len(prefix) + bool(prefix)) for limit, prefix in zip(limits, prefixes, strict=True)]
        most = self.longest_target()
        return limits if most is None else [min(limit, most) for limit in limits]

    def _generate(
        self,
        sources: Sequence[Sequence[int]],
        options: DecodingOptions,
        prefixes: Sequence[Sequence[int]],
        scores: bool = True,
    ) -> list[list[Hypothesis]]:
        input_ids, attention_mask = self.pad(sources, self.tokenizer.pad_token_id)
        limits = self.limits(sources, prefixes, options)
        penalty = options.penalty()
        kept = options.num_hypotheses
        settings: dict[str, Any] = {"do_sample": False, **options.generate}
        settings |= {"length_penalty": penalty} if options.beams > 1 else {}
        settings |= {"num_return_sequences": kept} if options.beams > 1 or kept > 1 else {}
        processors = LogitsProcessorList(settings.pop("logits_processor", None) or [])
        if any(prefixes):
            processors.append(PrefixPerSentence(prefixes))
        if settings.get("stop_strings"):
            settings["tokenizer"] = self.target_tokenizer
        model: Any = self.model  # PreTrainedModel alone has no `generate`
        if leaves_finished(settings, options, model.generation_config):
            settings["custom_generate"] = search
        with eval_mode(model), explained_generation(options):
            outputs = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                num_beams=options.beams,
                max_length=1 + max(limits),
                max_new_tokens=None,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList(
                    [MaxLengthPerSentence(torch.tensor(limits, device=self.model.device))]
                ),
                **settings,
            )
        limit_of_row = [limit for limit in limits for _ in range(kept)]
        tokens = [self.strip(row[:limit]) for row, limit in zip(outputs[:, 1:].tolist(), limit_of_row, strict=True)]
        return self.hypotheses_of(sources, tokens, options, scores)

    def hypotheses_of(
        self,
        sources: Sequence[Sequence[int]],
        tokens: Sequence[list[int]],
        options: DecodingOptions,
        scores: bool,
        searched: Sequence[float] | None = None,
    ) -> list[list[Hypothesis]]:
        """
        What a search has found, as hypotheses of each source, best first where their log-probabilities are known.

        Args:
            sources (sequence of sequences of `int`): Token ids.
            tokens (sequence of lists of `int`): Hypotheses, as many for each source, one source after the other.
            options ([`DecodingOptions`]): Penalty and alignments.
            scores (`bool`): Whether a pass of the model over the hypotheses gives their log-probabilities.
            searched (sequence of `float`, *optional*): Those of the search, where that pass is not wanted.
        """
        kept, penalty = len(tokens) // len(sources), options.penalty()
        repeated = [source for source in sources for _ in range(kept)]
        # generate reports its scores only along with those of the whole vocabulary at every step; a forced pass over
        # the finished hypotheses costs less than keeping those, and is what `score` computes.
        log_probs = list(searched or [math.nan] * len(tokens))
        if scores:
            log_probs = [sum(each) for each in self.score_tokens(repeated, tokens, options.max_tokens)]
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
        results = [hypotheses[i : i + kept] for i in range(0, len(hypotheses), kept)]
        # The search adds in float32; among near-ties the order by the scores reported here may differ.
        is_known = scores or searched is not None
        return [sorted(each, key=lambda one: -one.score) for each in results] if is_known else results


def leaves_finished(settings: dict[str, Any], options: DecodingOptions, own: GenerationConfig) -> bool:
    """Whether [`search`] may do what is asked for: search without chance, row by row, with a growing cache."""
    if settings["do_sample"] or not set(settings) <= SEARCHED or set(options.generate) & set(PYTHON_ARGUMENTS):
        return False
    return all(getattr(own, name, None) in allowed for name, allowed in KEPT_TOGETHER.items())


def paired(sentences: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    """Each sentence with its prefix; `UserError` where there are not as many."""
    if prefixes is None:
        yield from ((sentence, "") for sentence in sentences)
        return
    none: Any = object()
    for number, (sentence, prefix) in enumerate(zip_longest(sentences, prefixes, fillvalue=none), start=1):
        if sentence is none or prefix is none:
            fewer, more = ("sentences", "prefixes") if sentence is none else ("prefixes", "sentences")
            raise UserError(
                f"There are more {more} than {fewer}, which end after {number - 1}. Remedy: give one prefix for each "
                "sentence, and an empty one where its translation is free."
            )
        yield sentence, prefix


@contextmanager
def explained_generation(options: DecodingOptions) -> Iterator[None]:
    """Turns what transformers says of settings that the user passed on to `generate` into a [`UserError`]."""
    try:
        yield
    except (ValueError, TypeError, IndexError, AttributeError, ImportError) as error:
        places = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, UserError) or not options.generate or "transformers" not in places[-1].parts:
            raise
        raise UserError(
            f"generate={shown(options.generate)} cannot be done ({type(error).__name__}: {reason(error)}). Remedy: "
            "correct it, or leave it out."
        ) from error
