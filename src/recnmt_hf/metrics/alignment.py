"""Word alignments in Pharaoh format, and their error rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import evaluate

from ..models.user_errors import UserError


Links = set[tuple[int, int]]


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
