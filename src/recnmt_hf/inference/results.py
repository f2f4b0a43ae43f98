"""Results of translating and scoring: hypotheses, translations, scores."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Hypothesis:
    """
    One translation of a sentence.

    Attributes:
        text (`str`): Plain text. That of a split text is joined from its parts.
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


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids that the model wrote for a piece of a text; the attributes are as in [`Hypothesis`]."""

    ids: list[int]
    score: float
    log_prob: float
    alignment: list[tuple[int, int]] | None = None


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
