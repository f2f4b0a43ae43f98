#!/usr/bin/env python
"""
Write the results of a comparison of models from their evidence: the sections of the README, the cards and the page
between `<!-- results: NAME SECTION -->` and `<!-- end -->`, a CSV file, and the plots if a document has their section.

    python scripts/results.py                                  # with the stored scores and gains
    python scripts/results.py --references data/multi30k       # computes and stores those that are missing

The folder `model_cards/evidence/NAME` has a subfolder ROW-SEED for each run with `evidence.json` and `translations/` of
its model, and optionally the file `speed.json` that `scripts/benchmarks/table_speed.py` writes. The rows are those of
`scripts/recipes/rows/NAME.yaml`; the first one is the baseline. `NAME_papers.yaml` beside it says where the papers'
figures for the rows are, and which rows have a verdict.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import methodcaller
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any


sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "experiments")]
from length_penalties import RESULT as PENALTIES
from measures import gain_of, marks_of, scores_of
from sweep import read_rows

from recnmt_hf.analysis import plots
from recnmt_hf.analysis.plots import check_picture
from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.data.files import locked_file, open_output
from recnmt_hf.data.text import read_lines
from recnmt_hf.errors import MissingFileError, UserError, short_repr
from recnmt_hf.families import FAMILIES, PaperTable
from recnmt_hf.hub.card import describe_decoding, markdown_table, number
from recnmt_hf.metrics.bleu import bleu_tokenizer, scores_by_length
from recnmt_hf.metrics.significance import holm
from recnmt_hf.training.evidence import EVIDENCE, Evidence, TestScore, sum_of_lines
from recnmt_hf.training.recipe_yaml import read_yaml


SPEED, SCORES, TABLE = "speed.json", "scores.json", "table.csv"
# Settings of a recipe's training that all rows share: they determine how many words are read, and how often.
BUDGET = ("max_steps", "max_tokens", "gradient_accumulation_steps", "eval_steps", "bleu_samples", "bf16", "fp16")
# Figures of a row in `speed.json`, lists with a value for each turn, and their settings.
TRANSLATED, TRAINED, MEMORY = FIGURES = "sentences_per_second", "training_tokens_per_second", "training_mebibytes"
FIRST_STAGE = "first_stage_tokens_per_second"  # of rows with two stages
SPEED_SETTINGS = ("beams", "batch", "max_tokens", "sentences")
PLACE = re.compile(r"(<!-- results: (\w+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TOLERANCE = 1e-6  # of BLEU
EDGES = (5, 10, 15, 20, 30, 40)  # words of a source
# Settings that the rows of a fair table share; the column "recipe" names the others.
SHARED = (
    ("model", "dropout", "dropout"),
    ("model", "attention_dropout", "attention dropout"),
    ("model", "activation_dropout", "activation dropout"),
    ("model", "readout_dropout", "read-out dropout"),
    ("training", "max_grad_norm", "clipping"),
)


@dataclass
class Run:
    """A trained model of a row."""

    folder: Path
    seed: int
    evidence: Evidence

    @property
    def hours(self) -> float:
        return self.evidence.training["seconds"] / 3600

    def test(self, name: str) -> TestScore:
        return next(test for test in self.evidence.tests if test.name == name)

    def translations(self, name: str) -> list[str]:
        return list(read_lines(self.folder / self.test(name).translations))

    def evaluations(self) -> list[dict[str, Any]]:
        return [point for point in self.evidence.curve if "eval_loss" in point]

    @property
    def baseline_steps(self) -> int | None:
        return self.evidence.recipe.get("training", {}).get("baseline_steps")


@dataclass
class Row:
    """A row of the table: the runs of a model with different seeds."""

    name: str
    runs: list[Run]
    speeds: dict[str, dict[str, Any]] = field(default_factory=dict)  # what `table_speed.py` measured, by hardware
    scores: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by test set, one for each run
    gains: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # over a row, on a test set
    corrected: dict[str, float] = field(default_factory=dict)  # p-values against the first row

    @property
    def evidence(self) -> Evidence:
        return self.runs[0].evidence

    @property
    def label(self) -> str:
        return self.name + (" (two stages)" if self.runs[0].baseline_steps is not None else "")

    def bleu(self, test: str) -> list[float]:
        return [run.test(test).scores["bleu"] for run in self.runs]

    def score(self, name: str, test: str) -> list[float]:
        return [scores[name] for scores in self.scores.get(test, [])]

    def hours(self) -> dict[str, list[float]]:
        """Return the hours of the runs by the hardware that trained them."""
        values: dict[str, list[float]] = {}
        for run in self.runs:
            values.setdefault(run.evidence.training["hardware"], []).append(run.hours)
        return values

    def measured(self, figure: str) -> dict[str, list[float]]:
        """Return what `table_speed.py` measured, by hardware: a list with the median of the turns."""
        return {hardware: [median(speed[figure])] for hardware, speed in self.speeds.items()}


@dataclass(frozen=True)
class Claim:
    """Results that a paper reports for a row."""

    row: str
    baseline: str  # the row that the paper compares it with
    system: str  # its name in the paper's tables
    tables: Sequence[PaperTable]
    family: str
    control: str | None  # a row without the mechanism that the paper holds to be the cause
    has_verdict: bool

    def gains(self) -> list[float]:
        """Return the paper's differences to its baseline, on translation at the sizes below big."""
        tables = [table for table in self.tables if "BLEU" in table.task.metric and table.size != "big"]
        found = [table.differences(row) for table in tables if (row := table.row(self.system))]
        return list(chain(*dict.fromkeys(found)))

    def text(self) -> str:
        """Return the paper's scores of translation at the sizes below big, beside those of its baseline."""
        texts: dict[str, str] = {}  # by corpus and scores, which some papers print in several tables
        for table in self.tables:
            if "BLEU" in table.task.metric and table.size != "big" and (row := table.row(self.system)):
                (score, difference), mark = table.texts(self.system), f", p {row.p}" if row.p else ""
                pair = "-".join(map(str.capitalize, table.task.languages))
                base = f"{table.baseline.system} {table.texts(table.baseline.system)[0]}"
                figures = f"{table.task.name} {pair}, {base}: {score}"
                texts.setdefault(figures, f"{figures} ({difference}{mark})")
        return "; ".join(texts.values())


def slug(name: str) -> str:
    """Return the name of a row as folders have it, such as `relative_positions`."""
    return re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")


def read_json(path: Path, default: Any) -> Any:
    """Return the content of an optional file that this script or `table_speed.py` wrote."""
    if not path.is_file():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}).", field=path) from error
    if not isinstance(content, type(default)):
        raise UserError(f"{path} cannot be read (it is not a {type(default).__name__}).", field=path)
    return content


def read_speeds(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures that `table_speed.py` measured, with their settings, by row and hardware."""
    speeds: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in read_json(path, []):
        check_entry(path, entry, "hardware", "rows", *SPEED_SETTINGS)
        check_entry(path, entry["rows"])
        for name, figures in entry["rows"].items():
            check_entry(path, figures, *FIGURES)
            for turns in figures.values():
                if not isinstance(turns, list) or not turns or not all(isinstance(one, float | int) for one in turns):
                    raise UserError(f"{path} cannot be read (the row {name} has no numbers).", field=path)
            settings = {setting: entry[setting] for setting in SPEED_SETTINGS}
            speeds.setdefault(slug(name), {})[entry["hardware"]] = {**settings, **figures}
    return speeds


def read_scores(path: Path) -> dict[str, Any]:
    """Return the stored scores of runs and gains of rows, as [`measure`] returns them."""
    stored = read_json(path, {})
    for section in ("runs", "gains"):
        check_entry(path, stored.setdefault(section, {}))
        for tests in stored[section].values():
            check_entry(path, tests)
            for entry in tests.values():
                check_entry(path, entry, "sha256")
    return stored


def check_entry(path: Path, entry: Any, *names: str) -> None:
    """Raise `UserError` unless an entry of a file is a mapping with these names."""
    if not isinstance(entry, dict) or not all(name in entry for name in names):
        reason = f"an entry is not a mapping with {', '.join(names)}" if names else "an entry is not a mapping"
        raise UserError(f"{path} cannot be read ({reason}).", field=path)


def read_run(folder: Path, seed: int) -> Run:
    """Return the run in a folder; `UserError` if its evidence is missing, damaged or incomplete."""
    path = folder / EVIDENCE
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist.", field=path)
    run = Run(folder, seed, Evidence.load(folder))
    training = run.evidence.training
    for name, value in (
        ("parameters", run.evidence.model.get("parameters")),
        ("training time", training.get("seconds")),
        ("evaluations", run.evaluations()),
        ("test sets with BLEU", run.evidence.tests and all("bleu" in test.scores for test in run.evidence.tests)),
    ):
        if not value:
            raise UserError(f"{path} has no {short_repr(name)}.", field=path)
    if training["seed"] != seed:
        raise UserError(f"The seed is {training['seed']}, but {seed} in the name of the folder.", field=path)
    for test in run.evidence.tests:
        if not (folder / test.translations).is_file():
            raise MissingFileError(f"{folder / test.translations} does not exist.", field=folder / test.translations)
    return run


def budget_of(run: Run) -> dict[str, Any]:
    """Return what must be the same in all runs, by name."""
    evidence, training = run.evidence, run.evidence.recipe.get("training", {})
    values: dict[str, Any] = {"languages": evidence.languages, "data": evidence.data, "tokenizer": evidence.tokenizer}
    values |= {"steps": evidence.training["steps"], "processes": evidence.training["processes"]}
    values |= {f"training.{name}": training.get(name) for name in BUDGET}
    values["test sets"] = sorted(test.name for test in evidence.tests)
    for test in evidence.tests:
        values |= {
            f"{name} of {test.name}": getattr(test, name)
            for name in ("signature", "decoding", "sentences", "source_sha256", "reference_sha256")
        }
    return values


def model_of(run: Run) -> dict[str, Any]:
    """Return what must be the same in all runs of a row, by name."""
    recipe = {section: dict(values) for section, values in run.evidence.recipe.items()}
    recipe.get("training", {}).pop("seed", None)
    return {"model": run.evidence.model, **{f"recipe.{section}": values for section, values in recipe.items()}}


def check_same(runs: Sequence[Run], values_of: Callable[[Run], Mapping[str, Any]]) -> None:
    """Raise `UserError` unless all runs have the values of the first one."""
    first = values_of(runs[0])
    for run in runs[1:]:
        own = values_of(run)
        for name in dict.fromkeys([*first, *own]):
            if own.get(name) != first.get(name):
                raise UserError(
                    f"{name} is {short_repr(own.get(name))}, but {first.get(name)} in {runs[0].folder.name}.",
                    field=run.folder / EVIDENCE,
                )


def read_results(folder: Path, rows: Path) -> tuple[list[Row], list[str]]:
    """
    Return the rows of a comparison that have runs, in the order of the file of rows, and the names of the others.

    Raises:
        UserError: There are no runs of the first row, or a folder is not a run, damaged, or not comparable.
    """
    names = {slug(name): name for name in read_rows(rows)}
    runs: dict[str, list[Run]] = {name: [] for name in names.values()}
    for place in sorted(path for path in folder.glob("*") if path.is_dir()):
        name, _, seed = place.name.rpartition("-")
        if slug(name) not in names or not seed.isdigit():
            raise UserError(
                f"{place} must be named after a row of {rows.name} and a seed, such as {next(iter(names))}-1.",
                field=place,
            )
        runs[names[slug(name)]].append(read_run(place, int(seed)))
    baseline = next(iter(runs))
    if not runs[baseline]:
        raise UserError(
            f"{folder / f'{slug(baseline)}-1'} has no folder ROW-SEED with evidence.",
            field=folder / f"{slug(baseline)}-1",
        )
    result = [Row(name, sorted(own, key=lambda run: run.seed)) for name, own in runs.items() if own]
    check_same([run for row in result for run in row.runs], budget_of)
    speeds = read_speeds(folder / SPEED)
    for row in result:
        check_same(row.runs, model_of)
        row.speeds = speeds.get(slug(row.name), {})
        for speed in row.speeds.values() if row.runs[0].baseline_steps is not None else ():
            check_entry(folder / SPEED, speed, FIRST_STAGE)
    return result, [name for name, own in runs.items() if not own]


def read_claims(path: Path, names: Sequence[str]) -> list[Claim]:
    """Return the papers' claims about the rows of a comparison; none without the file."""
    content = read_yaml(path) if path.is_file() else {}
    check_entry(path, content)
    claims = []
    for row, entry in content.items():
        check_entry(path, entry, "family")
        baseline, family = entry.get("baseline", names[0]), FAMILIES.get(entry["family"])
        claim = Claim(
            row,
            baseline,
            entry.get("system", row),
            family.tables if family else (),
            entry["family"],
            entry.get("control"),
            entry.get("verdict", False),
        )
        if not {row, baseline, claim.control or row} <= set(names) or not claim.text():
            raise UserError(
                f"{short_repr(row)} or its baseline is not a row of the comparison, or the papers' tables of its "
                "family have no BLEU for this system.",
                field=path,
            )
        claims.append(claim)
    return claims


def test_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the test sets."""
    return [test.name for test in rows[0].evidence.tests]


def shared_runs(baseline: Row, row: Row) -> list[tuple[Run, Run]]:
    """Return the pairs of runs of two rows with the same seed."""
    by_seed = {run.seed: run for run in baseline.runs}
    return [(by_seed[run.seed], run) for run in row.runs if run.seed in by_seed]


def sum_of_pairs(pairs: Sequence[tuple[Run, Run]], test: str) -> str:
    """Return the checksum of the translations that a comparison reads."""
    return sum_of_lines(line for run in chain(*pairs) for line in run.translations(test))


def read_references(folder: Path, test: TestScore) -> list[list[str]]:
    """Return the sets of references of a test set, found by the names of its files; `UserError` if they are others."""
    targets: list[Any] = [corpus.get("target") for corpus in test.dataset]
    if not all(targets):  # not from files
        raise UserError(
            f"{folder} does not have the references of {test.name}, whose checksum is in the evidence.", field=folder
        )
    paths = [
        [folder / Path(file).name for file in (target if isinstance(target, list) else [target])] for target in targets
    ]
    for path in chain(*paths):
        if not path.is_file():
            raise MissingFileError(f"{path} does not exist.", field=path)
    columns = [[list(read_lines(path)) for path in files] for files in paths]
    references = [list(chain(*lines)) for lines in zip(*columns, strict=True)]
    if sum_of_lines(chain(*references)) != test.reference_sha256:
        raise UserError(
            f"{', '.join(map(str, chain(*paths)))} does not have the references of {test.name}, whose checksum is in "
            "the evidence.",
            field=", ".join(map(str, chain(*paths))),
        )
    return references


def compared_rows(rows: Sequence[Row], claims: Sequence[Claim]) -> list[tuple[Row, Row]]:
    """Return the pairs of rows that are compared, the baseline first: the first row, and those that claims name."""
    by_name = {row.name: row for row in rows}
    names = [(rows[0].name, row.name) for row in rows[1:]]
    names += [(other, claim.row) for claim in claims for other in (claim.baseline, claim.control) if other]
    return [(by_name[a], by_name[b]) for a, b in dict.fromkeys(names) if a in by_name and b in by_name and a != b]


def measure(
    rows: Sequence[Row],
    claims: Sequence[Claim],
    folder: Path,
    samples: int,
    stored: Mapping[str, Any],
    by_length: Collection[str] = (),
) -> dict[str, Any]:
    """
    Return the scores of all runs, for the test sets `by_length` also by length of the source, and the gains of compared
    rows, as [`SCORES`] stores them; keep what is there.
    """
    runs: dict[str, Any] = {}
    gains: dict[str, Any] = {}
    for test in test_names(rows):
        first_run = rows[0].runs[0].test(test)
        references = read_references(folder, first_run)
        tokenizer = next(iter(re.findall(r"\btok:([\w-]+)", first_run.signature)), None)
        for run in (run for row in rows for run in row.runs):
            texts, own = run.translations(test), run.test(test)
            entry = stored["runs"].get(run.folder.name, {}).get(test, {})
            if entry.get("sha256") != (checksum := sum_of_lines(texts)):
                entry = {**scores_of(texts, references, tokenizer), "sha256": checksum}
            if test in by_length and "by_length" not in entry:
                sources = list(chain(*(read_lines(folder / Path(corpus["source"]).name) for corpus in own.dataset)))
                bins = scores_by_length(sources, texts, references, EDGES, tokenizer)
                entry["by_length"] = [(words, size, score.score, score.length_ratio) for words, size, score in bins]
            bleu, same = entry["bleu"], entry["signatures"]["BLEU"] == own.signature
            if same and abs(bleu - own.scores["bleu"]) > TOLERANCE:
                raise UserError(
                    f"{run.folder} has BLEU {own.scores['bleu']} on {test}, but its translations have {bleu}.",
                    field=run.folder,
                )
            runs.setdefault(run.folder.name, {})[test] = entry
        for baseline, row in compared_rows(rows, claims):
            if pairs := shared_runs(baseline, row):
                key, checksum = f"{row.name} over {baseline.name}", sum_of_pairs(pairs, test)
                entry = stored["gains"].get(key, {}).get(test, {})
                if entry.get("sha256") != checksum or entry["samples"] != samples:
                    first, second = ([run.translations(test) for run in side] for side in zip(*pairs, strict=True))
                    entry = {**gain_of(first, second, references, samples, tokenizer), "sha256": checksum}
                gains.setdefault(key, {})[test] = entry
    return {"runs": runs, "gains": gains}


def add_stored(rows: Sequence[Row], claims: Sequence[Claim], stored: Mapping[str, Any]) -> list[str]:
    """Add stored scores and gains to rows, unless they belong to other translations; return what is missing."""
    missing = []
    for test in test_names(rows):
        for row in rows:
            own = [stored["runs"].get(run.folder.name, {}).get(test, {}) for run in row.runs]
            if [entry.get("sha256") for entry in own] == [sum_of_lines(run.translations(test)) for run in row.runs]:
                row.scores[test] = own
            else:
                missing.append(f"scores of {row.name} on {test}")
        for baseline, row in compared_rows(rows, claims):
            if pairs := shared_runs(baseline, row):
                entry = stored["gains"].get(f"{row.name} over {baseline.name}", {}).get(test, {})
                if entry.get("sha256") == sum_of_pairs(pairs, test):
                    row.gains[baseline.name, test] = entry
                else:
                    missing.append(f"gain of {row.name} over {baseline.name} on {test}")
        compared = [row for row in rows[1:] if (rows[0].name, test) in row.gains]
        p_values = [row.gains[rows[0].name, test]["p_value"] for row in compared]
        for row, value in zip(compared, holm(p_values), strict=True):
            row.corrected[test] = value
    return missing


def marks(row: Row, baseline: Row, test: str) -> list[str]:
    """Return the marks of a row's gain over another one: what BLEU alone does not say."""
    entry = row.gains.get((baseline.name, test))
    if entry is None:
        return []
    seeds = {run.seed for _, run in shared_runs(baseline, row)}

    def score(name: str, side: Row) -> float:
        values = zip(side.runs, side.score(name, test), strict=False)  # a side without stored scores counts as 0
        return mean([value for run, value in values if run.seed in seeds] or [0.0])

    chrf, ter = (score(name, row) - score(name, baseline) for name in ("chrf", "ter"))
    return marks_of(entry, chrf, ter)


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and standard deviation, `None` for one value."""
    return mean(values), stdev(values) if len(values) > 1 else None


def text_of(values: Sequence[float], digits: int = 2) -> str:
    """Return mean and standard deviation as text."""
    if not values:
        return ""
    middle, deviation = spread(values)
    return f"{middle:,.{digits}f}" + ("" if deviation is None else f" ± {deviation:,.{digits}f}")


def p_text(value: float | None) -> str:
    """Return a p-value as text."""
    return "" if value is None else "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")


def hardware_of(rows: Sequence[Row], values: Callable[[Row], Mapping[str, Any]]) -> list[str]:
    """Return the hardware of values, the most frequent one first."""
    names = [name for row in rows for name in values(row)]
    return sorted(dict.fromkeys(names), key=lambda name: -names.count(name))


# File, title and values of each plot.
PLOTS: tuple[tuple[str, str, Callable[[Row], Mapping[str, Sequence[float]]]], ...] = (
    ("bleu_over_hours.svg", "training hours", Row.hours),
    ("bleu_over_speed.svg", "sentences per second", methodcaller("measured", TRANSLATED)),
)


def cells_of(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Return the cells of a row of the table, by column."""
    tests = test_names(rows)
    cells = {"model": row.label, "seeds": str(len(row.runs))}
    cells["parameters"] = f"{row.evidence.model['parameters'] / 1e6:.2f}M"
    for test in tests:
        lengths = row.score("length_ratio", test)
        cells[f"BLEU (length) {test}"] = text_of(row.bleu(test)) + (f" ({mean(lengths):.2f})" if lengths else "")
        for metric, digits in (("chrF", 2), ("TER", 1)):
            scores = row.score(metric.lower(), test)
            cells[f"{metric} {test}"] = f"{mean(scores):.{digits}f}" if scores else ""
        p = p_text(row.corrected.get(test))
        cells[f"p {test}"] = ", ".join([p, *marks(row, rows[0], test)]) if p else ""
        cells[f"gain {test}"] = gain_text(row, rows[0], rows[0], test) if p else ""
    cells["recipe"] = differing_settings(row, rows[0])
    cells["validation loss"] = text_of([run.evaluations()[-1]["eval_loss"] for run in row.runs], 3)
    for title, digits, values in (
        ("training hours", 2, Row.hours),
        ("training tokens/s", 0, methodcaller("measured", TRAINED)),
        ("training MiB", 0, methodcaller("measured", MEMORY)),
        ("sentences/s", 1, methodcaller("measured", TRANSLATED)),
    ):
        names = hardware_of(rows, values)
        for name in names:
            head = title if len(names) == 1 else f"{title}, {name}"
            cells[head] = text_of(values(row).get(name, []), digits)
    return cells


# First words of the columns of a whole table; the others are in its CSV file.
COLUMNS = ("model", "seeds", "parameters", "BLEU", "chrF", "TER", "p ", "recipe", "sentences/s")


def differing_settings(row: Row, first: Row) -> str:
    """Return the settings of training and regularization that a row does not share with the first one."""
    texts, has_same_type = [], row.evidence.model["type"] == first.evidence.model["type"]
    for section, name, title in SHARED:
        own, other = (each.evidence.recipe.get(section, {}) for each in (row, first))
        if section == "model":
            own, other = own.get("fields", {}), other.get("fields", {})
        if own.get(name) != other.get(name) and (own.get(name) is not None or has_same_type):
            texts.append(f"{title} {own.get(name, 'of the preset')}")
    return ", ".join(texts)


def table_of(rows: Sequence[Row], all_rows: Sequence[Row], names: Sequence[str] = ()) -> str:
    """Return a table of rows without empty columns; `names` are the first words of the columns, by default all."""
    lines = [cells_of(row, all_rows) for row in rows]
    heads = [head for head in lines[0] if any(line[head] for line in lines)]
    heads = [head for head in heads if not names or head.startswith(tuple(names))]
    return markdown_table([heads, *([line[head] for head in heads] for line in lines)])


def lengths_of(rows: Sequence[Row], test: str) -> str:
    """Return a table of BLEU and length ratio by length of the source, means over seeds, as far as they are stored."""
    lines: list[list[Any]] = []
    unit = "words" if bleu_tokenizer(rows[0].evidence.languages[0]) == "13a" else "characters"
    for row in rows:
        stored = (scores["by_length"] for scores in row.scores.get(test, []) if "by_length" in scores)
        bins = list(zip(*stored, strict=True))
        lines = lines or [[unit, *(runs[0][0] for runs in bins)], ["sentences", *(runs[0][1] for runs in bins)]]
        means = ([mean(run[place] for run in runs) for place in (2, 3)] for runs in bins)
        lines.append([row.label, *(f"{bleu:.2f} ({ratio:.2f})" for bleu, ratio in means)])
    return markdown_table([list(map(str, line)) for line in lines])


def tuned_of(rows: Sequence[Row]) -> str:
    """
    Return a table of BLEU and length ratio with the length penalty tuned on the validation set (there also with the
    recipe's), means over seeds, for the rows whose runs all have [`PENALTIES`].
    """
    lines: list[dict[str, str]] = []
    for row in rows:
        paths = [run.folder / PENALTIES for run in row.runs]
        if all(path.is_file() for path in paths):
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            alpha = ", ".join(str(run["tuned_length_penalty"]) for run in runs)
            cells = {"model": row.label, "penalty": alpha}
            for test in ("validation", *test_names(rows)):
                penalties = {"recipe": runs[0]["length_penalty"]} if test == "validation" else {}
                for name, title in (penalties | {"tuned": "tuned"}).items():
                    scores = [run["sets"][test][name] for run in runs]
                    bleu, ratio = (mean(score[key] for score in scores) for key in ("bleu", "length_ratio"))
                    cells[f"{test}, {title}"] = f"{bleu:.2f} ({ratio:.2f})"
            lines.append(cells)
    return markdown_table([list(lines[0]), *(list(cells.values()) for cells in lines)])


def curves_of(rows: Sequence[Row], points: int = 6) -> str:
    """Return a table of validation BLEU at evenly spread steps, means over seeds of three evaluations up to each."""
    lines, points = [], min(points, len(rows[0].runs[0].evaluations()))
    for row in rows:
        curves = [[point["eval_bleu"] for point in run.evaluations()] for run in row.runs]
        ends = [len(curves[0]) * number // points for number in range(1, points + 1)]
        means = (mean(chain(*(curve[max(end - 3, 0) : end] for curve in curves))) for end in ends)
        lines.append([row.label, *(f"{bleu:.2f}" for bleu in means)])
    steps = [f"{rows[0].evidence.training['steps'] * number // points:,}" for number in range(1, points + 1)]
    return markdown_table([["steps", *steps], *lines])


def gain_text(row: Row, baseline: Row, first: Row, test: str) -> str:
    """Return a row's gain over another one with interval, p-value and marks."""
    entry = row.gains.get((baseline.name, test))
    if entry is None:
        return f"{mean(row.bleu(test)) - mean(baseline.bleu(test)):+.2f}"
    p = p_text(row.corrected.get(test) if baseline is first else entry["p_value"])
    low, high = entry["interval"]
    words = [f"{low:+.1f} to {high:+.1f}", f"p {p if p.startswith('<') else f'= {p}'}", *marks(row, baseline, test)]
    return f"{entry['difference']:+.2f} ({', '.join(words)})"  # of the seeds that both rows have, as the interval


REPRODUCED, OTHER_CAUSE = "reproduced", "gain without the stated cause"
NOT_REPRODUCED, UNKNOWN = "not reproduced", "cannot say at this budget"


def verdict(claim: Claim, rows: Mapping[str, Row]) -> str:
    """
    Return the verdict on a claim. Reproduced: three seeds, and on all test sets the interval of the gain is above 0,
    also without brevity penalty; if the paper's cause has a control, the gain over it is above 0, too. Not reproduced:
    on all test sets the interval ends below half of the paper's mean gain. Otherwise this budget cannot say.
    """
    row, baseline = rows.get(claim.row), rows.get(claim.baseline)
    if row is None or baseline is None or len(row.gains) == 0:
        return "not trained yet"
    tests = test_names([row])

    def gains(other: str) -> list[dict[str, Any]]:
        return [row.gains[other, test] for test in tests if (other, test) in row.gains]

    def is_positive(entry: Mapping[str, Any]) -> bool:
        return entry["interval"][0] > 0 and entry["interval_without_penalty"][0] > 0

    own = gains(claim.baseline)
    if len(shared_runs(baseline, row)) >= 3 and all(map(is_positive, own)):
        control = gains(claim.control) if claim.control else []
        return OTHER_CAUSE if control and not all(map(is_positive, control)) else REPRODUCED
    if own and all(entry["interval"][1] < mean(claim.gains()) / 2 for entry in own):
        return NOT_REPRODUCED
    return UNKNOWN


def verdicts_of(claims: Sequence[Claim], rows: Sequence[Row], page: str, family: str | None = None) -> str:
    """Return the table of verdicts (of a family): the paper's gain and ours, with intervals, seeds and marks."""
    by_name = {row.name: row for row in rows}
    lines = [["model", "paper", "its gain", *(f"ours, {test}" for test in test_names(rows)), "seeds", "verdict"]]
    for claim in (claim for claim in claims if claim.has_verdict and family in (None, claim.family)):
        row, baseline = by_name.get(claim.row), by_name.get(claim.baseline)
        here, seeds = ["not trained yet"] * len(test_names(rows)), ""
        if row and baseline:
            here = [gain_text(row, baseline, rows[0], test) for test in test_names(rows)]
            seeds = str(len(shared_runs(baseline, row)))
        low, high = min(claim.gains()), max(claim.gains())
        theirs = f"{low:+.1f}" if round(low, 1) == round(high, 1) else f"{low:+.1f} to {high:+.1f}"
        paper = FAMILIES[claim.family].paper.partition(", *")[0]
        over = "" if claim.baseline == rows[0].name else f" over {claim.baseline}"
        card = f"[{claim.row}]({page}{claim.family}.md){over}"
        lines.append([card, paper, theirs, *here, seeds, f"**{verdict(claim, by_name)}**"])
    return markdown_table(lines)


def setup_of(rows: Sequence[Row], missing_rows: Sequence[str], stored: Mapping[str, Any]) -> str:
    """Return what the figures depend on, in sentences."""
    first = rows[0].evidence
    runs = [run for row in rows for run in row.runs]
    steps, limit = first.training["steps"], first.recipe.get("training", {}).get("max_tokens")
    batches = f" of at most {limit:,} tokens" if limit else ""
    trained = ", ".join(dict.fromkeys(run.evidence.training["hardware"] for run in runs))
    versions = {name: sorted({run.evidence.versions.get(name, "") for run in runs}) for name in first.versions}
    listed = ", ".join(f"{name} {' / '.join(values)}" for name, values in versions.items())
    entries = [entry for tests in stored["runs"].values() for entry in tests.values()]
    others = [f"{metric}: `{one}`" for metric in ("chrF", "TER") for one in {e["signatures"][metric] for e in entries}]
    lines = [
        f"{first.data['training_pairs']:,} training pairs, {steps:,} steps{batches} for each run, on {trained}.",
        f"{describe_decoding(first.tests[0])}. {'; '.join([f'BLEU: `{first.tests[0].signature}`', *others])}.",
    ]
    if samples := {entry["samples"] for tests in stored["gains"].values() for entry in tests.values()}:
        counts = " or ".join(f"{count:,}" for count in sorted(samples))
        lines.append(f"p against {rows[0].name}: approximate randomization, {counts} samples, Holm-corrected.")
    if speeds := {hardware: speed for row in rows for hardware, speed in row.speeds.items()}:
        settings = "Speeds: random weights, beam {beams}, batches of {batch}; training: {max_tokens:,} tokens"
        lines += [f"{settings.format(**speed)}, on {hardware}." for hardware, speed in speeds.items()]
    lines.append(f"Versions: {listed}.")
    if missing_rows:
        lines.append(f"Not run yet: {'; '.join(missing_rows)}.")
    return "\n".join(f"- {line}" for line in lines)


def summary_of(rows: Sequence[Row], missing_rows: Sequence[str], page: str) -> str:
    """Return a short table for the README."""
    count = f"{len(rows)} of {len(rows) + len(missing_rows)}" if missing_rows else f"All {len(rows)}"
    names = ("model", "seeds", "parameters", "BLEU", "p ")
    return f"{count} models with the same training words ([details]({page})):\n\n{table_of(rows, rows, names)}"


def csv_rows(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, test set and hardware that trained or measured it."""
    for row in rows:
        hours, measured = row.hours(), {figure: row.measured(figure) for figure in FIGURES}
        for test in test_names(rows):
            for hardware in dict.fromkeys([*hours, *row.speeds]):
                cells: dict[str, Any] = {"model": row.name, "type": row.evidence.model["type"], "test_set": test}
                cells |= {"hardware": hardware, "two_stages": row.runs[0].baseline_steps is not None}
                cells |= {"seeds": len(row.runs), "parameters": row.evidence.model["parameters"]}
                for name, values in (
                    ("bleu", row.bleu(test)),
                    ("length_ratio", row.score("length_ratio", test)),
                    ("chrf", row.score("chrf", test)),
                    ("ter", row.score("ter", test)),
                    ("validation_loss", [run.evaluations()[-1]["eval_loss"] for run in row.runs]),
                    ("training_hours", hours.get(hardware, [])),
                    *((figure, values.get(hardware, [])) for figure, values in measured.items()),
                ):
                    middle, deviation = spread(values) if values else (None, None)
                    cells |= {name: number(middle, 4), f"{name}_deviation": number(deviation, 4)}
                gain = row.gains.get((rows[0].name, test), {})
                for name in ("difference", "difference_without_penalty"):
                    cells[name] = number(gain.get(name), 4)
                cells |= {"p": number(gain.get("p_value"), 4), "p_holm": number(row.corrected.get(test), 4)}
                cells["marks"] = ", ".join(marks(row, rows[0], test))
                yield cells


def write_plots(folder: Path, rows: Sequence[Row]) -> None:
    """Plot BLEU of each test set over hours and speed on the most frequent hardware; no plot without values."""
    for file, title, values in PLOTS:
        for hardware in hardware_of(rows, values)[:1]:
            panels: dict[str, dict[str, tuple[float, float, float, float]]] = {}
            for test in test_names(rows):
                for row in rows:
                    if hardware in values(row):
                        (x, x_deviation), (y, y_deviation) = spread(values(row)[hardware]), spread(row.bleu(test))
                        point = (x, x_deviation or 0.0, y, y_deviation or 0.0)
                        panels.setdefault(test, {})[row.label] = point
            heading = f"BLEU over {title} on {hardware}"
            if any(len(row.runs) > 1 for row in rows):
                heading += ", with standard deviations over seeds"
            labelled_points(folder / file, panels, title, "BLEU", heading)


def labelled_points(
    path: str | Path,
    panels: Mapping[str, Mapping[str, tuple[float, float, float, float]]],
    axis_name: str,
    name: str,
    title: str = "",
) -> None:
    """Plot panels of points side by side, with a common legend: x, its deviation, y, its deviation by title, label."""
    labels = list(dict.fromkeys(label for points in panels.values() for label in points))
    with plots.panel_axes(path, list(panels), labels, title, height=3.0) as (figure, axes):
        handles: dict[str, Any] = {}
        for axis, points in zip(axes, panels.values(), strict=True):
            for label, (x, x_deviation, y, y_deviation) in points.items():
                deviations: dict[str, Any] = {"xerr": x_deviation or None, "yerr": y_deviation or None, "capsize": 2}
                style: dict[str, Any] = plots.series(labels.index(label))
                handles[label] = axis.errorbar(x, y, linestyle="none", markersize=6, **deviations, **style)
            axis.margins(0.1)
            axis.grid(color="#E5E5E5", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.set_xlabel(axis_name)
            axis.set_ylabel(name)
        columns = plots.legend_columns(list(handles), figure.get_figwidth())
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=columns)


def plots_of(folder: Path, rows: Sequence[Row]) -> str:
    """Return the links to the plots in a page beside the folder `evidence`, and the rows that are not in them."""
    lines = []
    for file, title, values in PLOTS:
        names = hardware_of(rows, values)
        lines += [f"![BLEU over {title}]({folder.parent.name}/{folder.name}/{file})"] if names else []
        if without := [row.label for row in rows if not names or names[0] not in values(row)]:
            lines.append(f"Without {title}: {'; '.join(without) if names else 'all models'}.")
    return "\n\n".join(lines)


def fill(document: Path, sections: Mapping[str, Callable[[Path], str]], name: str) -> str:
    """Return the text of a document with the sections of a comparison."""

    def replace(match: re.Match[str]) -> str:
        before, of, section, after = match.groups()
        if of != name:
            return match[0]
        if section not in sections:
            raise UserError(
                f"there is no section {short_repr(section)}. Choose one of {', '.join(sections)}.", field=document
            )
        return f"{before}{sections[section](document)}\n{after}"

    return PLACE.sub(replace, document.read_text(encoding="utf-8"))


def sections_of(
    folder: Path, rows: Sequence[Row], missing_rows: Sequence[str], stored: Mapping[str, Any], claims: Sequence[Claim]
) -> dict[str, Callable[[Path], str]]:
    """Return functions that write the sections for a document."""

    def has_recurrence(row: Row) -> bool:
        fields = (row.evidence.recipe or {}).get("model", {}).get("fields", {})
        return not fields.keys().isdisjoint(("encoder_mixer", "decoder_autoregression"))

    def table_with_baseline(own: list[Row], *columns: str) -> str:
        if not own:
            return "None of them has been trained in this comparison yet."
        names = ("model", "seeds", "BLEU", *columns)
        return table_of(list({row.name: row for row in [rows[0], *own]}.values()), rows, names)

    def family(document: Path) -> str:
        baselines = {claim.baseline for claim in claims if claim.family == document.stem}
        own = [row for row in rows if row.evidence.model["type"] == document.stem or row.name in baselines]

        return table_with_baseline([row for row in own if not has_recurrence(row)], "parameters", "p ", "sentences/s")

    return {
        "table": lambda _: table_of(rows, rows, COLUMNS),
        "scores": lambda _: table_of(rows, rows, ("model", "seeds", "parameters", "BLEU", "p ")),
        "setup": lambda _: setup_of(rows, missing_rows, stored),
        "plots": lambda _: plots_of(folder, rows),
        **{f"lengths_{test}": lambda _, test=test: lengths_of(rows, test) for test in test_names(rows)},
        "tuned": lambda _: tuned_of(rows),
        "curves": lambda _: curves_of(rows),
        "summary": lambda _: summary_of(rows, missing_rows, f"model_cards/{folder.name}.md"),
        "family": family,
        "recurrences": lambda _: table_with_baseline([row for row in rows if has_recurrence(row)], "gain"),
        "verdict": lambda document: verdicts_of(claims, rows, "", document.stem),
        "verdicts": lambda document: verdicts_of(
            claims, rows, "" if document.parent.name == "model_cards" else "model_cards/"
        ),
    }


def documents_of(root: Path) -> list[Path]:
    """Return the files that may have sections."""
    return [root / "README.md", *sorted((root / "model_cards").glob("*.md"))]


def write_text(path: Path, text: str) -> None:
    with locked_file(path), open_output(path) as file:
        file.write(text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="results.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="multi30k_table", help="the comparison (default: multi30k_table)")
    parser.add_argument("--references", type=Path, help="folder of references; computes scores and gains")
    parser.add_argument("--samples", type=whole(1), default=10_000, help="samples of the test (default: 10000)")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="folder of the README")
    args = parser.parse_args(argv)
    folder = args.root / "model_cards" / "evidence" / args.name
    rows_file = args.root / f"scripts/recipes/rows/{args.name}.yaml"
    rows, missing_rows = read_results(folder, rows_file)
    claims = read_claims(rows_file.with_stem(f"{args.name}_papers"), list(read_rows(rows_file)))
    stored = read_scores(folder / SCORES)
    if args.references is not None:
        pages = "".join(document.read_text(encoding="utf-8") for document in documents_of(args.root))
        by_length = [test for test in test_names(rows) if f"<!-- results: {args.name} lengths_{test} -->" in pages]
        stored = measure(rows, claims, args.references, args.samples, stored, by_length)
    if missing := add_stored(rows, claims, stored):
        print(f"Pass --references; not stored: {', '.join(missing)}.", file=sys.stderr)
    check_picture(folder / PLOTS[0][0])
    sections = sections_of(folder, rows, missing_rows, stored, claims)
    texts = {document: fill(document, sections, args.name) for document in documents_of(args.root)}
    # Everything was computed without an error; only now files change.
    if args.references is not None:
        write_text(folder / SCORES, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    with open_output(folder / TABLE) as file:
        lines = list(csv_rows(rows))
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    if any(f"<!-- results: {args.name} plots -->" in text for text in texts.values()):
        write_plots(folder, rows)
    for document, text in texts.items():
        if text != document.read_text(encoding="utf-8"):
            write_text(document, text)
            print(document)


def run() -> int:
    try:
        main()
    except UserError as error:
        print(f"results.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run())
