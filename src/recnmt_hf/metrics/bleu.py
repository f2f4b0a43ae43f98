"""BLEU, chrF, TER and multi-bleu's BLEU, as functions and as `evaluate.Metric` classes that need no network."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import datasets
import evaluate
import sacrebleu
from sacrebleu.metrics.base import Metric as SacreMetric

from .._plain_text import count_words
from ..data.languages import main_language
from ..errors import UserError, packages_of_extra, short_repr, shorten
from ..options import check_value


# Languages without spaces between words, and Korean with its long words, by sacrebleu's tokenizer.
TOKENIZERS = {"zh": "zh yue wuu lzh", "ja-mecab": "ja", "ko-mecab": "ko", "char": "th km lo my shn bo dz"}
References = Sequence[str] | Sequence[Sequence[str]]  # one set, or several


@dataclass
class MetricScore:
    """
    A corpus score with the signature that makes it comparable. BLEU also has the length of the translations as a share
    of the references', the brevity penalty, and with samples the half-width of its 95% interval.
    """

    name: str
    score: float
    signature: str
    length_ratio: float | None = None
    brevity_penalty: float | None = None
    interval: float | None = None

    def __str__(self) -> str:
        text = f"{self.name} {self.score:.2f}" + ("" if self.interval is None else f" ± {self.interval:.2f}")
        if self.length_ratio is not None:
            text += f", length ratio {self.length_ratio:.3f}, brevity penalty {self.brevity_penalty:.3f}"
        return f"{text} ({self.signature})"


def reference_sets(hypotheses: Sequence[str], references: References) -> list[list[str]]:
    """Return a list per reference set; a list of sentences is one. Raise `UserError` unless their lengths agree."""
    sets: Any = [references] if references and isinstance(references[0], str) else references
    if isinstance(hypotheses, str) or not hypotheses or not sets or any(isinstance(lines, str) for lines in sets):
        raise UserError("Pass lists of at least one translation and reference.", field="references")
    for number, lines in enumerate(sets, start=1):
        if len(lines) != len(hypotheses):
            message = f"reference {number} has {len(lines)} entries, but there are {len(hypotheses)} translations."
            raise UserError(message, field=f"reference {number}")
    return [list(lines) for lines in sets]


def score_with(
    metric: SacreMetric, name: str, hypotheses: Sequence[str], references: References, samples: int = 1
) -> MetricScore:
    """Score with a metric of sacrebleu; more than one bootstrap sample gives an interval."""
    result: Any = metric.corpus_score(list(hypotheses), reference_sets(hypotheses, references), n_bootstrap=samples)
    score = MetricScore(name, result.score, str(metric.get_signature()))
    if isinstance(metric, sacrebleu.BLEU):
        score.length_ratio, score.brevity_penalty = result.sys_len / max(result.ref_len, 1), result.bp
    score.interval = result._ci if samples > 1 else None
    return score


def bleu_metric(
    lowercase: bool = False, tokenize: str | None = None, references: Sequence[Sequence[str]] | None = None
) -> sacrebleu.BLEU:
    """Return sacrebleu's BLEU; `UserError` for a tokenizer that is unknown, or that lacks a package or file."""
    check_value("tokenize", tokenize, Literal[(*sorted(sacrebleu.BLEU.TOKENIZERS), None)])
    try:
        return sacrebleu.BLEU(lowercase=lowercase, tokenize=tokenize, force=tokenize == "none", references=references)
    except (RuntimeError, ImportError, OSError) as error:  # it needs a package or a download
        reason = f"tokenize={short_repr(tokenize)} cannot be used ({shorten(str(error))})"
        raise UserError(f"{reason}. Install its package, or choose another tokenizer.", field="tokenize") from error


@cache
def bleu_tokenizer(language: str | None) -> str:
    """
    Return the name of sacrebleu's tokenizer for a language code: `zh` for Chinese, `ja-mecab` and `ko-mecab` for
    Japanese and Korean where their packages are installed, `char` for these elsewhere, and for Thai, Khmer, Lao,
    Burmese and Tibetan; `13a` for all others and without a code.
    """
    code = main_language(language or "")
    tokenizer = next((name for name, codes in TOKENIZERS.items() if code in codes.split()), "13a")
    try:
        bleu_metric(tokenize=tokenizer)
    except UserError:
        return "char"
    return tokenizer


def sacrebleu_score(
    hypotheses: Sequence[str],
    references: References,
    lowercase: bool = False,
    tokenize: str | None = None,
    samples: int = 1,
) -> MetricScore:
    """
    Compute the corpus BLEU of detokenized text (Papineni et al., 2002) with sacrebleu.

    Args:
        hypotheses (sequence of `str`): Translations.
        references (sequence of `str`, or of such sequences): One reference set, or several.
        lowercase (`bool`, *optional*, defaults to `False`): Case-insensitive.
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.
        samples (`int`, *optional*, defaults to 1): Bootstrap samples of the 95% interval; 1: no interval.

    Raises:
        UserError: The tokenizer is unknown, or the lists have different lengths.
    """
    name = "BLEU (case-insensitive)" if lowercase else "BLEU"
    return score_with(bleu_metric(lowercase, tokenize), name, hypotheses, references, samples)


def chrf_score(hypotheses: Sequence[str], references: References) -> MetricScore:
    """Compute chrF2 (Popović, 2015) of `hypotheses` against one or several sets of `references`."""
    return score_with(sacrebleu.CHRF(), "chrF2", hypotheses, references)


def ter_score(hypotheses: Sequence[str], references: References, tokenize: str | None = None) -> MetricScore:
    """Compute TER (Snover et al., 2006) of `hypotheses` against `references`; with `tokenize="zh"`, of characters."""
    asian = tokenize in TOKENIZERS
    return score_with(sacrebleu.TER(normalized=asian, asian_support=asian), "TER", hypotheses, references)


@cache
def moses_tokenizer(language: str) -> Any:
    """Return the Moses tokenizer of a language."""
    with packages_of_extra("metrics", "Tokenized BLEU of a language"):
        from sacremoses import MosesTokenizer

    return MosesTokenizer(lang=language)


def tokenized_bleu_score(
    hypotheses: Sequence[str], references: References, lowercase: bool = False, language: str | None = None
) -> MetricScore:
    """
    Compute the BLEU of tokenized text, the figure of Moses' `multi-bleu.perl`: no further tokenization, no smoothing.

    Args:
        hypotheses, references, lowercase: As in [`sacrebleu_score`].
        language (`str`, *optional*): Code of the language by which to tokenize both sides as Moses does (without
            escaping; unknown languages as English); `None`: they are tokenized already, with spaces between words.

    Raises:
        UserError: The language code is malformed, or the lists have different lengths.
    """
    code = main_language(language) if isinstance(language, str) else language
    if code is not None and not re.fullmatch("[a-z]{2,3}", str(code)):
        raise UserError(f"language={short_repr(language)} is not a code of two or three letters.", field="language")
    streams = reference_sets(hypotheses, references)
    if code is not None:
        tokenize = partial(moses_tokenizer(code).tokenize, return_str=True, escape=False)
        hypotheses, *streams = (list(map(tokenize, lines)) for lines in (hypotheses, *streams))
    metric = sacrebleu.BLEU(lowercase=lowercase, tokenize="none", smooth_method="none", force=True)
    result = score_with(metric, "tokenized BLEU" + (" (case-insensitive)" if lowercase else ""), hypotheses, streams)
    return MetricScore(result.name, result.score, f"{result.signature}|pretok:{f'moses-{code}' if code else 'none'}")


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
    Compute the corpus BLEU, or another score, in bins of the source's length.

    Args:
        sources, hypotheses (sequence of `str`): Sentences and their translations.
        references (sequence of `str`, or of sequences): One set of references, or several.
        edges (sequence of `int`, *optional*, defaults to `(15, 30, 45)`): Upper edges, themselves included; a last bin
            contains the rest, and the first one also sources of length 0. The default bins are those of Weng et al.
            (2020); tens up to 50 are those of Zhang et al. (2018).
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.
        score (callable, *optional*): Scores translations by reference sets; defaults to BLEU.
        length (callable, *optional*): Computes the length of a source; defaults to its number of words, or characters
            in scripts without spaces.

    Returns:
        Name, number of sentences and score of each bin with any sentence.

    Raises:
        ValueError: The edges do not increase, or the lists have different lengths.
    """
    edges = [check_value("edges", edge, int) for edge in edges]
    if edges != sorted(set(edges)) or not edges or edges[0] < 1:
        raise UserError(f"edges must be at least 1 and increase, such as 15 30 45, got {edges}.", field="edges")
    streams = reference_sets(hypotheses, references)
    reference_sets(hypotheses, sources)  # checks the sources
    lengths = list(map(length or count_words, sources))
    bins, score = [], score or partial(sacrebleu_score, tokenize=tokenize)
    for low, high in itertools.pairwise([-1 if 0 in lengths else 0, *edges, math.inf]):
        if rows := [i for i, count in enumerate(lengths) if low < count <= high]:
            part = score([hypotheses[i] for i in rows], [[stream[i] for i in rows] for stream in streams])
            bins.append((f"({low}, {high}]" if low >= 0 else f"[0, {high}]", len(rows), part))
    return bins


def sets_of(references: list[Any]) -> list[Any]:
    """Return reference sets from the references of each sentence, as `evaluate` passes them."""
    is_one = not references or isinstance(references[0], str)
    return references if is_one else list(map(list, zip(*references, strict=True)))


class TextMetric(evaluate.Metric):
    """
    A metric over translations and one or several references each, as in `evaluate`'s own sacrebleu.

    Args of `compute`:
        predictions (`list[str]`): Translations.
        references (`list[str]` or `list[list[str]]`): Their references.
        **options: Those of the metric's function, e.g. [`sacrebleu_score`].

    Returns:
        `dict`: `score` and `signature`.
    """

    citation = ""
    score: Callable[..., MetricScore]

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        kinds = (datasets.Sequence(text), text)
        features = [datasets.Features({"predictions": text, "references": kind}) for kind in kinds]
        description = (type(self).__doc__ or "").strip()
        return evaluate.MetricInfo(description=description, citation=self.citation, features=features)

    def _compute(self, predictions: list[str], references: list[Any], **options: Any) -> dict[str, object]:
        result = self.score(predictions, sets_of(references), **options)
        return {"score": result.score, "signature": result.signature}


class Bleu(TextMetric):
    """BLEU of detokenized text; `Bleu().compute(predictions=..., references=..., lowercase=False, tokenize=None)`."""

    citation = "Papineni et al., 2002; Post, 2018"
    score = staticmethod(sacrebleu_score)


class TokenizedBleu(TextMetric):
    """BLEU of tokenized text, comparable with multi-bleu.perl; options `lowercase` and `language`."""

    citation = "Papineni et al., 2002"
    score = staticmethod(tokenized_bleu_score)


class ChrF(TextMetric):
    """chrF2 of detokenized text."""

    citation = "Popović, 2015"
    score = staticmethod(chrf_score)


class Ter(TextMetric):
    """TER of detokenized text; lower is better."""

    citation = "Snover et al., 2006"
    score = staticmethod(ter_score)
