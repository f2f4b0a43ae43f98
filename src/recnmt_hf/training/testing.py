"""Translating test sets with a finished model: scores and translations, kept in its folder with what they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..data.corpora import Corpus
from ..data.files import open_output
from ..data.text import SentencePair, read_lines
from ..inference.options import DecodingOptions
from ..inference.translator import Translator
from ..metrics.significance import compare_systems
from ..models.user_errors import MissingFileError, UserError
from .evidence import TRANSLATIONS, Evidence, TestScore, refuse_links, sum_of_lines
from .metrics import TEXT_METRICS, text_scores


# What every score says of its decoding, defaults too.
ALWAYS = ("beams", "length_penalty_type", "length_penalty")
SAMPLES = 1000


def options_in_words(options: DecodingOptions) -> dict[str, Any]:
    """Beams and penalty, and what differs from the defaults."""
    plain = DecodingOptions()
    return {
        each.name: getattr(options, each.name)
        for each in fields(options)
        if each.name in ALWAYS or getattr(options, each.name) != getattr(plain, each.name)
    }


def as_said(corpus: Corpus | Mapping[str, Any]) -> dict[str, Any]:
    """A corpus as a recipe says it, without what it leaves to the defaults."""
    if not isinstance(corpus, Corpus):
        return dict(corpus)
    return {
        each.name: getattr(corpus, each.name) for each in fields(Corpus) if getattr(corpus, each.name) != each.default
    }


def test_model(
    translator: Translator,
    name: str,
    pairs: Sequence[SentencePair],
    language: str,
    options: DecodingOptions,
    training: Mapping[str, Any],
    dataset: Sequence[Corpus | Mapping[str, Any]] = (),
) -> tuple[TestScore, list[str], str]:
    """
    Translates a test set, and scores the translations. [`add_score`] keeps both.

    Args:
        translator ([`Translator`]): The model.
        name (`str`): Of the test set.
        pairs (sequence of [`SentencePair`]): Sources and references.
        language (`str`): Of the target; ends the file's name.
        options ([`DecodingOptions`]): How.
        training (mapping): `text_metric`, `rouge_units` and `bleu_lowercase` of a recipe.
        dataset (sequence of [`Corpus`] or mappings, *optional*): Where the pairs come from, as recipes say it.

    Returns:
        The score, the translations, and the score in words.
    """
    references = [pair.target for pair in pairs]
    sources = (pair.source for pair in pairs)
    is_rouge = training.get("text_metric") == "rouge"
    # A line is a segment: splitting it would change what the score is compared with.
    segments = replace(options, split_sentences="never")
    found = [each.text for each in translator.translate(sources, segments, scores=False, warn_short=not is_rouge)]
    scores = text_scores(
        found,
        references,
        training.get("text_metric", "bleu"),
        training.get("rouge_units", "words"),
        bool(training.get("bleu_lowercase")),
    )
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
            dataset=[as_said(each) for each in dataset],
        ),
        found,
        f"{name}: {', '.join(map(str, scores.values()))}",
    )


test_model.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's


def add_score(evidence: Evidence, folder: Path, score: TestScore, found: Sequence[str]) -> None:
    """
    Write translations into a model's folder, and add their score to its evidence.

    Args:
        evidence ([`Evidence`]): Of the model, as [`Evidence.changing`] gives it.
        folder (`Path`): Of the model.
        score ([`TestScore`]): Is added.
        found (sequence of `str`): The translations.

    Raises:
        UserError: The file of translations is a link or cannot be written.
    """
    refuse_links(folder / score.translations)
    with open_output(folder / score.translations) as file:
        file.writelines(f"{text}\n" for text in found)
    evidence.add(score)


def compare_with_baseline(
    score: TestScore,
    found: Sequence[str],
    references: Sequence[str],
    baseline: Path,
    name: str,
    training: Mapping[str, Any],
) -> None:
    """
    Adds to a score how it differs from what another model scored on the same test set.

    Args:
        score ([`TestScore`]): Is added to.
        found (sequence of `str`): The translations.
        references (sequence of `str`): Of the test set.
        baseline (`Path`): Folder of the other model, whose evidence has the test set.
        name (`str`): What that model is called.
        training (mapping): As for [`test_model`].

    Raises:
        UserError: The other model has no score on this very test set.
    """
    known = {each.name: each for each in Evidence.load(baseline).tests}
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
    kind = training.get("text_metric", "bleu")
    options: dict[str, Any] = {"lowercase": bool(training.get("bleu_lowercase"))}
    if kind == "rouge":
        options = {"metric": TEXT_METRICS[kind][-1], "units": training.get("rouge_units", "words")}
    systems = [("baseline", list(read_lines(path))), ("model", list(found))]
    result = compare_systems(systems, references, samples=SAMPLES, **options)[-1]
    score.baseline, score.baseline_scores, score.p_value = name, dict(other.scores), result.p_value
    score.test = f"paired bootstrap, {SAMPLES} samples"
