"""Significance tests of the difference between the scores of two systems."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from sacrebleu.significance import PairedTest, Result

from .._values import MOST_SEED, Range, check_value
from ..errors import UserError
from .bleu import bleu_metric, reference_sets
from .rouge import ROUGE_TYPES, RougeF1


METHODS = {"bootstrap": "bs", "randomization": "ar"}


@dataclass
class Comparison:
    """
    A system against the baseline.

    Attributes:
        system (`str`): Its name.
        score (`float`): BLEU or ROUGE.
        difference (`float`): Score minus that of the baseline; 0 for the baseline itself.
        p_value (`float`, *optional*): Chance of a difference at least as large if both systems were equally good;
            `None` for the baseline.
        interval (`tuple[float, float]`, *optional*): Mean and half-width of the 95% confidence interval of the score
            (bootstrap only).
        signature (`str`): sacrebleu's, with the test's settings.
    """

    system: str
    score: float
    difference: float
    p_value: float | None
    interval: tuple[float, float] | None
    signature: str


def compare_systems(
    systems: Mapping[str, Sequence[str]] | Iterable[tuple[str, Sequence[str]]],
    references: Sequence[str] | Sequence[Sequence[str]],
    method: str = "bootstrap",
    samples: int = 1000,
    seed: int = 12345,
    lowercase: bool = False,
    tokenize: str | None = None,
    metric: str = "bleu",
    units: str = "words",
) -> list[Comparison]:
    """
    Run paired tests of BLEU or ROUGE (sacrebleu's implementations).

    Args:
        systems (mapping of name to translations, or pairs of them): The first is the baseline.
        references (sequence of `str`, or of such sequences): One reference set or several.
        method (`str`, *optional*, defaults to `"bootstrap"`): `"bootstrap"`: paired bootstrap resampling (Koehn,
            2004). `"randomization"`: approximate randomisation (Riezler and Maxwell, 2005).
        samples (`int`, *optional*, defaults to 1000): Resamplings, or random swaps.
        seed (`int`, *optional*, defaults to 12345): Seed of the resampling.
        lowercase (`bool`, *optional*, defaults to `False`): Case-insensitive BLEU.
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.
        metric (`str`, *optional*, defaults to `"bleu"`): `"bleu"`, `"rouge1"`, `"rouge2"` or `"rougeL"`.
        units (`str`, *optional*, defaults to `"words"`): Units of ROUGE's n-grams, as for [`units_of`].

    Raises:
        ValueError: There are fewer than two systems, no such method, metric, units or tokenizer, a number is not
            allowed, or lengths differ.
    """
    samples = check_value("samples", samples, int, Range(least=1))
    seed = check_value("seed", seed, int, Range(least=0, most=MOST_SEED))
    check_value("method", method, Literal[(*METHODS,)])
    check_value("metric", metric, Literal["bleu", *ROUGE_TYPES])
    named = list(systems.items() if isinstance(systems, Mapping) else systems)
    systems = dict(named)
    if len(systems) < len(named):
        names = [str(name) for name, _ in named]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise UserError("metric.repeated_systems", value=repeated)
    if len(systems) < 2:
        raise UserError("metric.too_few_systems")
    for hypotheses in systems.values():
        streams = reference_sets(hypotheses, references)
    is_bleu = metric == "bleu"
    measure = bleu_metric(lowercase, tokenize, streams) if is_bleu else RougeF1(metric, units, streams)
    with environment(SACREBLEU_SEED=str(seed)):
        test = PairedTest(
            [(name, list(hypotheses)) for name, hypotheses in systems.items()],
            {metric: measure},
            references=None,
            test_type=METHODS[method],
            n_samples=samples,
        )
        signatures, scores = test()
    (name,) = signatures  # sacrebleu's own for the metric
    results = cast("list[Result]", scores[name])  # only the column of names holds text
    base = results[0].score
    return [
        Comparison(
            system=str(system),
            score=result.score,
            difference=result.score - base,
            # Any difference is at least as large as 0; sacrebleu's bootstrap counts only larger ones.
            p_value=1.0 if result.p_value is not None and result.score == base else result.p_value,
            interval=None if result.mean is None or result.ci is None else (result.mean, result.ci),
            signature=str(signatures[name]),
        )
        for system, result in zip(scores["System"], results, strict=True)
    ]


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables inside the context."""
    saved = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(saved)
