#!/usr/bin/env python
"""
Train a recipe several times with different fields: rows of a paper's table, a grid of values, seeds. The runs are
compared in a table and a plot.

    python scripts/experiments/sweep.py RECIPE --rows scripts/recipes/rows/gret_table_3.yaml --seeds 1 2 3
    python scripts/experiments/sweep.py RECIPE --vary model.fields.num_capsules=16,32,64 --plot capsules.png
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from recnmt_hf import Recipe
from recnmt_hf.analysis import plots
from recnmt_hf.analysis.plots import QUANTITIES, check_picture
from recnmt_hf.commands.arguments import PICTURE_HELP, Parser, add_recipe_arguments, whole
from recnmt_hf.data.corpora import load_test_set
from recnmt_hf.data.files import open_output, reject_model_folder
from recnmt_hf.data.text import read_lines, tsv
from recnmt_hf.errors import MissingFileError, UserError
from recnmt_hf.families import FAMILIES, PaperTable
from recnmt_hf.models.user_errors import masked
from recnmt_hf.options import MOST_SEED, check_value
from recnmt_hf.training.checkpoints import (
    FINAL,
    RECIPE,
    RESULTS,
    locked,
    mapping_in,
    newest_checkpoint,
    newest_intact_checkpoint,
    state_of,
)
from recnmt_hf.training.evidence import Evidence, differences, without_private
from recnmt_hf.training.metrics import TEXT_METRICS
from recnmt_hf.training.plan import Plan, model_on_meta, values_of
from recnmt_hf.training.processes import Processes, logger
from recnmt_hf.training.recipe_yaml import load_yaml, read_yaml
from recnmt_hf.training.run import train


SEED = "training.seed"
# Placeholders for the seed of the run, and for its size in names of presets.
SEED_MARK = "{seed}"
SIZE_MARK = "{size}"
PRESET = "model.preset"
# Characters that are replaced in names of folders.
UNSAFE_CHARACTERS = re.compile(r"[^\w.=,+-]+")
MAX_RUNS = 1000


def write_results(results: Sequence[Any], table: Sequence[Sequence[str]], path: Path) -> None:
    """Write the objects of a dataclass to `path`, a JSON file, and their table to the TSV file beside it."""
    with open_output(path) as file:
        json.dump([asdict(result) for result in results], file, indent=1, ensure_ascii=False)
    with open_output(path.with_suffix(".tsv")) as file:
        file.write(tsv(table))


def paper_table_of(systems: Sequence[str], size: str | None = None) -> PaperTable | None:
    """
    Return the paper's table of a comparison of these systems, or `None`. Its first row is the first system. It has at
    least two of them, and the given size (a preset) or more than a third of them. Of several tables, the one with most
    of them is returned.
    """
    counts = [
        (sum(table.row(name) is not None for name in systems), table)
        for family in FAMILIES.values()
        for table in family.tables
        if [table.baseline.system] == list(systems[:1]) and size in (None, table.size)
    ]
    count, table = max(counts, key=lambda entry: entry[0], default=(0, None))
    return table if count >= 2 and (size is not None or 3 * count > len(systems)) else None


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str  # of its folder
    values: Mapping[str, Any]  # its own values, for tables and plots
    overrides: tuple[str, ...]  # the same as changes of the recipe
    seed: int | None = None  # if the sweep has several


@dataclass
class CellResult:
    """Result of a run."""

    name: str
    values: dict[str, Any]
    seed: int | None
    parameters: int
    steps: int  # of training
    validation: dict[str, float] = field(default_factory=dict)  # the last evaluation, by metric
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # by test set and metric
    baseline: str = ""  # name of the first cell of the same seed
    p_values: dict[str, float] = field(default_factory=dict)  # by test set: randomization against the baseline


def read_rows(path: str | Path) -> dict[str, list[str]]:
    """
    Read rows of a table: a YAML mapping of names to changes of the recipe, such as
    `no gate: {model.fields.global_gate: false}`; a row without changes is empty. Exit with a message if it is not one.
    """
    content = read_yaml(Path(path))
    if not isinstance(content, dict) or not content or not all(isinstance(row or {}, dict) for row in content.values()):
        raise SystemExit(f"{path} has no rows; write names with changes, e.g. plain: {{model.type: nmt_transformer}}")
    return {
        str(name): [f"{place}={json.dumps(value, ensure_ascii=False)}" for place, value in (row or {}).items()]
        for name, row in content.items()
    }


def with_size(
    rows: Mapping[str, Sequence[str]], size: str | None, recipe: str | Path, overrides: Sequence[str] = ()
) -> dict[str, list[str]]:
    """
    Return rows of a size: `{size}` in them is replaced, and a row without a preset gets the one of that name. Without a
    size they have that of the preset of the recipe with its overrides, e.g. `small` of `small_hybrid`.
    """
    if size is not None:
        own = {name for name, row in rows.items() if any(text.startswith(f"{PRESET}=") for text in row)}
        rows = {name: [*([] if name in own else [f"{PRESET}={size}"]), *row] for name, row in rows.items()}
    elif any(SIZE_MARK in text for row in rows.values() for text in row):
        size = Recipe.from_file(recipe, overrides).model.preset.partition("_")[0]
    return {name: [text.replace(SIZE_MARK, str(size)) for text in row] for name, row in rows.items()}


def read_axis(text: str) -> tuple[str, list[Any]]:
    """Read a field and its values from `section.field=1,2,3`; exit with a message if they are missing or repeated."""
    name, equals, values = text.partition("=")
    if not equals or not name or not values.strip():
        raise SystemExit(f"{text!r} is not a field with values; write section.field=value,value,...")
    axis = load_yaml(values if values.lstrip().startswith("[") else f"[{values}]", f"the values of {name}")
    if len({json.dumps(value) for value in axis}) < len(axis):
        raise SystemExit(f"A value of {name} is repeated")
    return name, axis


def cells_of(
    rows: Mapping[str, Sequence[str]], axes: Sequence[tuple[str, Sequence[Any]]], seeds: Sequence[int]
) -> list[Cell]:
    """
    Return all runs: each row with each combination of the axes' values and each seed. An axis `training.seed`
    gives the seeds. Exit with a message if a field is varied twice, or there are too many runs or equal names.
    """
    names = [name for name, _ in axes]
    if len(set(names)) < len(names) or (seeds and SEED in names):
        raise SystemExit("A field is varied twice; name each field once, and use --seeds for seeds")
    if SEED in names:
        place = names.index(SEED)
        names.pop(place)
        axes = [*axes]
        seeds = [check_value(SEED, seed, int) for seed in axes.pop(place)[1]]
    for row in rows:
        if row.strip(".") != row or not row:
            raise SystemExit(f"The row name {row!r} is empty, or begins or ends with a dot")
    last = [name.rpartition(".")[2] for name in names]  # unless two fields have the same last part
    short = [name if last.count(part) > 1 else part for name, part in zip(names, last, strict=True)]
    all_seeds: list[int | None] = [*seeds] or [None]
    cells = []
    for (row, changes), values, seed in itertools.product(
        rows.items() if rows else [("", ())], itertools.product(*(values for _, values in axes)), all_seeds
    ):
        parts = [row] if row else []
        parts += [f"{name}={plain(masked(value, name))}" for name, value in zip(short, values, strict=True)]
        overrides = [*changes, *(f"{name}={plain(value)}" for name, value in zip(names, values, strict=True))]
        if seed is not None:
            parts.append(f"seed={seed}")
            overrides.append(f"{SEED}={seed}")
        own_values = ({"row": row} if row else {}) | dict(zip(short, masked(values), strict=True))
        cells.append(Cell(UNSAFE_CHARACTERS.sub("_", ",".join(parts)), own_values, tuple(overrides), seed))
    if len(cells) > MAX_RUNS:
        raise SystemExit(f"{len(cells)} runs exceed the limit of {MAX_RUNS}; vary fewer values")
    if len({cell.name for cell in cells}) < len(cells):
        raise SystemExit("Two runs would have the same folder; use different letters and digits in the names of rows")
    return cells


def plain(value: Any) -> str:
    """Return a value as overrides write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sweep(
    recipe: str | Path,
    cells: Sequence[Cell],
    output: str | Path,
    overrides: Sequence[str] = (),
    score: str | None = None,
) -> list[CellResult]:
    """
    Train each cell of a recipe sequentially in its own subfolder of `output`, and collect the results in `sweep.json`
    and `sweep.tsv`. All are compared with the first one. Finished runs are skipped, a killed run resumes, and after a
    failed run the others are still trained. Only one sweep at a time can write into the folder. `overrides` change the
    recipe for all runs; `{seed}` in a value is the seed of the run; `score` is a column that the table must have.

    Exit with a message before training if a recipe is not allowed, its runs have no such score, or another sweep writes
    into the folder; after training, if some runs failed.
    """
    output = Path(output)
    reject_model_folder(output)
    recipes = []
    for cell in cells:
        own = {override.partition("=")[0] for override in cell.overrides}
        changes = [*(text for text in overrides if text.partition("=")[0] not in own), *cell.overrides]
        try:
            recipes.append(Recipe.from_file(recipe, with_seed(changes, recipe)))
            model_on_meta(Plan.of(recipes[-1], output))
        except MissingFileError:
            raise
        except UserError as error:
            raise error.inside(cell.name) from error
        if score is not None:
            check_score(score, scores_of(recipes[-1]))
    results: list[CellResult] = []
    failures = []
    is_main = Processes(recipes[0].training.runs_on_cpu).is_main
    with locked(output) if is_main else nullcontext():
        for number, (cell, cell_recipe) in enumerate(zip(cells, recipes, strict=True), start=1):
            folder = output / cell.name
            is_finished = is_done(folder, cell_recipe)
            logger.info(f"{cell.name} ({number} of {len(cells)}){' is done.' if is_finished else ''}")
            if not is_finished:
                try:
                    train(cell_recipe, folder, resume=True)
                except UserError as error:
                    logger.info(f"{cell.name} failed: {error}")
                    failures.append(f"{cell.name} ({error})")
                    continue
            first = next(other.name for other in cells if other.seed == cell.seed)
            results.append(replace(result_of(cell, folder), baseline=first))
            compare(results[-1], baseline_of(results[-1], results), cell_recipe, output)
            if is_main:
                write_results(results, table_of(results), output / "sweep.json")
    if failures:
        raise SystemExit(
            f"{len(failures)} of {len(cells)} runs failed: {'; '.join(failures)}. All other results are in "
            f"{output}/sweep.tsv. Correct the cause and start the sweep again; finished runs are skipped."
        )
    return results


def with_seed(changes: Sequence[str], recipe: str | Path) -> list[str]:
    """Return changes of a recipe in which `{seed}` is replaced with the seed that they select."""
    if not any(SEED_MARK in text for text in changes):
        return list(changes)
    seed = Recipe.from_file(recipe, [text for text in changes if SEED_MARK not in text]).training.seed
    return [text.replace(SEED_MARK, str(seed)) for text in changes]


def scores_of(recipe: Recipe) -> list[str]:
    """Return the names of the table's columns with scores."""
    kinds = TEXT_METRICS[recipe.training.text_metric]
    columns = [f"{name} {kind}" for name in recipe.test for kind in kinds]
    return columns + [f"validation {kind}" for kind in ("loss", "perplexity", *kinds)]


def check_score(score: str, columns: Sequence[str]) -> None:
    """Exit with a message if the table has no such column."""
    if score not in columns:
        raise SystemExit(f"There is no score {score!r}; choose one of {', '.join(columns)}")


def is_done(folder: Path, recipe: Recipe) -> bool:
    """Return whether a folder contains the final model of a recipe, and its scores."""
    if not (folder / FINAL / "config.json").is_file() or (recipe.test and not (folder / RESULTS).is_file()):
        return False
    plan = Plan.of(recipe, folder, newest_checkpoint(folder))
    # A run with another recipe that was interrupted has written that recipe, and left the earlier model.
    is_of_model = Evidence.load(folder / FINAL).recipe == without_private(differences(plan.settings))
    earlier = mapping_in(folder / RECIPE)
    return is_of_model and bool(earlier) and values_of(Recipe(**earlier).to_dict()) == values_of(plan.settings)


def result_of(cell: Cell, folder: Path) -> CellResult:
    """Load the result of a finished run."""
    checkpoint = newest_intact_checkpoint(folder)
    state = state_of(checkpoint) if checkpoint is not None else {}
    evaluations = [entry for entry in state.get("log_history", []) if "eval_loss" in entry]
    kinds = {"loss", "perplexity", *(name for names in TEXT_METRICS.values() for name in names)}
    last = {name.removeprefix("eval_"): value for name, value in evaluations[-1].items()} if evaluations else {}
    tests = json.loads((folder / RESULTS).read_text(encoding="utf-8")) if (folder / RESULTS).is_file() else {}
    scores = {
        name: {kind: value for kind, value in entry.items() if kind in kinds}
        for name, entry in tests.items()
        if isinstance(entry, dict) and "signature" in entry
    }
    validation = {name: value for name, value in last.items() if name in kinds}
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(folder / FINAL, trust_remote_code=False))
    parameters = model.num_parameters()
    steps = int(state.get("global_step", 0))
    return CellResult(cell.name, dict(cell.values), cell.seed, parameters, steps, validation, scores)


def baseline_of(result: CellResult, results: Sequence[CellResult]) -> CellResult | None:
    """Return the result that another one is compared with; `None` if it is that one, or that run failed."""
    return next((other for other in results if other.name == result.baseline and other is not result), None)


def compare(last: CellResult, first: CellResult | None, recipe: Recipe, output: Path) -> None:
    """Add the p-values of a result against its baseline."""
    if first is None:
        return
    data, plan = recipe.data, Plan.of(recipe, output)
    for name in last.scores:
        paths = [output / result.name / f"{FINAL}-{name}.{data.target_lang}" for result in (first, last)]
        if name not in first.scores or not all(path.is_file() for path in paths):
            continue
        baseline, texts = (list(read_lines(path)) for path in paths)
        _, references = load_test_set(recipe.test[name], data.source_lang, data.target_lang, data.on_empty)
        p_value = plan.scorer_of(name).compare(baseline, texts, references).p_value
        if p_value is not None:
            last.p_values[name] = p_value


def table_of(results: Sequence[CellResult]) -> list[list[str]]:
    """
    Return a table with a row for each run. If the rows are those of a paper's table, its scores follow, and the
    differences to their baselines: those measured on the first test set, and the paper's.
    """
    fields = list(dict.fromkeys(name for result in results for name in result.values))
    has_seeds = any(result.seed is not None for result in results)
    # ("", kind) are validation scores, (test set, kind) others.
    columns = {("", kind): None for result in results for kind in result.validation}
    columns |= {(name, kind): None for result in results for name, kinds in result.scores.items() for kind in kinds}
    compared = list(dict.fromkeys(name for result in results for name in result.p_values))
    titles = [*fields, *(["seed"] if has_seeds else []), "parameters", "steps"]
    titles += [f"{name or 'validation'} {kind}" for name, kind in columns] + [f"{name} p" for name in compared]
    paper = paper_table_of([str(result.values.get("row")) for result in results])
    if paper is not None:
        titles += ["difference", f"{paper.name}: {' / '.join(paper.task.tests)}", f"{paper.name}: difference"]
    rows = [titles]
    for result in results:
        row = [plain(result.values.get(name, "")) for name in fields] + ([str(result.seed)] if has_seeds else [])
        row += [str(result.parameters), str(result.steps)]
        for name, kind in columns:
            value = (result.scores.get(name, {}) if name else result.validation).get(kind)
            row.append("" if value is None else f"{value:.3f}" if kind == "loss" else f"{value:.2f}")
        row += [f"{result.p_values[name]:.3f}" if name in result.p_values else "" for name in compared]
        if paper is not None:
            row += [difference_text(result, results), *paper.texts(str(result.values["row"]))]
        rows.append(row)
    return rows


def difference_text(result: CellResult, results: Sequence[CellResult]) -> str:
    """Return the main score of a result on the first test set minus that of its baseline."""
    baseline = baseline_of(result, results)
    name, kinds = next(iter(result.scores.items()), ("", {}))
    kind = next(iter(kinds), "")
    base = baseline.scores.get(name, {}).get(kind) if baseline is not None else None
    return "" if base is None else f"{kinds[kind] - base:+.2f}"


def grouped(results: Sequence[CellResult], score: str) -> dict[tuple[str, ...], list[float]]:
    """Return the values of a column of [`table_of`] for each combination of varied values, one value for each seed."""
    titles, *rows = table_of(results)
    width = titles.index("parameters") - ("seed" in titles)
    check_score(score, titles[titles.index("steps") + 1 :])
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if value := row[titles.index(score)]:
            groups.setdefault(tuple(row[:width]), []).append(float(value))
    return groups


def main_score(results: Sequence[CellResult]) -> str:
    """Return the most informative column: BLEU or ROUGE-L of the first test set, else of validation, else the loss."""
    titles = sorted(table_of(results)[0], key=lambda title: title.startswith("validation "))
    matches = (title for kind in ("bleu", "rougeL", "loss") for title in titles if title.endswith(f" {kind}"))
    return next(matches, "validation loss")


def plot_sweep(results: Sequence[CellResult], path: str | Path, score: str) -> None:
    """Plot a column of the table: a grid for two varied fields, otherwise points with a line."""
    groups = grouped(results, score)
    if not groups:
        raise SystemExit(f"No run has the score {score!r}")
    names = list(dict.fromkeys(name for result in results for name in result.values)) or ["recipe"]
    data, _, metric = score.rpartition(" ")
    label = QUANTITIES.get(metric, metric)
    title = f"{label[0].upper()}{label[1:].partition(' (')[0]} on {data} by {' and '.join(names)}"
    if len(names) != 2:
        points = {", ".join(key) or "all seeds": values for key, values in groups.items()}
        points_of_scores(path, points, ", ".join(names), label, title)
        return
    rows, columns = (list(dict.fromkeys(key[place] for key in groups)) for place in (0, 1))
    values = [[groups.get((row, column), []) for column in columns] for row in rows]
    grid_of_scores(path, values, columns, rows, label, column_name=names[1], row_name=names[0], title=title)


def grid_of_scores(
    path: str | Path,
    values: Sequence[Sequence[Sequence[float]]],
    columns: Sequence[str],
    rows: Sequence[str],
    name: str,
    column_name: str = "",
    row_name: str = "",
    title: str = "",
) -> None:
    """
    Plot the scores (one per seed) of each row and column as a heat map of means, with their ranges. `name` is that of
    the score.
    """
    means = np.array([[np.mean(cell) if cell else np.nan for cell in row] for row in values])
    seeds = max(len(cell) for row in values for cell in row)
    title += "" if seeds == 1 else f": mean and range over {seeds} seeds"
    with plots.canvas(path, 2.5 + 1.1 * len(columns), 1.2 + 0.45 * len(rows), title) as figure:
        axis = figure.add_subplot()
        image = axis.imshow(means, cmap=plots.SEQUENTIAL, aspect="auto")
        for y, row in enumerate(values):
            for x, cell in enumerate(row):
                if cell:
                    spread = f"\n{min(cell):.2f} to {max(cell):.2f}" if len(cell) > 1 else ""
                    red, green, blue, _ = image.cmap(image.norm(means[y, x]))
                    color = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
                    axis.text(x, y, f"{means[y, x]:.2f}{spread}", ha="center", va="center", color=color)
        plots.label_cells(axis, columns, rows, column_name, row_name)
        if max(map(len, columns)) <= 12:  # fits below its column
            axis.set_xticks(range(len(columns)), columns, rotation=0, ha="center")
        figure.colorbar(image, ax=axis, label=name)


def points_of_scores(
    path: str | Path, values: Mapping[str, Sequence[float]], axis_name: str, name: str, title: str = ""
) -> None:
    """Plot scores (one per seed) as points over the values of a setting, with a line through their means."""
    longest = max(map(len, values))
    seeds = max(map(len, values.values()))
    title += "" if seeds == 1 else f": {seeds} seeds, line through their means"
    with plots.canvas(path, min(2.5 + 0.7 * len(values), plots.WIDTH), 2.8 + 0.05 * longest, title) as figure:
        axis = figure.add_subplot()
        axis.plot(range(len(values)), [float(np.mean(scores)) for scores in values.values()], color=plots.MAIN)
        for place, scores in enumerate(values.values()):
            axis.scatter([place] * len(scores), scores, color=plots.MAIN, s=18)
        axis.set_xticks(range(len(values)), list(values), **plots.ROTATED_LABELS)
        axis.set_xlabel(axis_name)
        axis.set_ylabel(name)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_recipe_arguments(
        parser,
        "fields to override in all runs; {seed} in a value is replaced by the seed of the run",
        "folder in which one folder per run is written (default: outputs/NAME-OF-RECIPE_sweep)",
    )
    values = "field and values to train with; several --vary train all combinations"
    add("--vary", action="append", default=[], metavar="SECTION.FIELD=VALUE,VALUE,...", help=values)
    rows = "YAML file with named rows and the fields that each overrides, e.g. one of scripts/recipes/rows"
    add("--rows", metavar="FILE", help=rows)
    add("--size", help="preset of all rows, also for {size} in the names of presets (default: that of the recipe)")
    add("--seeds", type=whole(0, MOST_SEED), nargs="+", default=[], help="seeds with which every variant is trained")
    add("--score", help="column to plot and summarize (default: that of the first test set)")
    add("--plot", help=f"{PICTURE_HELP} for a plot: a line for one varied field, a grid for two")
    add("--list", action="store_true", help="print the runs and their overrides without training")
    args = parser.parse_intermixed_args(argv)
    if not (args.vary or args.rows or args.seeds):
        parser.error("pass --vary, --rows or --seeds")
    if args.size is not None and args.rows is None:
        parser.error("--size requires --rows")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.plot is not None:
        check_picture(args.plot)
    rows = {} if args.rows is None else read_rows(args.rows)
    rows = with_size(rows, args.size, args.recipe, args.overrides)
    cells = cells_of(rows, [read_axis(text) for text in args.vary], list(dict.fromkeys(args.seeds)))
    if args.list:
        for cell in cells:
            print(cell.name, *cell.overrides, sep="\t")
        return
    output = Path(args.output or Path("outputs") / f"{Path(args.recipe).stem}_sweep")
    results = sweep(args.recipe, cells, output, args.overrides, args.score)
    print(tsv(table_of(results)), end="")
    score = args.score or main_score(results)
    groups = grouped(results, score)
    if args.seeds:
        print(f"{score}: mean (from, to) over seeds")
        for key, values in groups.items():
            mean = sum(values) / len(values)
            print(f"  {', '.join(key) or 'all'}: {mean:.2f} ({min(values):.2f}, {max(values):.2f})")
    if args.plot is not None:
        plot_sweep(results, args.plot, score)
        print(f"{args.plot}: {score} of {len(groups)} settings")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"sweep.py: {error}")
