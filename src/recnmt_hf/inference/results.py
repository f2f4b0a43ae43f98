"""Results of translating, scoring and aligning, warnings about translations, and links by cross-attention."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.records import TokenRows
from ..errors import UserError
from ..metrics.alignment import format_links


logger = logging.get_logger(__name__)

# A warning reports unknown tokens above this share, and as many numbers of short translations.
UNKNOWN_SHARE, MOST_NUMBERS = 0.01, 5
# A translation is far too short with less than this share of the letters of a source of at least this many. Of 90,000
# reference translations between eight languages, 4 pairs of a web crawl are. Multi30k's smallest share is 0.44.
LEAST_LETTERS, LEAST_SHARE = 60, 0.25
# A Chinese character carries about as much as three letters, one of Japanese or Korean syllables as two.
HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
SYLLABLE = re.compile("[\u3040-\u30ff\uac00-\ud7af]")


@dataclass
class Hypothesis:
    """
    One translation of a sentence.

    Attributes:
        text (`str`): Plain text, empty before decoding. That of a split text is joined from its parts.
        score (`float`): Log-probability divided by the length penalty; hypotheses are ordered by it.
        log_prob (`float`): Natural log-probability of all tokens under the model, end token included. Settings of
            `generate` (a repetition penalty, a temperature) have no effect on it.
        tokens (`list[int]`): Token ids, with the end token unless the length limit came first. Those of a split text
            are the tokens of its parts, each with its end token.
        finished (`bool`): Whether the model ended the sentence itself.
        alignment (`list[tuple[int, int]]`, *optional*): Links to the source token of largest cross-attention, as
            (source, target) positions in the source's token ids and in `tokens`. End tokens have no link.
        parts (`int`): Number of parts that were translated by themselves and joined.
    """

    text: str
    score: float
    log_prob: float
    tokens: list[int] = field(default_factory=list)
    finished: bool = True
    alignment: list[tuple[int, int]] | None = None
    parts: int = 1


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
    Log-probability of a given translation under the model.

    Attributes:
        score (`float`): Log-probability divided by the length penalty.
        log_prob (`float`): Natural log-probability, end token included.
        token_log_probs (`list[float]`): Its summands.
    """

    score: float
    log_prob: float
    token_log_probs: list[float]


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


def count_letters(text: str) -> int:
    """Return the number of letters and digits, with a weight for scripts that need fewer characters."""
    return sum(map(str.isalnum, text)) + 2 * len(HAN.findall(text)) + len(SYLLABLE.findall(text))


def is_far_too_short(translation: Translation) -> bool:
    """Return whether the model ended its best translation long before the end of the source."""
    best, letters = translation.hypotheses[0], count_letters(translation.source)
    return best.finished and letters >= LEAST_LETTERS and count_letters(best.text) < LEAST_SHARE * letters


class TranslationWarnings:
    """Counts the source tokens that a tokenizer does not know, and translations that are far too short."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.unknown_id = tokenizer.unk_token_id
        self.unknown = self.tokens = self.translations = 0
        self.short: list[int] = []  # numbers of the sentences

    def count_tokens(self, sources: TokenRows) -> None:
        self.tokens += sum(map(len, sources))
        self.unknown += sum(source.ids.count(self.unknown_id) for source in sources)

    def check_lengths(self, translations: Sequence[Translation], first: int) -> None:
        """Check translations; `first` is the number of the first sentence, counted from 1."""
        self.translations += len(translations)
        self.short += [first + i for i, translation in enumerate(translations) if is_far_too_short(translation)]

    def unknown_tokens(self) -> str:
        """Return the warning of unknown tokens; empty if their share is at most 1%."""
        if self.unknown <= UNKNOWN_SHARE * self.tokens:
            return ""
        return (
            f"{100 * self.unknown / self.tokens:.1f}% of the source tokens are unknown to the tokenizer, and the model "
            "cannot distinguish them. Use a model whose tokenizer covers this language and script."
        )

    def log(self) -> None:
        """Log both warnings."""
        if warning := self.unknown_tokens():
            logger.warning_once(warning)
        if self.short:
            numbers = ", ".join(map(str, self.short[:MOST_NUMBERS])) + ", ..." * (len(self.short) > MOST_NUMBERS)
            logger.warning(
                f"{len(self.short)} of {self.translations} translations have less than a quarter of their source's "
                f"letters (sentence numbers: {numbers}), so parts of the sources are probably untranslated. Split the "
                "sources into sentences (--split-sentences), or use a model trained on texts of this length."
            )


def word_matrix(
    weights: np.ndarray, source: Sequence[int | None], target: Sequence[int | None], sizes: tuple[int, int]
) -> np.ndarray:
    """
    Compute attention between words `(target_words, source_words + 1)`, whose numbers are `sizes`, from that between
    tokens: the mean over the tokens of a target word, the sum over those of a source word. `source` and `target` are
    the word of each token, `None` for special ones, which share the last column; words without a token have zeros.
    """
    source_words, target_words = sizes
    columns = np.zeros((weights.shape[0], source_words + 1))
    for place, word in enumerate(source):
        columns[:, source_words if word is None else word] += weights[:, place]
    rows, tokens = np.zeros((target_words, source_words + 1)), np.zeros(target_words)
    for place, word in enumerate(target):
        if word is not None:
            rows[word] += columns[place]
            tokens[word] += 1
    return rows / np.maximum(tokens, 1)[:, None]


def choose_attention(
    attentions: Sequence[torch.Tensor], layer: int | str | None = None, head: int | None = None
) -> torch.Tensor:
    """
    Return the cross-attention to align by, `(batch_size, target_length, source_length)`, from that of all layers, each
    `(batch_size, heads, target_length, source_length)`. `layer` is a decoder layer from 0 or `"mean"`, by default the
    one below the top, which Garg et al. (2019) found best; `head` is one from 0, by default the mean of all.
    """
    heads, layers = attentions[0].shape[1], len(attentions)
    if layer is None:
        layer = max(layers - 2, 0)
    for name, index, size in (("layer", layer, layers), ("head", head, heads)):
        if index not in (None, "mean", *range(size)):
            raise UserError(f"{name}={index!r} does not exist; the model has 0 to {size - 1}.", field=name)
    weights: Any = torch.stack(list(attentions)).mean(dim=0) if layer == "mean" else attentions[int(layer)]
    return weights.mean(dim=1) if head is None else weights[:, head]


def links_of_matrix(matrix: np.ndarray) -> list[tuple[int, int]]:
    """Link rows of a [`word_matrix`] to their largest column, as (source, target), unless that is the last one or 0."""
    end = matrix.shape[1] - 1
    return [(int(best), j) for j, best in enumerate(matrix.argmax(axis=1)) if best < end and matrix[j].any()]
