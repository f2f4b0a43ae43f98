"""Between text and token ids: languages, tags, sentences, truncation, prefixes and control tokens."""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any, NamedTuple

from .._plain_text import control_ids, is_blank
from ..data.alignments import words_of_tokens
from ..data.records import ParsedSentence, Sentence, SourceText, Tokens
from ..data.tokenization import source_tags, tag_ids
from ..data.tokenizer_pair import vocabulary_sizes
from ..data.tree_inputs import tree_options
from ..errors import UserError, short_repr
from .backends.protocol import Backend
from .languages import TOKENIZING, Direction, encode_text, find_languages
from .model_settings import ModelTask, end_ids, start_id
from .options import DecodingOptions
from .results import Hypothesis, Translation
from .splitting import join_pieces, split_sentences, split_text


DEFAULTS = DecodingOptions()
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class Request:
    """A text as the model reads it."""

    text: str  # as the user passed it
    direction: Direction  # the languages, with the tokens and texts that tell the model about them
    pieces: list[Tokens] = field(default_factory=list)  # parts that are translated by themselves; none of blank text
    separators: list[str] = field(default_factory=list)  # text that joins each translation to the one before
    openings: list[Tokens] = field(default_factory=list)  # tokens that the translation of each piece begins with
    dropped: int = 0  # number of source tokens that truncation removed


class EncodedPair(NamedTuple):
    """A source and its translation, and the number of the word of each token; `None` for control tokens."""

    source: Tokens
    target: Tokens
    source_words: list[int | None]
    target_words: list[int | None]


class Codec:
    """Turns text into the token ids that a model reads, and the token ids that it writes into text."""

    def __init__(self, backend: Backend, task: ModelTask):
        self.backend, self.tokenizers = backend, backend.tokenizers
        self.source_lang: str | None = None  # languages of texts whose options do not name any
        self.target_lang: str | None = None
        self.trees = self.tokenizers.tree_encoder(self.model.config)
        self.reads_trees = tree_options(self.model.config) is not None
        self.languages = find_languages(self.tokenizers, self.model, task)
        self.control_ids = [control_ids(tokenizer) | self.languages.control_ids for tokenizer in self.tokenizers]
        self.target_names = tag_ids(self.tokenizers.target) | self.languages.control_ids
        self.source_tags = source_tags(self.tokenizers.source)
        self.instructions = {"": 0}  # their numbers of tokens

    @property
    def model(self) -> Any:
        return self.backend.model

    def encode(
        self, sentence: SourceText, options: DecodingOptions, prefix: str = "", place: str = "The sentence"
    ) -> Request:
        """Encode a sentence or a text, split and truncated as the options say; `prefix` begins the translation."""
        source, direction = self.read_source(sentence, options, place)
        request = Request(str(sentence), direction)
        start = self.encode_prefix(prefix, f"{place}: prefix", direction) if prefix else []
        parts = [] if is_blank(source.text) else [("", source)]
        by_default = not start and not self.is_summarizing(options)
        splits = options.split_sentences == "always" or (options.split_sentences == "auto" and by_default)
        if parts and splits and not (self.reads_trees and source.tree is not None):  # a tree is that of one sentence
            sentences = split_sentences(source.text, direction.source)
            parts = [(space, Sentence(part)) for space, part in sentences] if len(sentences) > 1 else parts
        encoded = [(space, part, self.encode_source(part, direction)) for space, part in parts]
        if options.alignments and len(parts) > 1:
            # Positions of alignments are those of the whole text, which must have the same tokens.
            whole = self.encode_source(source, direction)
            if [id for *_, tokens in encoded for id in self.words_of(tokens)] != self.words_of(whole):
                encoded = [("", source, whole)]
        space = ""
        for number, (separator, part, tokens) in enumerate(encoded, start=1):
            name, space = place if len(encoded) == 1 else f"{place}, part {number}", space + separator
            for space_before, piece in self.limit_length(part, tokens, direction, options, name):
                space += space_before
                if not self.is_empty(piece, direction):
                    request.dropped += len(tokens) - len(piece) if options.on_long == "truncate" else 0
                    request.openings.append(direction.opening(() if request.pieces else start))
                    request.pieces.append(piece)
                    request.separators.append(space)
                    space = ""
        return request

    def is_summarizing(self, options: DecodingOptions) -> bool:
        """Return whether a text is one input, with a much shorter output."""
        return options.on_long == "truncate" or self.languages.task.summarizes

    def direction(self, options: DecodingOptions | None = None) -> Direction:
        """Return the languages that options, codec, tokenizer and the model's files name, in this order."""
        options = options or DEFAULTS
        source, target = options.source_lang or self.source_lang, options.target_lang or self.target_lang
        forced, instruction = options.generate.get("forced_bos_token_id"), options.source_prefix
        if forced is not None and options.target_lang is not None and self.languages.targets:
            raise UserError("target_lang and forced_bos_token_id set the same option.", field="target_lang")
        direction = self.languages.direction(source, target, forced)
        if instruction is not None and direction.instruction:
            raise UserError("source_prefix and target_lang set the same option.", field="source_prefix")
        return direction if instruction is None else replace(direction, instruction=instruction)

    def read_source(self, sentence: SourceText, options: DecodingOptions, place: str) -> tuple[Sentence, Direction]:
        """Return a source without the language and the tags that it names, and its direction, which has them."""
        if not isinstance(sentence, ParsedSentence):
            check_text(sentence, place)
        source, direction = Sentence.of(sentence), self.direction(options)
        target, text = self.languages.read_target(source.text)
        if target is None or (direction.target is not None and target not in self.languages.targets):
            if not is_blank(source.text):
                self.languages.require_target(direction)
        elif direction.target not in (None, target):
            raise UserError(f"it names the language {target}, but target_lang is {direction.target}.", field=place)
        else:
            source, direction = Sentence(text), self.direction(replace(options, target_lang=target))
        tags = [] if source.tree is not None else self.source_tags
        while (found := next((tag for tag in tags if source.text.lstrip().startswith(tag[0])), None)) is not None:
            source = Sentence(source.text.lstrip().removeprefix(found[0]).lstrip())
            direction = replace(direction, tags=(*direction.tags, found[1]))
        return source, direction

    def encode_source(self, sentence: Sentence | SourceText, direction: Direction | None = None) -> Tokens:
        """Return the tokens of a source, in which `</s>` and the like are text, with its tree if the model reads it."""
        direction, source = direction or self.direction(), Sentence.of(sentence)
        if source.tree is not None and self.reads_trees:
            assert self.trees is not None, "relations.json of a model that reads trees is missing"
            return self.trees([source.tree])[0]
        return Tokens(direction.enclose(encode_text(self.tokenizers.source, direction.instruction + source.text)))

    def limit_length(
        self, sentence: Sentence, tokens: Tokens, direction: Direction, options: DecodingOptions, place: str
    ) -> list[tuple[str, Tokens]]:
        """Return the tokens of a sentence or of its parts, none too long for the model, and the space before each."""
        limits = (options.max_source_length, self.backend.limits.source)
        limit = min((limit for limit in limits if limit), default=None)
        if limit is None or len(tokens) <= limit or self.is_empty(tokens, direction):
            return [("", tokens)]
        if options.on_long == "truncate":
            return [("", tokens.truncated(limit, end_ids(self.model).union(direction.after)))]
        if options.on_long == "split":
            cut = split_text(sentence.text.strip(), limit, lambda part: len(self.encode_source(part, direction)))
            parts = [self.encode_source(part, direction) for part in sentence.parts([text for _, text in cut])]
            if all(len(part) <= limit or self.is_empty(part, direction) for part in parts):
                return [(space, part) for (space, _), part in zip(cut, parts, strict=True)]
        raise UserError(f"{place} has {len(tokens)} tokens; the maximum is {limit} (see --on-long).", field=place)

    def encode_prefix(self, prefix: str, place: str, direction: Direction | None = None) -> list[int]:
        """Return the token ids of the beginning of a translation, without the end of the sentence."""
        ids = [] if is_blank(check_text(prefix, place)) else self.encode_target(prefix, direction).ids
        while ids and ids[-1] in end_ids(self.model):
            ids = ids[:-1]
        limit = self.backend.limits.target
        if limit is not None and len(ids) >= limit:
            raise UserError(f"{place} has {len(ids)} tokens, but the model can generate only {limit}.", field=place)
        return ids

    def encode_target(
        self, target: str | Sequence[int], direction: Direction | None = None, place: str = "The translation"
    ) -> Tokens:
        """Return the tokens of a translation: text gets an end token, ids stay as they are; reject unknown ids."""
        direction, adds = direction or self.direction(), not self.languages.names_targets
        if isinstance(target, str):
            ids = encode_text(self.tokenizers.target, check_text(target, place), adds, adds)
            ids = ids if adds else [*direction.given, *ids]
            ends, end = end_ids(self.model), self.tokenizers.target.eos_token_id
            if ends and ends.isdisjoint(ids[-1:]):
                ids.append(end if end in ends else min(ends))
        else:
            ids, (_, size) = list(map(operator.index, target)), vocabulary_sizes(self.model.config)
            if any(not 0 <= id < size for id in ids):
                raise UserError(f"{place} has token ids beyond 0 to {size - 1}.", field=place)
        is_given = bool(ids) and (ids[0] in direction.given or ids[0] in self.languages.control_ids)
        return Tokens(ids, start=direction.start, given=int(is_given))

    def encode_pairs(
        self,
        sources: Sequence[SourceText],
        targets: Sequence[str | Sequence[int]],
        options: DecodingOptions,
        places: Sequence[str] | None = None,
        with_words: bool = False,
    ) -> list[EncodedPair]:
        """Encode pairs, `with_words` if both sides are text; other arguments and errors as of [`Translator.score`]."""
        refuse_text(sources=sources, translations=targets)
        source_limit, target_limit = self.backend.limits
        # The decoder does not read the last target token.
        limits = source_limit, None if target_limit is None else target_limit + 1
        places, pairs = places or [f"Pair {number}" for number in range(1, len(sources) + 1)], []
        for place, text, target in zip(places, sources, targets, strict=True):
            sentence, direction = self.read_source(text, options, f"{place}: source")
            source = self.encode_source(sentence, direction)
            pair = EncodedPair(source, self.encode_target(target, direction, f"{place}: translation"), [], [])
            if with_words:
                first = len(str(text).split()) - len(sentence.text.split())  # after words that name the language
                pair = self.with_words(pair, sentence, str(target), direction, first)
            if is_blank(sentence.text) or self.is_empty(pair.source, direction):
                raise UserError("empty, so it cannot be scored or aligned.", field=f"{place}: source")
            for side, tokens, limit in zip(("source", "target"), pair[:2], limits, strict=True):
                if limit is not None and len(tokens) > limit:
                    raise UserError(f"{place} has {len(tokens)} {side} tokens; the maximum is {limit}.", field=place)
            pairs.append(pair)
        return pairs

    def with_words(
        self, pair: EncodedPair, sentence: Sentence, target: str, direction: Direction, first: int
    ) -> EncodedPair:
        """Add the word of each token to a pair; those of the source count from `first`."""
        instruction, adds = direction.instruction, not self.languages.names_targets
        with TOKENIZING:
            ids, words = words_of_tokens(self.tokenizers.source, instruction + sentence.text, add_special_tokens=False)
            _, target_words = words_of_tokens(self.tokenizers.target, target, adds, adds)
        source, least = Tokens(direction.enclose(ids)), len(instruction.split())
        numbers = [None if word is None or word < least else word - least + first for word in words]
        before = len(direction.before) + len(direction.tags), 0 if adds else len(direction.given)
        sides = []
        for tokens, own, start in zip((source, pair.target), (numbers, target_words), before, strict=True):
            sides.append([*[None] * start, *own, *[None] * (len(tokens) - start - len(own))])
        source = pair.source if pair.source.ids == source.ids else source  # with the edges of a tree
        return EncodedPair(source, pair.target, *sides)

    def decode(self, request: Request, rows: Sequence[Sequence[Hypothesis]], options: DecodingOptions) -> Translation:
        """Return the translation of a text from the rows that the model wrote for each piece, best first."""
        pieces = []
        for own in rows:
            # The token of a language, or a tag such as >>de<<, is not part of the text that follows.
            shown = [[*dropwhile(self.target_names.__contains__, row.tokens)] for row in own]
            texts = self.tokenizers.target.batch_decode(shown, skip_special_tokens=True)
            pieces.append([replace(row, text=text.strip()) for text, row in zip(texts, own, strict=True)])
        if not pieces:
            return Translation(request.text, [Hypothesis("", 0.0, 0.0, alignment=[] if options.alignments else None)])
        if len(pieces) == 1:
            return Translation(request.text, pieces[0])
        lengths = [len(self.words_of(piece)) for piece in request.pieces]
        return Translation(request.text, join_pieces(pieces, options.penalty(), request.separators, lengths))

    def strip(self, row: list[int]) -> list[int]:
        """Return a row up to its end token or its padding; beam search may fill up rows beyond their limit."""
        ends, length = end_ids(self.model), len(row)
        for i, token in enumerate(row):
            if token in ends:
                return row[: i + 1]
        while length and row[length - 1] == self.tokenizers.target.pad_token_id:
            length -= 1
        return row[:length]

    def words_of(self, source: Tokens) -> list[int]:
        """Return the token ids of a source without control tokens."""
        return [id for id in source.ids if id not in self.control_ids[0]]

    def is_empty(self, source: Tokens, direction: Direction | None = None) -> bool:
        """Return whether a source has only control tokens, and the tags and instruction of its direction."""
        direction = direction or Direction()
        if (text := direction.instruction.rstrip()) not in self.instructions:
            self.instructions[text] = len(encode_text(self.tokenizers.source, text))
        tags = self.words_of(Tokens(list(direction.tags)))
        return len(self.words_of(source)) <= len(tags) + self.instructions[text]

    def is_empty_source(self, sentence: SourceText) -> bool:
        """Return whether a sentence has no visible character, or none that its tokenizer keeps."""
        return is_blank(str(sentence)) or self.is_empty(self.encode_source(sentence))

    def trace(
        self, number: int, request: Request, rows: Sequence[Sequence[Hypothesis]], translation: Translation
    ) -> dict[str, Any]:
        """Return what the model read and wrote for a text, in the form of JSON; `number` is that of the text."""
        source, target = self.tokenizers
        direction, pieces = request.direction, []

        def named(tokenizer: Any, ids: Sequence[int]) -> dict[str, Any]:
            return {"ids": list(ids), "tokens": tokenizer.convert_ids_to_tokens(list(ids))}

        for piece, opening, own in zip(request.pieces, request.openings, rows, strict=True):
            first = start_id(self.model) if opening.start is None else opening.start
            ends = not end_ids(self.model).isdisjoint(piece.ids)  # False for a source that was cut
            read = {"unknown": piece.ids.count(source.unk_token_id), "has_end": ends, **named(source, piece.ids)}
            start = {"given": opening.given, **named(target, [first, *opening.ids])}
            written = [{"score": row.score, "log_prob": row.log_prob, **named(target, row.tokens)} for row in own]
            pieces.append({"source": read, "decoder_start": start, "rows": written})
        tags = source.convert_ids_to_tokens(list(direction.tags))
        languages = {"source_lang": direction.source, "target_lang": direction.target, "tags": tags}
        head = {"sentence": number, "source": request.text, **languages, "instruction": direction.instruction}
        return head | {"truncated": request.dropped, "pieces": pieces, "translation": translation.text}


def check_text(sentence: object, place: str) -> str:
    """Return a sentence; `UserError` unless it is text that UTF-8 can encode. `place` is its name in the message."""
    if not isinstance(sentence, str) or SURROGATE.search(sentence):
        raise UserError(f"{short_repr(sentence)} is not text.", field=place)
    return sentence


def refuse_text(**values: Any) -> None:
    """Raise `UserError` if a text is passed where a list of texts is expected: its letters would be sentences."""
    for name, value in values.items():
        if isinstance(value, str):
            raise UserError(f"{name} must be several sentences, got {short_repr(value)}.", field=name)
