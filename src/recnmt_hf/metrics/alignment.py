"""Word alignments in Pharaoh format, and their error rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..data.alignments import marked_links
from ..errors import UserError
from .bleu import TextMetric


Links = set[tuple[int, int]]


@dataclass
class GoldAlignment:
    """A hand-made alignment of a sentence pair, as (source, target) positions of words from 0."""

    sure: Links  # unambiguous
    possible: Links  # not counted as errors; the sure ones are added

    def __post_init__(self) -> None:
        self.possible = self.possible | self.sure


def parse_links(line: str, place: str = "the alignment", one_based: bool = False) -> GoldAlignment:
    """
    Parse a line of links: `0-0 1-2` (Pharaoh format), with `1p3` or `1?3` for possible ones.

    Args:
        line (`str`): Links separated by spaces; an empty line has none.
        place (`str`, *optional*): Name of the line in messages.
        one_based (`bool`, *optional*, defaults to `False`): Whether positions count from 1.

    Raises:
        UserError: A link has another form, or a position is below the first.
    """
    links = list(marked_links(line, place, one_based))
    return GoldAlignment({link for link, is_sure in links if is_sure}, {link for link, _ in links})


def format_links(links: Sequence[tuple[int, int]] | Links) -> str:
    """Return links in Pharaoh format, in order: `0-0 1-2`."""
    return " ".join(f"{i}-{j}" for i, j in sorted(links))


@dataclass
class AlignmentScore:
    """Alignment error rate of a corpus, with its parts; all from 0 to 1."""

    aer: float  # 1 - (|A & S| + |A & P|) / (|A| + |S|); lower is better
    precision: float  # |A & P| / |A|
    recall: float  # |A & S| / |S|
    links: int  # |A|
    sure: int  # |S|
    possible: int  # |P|

    def __str__(self) -> str:
        return (
            f"AER {100 * self.aer:.2f} (precision {100 * self.precision:.2f}, recall {100 * self.recall:.2f}; "
            f"{self.links} links, {self.sure} sure, {self.possible} possible)"
        )


def alignment_error_rate(predictions: Sequence[Links], references: Sequence[GoldAlignment]) -> AlignmentScore:
    """
    Compute the alignment error rate over a corpus (Och and Ney, 2003, section 6).

    Args:
        predictions (sequence of `set`): A, the links of each sentence pair.
        references (sequence of [`GoldAlignment`]): S and P.

    Raises:
        UserError: Their numbers differ, or there is neither a link nor a sure one.
    """
    if (count := len(predictions)) != len(references):
        raise UserError(f"alignments has {count} entries, but gold has {len(references)}.", field="alignments")
    sides = [(set(links), gold.sure, gold.possible) for links, gold in zip(predictions, references, strict=True)]
    links, sure, possible = (sum(map(len, side)) for side in zip(*sides, strict=True)) if sides else (0, 0, 0)
    in_sure = sum(len(links & sure) for links, sure, _ in sides)
    in_possible = sum(len(links & possible) for links, _, possible in sides)
    if links + sure == 0:
        raise UserError("Neither the alignments nor the gold alignments have links, so the error rate is undefined.")
    aer = 1 - (in_sure + in_possible) / (links + sure)
    return AlignmentScore(aer, in_possible / (links or 1), in_sure / (sure or 1), links, sure, possible)


class AlignmentErrorRate(TextMetric):
    """
    Alignment error rate; `AlignmentErrorRate().compute(predictions=["0-0 1-2"], references=["0-0 1p2"])`, one line of
    links in Pharaoh format for each sentence pair, possible links of the references as `1p2`. With `one_based=True`
    positions count from 1.
    """

    citation = "Och and Ney, 2003"

    def _compute(self, predictions: list[str], references: list[Any], **options: Any) -> dict[str, object]:
        sides = [
            [parse_links(line, f"{name} {number}", **options) for number, line in enumerate(lines, start=1)]
            for name, lines in (("prediction", predictions), ("reference", references))
        ]
        score = alignment_error_rate([alignment.possible for alignment in sides[0]], sides[1])
        return {"aer": score.aer, "precision": score.precision, "recall": score.recall}
