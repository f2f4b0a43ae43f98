"""Translating test sets with a finished model: scores and translations, kept in its folder with what they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..data.files import open_output
from ..data.text import SentencePair, read_lines
from ..inference.options import DecodingOptions
from ..inference.translator import Translator
from ..models.user_errors import MissingFileError, UserError
from .evidence import TRANSLATIONS, Evidence, TestScore, refuse_links, sum_of_lines
from .metrics import TextScorer


# Decoding options that every score records, even if they are defaults.
ALWAYS = ("beams", "length_penalty_type", "length_penalty")
SAMPLES = 1000


def options_in_words(options: DecodingOptions) -> dict[str, Any]:
    """Return beams and penalty, and all options that are not the default."""
    default = DecodingOptions()
    return {
        entry.name: getattr(options, entry.name)
        for entry in fields(options)
        if entry.name in ALWAYS or getattr(options, entry.name) != getattr(default, entry.name)
    }


def test_model(
    translator: Translator,
    name: str,
    pairs: Sequence[SentencePair],
    language: str,
    options: DecodingOptions,
    scorer: TextScorer,
    dataset: Sequence[Mapping[str, Any]] = (),
) -> tuple[TestScore, list[str], str]:
    """
    Translate a test set, and score the translations. [`add_score`] saves both.

    Args:
        translator ([`Translator`]): The model.
        name (`str`): Name of the test set.
        pairs (sequence of [`SentencePair`]): Sources and references.
        language (`str`): Code of the target language, the suffix of the file's name.
        options ([`DecodingOptions`]): Decoding options.
        scorer ([`TextScorer`]): Scorer of the translations.
        dataset (sequence of mappings, *optional*): The corpora of the pairs, as recipes have them.

    Returns:
        The score, the translations, and a line with the score.
    """
    references = [pair.target for pair in pairs]
    sources = (pair.source for pair in pairs)
    # A line is a segment: splitting it would change what the score is compared with.
    segments = replace(options, split_sentences="never")
    warns = scorer.metric != "rouge"
    texts = [result.text for result in translator.translate(sources, segments, scores=False, warn_short=warns)]
    scores = scorer.scores(texts, references)
    return (
        TestScore(
            name=name,
            scores={kind: score.score for kind, score in scores.items()},
            signature=next(iter(scores.values())).signature,
            sentences=len(pairs),
            source_sha256=sum_of_lines(pair.source for pair in pairs),
            reference_sha256=sum_of_lines(references),
            decoding=options_in_words(options),
            translations=f"{TRANSLATIONS}/{name}.{language}",
            dataset=[dict(corpus) for corpus in dataset],
        ),
        texts,
        f"{name}: {', '.join(map(str, scores.values()))}",
    )


test_model.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's


def add_score(evidence: Evidence, folder: Path, score: TestScore, texts: Sequence[str]) -> None:
    """
    Write translations into a model's folder, and add their score to its evidence.

    Args:
        evidence ([`Evidence`]): Of the model, as [`Evidence.changing`] gives it.
        folder (`Path`): Of the model.
        score ([`TestScore`]): Is added.
        texts (sequence of `str`): The translations.

    Raises:
        UserError: The file of translations is a link or cannot be written.
    """
    refuse_links(folder / score.translations)
    with open_output(folder / score.translations) as file:
        file.writelines(f"{text}\n" for text in texts)
    evidence.add(score)


def compare_with_baseline(
    score: TestScore,
    texts: Sequence[str],
    references: Sequence[str],
    baseline: Path,
    name: str,
    scorer: TextScorer,
) -> None:
    """
    Add to a score its difference from another model's score on the same test set.

    Args:
        score ([`TestScore`]): Is added to.
        texts (sequence of `str`): The translations.
        references (sequence of `str`): Of the test set.
        baseline (`Path`): Folder of the other model, whose evidence has the test set.
        name (`str`): What that model is called.
        scorer ([`TextScorer`]): Scorer of the translations.

    Raises:
        UserError: The other model has no score on this very test set.
    """
    known = {test.name: test for test in Evidence.load(baseline).tests}
    other = known.get(score.name)
    if other is None:
        listed = ", ".join(known) or "none"
        raise UserError(
            f"{baseline} has no translations of {score.name} (it has those of: {listed}). Remedy: test it first, with "
            "the same name of the test set."
        )
    if (other.source_sha256, other.reference_sha256) != (score.source_sha256, score.reference_sha256):
        raise UserError(
            f"{baseline} was tested on other sentences under the name {score.name}. Remedy: test it on the same files."
        )
    path = baseline / other.translations
    if not path.is_file():
        raise MissingFileError(f"{path} is missing. Remedy: test {baseline} again.")
    score.baseline, score.baseline_scores = name, dict(other.scores)
    score.p_value = scorer.compare(list(read_lines(path)), texts, references, SAMPLES).p_value
    score.test = f"paired bootstrap, {SAMPLES} samples"
