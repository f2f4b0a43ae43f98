"""Whether one system's score is better than another's by more than chance."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sacrebleu.metrics.base import Metric as SacreMetric
from sacrebleu.significance import PairedTest, Result

from .._values import Range, check_value
from ..models.user_errors import UserError
from .bleu import bleu_metric, check_lengths, reference_streams
from .rouge import ROUGE_TYPES, RougeF1


METHODS = {"bootstrap": "bs", "randomization": "ar"}


@dataclass
class Comparison:
    """
    A system against the baseline.

    Attributes:
        system (`str`): Its name.
        score (`float`): BLEU, or the ROUGE asked for.
        difference (`float`): What it is above the baseline's; 0 for the baseline itself.
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
    Paired tests of BLEU or ROUGE (sacrebleu's implementations).

    Args:
        systems (mapping of name to translations, or pairs of them): The first is the baseline.
        references (sequence of `str`, or of such sequences): One reference set or several.
        method (`str`, *optional*, defaults to `"bootstrap"`): `"bootstrap"`: paired bootstrap resampling (Koehn,
            2004). `"randomization"`: approximate randomisation (Riezler and Maxwell, 2005).
        samples (`int`, *optional*, defaults to 1000): Resamplings, or random swaps.
        seed (`int`, *optional*, defaults to 12345): Of the resampling.
        lowercase (`bool`, *optional*, defaults to `False`): Case-insensitive BLEU.
        tokenize (`str`, *optional*): sacrebleu's tokenizer; `None`: `13a`.
        metric (`str`, *optional*, defaults to `"bleu"`): `"bleu"`, `"rouge1"`, `"rouge2"` or `"rougeL"`.
        units (`str`, *optional*, defaults to `"words"`): What ROUGE counts, as for [`units_of`].

    Raises:
        ValueError: There are fewer than two systems, no such method, metric, units or tokenizer, a number is not
            allowed, or lengths differ.
    """
    samples = check_value("samples", samples, int, Range(least=1))
    seed = check_value("seed", seed, int, Range(least=0, most=2**32 - 1))
    if method not in METHODS:
        raise UserError(f"There is no test {method!r}; choose one of {', '.join(METHODS)}.")
    if metric not in ("bleu", *ROUGE_TYPES):
        raise UserError(f"There is no test of {metric!r}; choose one of bleu, {', '.join(ROUGE_TYPES)}.")
    named = list(systems.items() if isinstance(systems, Mapping) else systems)
    systems = dict(named)
    if len(systems) < len(named):
        twice = sorted({str(name) for name, _ in named if [other for other, _ in named].count(name) > 1})
        raise UserError(f"There is more than one system named {', '.join(twice)}. Remedy: give each its own name.")
    if len(systems) < 2:
        raise UserError("A comparison needs a baseline and at least one other system.")
    streams = reference_streams(references)
    for hypotheses in systems.values():
        check_lengths(hypotheses, streams)
    measure: SacreMetric
    if metric == "bleu":
        measure = bleu_metric(lowercase, tokenize, streams)
    else:
        measure = RougeF1(metric, units, streams)
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
            # Any difference is at least as large as none; sacrebleu's bootstrap counts larger ones alone.
            p_value=1.0 if result.p_value is not None and result.score == base else result.p_value,
            interval=None if result.mean is None or result.ci is None else (result.mean, result.ci),
            signature=str(signatures[name]),
        )
        for system, result in zip(scores["System"], results, strict=True)
    ]


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
