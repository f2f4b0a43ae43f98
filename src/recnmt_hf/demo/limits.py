"""Limits of the page: how much one visitor may ask for."""

from dataclasses import dataclass
from typing import Annotated

from ..options import MOST_BEAMS, Range, check_options, documented, option


@documented
@dataclass(frozen=True)
class Limits:
    """Limits of a request to the page, and of the number of requests."""

    max_characters: Annotated[int, Range(least=1, most=10_000_000)] = option(
        20_000, "maximum number of characters of a text"
    )
    max_beams: Annotated[int, Range(least=1, most=MOST_BEAMS)] = option(
        8, "largest beam size, and largest number of hypotheses, that can be chosen"
    )
    max_segment: Annotated[int, Range(least=8, most=100_000)] = option(
        256, "split sentences with more tokens than this"
    )
    batch_tokens: Annotated[int, Range(least=1, most=10_000_000)] = option(
        2_048, "maximum size of a batch in tokens (source tokens times beams), which bounds the memory"
    )
    time_limit: Annotated[float, Range(above=0, most=1_000_000)] = option(
        120.0, "seconds after which the translation of a text ends"
    )
    queue_size: Annotated[int, Range(least=1, most=10_000)] = option(20, "maximum number of waiting requests")
    parallel: Annotated[int, Range(least=1, most=1_000)] = option(2, "number of requests that run at the same time")

    def __post_init__(self) -> None:
        check_options(self)
