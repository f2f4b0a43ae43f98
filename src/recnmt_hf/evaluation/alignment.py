"""Word alignments: reading them off a model's attention, the Pharaoh format, and their error rate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import datasets
import evaluate
import numpy as np
from transformers import PreTrainedTokenizerBase

from .._plain_text import control_ids, encode_plain, is_blank
from ..models.user_errors import UserError
from .attention_links import choose_attention, links_of_matrix, word_matrix
from .forced_decoding import ForcedDecoder, batches_by_tokens


Links = set[tuple[int, int]]


# -- formats and error rate --------------------------------------------------------------------------------------------


@dataclass
class GoldAlignment:
    """
    A hand-made alignment of a sentence pair, as (source, target) positions of words from 0.

    Attributes:
        sure (`set`): Links that must be there.
        possible (`set`): Links that may be there; the sure ones are among them.
    """

    sure: Links
    possible: Links

    def __post_init__(self) -> None:
        if not set(self.sure) <= set(self.possible):
            wrong = format_links(set(self.sure) - set(self.possible))
            raise UserError(f"The sure links {wrong} are not among the possible ones. Remedy: add them there.")


def parse_links(line: str, place: str = "the alignment", one_based: bool = False) -> GoldAlignment:
    """
    A line of links: `0-0 1-2` (Pharaoh format), with `1p3` or `1?3` for possible ones.

    Args:
        line (`str`): Links apart by spaces; an empty line has none.
        place (`str`, *optional*): Names the line in errors.
        one_based (`bool`, *optional*, defaults to `False`): Whether positions count from 1.

    Raises:
        ValueError: A link has another form, or a position is below the first.
    """
    sure: Links = set()
    possible: Links = set()
    for word in line.split():
        found = re.fullmatch(r"(\d+)([-p?])(\d+)", word)
        if found is None:
            raise UserError(f"{place}: {word!r} is no link. Remedy: write source-target, e.g. 0-1, or 0p1 (possible).")
        link = (int(found[1]) - one_based, int(found[3]) - one_based)
        if min(link) < 0:
            raise UserError(f"{place}: {word!r} has a position below 1. Remedy: positions count from 0 here.")
        possible.add(link)
        if found[2] == "-":
            sure.add(link)
    return GoldAlignment(sure, possible)


def format_links(links: Sequence[tuple[int, int]] | Links) -> str:
    """Links in Pharaoh format, in order: `0-0 1-2`."""
    return " ".join(f"{i}-{j}" for i, j in sorted(links))


@dataclass
class AlignmentScore:
    """
    Alignment error rate of a corpus, with its parts; all from 0 to 1.

    Attributes:
        aer (`float`): `1 - (|A & S| + |A & P|) / (|A| + |S|)`; lower is better.
        precision (`float`): `|A & P| / |A|`.
        recall (`float`): `|A & S| / |S|`.
        links, sure, possible (`int`): |A|, |S| and |P|.
    """

    aer: float
    precision: float
    recall: float
    links: int
    sure: int
    possible: int

    def __str__(self) -> str:
        return (
            f"AER {100 * self.aer:.2f} (precision {100 * self.precision:.2f}, recall {100 * self.recall:.2f}; "
            f"{self.links} links, {self.sure} sure, {self.possible} possible)"
        )


def alignment_error_rate(predictions: Sequence[Links], references: Sequence[GoldAlignment]) -> AlignmentScore:
    """
    Alignment error rate over a corpus (Och and Ney, 2003, section 6).

    Args:
        predictions (sequence of `set`): A, the links of each sentence pair.
        references (sequence of [`GoldAlignment`]): S and P.

    Raises:
        ValueError: Their numbers differ, or there is neither a link nor a sure one.
    """
    if len(predictions) != len(references):
        raise UserError(
            f"{len(predictions)} alignments and {len(references)} gold alignments: there must be one for each. Remedy: "
            "compare files of the same sentences."
        )
    found = in_sure = in_possible = sure = possible = 0
    for links, gold in zip(predictions, references, strict=True):
        links = set(links)
        found += len(links)
        sure += len(gold.sure)
        possible += len(gold.possible)
        in_sure += len(links & gold.sure)
        in_possible += len(links & gold.possible)
    if found + sure == 0:
        raise UserError("There is nothing to compare: neither the alignments nor the gold ones have a link.")
    return AlignmentScore(
        aer=1 - (in_sure + in_possible) / (found + sure),
        precision=in_possible / found if found else 0.0,
        recall=in_sure / sure if sure else 0.0,
        links=found,
        sure=sure,
        possible=possible,
    )


class AlignmentErrorRate(evaluate.Metric):
    """
    Alignment error rate; `AlignmentErrorRate().compute(predictions=["0-0 1-2"], references=["0-0 1p2"])`, one line of
    links in Pharaoh format for each sentence pair, possible links of the references as `1p2`.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=(type(self).__doc__ or "").strip(),
            citation="Och and Ney, 2003",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str], one_based: bool = False) -> dict[str, float]:
        sides = [
            [parse_links(line, f"{name} {number}", one_based) for number, line in enumerate(lines, start=1)]
            for name, lines in (("prediction", predictions), ("reference", references))
        ]
        score = alignment_error_rate([each.possible for each in sides[0]], sides[1])
        return {"aer": score.aer, "precision": score.precision, "recall": score.recall}


# -- reading alignments off attention ----------------------------------------------------------------------------------


@dataclass
class WordAlignment:
    """
    What a model attends in a sentence pair.

    Attributes:
        source, target (`list[str]`): Words, apart by spaces in the text.
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
        """The links in Pharaoh format, source first."""
        return format_links(self.links)


def words_of_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, is_target: bool = False
) -> tuple[list[int], list[int | None]]:
    """
    A sentence's token ids, and for each token the word (apart by spaces, from 0) that it is a part of; `None` for
    special tokens.

    Raises:
        ValueError: The tokenizer does not report where its tokens stand in the text.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not tell where its tokens stand in the text, so that sub-words cannot be "
            "mapped to words. Remedy: load the fast version of the tokenizer, or convert it to tokenizer.json."
        )
    encoded = encode_plain(tokenizer, text, is_target, return_offsets_mapping=True)
    starts = [found.start() for found in re.finditer(r"\S+", text)]
    controls = control_ids(tokenizer)
    words: list[int | None] = []
    for id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if id in controls:
            words.append(None)
            continue
        # A token may begin with the space before its word, or be that space alone.
        part = text[start:end]
        first = start + len(part) - len(part.lstrip())
        if not part.strip():
            first = next((place for place in starts if place >= start), first)
        words.append(max(int(np.searchsorted(starts, first, side="right")) - 1, 0))
    return encoded["input_ids"], words


def align_pairs(
    translator: ForcedDecoder,
    sources: Sequence[str],
    targets: Sequence[str],
    layer: int | str | None = None,
    head: int | None = None,
    max_tokens: int = 4096,
) -> Iterator[WordAlignment]:
    """
    Aligns sentences with their translations: the model is made to say the translation, and each word of that is linked
    to the source word that it attends most.

    Args:
        translator ([`Translator`]): Model and tokenizers.
        sources, targets (sequence of `str`): Text whose words are apart by spaces.
        layer (`int` or `"mean"`, *optional*), head (`int`, *optional*): As in [`choose_attention`].
        max_tokens (`int`, *optional*, defaults to 4096): Tokens of a batch.

    Raises:
        ValueError: There are not as many sources as targets, a sentence is empty, or the model gives no attention to
            source words.
    """
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} sources and {len(targets)} translations: there must be one for each.")
    pairs = []
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
        translator.check_text(source, f"Source {number}")
        translator.check_text(target, f"Translation {number}")
        if is_blank(source) or is_blank(target):
            raise UserError(f"Pair {number} has an empty side and no alignment. Remedy: remove it from both files.")
        pairs.append(
            (words_of_tokens(translator.tokenizer, source), words_of_tokens(translator.target_tokenizer, target, True))
        )
    for number, ((source_ids, _), (target_ids, _)) in enumerate(pairs, start=1):
        translator.check_lengths(len(source_ids), len(target_ids), f"Pair {number}")
    results: dict[int, WordAlignment] = {}
    lengths = [max(len(source_ids), len(target_ids)) for (source_ids, _), (target_ids, _) in pairs]
    for batch in batches_by_tokens(lengths, max_tokens):
        weights = translator.attention([pairs[i][0][0] for i in batch], [pairs[i][1][0] for i in batch])
        chosen = choose_attention(weights, layer, head).float().cpu().numpy()
        for row, i in enumerate(batch):
            (source_ids, source_words), (target_ids, target_words) = pairs[i]
            words, spoken = re.findall(r"\S+", sources[i]), re.findall(r"\S+", targets[i])
            own = chosen[row, : len(target_ids), : len(source_ids)]
            matrix = word_matrix(own, source_words, target_words, len(words), len(spoken))
            results[i] = WordAlignment(words, spoken, links_of_matrix(matrix), matrix)
    yield from (results[i] for i in range(len(pairs)))
