"""Test sets: scores and translations of a finished model, saved in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .._plain_text import on_one_line
from ..data.text import read_lines, write_lines
from ..errors import MissingFileError, UserError
from ..inference.options import DecodingOptions
from ..inference.translator import Translator
from .evidence import TRANSLATIONS, Evidence, TestScore, refuse_links, sum_of_lines
from .metrics import TextScorer


# Decoding options that every score records.
ALWAYS = ("beams", "length_penalty_type", "length_penalty")
SAMPLES = 1000


def recorded_options(options: DecodingOptions) -> dict[str, Any]:
    """Return beams and penalty, and all options that are not the default."""
    default, names = DecodingOptions(), [entry.name for entry in fields(options)]
    changed = {name for name in names if getattr(options, name) != getattr(default, name)}
    return {name: getattr(options, name) for name in names if name in changed.union(ALWAYS)}


def test_model(
    translator: Translator,
    name: str,
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    language: str,
    options: DecodingOptions,
    scorer: TextScorer,
    dataset: Sequence[Mapping[str, Any]] = (),
    tag: str | None = None,
) -> tuple[TestScore, list[str], str]:
    """
    Translate and score a test set with one or several sets of references. Return the score with `dataset` (its corpora,
    as in recipes), the translations, and a line with the score. [`add_score`] saves both; `language` is the suffix of
    the file of translations. With `tag` all translations begin with it; it is not part of their texts.
    """
    # A line is a segment; splitting it would make scores incomparable.
    segments = replace(options, split_sentences="never")
    warns = scorer.metric != "rouge"
    prefixes = None if tag is None else [tag] * len(sources)
    results = translator.translate(sources, segments, prefixes, scores=False, warn_short=warns)
    texts = [on_one_line(result.text) for result in results]
    scores = scorer.scores(texts, references)
    return (
        TestScore(
            name=name,
            scores={kind: score.score for kind, score in scores.items()},
            signature=next(iter(scores.values())).signature,
            sentences=len(sources),
            source_sha256=sum_of_lines(sources),
            reference_sha256=sum_of_lines(chain(*references)),
            decoding=recorded_options(options),
            translations=f"{TRANSLATIONS}/{name}.{language}",
            dataset=[dict(corpus) for corpus in dataset],
            references=len(references),
        ),
        texts,
        f"{name}: {', '.join(map(str, scores.values()))}",
    )


test_model.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's


def add_score(evidence: Evidence, folder: Path, score: TestScore, texts: Sequence[str]) -> None:
    """Write translations into a model's folder (`UserError` for a link), and add their score to its evidence."""
    refuse_links(folder / score.translations)
    write_lines(folder / score.translations, texts)
    evidence.add(score)


def compare_with_baseline(
    score: TestScore,
    texts: Sequence[str],
    references: Sequence[Sequence[str]],
    baseline: Path,
    name: str,
    scorer: TextScorer,
) -> None:
    """
    Add to a score its difference from that of another model, called `name`, on the same test set. `UserError` if the
    evidence in the folder `baseline` has no such score.
    """
    known = {test.name: test for test in Evidence.load(baseline).tests}
    if score.name not in known:
        names = ", ".join(known) or "none"
        raise UserError("test.not_tested", field=str(baseline), name=score.name, known=names)
    other = known[score.name]
    if (other.source_sha256, other.reference_sha256) != (score.source_sha256, score.reference_sha256):
        raise UserError("test.other_sentences", field=str(baseline), name=score.name)
    path = baseline / other.translations
    if not path.is_file():
        raise MissingFileError("test.missing_translations", field=str(path), model=baseline)
    score.baseline, score.baseline_scores = name, dict(other.scores)
    score.p_value = scorer.compare(list(read_lines(path)), texts, references, SAMPLES).p_value
    score.test = f"approximate randomization, {SAMPLES} samples"
