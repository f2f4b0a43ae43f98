"""BLEU, chrF, TER and multi-bleu's BLEU, as functions and as `evaluate.Metric` classes that need no network."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import datasets
import evaluate
import sacrebleu
from sacrebleu.metrics.base import Metric as SacreMetric

from .._extras import packages_of_extra
from .._values import check_value
from ..models.user_errors import UserError


# One reference set, or several.
References = Sequence[str] | Sequence[Sequence[str]]


@dataclass
class MetricScore:
    """A corpus score with the signature that makes it comparable."""

    name: str
    score: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f} ({self.signature})"


def check_lengths(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raises `ValueError` unless translations and references are lists of text of one length, and hold something."""
    for name, lines in (
        ("the translations", hypotheses),
        *((f"reference {n}", r) for n, r in enumerate(references, 1)),
    ):
        if isinstance(lines, str):
            raise UserError(f"One text was given as {name}. Remedy: give a list of sentences.")
        for number, line in enumerate(lines, start=1):
            if not isinstance(line, str):
                raise UserError(f"Sentence {number} of {name} is no text but {line!r}. Remedy: give sentences.")
    if not references:
        raise UserError("There are no references. Remedy: give at least one list of them.")
    for number, stream in enumerate(references, start=1):
        if len(stream) != len(hypotheses):
            raise UserError(
                f"{len(hypotheses)} translations and {len(stream)} sentences in reference {number}: there must be one "
                "for each. Remedy: score the file that was translated."
            )
    if not hypotheses:
        raise UserError("There is nothing to score: the list of translations is empty.")


def reference_streams(references: References) -> list[list[str]]:
    """References as one list per reference set; a plain list of sentences is one set."""
    if isinstance(references, str):
        raise UserError("One text was given as the references. Remedy: give a list of sentences.")
    if references and (isinstance(references[0], str) or not hasattr(references[0], "__iter__")):
        return [cast("list[str]", list(references))]
    # A text in place of a list stays one, for `check_lengths` to refuse.
    return [cast("list[str]", stream) if isinstance(stream, str) else list(stream) for stream in references]


def score_with(metric: SacreMetric, name: str, hypotheses: Sequence[str], references: References) -> MetricScore:
    streams = reference_streams(references)
    check_lengths(hypotheses, streams)
    result = metric.corpus_score(list(hypotheses), streams)
    return MetricScore(name, result.score, str(metric.get_signature()))


def bleu_metric(
    lowercase: bool = False, tokenize: str | None = None, references: Sequence[Sequence[str]] | None = None
) -> sacrebleu.BLEU:
    """
    sacrebleu's BLEU; text that is not to be tokenised may be tokenised already, without a warning.

    Raises:
        ValueError: sacrebleu has no such tokenizer, or that needs a package or a file that is not there.
    """
    check_tokenizer(tokenize)
    return sacrebleu.BLEU(lowercase=lowercase, tokenize=tokenize, force=tokenize == "none", references=references)


def sacrebleu_score(
    hypotheses: Sequence[str], references: References, lowercase: bool = False, tokenize: str | None = None
) -> MetricScore:
    """
    Corpus BLEU of detokenised text (Papineni et al., 2002) as sacrebleu computes it.

    Args:
        hypotheses (sequence of `str`): Translations.
        references (sequence of `str`, or of such sequences): One reference set, or several.
        lowercase (`bool`, *optional*, defaults to `False`): Case-insensitive.
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.

    Raises:
        ValueError: There is no such tokenizer, or the lists do not belong together.
    """
    metric = bleu_metric(lowercase, tokenize)
    return score_with(metric, "BLEU (case-insensitive)" if lowercase else "BLEU", hypotheses, references)


def check_tokenizer(tokenize: str | None) -> None:
    """Raises `ValueError` for a tokenizer that sacrebleu has not, or that cannot be used on this machine."""
    known = sorted(sacrebleu.BLEU.TOKENIZERS)
    if tokenize is not None and tokenize not in known:
        raise UserError(f"There is no tokenizer {tokenize!r} of sacrebleu; choose one of {', '.join(known)}.")
    try:
        sacrebleu.BLEU(tokenize=tokenize)
    except (RuntimeError, ImportError, OSError) as error:  # it needs a package or a download
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"sacrebleu's tokenizer {tokenize!r} cannot be used here ({first}). Remedy: install what it needs, or "
            "choose another one."
        ) from error


def chrf_score(hypotheses: Sequence[str], references: References) -> MetricScore:
    """chrF2 (Popović, 2015)."""
    return score_with(sacrebleu.CHRF(), "chrF2", hypotheses, references)


def ter_score(hypotheses: Sequence[str], references: References) -> MetricScore:
    """TER (Snover et al., 2006); lower is better."""
    return score_with(sacrebleu.TER(), "TER", hypotheses, references)


@cache
def moses_tokenizer(language: str) -> Any:
    with packages_of_extra("metrics", "Tokenised BLEU of a language"):
        from sacremoses import MosesTokenizer

    return MosesTokenizer(lang=language)


def tokenized_bleu_score(
    hypotheses: Sequence[str], references: References, lowercase: bool = False, language: str | None = None
) -> MetricScore:
    """
    BLEU of tokenised text, the figure of Moses' `multi-bleu.perl`: no further tokenisation and no smoothing.

    Args:
        lowercase (`bool`, *optional*, defaults to `False`): As `multi-bleu.perl -lc`.
        language (`str`, *optional*): Tokenises both sides as Moses does for the language of this code (no escaping; of
            one that it does not know, as English); `None`: they are tokenised already, and words are what spaces part.

    Raises:
        ValueError: That is no code of a language, or the lists do not belong together.
    """
    if language is not None and not (isinstance(language, str) and re.fullmatch("[a-z]{2,3}", language)):
        raise UserError(f"language={language!r} is not allowed. Remedy: give a language's code, such as de.")
    streams = reference_streams(references)
    check_lengths(hypotheses, streams)
    hypotheses = list(hypotheses)
    if language is not None:
        tokenizer = moses_tokenizer(language)
        hypotheses = [tokenizer.tokenize(line, return_str=True, escape=False) for line in hypotheses]
        streams = [[tokenizer.tokenize(line, return_str=True, escape=False) for line in s] for s in streams]
    metric = sacrebleu.BLEU(lowercase=lowercase, tokenize="none", smooth_method="none", force=True)
    name = "tokenised BLEU" + (" (case-insensitive)" if lowercase else "")
    result = score_with(metric, name, hypotheses, streams)
    tool = "moses" if language else "none"
    return MetricScore(name, result.score, f"{result.signature}|pretok:{tool}{f'-{language}' if language else ''}")


def scores_by_length(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: References,
    edges: Sequence[int] = (15, 30, 45),
    tokenize: str | None = None,
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], MetricScore] | None = None,
    length: Callable[[str], int] | None = None,
) -> list[tuple[str, int, MetricScore]]:
    """
    Corpus BLEU, or another score, in bins of the source's length.

    Args:
        edges (sequence of `int`, *optional*, defaults to `(15, 30, 45)`): Upper edges, themselves included; a last bin
            takes the rest. The default bins are those of Weng et al. (2020); tens up to 50 are those of Zhang et al.
            (2018).
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.
        score (callable, *optional*): Of translations and reference sets; `None`: BLEU.
        length (callable, *optional*): Of a source; `None`: in words.

    Returns:
        Name, number of sentences and score of each bin that holds any sentence.

    Raises:
        ValueError: The edges do not rise, or the lists do not belong together.
    """
    edges = [check_value("edges", edge, int) for edge in edges]
    if edges != sorted(set(edges)) or not edges or edges[0] < 1:
        raise UserError(f"Length edges {edges} must rise and start at 1 or more, e.g. 15 30 45.")
    streams = reference_streams(references)
    check_lengths(hypotheses, streams)
    check_lengths(hypotheses, [sources])
    lengths = [len(source.split()) if length is None else length(source) for source in sources]
    bins = []
    score = score or partial(sacrebleu_score, tokenize=tokenize)
    for low, high in zip([0, *edges], [*edges, None], strict=True):
        chosen = [i for i, count in enumerate(lengths) if count > low and (high is None or count <= high)]
        if chosen:
            part = score([hypotheses[i] for i in chosen], [[stream[i] for i in chosen] for stream in streams])
            bins.append((f"({low}, {'inf' if high is None else high}]", len(chosen), part))
    return bins


def sets_of(references: list[Any]) -> list[Any]:
    """
    Reference sets from the references of each sentence, as `evaluate` gives them.

    Raises:
        ValueError: Sentences have different numbers of references.
    """
    if not references or isinstance(references[0], str):
        return references
    counts = {len(each) for each in references}
    if len(counts) != 1:
        raise UserError(f"Every translation needs as many references, but there are {sorted(counts)}.")
    return [list(stream) for stream in zip(*references, strict=True)]


class TextMetric(evaluate.Metric):
    """A metric over translations and one or several references each, as in `evaluate`'s own sacrebleu."""

    name = ""
    citation = ""

    def _info(self) -> evaluate.MetricInfo:
        one = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        many = datasets.Features(
            {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
        )
        return evaluate.MetricInfo(
            description=(type(self).__doc__ or "").strip(), citation=self.citation, features=[many, one]
        )

    def _compute(self, predictions: list[str], references: list[Any], **options: Any) -> dict[str, object]:
        result = self.score(predictions, sets_of(references), **options)
        return {"score": result.score, "signature": result.signature}

    def score(self, predictions: list[str], references: list[Any], **options: Any) -> MetricScore:
        raise NotImplementedError(f"{type(self).__name__} must override score")


class Bleu(TextMetric):
    """
    BLEU of detokenised text; `Bleu().compute(predictions=[...], references=[...], lowercase=False, tokenize=None)`.
    """

    citation = "Papineni et al., 2002; Post, 2018"

    def score(self, predictions: list[str], references: list[Any], **options: Any) -> MetricScore:
        return sacrebleu_score(predictions, references, **options)


class TokenizedBleu(TextMetric):
    """
    BLEU of tokenised text, comparable with multi-bleu.perl; options `lowercase` and `language`.
    """

    citation = "Papineni et al., 2002"

    def score(self, predictions: list[str], references: list[Any], **options: Any) -> MetricScore:
        return tokenized_bleu_score(predictions, references, **options)


class ChrF(TextMetric):
    """chrF2 of detokenised text."""

    citation = "Popović, 2015"

    def score(self, predictions: list[str], references: list[Any], **options: Any) -> MetricScore:
        return chrf_score(predictions, references, **options)


class Ter(TextMetric):
    """TER of detokenised text; lower is better."""

    citation = "Snover et al., 2006"

    def score(self, predictions: list[str], references: list[Any], **options: Any) -> MetricScore:
        return ter_score(predictions, references, **options)
