#!/usr/bin/env python
"""
Write the tables of model_cards/*.md from model_cards/evidence, and draw the pictures of the cards from the same files.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any


sys.path.append(str(Path(__file__).resolve().parent / "experiments"))  # the programs that write such results
from logical_inference import plot_accuracies
from sweep import paper_table_of

from recnmt_hf.analysis.plots import check_picture
from recnmt_hf.data.files import locked_file, open_output
from recnmt_hf.hub.card import markdown_table, number


# In a card: `<!-- evidence: NAME -->`, the table, `<!-- end -->`. The folder `evidence` beside it contains NAME.json.
_PLACE = re.compile(r"(<!-- evidence: ([\w.,* -]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDER = "evidence"


def table_of_sweep(results: list[dict[str, Any]]) -> str:
    """
    Return the table of a `sweep.json` as `sweep.py` writes it: a row for each run, with parameters, validation
    loss, and for each test set the score and the p-value against the first run. If the rows are those of a paper's
    table, the differences to the first row follow, those measured and the paper's.
    """
    names = list(dict.fromkeys(name for run in results for name in run["values"]))
    tests = list(dict.fromkeys(name for run in results for name in run["scores"]))
    has_seeds = len({run["seed"] for run in results}) > 1
    heads = [*names, *(["seed"] if has_seeds else []), "parameters", "loss"]
    for test in tests:
        heads += [test, "p"]
    paper = paper_table_of([str(run["values"].get("row")) for run in results])
    if paper is not None:
        heads += ["difference", "the paper's"]
    rows = [heads]
    for run in results:
        row = [str(run["values"].get(name, "")) for name in names] + ([str(run["seed"])] if has_seeds else [])
        row += [f"{run['parameters'] / 1e6:.2f}M", number(run["validation"].get("loss"), 3)]
        for test in tests:
            scores = " / ".join(number(score) for score in run["scores"].get(test, {}).values())
            row += [scores, format_p(run["p_values"].get(test))]
        if paper is not None:
            row += [differences_of(run, results), paper.texts(str(run["values"]["row"]))[1]]
        rows.append(row)
    return markdown_table(rows)


def differences_of(run: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return for each test set the first score of a run minus that of the first run of the same seed."""
    first = next(other for other in results if other["seed"] == run["seed"])
    pairs = [
        (next(iter(scores.values())), next(iter(first["scores"][test].values())))
        for test, scores in run["scores"].items()
        if test in first["scores"]
    ]
    return "" if first is run else " / ".join(f"{score - base:+.2f}" for score, base in pairs)


def millions(value: float | None, sign: str = "") -> str:
    """Return a number of parameters in millions as text."""
    return "" if value is None else f"{value:{sign}.2f}".rstrip("0").rstrip(".") + "M"


def format_p(value: float | None) -> str:
    """Return a p-value with the digits that a thousand resamplings give."""
    return "" if value is None else "< .01" if value < 0.01 else f"{value:.2f}".removeprefix("0")


def table_of(path: Path) -> str:
    """Return the table of a file: results of `sweep.py`, or a list of rows, the first of which is the header."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content[0], list):
        return markdown_table([[str(cell) for cell in row] for row in content])
    return table_of_sweep(content)


def with_tables(card: Path) -> str:
    """Return the text of a card, with its tables regenerated from their files."""
    text = card.read_text(encoding="utf-8")

    def fill(match: re.Match[str]) -> str:
        before, name, after = match.groups()
        table = table_of(card.parent / FOLDER / f"{name}.json")
        return f"{before}{table}\n{after}"

    return _PLACE.sub(fill, text)


def draw_logic(data: Path, picture: Path) -> None:
    """Draw the accuracy of logical inference from a table with a row for each model, and a last one for the pairs."""
    heads, *rows = json.loads(data.read_text(encoding="utf-8"))
    first = heads.index("0")
    operators = [int(head) for head in heads[first:]]
    lines = {row[0]: list(zip(operators, map(float, row[first:]), strict=True)) for row in rows if row[0] != "pairs"}
    plot_accuracies(lines, picture, most_trained=6)


# Pictures in `FOLDER`, with the file of their values and the function that draws them.
PICTURES = {"logical_inference.svg": ("logical_inference.json", draw_logic)}


def draw_pictures(data: Path, output: Path) -> None:
    """Draw all pictures of the cards from the files in one folder into another."""
    for name, (values, draw) in PICTURES.items():
        draw(data / values, check_picture(output / name))


def main() -> None:
    for card in sorted((Path(__file__).resolve().parents[1] / "model_cards").glob("*.md")):
        with locked_file(card), open_output(card) as file:
            file.write(with_tables(card))
    draw_pictures(card.parent / FOLDER, card.parent / FOLDER)


if __name__ == "__main__":
    main()
