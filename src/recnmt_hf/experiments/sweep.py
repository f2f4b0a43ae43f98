"""Several runs of one recipe that differ in some fields: rows of a paper's table, a grid of values, seeds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import AutoConfig

from .._values import shown
from ..analysis.plots import grid_of_scores, points_of_scores
from ..data.files import open_output, refuse_model_folder
from ..data.text import read_lines
from ..models.user_errors import UserError
from ..training.checkpoints import newest_intact_checkpoint, state_of
from ..training.checks import check_decoding, check_model, without_memory
from ..training.metrics import TEXT_METRICS, without_prefix
from ..training.output_folder import FINAL, RESULTS, locked
from ..training.processes import logger
from ..training.recipe import Recipe
from ..training.recipe_yaml import load_yaml, read_text
from ..training.resuming import changes_of_recipe, earlier_baseline_steps


SEED = "training.seed"
# Stands in a value for the seed of the run.
SEED_MARK = "{seed}"
# Names of folders hold nothing else.
UNUSUAL = re.compile(r"[^\w.=,+-]+")
MOST_RUNS = 1000


@dataclass(frozen=True)
class Cell:
    """
    One run of a sweep.

    Attributes:
        name (`str`): Of its folder.
        values (`dict`): What it differs in, as tables and plots show it.
        overrides (`tuple[str, ...]`): The same as changes of the recipe.
        seed (`int`, *optional*): Of the run, where the sweep has several.
    """

    name: str
    values: Mapping[str, Any]
    overrides: tuple[str, ...]
    seed: int | None = None


@dataclass
class CellResult:
    """
    Result of a run.

    Attributes:
        name (`str`), values (`dict`), seed (`int`, *optional*): Of its cell.
        parameters (`int`): Of the model.
        steps (`int`): Of training.
        validation (`dict[str, float]`): The last evaluation.
        scores (`dict[str, dict[str, float]]`): Of each test set, by metric.
        p_values (`dict[str, float]`): Of each test set: paired bootstrap against the first cell of the same seed.
    """

    name: str
    values: dict[str, Any]
    seed: int | None
    parameters: int
    steps: int
    validation: dict[str, float] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)


def read_rows(path: str | Path) -> dict[str, list[str]]:
    """
    Named rows of a table: a YAML mapping of names to changes of the recipe, such as
    `no gate: {model.fields.global_gate: false}`; a row that changes nothing is empty.

    Raises:
        ValueError, FileNotFoundError: It is no such mapping.
    """
    content = load_yaml(read_text(Path(path)), str(path))
    if not isinstance(content, dict) or not content or not all(isinstance(row or {}, dict) for row in content.values()):
        raise UserError(
            f"{path} holds no rows. Remedy: write a mapping of names to changes of the recipe, such as "
            "`plain: {model.type: nmt_transformer}`."
        )
    return {
        str(name): [f"{place}={json.dumps(value, ensure_ascii=False)}" for place, value in (row or {}).items()]
        for name, row in content.items()
    }


def read_axis(text: str) -> tuple[str, list[Any]]:
    """
    A field and its values from `section.field=1,2,3`.

    Raises:
        ValueError: There is no field, or no value.
    """
    name, equals, values = text.partition("=")
    if not equals or not name or not values.strip():
        raise UserError(f"{shown(text)} is no field with values. Remedy: write section.field=value,value,...")
    listed = values if values.lstrip().startswith("[") else f"[{values}]"
    found = load_yaml(listed, f"the values of {name}")
    if len({json.dumps(value) for value in found}) < len(found):
        raise UserError(f"A value of {name} is given twice. Remedy: give each value once.")
    return name, found


def cells_of(
    rows: Mapping[str, Sequence[str]], axes: Sequence[tuple[str, Sequence[Any]]], seeds: Sequence[int]
) -> list[Cell]:
    """
    All runs: each row with each combination of the axes' values and each seed.

    Raises:
        ValueError: There is nothing to vary, there are too many runs, or an axis stands twice.
    """
    names = [name for name, _ in axes]
    if len(set(names)) < len(names) or (seeds and SEED in names):
        raise UserError("A field is varied twice. Remedy: name each once; seeds are --seeds.")
    if not (rows or axes or seeds):
        raise UserError("There is nothing to vary. Remedy: give rows, fields with values, or seeds.")
    short = short_names(names)
    cells = []
    for row in rows:
        if row.strip(".") != row or not row:
            raise UserError(
                f"The row name {shown(row)} cannot be the name of a folder: it must not be empty, nor begin or end "
                "with a dot. Remedy: rename the row."
            )
    chosen_seeds: list[int | None] = [*seeds] or [None]
    for (row, changes), values, seed in itertools.product(
        rows.items() if rows else [("", ())], itertools.product(*(values for _, values in axes)), chosen_seeds
    ):
        shown_values = ({"row": row} if row else {}) | dict(zip(short, values, strict=True))
        parts = [row] if row else []
        parts += [f"{name}={plain(value)}" for name, value in zip(short, values, strict=True)]
        overrides = [*changes, *(f"{name}={plain(value)}" for name, value in zip(names, values, strict=True))]
        if seed is not None:
            parts.append(f"seed={seed}")
            overrides = [each.replace(SEED_MARK, str(seed)) for each in overrides] + [f"{SEED}={seed}"]
        cells.append(Cell(UNUSUAL.sub("_", ",".join(parts)), shown_values, tuple(overrides), seed))
    if len(cells) > MOST_RUNS:
        raise UserError(f"These are {len(cells)} runs, more than {MOST_RUNS}. Remedy: vary less at once.")
    if len({cell.name for cell in cells}) < len(cells):
        raise UserError("Two runs would have the same folder. Remedy: give rows names of letters and digits.")
    return cells


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of fields' names, where these tell them apart."""
    last = [name.rpartition(".")[2] for name in names]
    return [name if last.count(short) > 1 else short for name, short in zip(names, last, strict=True)]


def plain(value: Any) -> str:
    """A value as an override writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sweep(
    recipe: str | Path,
    cells: Sequence[Cell],
    output: str | Path,
    overrides: Sequence[str] = (),
    score: str | None = None,
) -> list[CellResult]:
    """
    Trains each cell in a folder of its own, one after the other, and collects the results in `sweep.json` and
    `sweep.tsv`. Runs that are done are not repeated, one that was killed goes on, and one that fails does not keep the
    others from being trained. No second sweep can write into the folder meanwhile.

    Args:
        recipe (`str` or `Path`): The recipe that all share.
        cells (sequence of [`Cell`]): What they differ in; the first is what the others are compared with.
        output (`str` or `Path`): Gets a folder for each cell.
        overrides (sequence of `str`, *optional*): Changes of the recipe for all; `{seed}` in a value is the run's seed.
        score (`str`, *optional*): A column that the table shall have.

    Returns:
        A [`CellResult`] for each cell.

    Raises:
        ValueError, FileNotFoundError: A recipe is not allowed, there will be no such score, or another sweep writes
            into the folder, before anything is trained; or some runs failed, after the others were trained.
    """
    from ..training.run import train

    output = Path(output)
    refuse_model_folder(output)
    recipes = []
    for cell in cells:
        shared = [each.replace(SEED_MARK, str(cell.seed)) for each in overrides]
        try:
            recipes.append(Recipe.from_file(recipe, joined(shared, cell.overrides)))
            check_model(recipes[-1])
            check_decoding(recipes[-1])
        except UserError as error:
            raise UserError(f"{cell.name}: {error}") from error
        if score is not None:
            check_score(score, scores_of(recipes[-1]))
    results: list[CellResult] = []
    failed = []
    with locked(output) if PartialState().is_main_process else nullcontext():
        for number, (cell, own) in enumerate(zip(cells, recipes, strict=True), start=1):
            folder = output / cell.name
            if is_done(folder, own):
                logger.info(f"{cell.name} ({number} of {len(cells)}) is done.")
            else:
                logger.info(f"{cell.name} ({number} of {len(cells)})")
                try:
                    train(own, folder, resume=True)
                except UserError as error:
                    logger.info(f"{cell.name} failed: {error}")
                    failed.append(f"{cell.name} ({error})")
                    continue
            results.append(result_of(cell, folder))
            first = next(each.name for each in cells if each.seed == cell.seed)
            compare(results[-1], next((each for each in results if each.name == first), None), own, output)
            write_results(results, output)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(cells)} runs failed: {'; '.join(failed)}. {output}/sweep.tsv has the others. "
            "Remedy: correct the cause, and start the sweep again, which keeps what is done."
        )
    return results


def scores_of(recipe: Recipe) -> list[str]:
    """The columns of the table that hold scores."""
    kinds = recipe.training.scorer.names
    return [f"{name} {kind}" for name in recipe.test for kind in kinds] + [
        f"validation {kind}" for kind in ("loss", "perplexity", *kinds)
    ]


def check_score(score: str, known: Sequence[str]) -> None:
    if score not in known:
        raise UserError(f"There is no score {score!r}. Remedy: choose one of {', '.join(known)}.")


def joined(shared: Sequence[str], own: Sequence[str]) -> list[str]:
    """Overrides for all, without those that a cell states itself, and the cell's."""
    stated = {each.partition("=")[0] for each in own}
    return [each for each in shared if each.partition("=")[0] not in stated] + list(own)


def is_done(folder: Path, recipe: Recipe) -> bool:
    """Return whether a folder holds the final model of a recipe, and its scores."""
    finished = (folder / FINAL / "config.json").is_file() and (not recipe.test or (folder / RESULTS).is_file())
    return finished and changes_of_recipe(recipe.with_whole_steps(earlier_baseline_steps(folder)), folder) == {}


def result_of(cell: Cell, folder: Path) -> CellResult:
    """Load the result of a finished run."""
    checkpoint = newest_intact_checkpoint(folder, logger.info)
    state = state_of(checkpoint) if checkpoint is not None else {}
    evaluated = [entry for entry in state.get("log_history", []) if "eval_loss" in entry]
    kinds = {"loss", "perplexity", *(name for names in TEXT_METRICS.values() for name in names)}
    last = {without_prefix(name): value for name, value in evaluated[-1].items()} if evaluated else {}
    found = json.loads((folder / RESULTS).read_text(encoding="utf-8")) if (folder / RESULTS).is_file() else {}
    scores = {
        name: {kind: value for kind, value in each.items() if kind in kinds}
        for name, each in found.items()
        if isinstance(each, dict) and "signature" in each
    }
    return CellResult(
        cell.name,
        dict(cell.values),
        cell.seed,
        without_memory(AutoConfig.from_pretrained(folder / FINAL, trust_remote_code=False)).num_parameters(),
        int(state.get("global_step", 0)),
        {name: value for name, value in last.items() if name in kinds},
        scores,
    )


def compare(last: CellResult, first: CellResult | None, recipe: Recipe, output: Path) -> None:
    """Adds to a result how it differs from the first one of the same seed, unless that failed."""
    if first is None or first is last:
        return
    for name in last.scores:
        ending = f"{FINAL}-{name}.{recipe.data.target_lang}"
        paths = [output / each.name / ending for each in (first, last)]
        if name not in first.scores or not all(path.is_file() for path in paths):
            continue
        baseline, texts = (list(read_lines(path)) for path in paths)
        p_value = recipe.training.scorer.compare(baseline, texts, references_of(recipe, name)).p_value
        if p_value is not None:
            last.p_values[name] = p_value


def references_of(recipe: Recipe, name: str) -> list[str]:
    """The target side of a test set."""
    from ..data.corpora import load_pairs

    data = recipe.data
    return [pair.target for pair in load_pairs(recipe.test[name], data.source_lang, data.target_lang, data.on_empty)]


def write_results(results: Sequence[CellResult], output: Path) -> None:
    with open_output(output / "sweep.json") as file:
        json.dump([asdict(each) for each in results], file, indent=1, ensure_ascii=False)
    with open_output(output / "sweep.tsv") as file:
        file.writelines("\t".join(row) + "\n" for row in table_of(results))


def table_of(results: Sequence[CellResult]) -> list[list[str]]:
    """A row for each run, below the names of the columns."""
    fields = list(dict.fromkeys(name for each in results for name in each.values))
    seeded = any(each.seed is not None for each in results)
    measured = list(dict.fromkeys(("", kind) for each in results for kind in each.validation))
    measured += list(
        dict.fromkeys((name, kind) for each in results for name, kinds in each.scores.items() for kind in kinds)
    )
    compared = list(dict.fromkeys(name for each in results for name in each.p_values))
    heads = [*fields, *(["seed"] if seeded else []), "parameters", "steps"]
    heads += [f"{name or 'validation'} {kind}" for name, kind in measured] + [f"{name} p" for name in compared]
    rows = [heads]
    for each in results:
        row = [plain(each.values.get(name, "")) for name in fields] + ([str(each.seed)] if seeded else [])
        row += [str(each.parameters), str(each.steps)]
        for name, kind in measured:
            value = (each.scores.get(name, {}) if name else each.validation).get(kind)
            row.append("" if value is None else f"{value:.3f}" if kind == "loss" else f"{value:.2f}")
        rows.append(row + [f"{each.p_values[name]:.3f}" if name in each.p_values else "" for name in compared])
    return rows


def grouped(results: Sequence[CellResult], score: str) -> dict[tuple[str, ...], list[float]]:
    """
    The values of a column of [`table_of`] for each combination of what is varied, one for each seed.

    Raises:
        ValueError: There is no such column.
    """
    heads, *rows = table_of(results)
    first = heads.index("parameters") - ("seed" in heads)
    check_score(score, heads[heads.index("steps") + 1 :])
    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        value = row[heads.index(score)]
        found.setdefault(tuple(row[:first]), []).extend([float(value)] if value else [])
    return {key: values for key, values in found.items() if values}


def main_score(results: Sequence[CellResult]) -> str:
    """The column that says most: the first test set's BLEU or ROUGE-L, else that of validation."""
    heads = table_of(results)[0]
    tests_first = sorted(heads, key=lambda head: head.startswith("validation "))
    found = (head for kind in ("bleu", "rougeL", "loss") for head in tests_first if head.endswith(f" {kind}"))
    return next(found, "validation loss")


def plot_sweep(results: Sequence[CellResult], path: str | Path, score: str) -> None:
    """
    A column of the table as a picture: a grid where two things are varied, else points with a line.

    Raises:
        ValueError: There is no such column, or no value in it.
    """
    groups = grouped(results, score)
    if not groups:
        raise UserError(f"No run has a value of {score}. Remedy: name another score.")
    names = list(dict.fromkeys(name for each in results for name in each.values)) or ["recipe"]
    if len(names) != 2:
        points = {", ".join(key) or "all seeds": values for key, values in groups.items()}
        points_of_scores(path, points, ", ".join(names), score)
        return
    rows, columns = (list(dict.fromkeys(key[place] for key in groups)) for place in (0, 1))
    values = [[groups.get((row, column), []) for column in columns] for row in rows]
    labels = [[f"{name}={each}" for each in found] for name, found in zip(names, (rows, columns), strict=True)]
    grid_of_scores(path, values, labels[1], labels[0], score)
