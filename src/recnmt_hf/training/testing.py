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


# Options of several beams or hypotheses, which have no effect on validation or are replaced there.
OF_BEAMS = ("beams", "num_hypotheses", "alignments", "on_long", "generate")
# Decoding options that every score records.
ALWAYS = ("beams", "length_penalty_type", "length_penalty")
SAMPLES = 1000


def recorded_options(options: DecodingOptions) -> dict[str, Any]:
    """Return beams and penalty, and all options that are not the default."""
    default, names = DecodingOptions(), [entry.name for entry in fields(options)]
    changed = {name for name in names if getattr(options, name) != getattr(default, name)}
    return {name: getattr(options, name) for name in names if name in changed.union(ALWAYS)}


def validation_options(decoding: Mapping[str, Any], beams: int) -> DecodingOptions:
    """
    Return the options of validation: those of test sets with other `beams`. Long sources are split instead of rejected,
    because they must not end the training.
    """
    options = {name: value for name, value in decoding.items() if name not in OF_BEAMS}
    generate = dict(decoding.get("generate", {}))
    if beams == 1:
        generate.pop("early_stopping", None)  # transformers rejects it
    on_long: Any = "truncate" if decoding.get("on_long") == "truncate" else "split"
    return DecodingOptions(**options, beams=beams, on_long=on_long, generate=generate)


def translate_segments(
    translator: Translator,
    sources: Sequence[Any],
    prefixes: Sequence[str],
    languages: Sequence[tuple[str | None, ...]],
    options: DecodingOptions,
    warn_short: bool = False,
) -> list[str]:
    """
    Return the translations of a validation or test set, one line each. Each source is one segment; splitting it would
    make scores incomparable. Translations begin with their prefix, which is not part of the text if it is a tag.
    `languages` are the codes of source and target of each segment, or empty for a model without tokens of languages.
    """
    texts = [""] * len(sources)
    for codes in dict.fromkeys(languages):
        rows = [row for row, own in enumerate(languages) if own == codes]
        names: dict[str, Any] = dict(zip(("source_lang", "target_lang"), codes, strict=False))
        results = translator.translate(
            [sources[row] for row in rows],
            replace(options, split_sentences="never", **names),
            [prefixes[row] for row in rows],
            scores=False,
            warn_short=warn_short,
        )
        for row, result in zip(rows, results, strict=True):
            texts[row] = on_one_line(result.text)
    return texts


def test_model(
    translator: Translator,
    name: str,
    sources: Sequence[Any],
    references: Sequence[Sequence[str]],
    language: str,
    options: DecodingOptions,
    scorer: TextScorer,
    dataset: Sequence[Mapping[str, Any]] = (),
    prefixes: Sequence[str] = (),
    languages: Sequence[tuple[str | None, ...]] = (),
) -> tuple[TestScore, list[str], str]:
    """
    Translate and score a test set with one or several sets of references. Return the score with `dataset` (its corpora,
    as in recipes), the translations, and a line with the score. [`add_score`] saves both; `language` is the suffix of
    the file of translations. `prefixes` and `languages` are those of [`translate_segments`].
    """
    prefixes, languages = prefixes or [""] * len(sources), languages or [()] * len(sources)
    texts = translate_segments(translator, sources, prefixes, languages, options, scorer.metric != "rouge")
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
        raise UserError(f"{baseline} has no translations of {score.name}, only of {names}.", field=baseline)
    other = known[score.name]
    if (other.source_sha256, other.reference_sha256) != (score.source_sha256, score.reference_sha256):
        raise UserError(f"{baseline} was tested on other sentences under the name {score.name}.", field=baseline)
    path = baseline / other.translations
    if not path.is_file():
        raise MissingFileError(f"{path} is missing. Test {baseline} again.", field=path)
    baseline_texts = list(read_lines(path))
    scores = scorer.scores(baseline_texts, references)  # the stored ones may be of another tokenizer
    score.baseline, score.baseline_scores = name, {kind: own.score for kind, own in scores.items()}
    score.p_value = scorer.compare(baseline_texts, texts, references, SAMPLES).p_value
    score.test = f"approximate randomization, {SAMPLES} samples"
