"""Align words by the cross-attention of a model that is given the translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .._plain_text import is_blank
from ..data.records import SourceText, Tokens
from ..errors import UserError
from ..metrics.alignment import format_links
from .attention_links import links_of_matrix, word_matrix
from .codec import check_text, refuse_text
from .options import DecodingOptions
from .translator import Translator


@dataclass
class WordAlignment:
    """
    Links and attention between the words of a sentence pair.

    Attributes:
        source, target (`list[str]`): Words, separated by spaces in the text.
        links (`list[tuple[int, int]]`): At most one for each target word: its source word of largest attention, none
            where that is the source's end token, or where the tokenizer leaves nothing of the word.
        weights (`numpy.ndarray` of shape `(len(target), len(source) + 1)`): Attention of target words to source words
            and, in the last column, to the source's end token.
    """

    source: list[str]
    target: list[str]
    links: list[tuple[int, int]]
    weights: np.ndarray

    def to_pharaoh(self) -> str:
        """Return the links in Pharaoh format, source first."""
        return format_links(self.links)


def align_pairs(
    translator: Translator,
    sources: Sequence[SourceText],
    targets: Sequence[str],
    layer: int | str | None = None,
    head: int | None = None,
    max_tokens: int = 4096,
    options: DecodingOptions | None = None,
    first: int = 1,
) -> Iterator[WordAlignment]:
    """
    Align sentences with their translations: the model is given the translation, and each of its words is linked to the
    source word with the largest attention.

    Args:
        translator ([`Translator`]): Model and tokenizers.
        sources, targets (sequence of `str`): Text whose words are separated by spaces. For a model that reads
            dependency trees, a source may be a [`~recnmt_hf.data.ParsedSentence`].
        layer (`int` or `"mean"`, *optional*), head (`int`, *optional*): As in [`choose_attention`].
        max_tokens (`int`, *optional*, defaults to 4096): Tokens of a batch.
        options ([`DecodingOptions`], *optional*): The languages, for a model of several.
        first (`int`, *optional*, defaults to 1): Number of the first pair in messages.

    Returns:
        An iterator over [`WordAlignment`], one for each pair, in order.

    Raises:
        ValueError: A sentence is empty, or the model does not attend to source words.
    """
    refuse_text(sources=sources, translations=targets)
    codec, options = translator.codec, options or DecodingOptions()
    source_sides: list[tuple[Tokens, list[int | None]]] = []
    target_sides: list[tuple[Tokens, list[int | None]]] = []
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), first):
        sentence, direction = codec.read_source(source, options, f"Pair {number}: source")
        check_text(target, f"Pair {number}: translation")
        if is_blank(sentence.text) or is_blank(target):
            raise UserError(f"Pair {number} is empty, so it cannot be scored or aligned.", field=f"Pair {number}")
        tokens, words_of_source = codec.words_of_source(sentence, direction)
        before = len(str(source).split()) - len(sentence.text.split())  # words that name the target language
        source_sides.append((tokens, [None if word is None else word + before for word in words_of_source]))
        target_sides.append(codec.words_of_target(target, direction))
        codec.check_lengths(len(source_sides[-1][0]), len(target_sides[-1][0]), f"Pair {number}")
    source_ids, target_ids = ([ids for ids, _ in side] for side in (source_sides, target_sides))
    for i, weights in enumerate(translator.attention(source_ids, target_ids, layer, head, max_tokens)):
        words, translated = str(sources[i]).split(), targets[i].split()
        matrix = word_matrix(weights, source_sides[i][1], target_sides[i][1], len(words), len(translated))
        yield WordAlignment(words, translated, links_of_matrix(matrix), matrix)
