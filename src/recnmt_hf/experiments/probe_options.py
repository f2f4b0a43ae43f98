"""How probes are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .._values import MOST_SEED, Range, check_options, documented, option


@documented
@dataclass
class ProbeOptions:
    """
    How a probe is trained: Adam on frozen, standardized vectors, until the validation loss no longer falls.
    """

    epochs: Annotated[int, Range(least=1, most=10000)] = option(50, "most passes over the training pairs")
    patience: Annotated[int, Range(least=1)] = option(3, "passes without a lower validation loss after which it ends")
    batch_size: Annotated[int, Range(least=1)] = option(64, "sentences of a batch")
    learning_rate: Annotated[float, Range(above=0)] = option(1e-3, "of Adam")
    seed: Annotated[int, Range(least=0, most=MOST_SEED)] = option(1, "of the probe's first weights and the batches")

    def __post_init__(self) -> None:
        check_options(self)
