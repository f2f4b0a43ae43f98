"""Faults of translations that a score does not show."""

from collections import Counter
from collections.abc import Iterator, Sequence

from .._plain_text import count_words
from .bleu import References, reference_sets


def suspicions(
    hypotheses: Sequence[str], references: References, sources: Sequence[str] | None = None, tokenize: str | None = None
) -> Iterator[str]:
    """Yield a warning for each fault: wrong tokenizer, nearly constant output, copies of sources, wrong lengths."""
    first, count = reference_sets(hypotheses, references)[0], len(hypotheses)
    frequent = sum(number for _, number in Counter(hypotheses).most_common(3))
    if len(set(sources or first)) > 6 and 2 * frequent > count:
        yield f"{frequent} of {count} translations are one of three strings."
    if sources is not None:
        copied = sum(one.split() == source.split() != [] for one, source in zip(hypotheses, sources, strict=True))
        if 4 * copied > count:
            yield f"{copied} of {count} translations are copies of their sources."
    lengths = [(count_words(one), count_words(reference)) for one, reference in zip(hypotheses, first, strict=True)]
    if tokenize == "13a" and sum(other for _, other in lengths) > 2 * len(" ".join(first).split()):
        yield "the references have no spaces between words; BLEU needs their --language."
    shorter, longer = sum(2 * own < other for own, other in lengths), sum(own > 2 * other for own, other in lengths)
    for text, number in (("shorter than half", shorter), ("longer than twice", longer)):
        if 4 * number > count:
            yield f"{number} of {count} translations are {text} the length of their references."
